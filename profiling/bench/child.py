"""The child process: one task from stdin, events on the pipe that was stdout."""

from __future__ import annotations

import os
import sys
import threading
from typing import BinaryIO

from .cases import BenchError
from .protocol import ChildEvent, request_from, to_line

ORPHANED = 125
"""Exit code of a child whose parent has gone."""
FAILED = 3
"""Exit code after an error that was told."""


def main() -> None:
    """Do the task that stdin names."""
    pipe = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is no event
    request = request_from(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, args=(sys.stdin.buffer,), daemon=True).start()

    def tell(event: ChildEvent) -> None:
        pipe.write(to_line(event))

    try:
        from .tasks import perform

        perform(request, tell)
    except Exception as error:
        tell(ChildEvent(event="failed", sentence=sentence_of(error)))
        raise SystemExit(FAILED) from error
    # what libraries left running must not hold up the next child
    sys.stderr.flush()
    os._exit(0)


def _end_with_parent(stdin: BinaryIO) -> None:
    """The parent never writes again: the end of its pipe is its own end."""
    stdin.read()
    os._exit(ORPHANED)


def sentence_of(error: Exception) -> str:
    """One line: an error of ours in its own words, another with its type."""
    lines = str(error).strip().splitlines()
    text = lines[0][:400] if lines else ""
    return text if isinstance(error, BenchError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
