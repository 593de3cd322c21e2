"""The process in an installation: one task from stdin, one answer on the pipe that was stdout."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import BinaryIO

from ..codec import decode, encode
from .records import Answer, Ask

ORPHANED = 125
"""Exit code of a child whose parent has gone."""


def main() -> None:
    """Do the task that stdin names, tell the answer, and end."""
    pipe = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is no answer
    ask = decode(Ask, json.loads(sys.stdin.buffer.readline()), "ask")
    threading.Thread(target=_end_with_parent, args=(sys.stdin.buffer,), daemon=True).start()
    pipe.write(json.dumps(encode(answer_to(ask)), allow_nan=False).encode() + b"\n")
    sys.stderr.flush()
    os._exit(0)  # what libraries left running must not hold up the next child


def answer_to(ask: Ask) -> Answer:
    """The answer, whatever goes wrong."""
    try:
        import numpy  # noqa: F401 (what an installation needs: said before anything else fails for want of it)
        import safetensors  # noqa: F401
        import torch
    except ImportError as error:
        return Answer(status="failed", error=f"it needs torch, numpy and safetensors: {_first_line(error)}")
    try:
        if ask.task == "set_up":
            from .setup import read_setup

            if ask.threads is not None:
                torch.set_num_threads(ask.threads)
            return Answer(setup=read_setup())
        from .measure import measure

        return measure(ask)
    except Exception as error:
        return Answer(status="failed", error=f"{type(error).__name__}: {_first_line(error)}".rstrip(": "))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:400]


def _end_with_parent(stdin: BinaryIO) -> None:
    """The parent never writes again: the end of its pipe is its own end."""
    stdin.read()
    os._exit(ORPHANED)
