"""What `decode` writes beside pictures: traces and memory charts, and the profile level they need."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .command import CommandError, ExitCode

if TYPE_CHECKING:
    from ..record import DecodeRecord, Level

LEVELS = ("off", "summary", "per_op")
log = logging.getLogger("halo_vae")


def add_profile_flags(parser: argparse.ArgumentParser) -> None:
    """How much is measured, and files that show it."""
    add = parser.add_argument_group("what to measure").add_argument
    add("--profile", choices=LEVELS, help="how much is recorded; summary unless a file below needs per_op")
    add("--trace", action="store_true", help="also write LATENT.trace.json, for Perfetto or chrome://tracing")
    add("--memory-chart", action="store_true", help="also write LATENT.memory.png, memory over time (extra `charts`)")


def level_of(args: argparse.Namespace) -> Level:
    """The level that the flags ask for. CommandError where a file needs more than `--profile` allows."""
    asked: Level | None = getattr(args, "profile", None)
    wanted = [flag for flag in ("trace", "memory_chart") if getattr(args, flag, False)]
    if wanted and asked not in (None, "per_op"):
        flag = wanted[0].replace("_", "-")
        raise CommandError(f"--{flag} needs --profile per_op and --profile is {asked}; leave --profile out")
    return "per_op" if wanted else asked or "summary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Files of one latent beside its pictures."""

    trace: Path | None
    chart: Path | None

    @property
    def paths(self) -> tuple[Path, ...]:
        """Those that are asked for."""
        return tuple(p for p in (self.trace, self.chart) if p is not None)

    def write(self, record: DecodeRecord) -> None:
        """Write them. What cannot be written is a warning in the log: the pictures are there."""
        from ..memory_chart import ChartError, write_memory_chart
        from ..trace import write_chrome_trace

        for path, write in ((self.trace, write_chrome_trace), (self.chart, write_memory_chart)):
            if path is None:
                continue
            try:
                write(record, path)
            except (OSError, ChartError) as error:
                log.warning("%s was not written: %s", path, error)


NO_EXTRAS = Extras(trace=None, chart=None)
"""Pictures alone."""


def extras_of(args: argparse.Namespace, stem: str) -> Extras:
    """What is asked for beside the pictures of `<stem>`."""
    return Extras(
        trace=args.output / f"{stem}.trace.json" if args.trace else None,
        chart=args.output / f"{stem}.memory.png" if args.memory_chart else None,
    )


def check_extras(args: argparse.Namespace) -> None:
    """CommandError if the package that draws charts is not installed."""
    if args.memory_chart and find_spec("matplotlib") is None:
        raise CommandError(
            "--memory-chart needs matplotlib; install it (pip install 'halo-vae[charts]') or use --trace",
            exit_code=ExitCode.FAILED,
        )
