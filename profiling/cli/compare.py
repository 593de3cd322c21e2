"""`halo-vae compare`: the same decodes in several PyTorch installations."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .command import CommandError, ExitCode
from .history_files import check_target, write_text

if TYPE_CHECKING:
    from ..compare.records import CompareRequest, Comparison, DeviceKind, Installation, Round

_RUNS, _TIME_LIMIT_S = 5, 300.0
DEVICES = ("auto", "cpu", "gpu", "both")


class CompareCommand:
    """Decode the same in several PyTorch installations and show how they compare, and what about them differs.

    Each run is a process of its own; installations take turns. They need torch, numpy and safetensors only: this
    package is handed to them by its path, and nothing is written into them. Exit code 1 if anything failed.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add = parser.add_argument
        add("--env", action="append", metavar="NAME=PYTHON", help="an installation: its name, and its Python; repeat")
        add("--reference", default="", metavar="NAME", help="the installation that is 100 %%, default the first")
        add("--cases", metavar="NAME,…", help="cases, default those that --list marks")
        add("--list", action="store_true", help="show the cases, and run nothing")
        add("--runs", type=int, default=_RUNS, metavar="N", help=f"processes of each case, {_RUNS} (default) or more")
        add("--device", choices=DEVICES, default="auto", help="auto: the CPU, and the GPU where one of them sees it")
        add("--threads", type=int, metavar="N", help="CPU threads, default what each torch takes")
        add("--seed", type=int, default=0, metavar="N", help="of the latents and of random weights, default 0")
        add("--time-limit", type=float, default=_TIME_LIMIT_S, metavar="SECONDS", help="for one process, default 300")
        add("--host", metavar="NAME", help="what the tables call this machine, default its host name")
        add("--json", action="store_true", help="one JSON object with every round instead of Markdown")
        add("-o", "--output", type=Path, metavar="FILE", help="file to write instead of stdout; .json as --json")
        add("--force", action="store_true", help="overwrite a file that exists")
        add("--results", type=Path, metavar="FILE", help="also add a line per run to a file of results")

    def run(self, args: argparse.Namespace) -> ExitCode:
        """See Command."""
        if args.list:
            return _list()
        args.format = "json" if args.json or (args.output is not None and args.output.suffix == ".json") else "md"
        check_target(args)
        from ..bench.cases import BenchError
        from ..bench.guard import BusyError
        from ..bench.invocation import check_results_path
        from ..compare.run import run_comparison

        try:
            request = request_from(args)
        except BenchError as error:
            raise CommandError(str(error)) from error
        if args.results is not None:
            check_results_path(args.results)
        try:
            with _alone():
                comparison = run_comparison(request, report=_report, keep=_keep_in(args.results))
        except BusyError as busy:
            sys.stdout.write(f"nothing was run: {busy}\n")
            return ExitCode.OK
        _show(comparison, args)
        if comparison.cancelled:
            n = len(comparison.rounds)
            raise CommandError(f"cancelled; the tables hold {n} run(s)", exit_code=ExitCode.CANCELLED)
        return ExitCode.FAILED if _any_failed(comparison) else ExitCode.OK


def request_from(args: argparse.Namespace) -> CompareRequest:
    """What the flags ask for. BenchError, CommandError."""
    from ..compare.cases import USUAL, case_of
    from ..compare.records import CompareRequest

    if args.runs < _RUNS:
        raise CommandError(f"--runs is {args.runs}; a comparison takes {_RUNS} or more")
    cases = USUAL if args.cases is None else tuple(map(case_of, _words(args.cases)))
    kinds: dict[str, tuple[DeviceKind, ...] | None] = {
        "auto": None, "cpu": ("cpu",), "gpu": ("gpu",), "both": ("cpu", "gpu"),
    }  # fmt: skip
    return CompareRequest(
        installations=tuple(map(_installation, args.env or ())), reference=args.reference, cases=cases,
        rounds=args.runs, threads=args.threads, devices=kinds[args.device], seed=args.seed,
        time_limit_s=args.time_limit, host=args.host or platform.node() or "unnamed",
    )  # fmt: skip


def _installation(text: str) -> Installation:
    from ..compare.records import Installation
    from ..compare.run import find_python

    name, found, python = text.partition("=")
    if not found or not name.strip() or not python:
        raise CommandError(f"--env is {text!r}; give NAME=PYTHON, such as nightly=venv/bin/python")
    return Installation(name=" ".join(name.split()), python=find_python(python))


def _words(text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise CommandError("--cases names nothing; give words separated by commas")
    return words


def _list() -> ExitCode:
    from ..compare.cases import CASES

    for case in CASES:
        mark = "" if case.is_usual else " (only when named)"
        sys.stdout.write(f"{case.key}: {case.title}, {case.width_px}x{case.height_px}, {case.precision}{mark}\n")
    return ExitCode.OK


def _report(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _keep_in(path: Path | None) -> Callable[[Comparison, Round], None]:
    """Append each round as it ends; what a full disk refuses is told once, and the tables come all the same."""
    told: list[str] = []

    def keep(comparison: Comparison, one: Round) -> None:
        from ..bench.cases import BenchError
        from ..bench.results import ResultsFile
        from ..compare.results_lines import line_of_round

        line = line_of_round(comparison, one, uuid.uuid4().hex)
        if path is None or line is None:
            return
        try:
            ResultsFile(path).append(line)
        except (BenchError, OSError) as error:
            if not told:
                told.append(str(error))
                _report(f"halo-vae: results are not kept: {error}")

    return keep


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One benchmark at a time. BusyError."""
    import tempfile

    from ...optim.errors import HaloError
    from ...optim.files import user_dir
    from ..bench.guard import LOCK_NAME, bench_lock

    try:
        folder = user_dir("cache")
    except HaloError:
        folder = Path(tempfile.gettempdir())
    with bench_lock(folder / LOCK_NAME):
        yield


def _show(comparison: Comparison, args: argparse.Namespace) -> None:
    """Write the tables, or all of it as JSON."""
    from ..compare.render import comparison_json, render_comparison

    if args.format == "json":
        write_text(json.dumps(comparison_json(comparison), ensure_ascii=False, allow_nan=False) + "\n", args)
    else:
        write_text(render_comparison(comparison), args)

def _any_failed(comparison: Comparison) -> bool:
    from ..compare.figures import figures_of

    return any(
        figure.failure is not None
        for device in comparison.devices
        for figure in figures_of(comparison, device).values()
    )
