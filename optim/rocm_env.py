"""Environment variables that decide how MIOpen meets a new shape, as functions of a mapping.

Nothing here writes the environment of this process, which is the user's: there are lines for the user to export, and
copies of an environment for child processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FIND_MODE = "MIOPEN_FIND_MODE"
COMFYUI_SWITCH = "COMFYUI_ENABLE_MIOPEN"

Purpose = Literal["bench", "tune"]

_MEANINGS = {
    "NORMAL": "each new shape is searched for among all solvers, which takes minutes",
    "FAST": "a new shape takes what the databases or a heuristic say, without a search",
    "HYBRID": "as FAST where the database knows a shape, else as NORMAL",
    "DYNAMIC_HYBRID": "as HYBRID, without solvers that compile a kernel for each shape",
    "TRUST_VERIFY": "what the database says is checked once; where it is slower, or for a new shape, a timed search",
    "TRUST_VERIFY_FULL": "as TRUST_VERIFY, without a limit of time",
}
"""By the name that MIOpen gives a mode. Source: MIOpen's pages on find modes."""
_NUMBERS = {
    "1": "NORMAL", "2": "FAST", "3": "HYBRID", "5": "DYNAMIC_HYBRID", "6": "TRUST_VERIFY",
    "7": "TRUST_VERIFY_FULL",
}  # fmt: skip
_MODE_FOR: Mapping[Purpose, str] = {"bench": "FAST", "tune": "NORMAL"}
"""Tuning is the deliberate place to pay for searches, and what they find stays in MIOpen's database: from then on FAST
takes it from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindMode:
    """How MIOpen chooses kernels for shapes that are new to it."""

    value: str | None
    """As it is set, in any spelling; None where it is not."""
    name: str | None
    """MIOpen's name of the mode ("FAST"); None where the variable is not set or MIOpen knows no such mode."""
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportLine:
    """A line to put into the shell that starts the program, and why."""

    line: str
    reason: str


def find_mode(environ: Mapping[str, str]) -> FindMode:
    """What MIOPEN_FIND_MODE says, by number or by name in any case."""
    value = environ.get(FIND_MODE)
    if value is None:
        default = "not set: MIOpen takes its default, which is DYNAMIC_HYBRID in recent versions"
        return FindMode(value=None, name=None, meaning=default)
    word = value.strip().upper()
    name = _NUMBERS.get(word, word)
    if name in _MEANINGS:
        return FindMode(value=value, name=name, meaning=_MEANINGS[name])
    known = ", ".join(f"{number} or {mode}" for number, mode in _NUMBERS.items())
    return FindMode(value=value, name=None, meaning=f"unknown to MIOpen; it may be {known}")


def lines_to_export(environ: Mapping[str, str], hip: str | None, system: str = "Linux") -> tuple[ExportLine, ...]:
    """What a user of a ROCm build (`hip` is its version, None on other builds) may set before starting.

    A variable that is set, however it is spelt, is left to the user: there is no line for it.
    """
    if hip is None or FIND_MODE in environ:
        return ()
    keyword = "set" if system == "Windows" else "export"
    when = f"MIOpen is on ({COMFYUI_SWITCH}=1)" if environ.get(COMFYUI_SWITCH) == "1" else "where MIOpen is on"
    reason = f"{when}, and without this a shape that is new to it may be searched for, for minutes"
    return (ExportLine(line=f"{keyword} {FIND_MODE}=FAST", reason=reason),)


def child_environment(environ: Mapping[str, str], purpose: Purpose = "tune") -> dict[str, str]:
    """A copy of an environment for a child process that tunes or benches; what the user has set stays as it is.

    Only MIOpen reads what is added, so it is the same on every build of torch.
    """
    return {FIND_MODE: _MODE_FOR[purpose], **environ}
