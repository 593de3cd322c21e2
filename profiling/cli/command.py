"""What a command is and how it ends."""

from __future__ import annotations

import argparse
from enum import IntEnum
from typing import Protocol


class ExitCode(IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILED = 1
    """The input was right, the work was not: a decode that failed, a full disk."""
    BAD_INPUT = 2
    """A file, a flag or a combination that cannot work; nothing was written."""
    CANCELLED = 130
    """Stopped by Ctrl-C, as shells count it (128 + SIGINT)."""


class CommandError(Exception):
    """One sentence for stderr and the exit code to leave with.

    Attributes:
        exit_code: what the process returns.
    """

    def __init__(self, message: str, *, exit_code: ExitCode = ExitCode.BAD_INPUT) -> None:
        """Store the code beside the sentence."""
        super().__init__(message)
        self.exit_code = exit_code


class Command(Protocol):
    """One sub-command: named after its class (`DecodeCommand` is `decode`), explained by its docstring."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, args: argparse.Namespace) -> ExitCode:
        """Do the work. Raises CommandError or a HaloError, which `main` turns into one line and an exit code."""


def command_name(command: Command) -> str:
    """The word on the command line."""
    return type(command).__name__.removesuffix("Command").lower()
