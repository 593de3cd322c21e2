"""Processes that run this package for somebody: how they find it, how they are ended, and what their end says."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the package, which a program of `program_of` takes as its argument."""
_LOADER = """
import importlib.util, sys
sys.path[:] = [folder for folder in sys.path if folder]
root = sys.argv[1]
spec = importlib.util.spec_from_file_location("halo_vae", root + "/__init__.py", submodule_search_locations=[root])
package = importlib.util.module_from_spec(spec)
sys.modules["halo_vae"] = package
spec.loader.exec_module(package)
"""
_TAIL_BYTES = 8192


def program_of(module: str) -> str:
    """A program for `python -c` that runs `main` of a module, given by its name within the package.

    It takes the package by its folder, whatever that is called, and whether or not the interpreter has one installed;
    the folder that it is started in supplies no module.
    """
    return f"{_LOADER}from halo_vae.{module} import main\nmain()\n"


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a group, and what it started, if it still runs, and wait for it."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(fd: int) -> str:
    """The last line with something in it, of a file that is open for reading; empty where there is none."""
    size = os.lseek(fd, 0, os.SEEK_END)
    os.lseek(fd, max(0, size - _TAIL_BYTES), os.SEEK_SET)
    lines = [line.strip() for line in os.read(fd, _TAIL_BYTES).decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")[:400]


def judge_code(code: int, last_said: str) -> tuple[Literal["crashed", "failed"], str]:
    """What an exit code means where the process told no end of its own, and a sentence on it."""
    if code < 0:
        return "crashed", f"ended by {_signal_name(-code)}"
    why = f": {last_said}" if last_said else ""
    if code > 128 or code >= 0x80000000:  # a shell tells a signal by the former, Windows a crash by the latter
        return "crashed", f"ended with exit code {code}{why}"
    return "failed", f"the process ended with exit code {code}{why}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
