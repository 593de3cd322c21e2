"""What `history export` writes: text to stdout or a file, a chart to a file, never over another unless asked."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .command import CommandError, ExitCode
from .outputs import write_atomically

if TYPE_CHECKING:
    from ..record import DecodeRecord

FORMATS = ("json", "csv", "trace", "png")


def check_target(args: argparse.Namespace) -> None:
    """CommandError where the file may not be written, or nothing here writes its format."""
    path: Path | None = args.output
    if args.format == "png":
        if path is None:
            raise CommandError("--format png is a picture; say where it goes with -o FILE")
        if find_spec("matplotlib") is None:
            raise CommandError(
                "--format png needs matplotlib; install it (pip install 'halo-vae[charts]') or use --format trace",
                exit_code=ExitCode.FAILED,
            )
    if path is None:
        return
    if path.is_dir():
        raise CommandError(f"{path} is a folder; give the name of a file with -o")
    if path.exists() and not args.force:
        raise CommandError(f"{path} exists; use --force to overwrite it or choose another -o")
    if not path.parent.is_dir():
        raise CommandError(f"there is no folder {path.parent}; make it or choose another -o")


def export_text(fmt: str, records: Sequence[DecodeRecord]) -> str:
    """Records as text; a trace is of the first one."""
    if fmt == "trace":
        from ..trace import chrome_trace

        return json.dumps(chrome_trace(records[0]), allow_nan=False, separators=(",", ":")) + "\n"
    from ..export import csv_of, json_of
    from ..rows import row_of

    return csv_of(map(row_of, records)) if fmt == "csv" else json_of(records)


def write_text(text: str, args: argparse.Namespace) -> None:
    """To stdout, or to the file that is asked for. CommandError if the disk refuses."""
    if args.output is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(newline="")  # CSV brings its own line ends
        sys.stdout.write(text)
        return
    try:
        write_atomically(args.output, text.encode())
    except OSError as error:
        raise _refused(args.output, error) from error
    sys.stdout.write(f"{args.output}\n")


def write_chart(record: DecodeRecord, args: argparse.Namespace) -> None:
    """Draw a record's memory over time. CommandError if the disk refuses or the record has none."""
    from ..memory_chart import ChartError, write_memory_chart

    path: Path = args.output
    temporary = path.with_name(f".halo-vae-{os.getpid()}.png")
    try:
        write_memory_chart(record, temporary)
        os.replace(temporary, path)
    except ChartError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise _refused(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    sys.stdout.write(f"{path}\n")


def _refused(path: Path, error: OSError) -> CommandError:
    message = f"cannot write {path} ({error.strerror or error}); free space or choose another -o"
    return CommandError(message, exit_code=ExitCode.FAILED)
