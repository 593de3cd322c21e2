"""Starts a child process for one task, hears it to its end, and ends it where it takes too long."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from .ending import ROOT, end_group, judge_code, last_line, program_of
from .protocol import ChildEvent, ChildRequest, Described, Measured, event_from, to_line

Ending = Literal["ok", "failed", "timeout", "crashed", "not_finite"]
_PROGRAM = program_of("profiling.bench.child")
_GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python with torch, numpy and safetensors."""

    python: str = sys.executable
    folder: Path | None = None
    """Where it is started; None = here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildOutcome:
    """How a child ended and what it told before."""

    ending: Ending
    sentence: str | None
    """Why, exactly where the ending is not ok."""
    warm_ups_ns: tuple[int, ...] = ()
    samples_ns: tuple[int, ...] = ()
    described: Described | None = None
    measured: Measured | None = None


class ChildStoppedError(Exception):
    """Ctrl-C while a child worked.

    Attributes:
        outcome: what it had told until then.
    """

    def __init__(self, outcome: ChildOutcome) -> None:
        """Keep what there is."""
        super().__init__("cancelled")
        self.outcome = outcome


Start = Callable[[ChildRequest, Interpreter, Mapping[str, str], float], ChildOutcome]
"""(request, interpreter, environment, time limit in seconds) to the outcome, as `run_child`."""


def run_child(
    request: ChildRequest,
    interpreter: Interpreter,
    environment: Mapping[str, str],
    time_limit_s: float,
    heard: Callable[[ChildEvent], None] = lambda event: None,
) -> ChildOutcome:
    """Run one task. `heard` is called with each event, on this thread.

    ChildStoppedError after Ctrl-C; the child is gone then.
    OSError where the interpreter cannot be started.
    """
    told: list[ChildEvent] = []
    with tempfile.TemporaryFile() as errors:
        process = _start(interpreter, environment, errors)
        try:
            _ask(process, request)
            ended = _listen(process, time_limit_s, told, heard)
        except KeyboardInterrupt:
            _end(process)
            raise ChildStoppedError(_outcome(told, "failed", "cancelled")) from None
        finally:
            _end(process)
        if not ended:
            return _outcome(told, "timeout", f"not done after {time_limit_s:g} s, the time limit of a run")
        return _judge(told, process.returncode, last_line(errors.fileno()))


def _start(interpreter: Interpreter, environment: Mapping[str, str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [interpreter.python, "-c", _PROGRAM, str(ROOT)]
    # a session of its own: Ctrl-C is the parent's, which ends the child and all that it started
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=dict(environment),
        cwd=interpreter.folder, start_new_session=sys.platform != "win32",
    )  # fmt: skip


def _ask(process: subprocess.Popen[bytes], request: ChildRequest) -> None:
    """The pipe stays open: its end tells the child that its parent has gone."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended already: what it left on stderr tells why
        process.stdin.write(to_line(request))
        process.stdin.flush()


def _listen(
    process: subprocess.Popen[bytes], time_limit_s: float, told: list[ChildEvent], heard: Callable[[ChildEvent], None]
) -> bool:
    """Hear the child to the end of its pipe and wait for it; False where the time is over before."""
    assert process.stdout is not None
    lines: queue.Queue[bytes] = queue.Queue()
    reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True)
    reader.start()
    deadline = time.monotonic() + time_limit_s
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return False
        if not line:
            break
        try:
            event = event_from(line)
        except (ValueError, RecursionError):
            continue  # what something in the child wrote past us
        told.append(event)
        heard(event)
    try:
        process.wait(timeout=max(_GRACE_S, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _read_lines(stream: IO[bytes], lines: queue.Queue[bytes]) -> None:
    """Each line, then an empty one."""
    with contextlib.suppress(OSError, ValueError):  # closed under us
        for line in stream:
            lines.put(line)
    lines.put(b"")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the child and what it started, if it still runs, and wait for it."""
    end_group(process)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _judge(told: list[ChildEvent], code: int, last_said: str) -> ChildOutcome:
    """The ending by what was told last, else by the exit code."""
    last = told[-1] if told else None
    if last is not None and last.event == "not_finite":
        return _outcome(told, "not_finite", last.sentence)
    if last is not None and last.event == "failed":
        return _outcome(told, "failed", last.sentence)
    if last is not None and last.event in ("done", "described") and code == 0:
        return _outcome(told, "ok", None)
    return _outcome(told, *judge_code(code, last_said))


def _outcome(told: list[ChildEvent], ending: Ending, sentence: str | None) -> ChildOutcome:
    return ChildOutcome(
        ending=ending, sentence=None if ending == "ok" else sentence or "no reason was told",
        warm_ups_ns=tuple(e.ns for e in told if e.event == "warm_up" and e.ns is not None),
        samples_ns=tuple(e.ns for e in told if e.event == "sample" and e.ns is not None),
        described=next((e.described for e in told if e.described is not None), None),
        measured=next((e.measured for e in told if e.measured is not None), None),
    )  # fmt: skip
