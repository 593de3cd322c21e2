"""`main`: parse, run one command, turn its errors into a sentence and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence

from ... import __version__
from .bench import BenchCommand
from .command import Command, CommandError, ExitCode, command_name
from .compare import CompareCommand
from .decode import DecodeCommand
from .demo import DemoCommand
from .doctor import DoctorCommand
from .history import HistoryCommand
from .plan import PlanCommand
from .publish import PublishCommand
from .report import ReportCommand
from .tune import TuneCommand

COMMANDS: tuple[Command, ...] = (
    DecodeCommand(), PlanCommand(), DemoCommand(), HistoryCommand(), DoctorCommand(), TuneCommand(),
    ReportCommand(), PublishCommand(), BenchCommand(), CompareCommand(),
)  # fmt: skip

EPILOG = "exit codes: 0 ok, 1 failed, 2 bad input (nothing written), 130 cancelled"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; see `ExitCode`."""
    _never_fail_on_a_character()
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as e:  # argparse: 0 after --help, 2 after a usage error
        return e.code if isinstance(e.code, int) else ExitCode.BAD_INPUT
    try:
        with _log_on_stderr():
            code: ExitCode = args.command.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _complain("cancelled", ExitCode.CANCELLED)
    except CommandError as e:
        return _complain(str(e), e.exit_code)
    except BrokenPipeError:
        # The reader of stdout has gone (`| head`): nobody to tell, and the interpreter must not try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    except Exception as e:
        found = classify(e)
        if found is None:
            raise
        return _complain(_sentence(e), found)


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command in it."""
    description = "Exact, planned and recorded VAE decoding."
    parser = argparse.ArgumentParser(prog="halo-vae", description=description, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"halo-vae {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        text = type(command).__doc__ or ""
        sub = commands.add_parser(
            command_name(command), help=text.splitlines()[0], description=text, epilog=EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.prepare_parser(sub)
        sub.set_defaults(command=command)
    return parser


def classify(error: Exception) -> ExitCode | None:
    """The exit code for an error that needs no traceback, or None for a fault of ours."""
    from ...optim.errors import DecodeCancelled, HaloError, LatentError, SettingsError, WeightsError
    from ...optim.errors_oom import is_out_of_memory

    if isinstance(error, DecodeCancelled):
        return ExitCode.CANCELLED
    if isinstance(error, LatentError | SettingsError | WeightsError):
        return ExitCode.BAD_INPUT
    known = isinstance(error, HaloError | OSError | MemoryError) or is_out_of_memory(error)
    return ExitCode.FAILED if known else None


@contextlib.contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Our own log lines on stderr while a command runs; nobody else's logging is touched."""
    log = logging.getLogger("halo_vae")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("halo-vae: %(levelname)s: %(message)s"))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _never_fail_on_a_character() -> None:
    """A terminal that lacks "×" shows "?" instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _sentence(error: Exception) -> str:
    from ...optim.errors import HaloError

    if not isinstance(error, HaloError | OSError):
        return "out of memory; close other programs or give a smaller --tile-size"
    return str(error) or type(error).__name__


def _complain(message: str, code: ExitCode) -> ExitCode:
    """One line on stderr."""
    sys.stderr.write(f"halo-vae: {' '.join(message.split())}\n")
    return code
