"""Starts one process in an installation, waits for its answer, and ends it where it takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..bench.ending import ROOT, end_group, judge_code, last_line, program_of
from ..bench.results import RunStatus
from ..codec import decode, encode
from .records import Answer, Ask

_PROGRAM = """
import sys
if sys.version_info < (3, 10):
    sys.exit("Python 3.10 or newer is needed; it has %d.%d" % sys.version_info[:2])
""" + program_of("profiling.compare.child")
_DROPPED = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables that would lead one Python to another one's packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended."""

    status: RunStatus
    error: str | None = None
    answer: Answer | None = None
    process_ns: int | None = None


Start = Callable[[Ask, str, Mapping[str, str], float], Ended]
"""(ask, python, environment, time limit in seconds), as `run_child`. KeyboardInterrupt passes through."""


def child_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a Python finds its own packages and writes no bytecode."""
    return {k: v for k, v in environ.items() if k not in _DROPPED} | {"PYTHONDONTWRITEBYTECODE": "1"}


def run_child(ask: Ask, python: str, environ: Mapping[str, str], time_limit_s: float) -> Ended:
    """Run one task. What goes wrong is told, never raised; after KeyboardInterrupt the process is gone."""
    begun = time.monotonic_ns()
    with contextlib.ExitStack() as stack:
        out, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        read_end, write_end = os.pipe()
        stack.callback(os.close, write_end)
        try:
            # a session of its own: Ctrl-C is the parent's, which ends the child and all that it started
            process = subprocess.Popen(
                [python, "-c", _PROGRAM, str(ROOT)], stdin=read_end, stdout=out, stderr=errors, env=dict(environ),
                start_new_session=sys.platform != "win32",
            )  # fmt: skip
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            return Ended(status="failed", error=f"its Python cannot be started ({reason}); give the path of one")
        finally:
            os.close(read_end)
        try:
            with contextlib.suppress(OSError):  # it has ended already: what it left on stderr tells why
                os.write(write_end, json.dumps(encode(ask)).encode() + b"\n")
            process.wait(timeout=time_limit_s)
        except subprocess.TimeoutExpired:
            return Ended(status="timeout", error=f"not done after {time_limit_s:g} s, the time limit of a run")
        finally:
            end_group(process)
        out.seek(0)
        return _judge(out.read(), process.returncode, last_line(errors.fileno()), time.monotonic_ns() - begun)


def _judge(said: bytes, code: int, last_said: str, process_ns: int) -> Ended:
    if code:
        status, sentence = judge_code(code, last_said)
        return Ended(status=status, error=sentence, process_ns=process_ns)
    try:
        answer = decode(Answer, json.loads(said.splitlines()[-1]), "answer")
    except (ValueError, IndexError, RecursionError):
        why = f": {last_said}" if last_said else ""
        return Ended(status="failed", error=f"it gave no answer{why}", process_ns=process_ns)
    return Ended(status=answer.status, error=answer.error, answer=answer, process_ns=process_ns)
