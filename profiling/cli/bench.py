"""`halo-vae bench`: time the eight cases under named cache conditions, and keep every sample."""

from __future__ import annotations

import argparse
import contextlib
import platform
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from .command import CommandError, ExitCode

if TYPE_CHECKING:
    from ..bench.cases import BenchCase, Configuration, Scenario
    from ..bench.request import BenchRequest, ComfyUI
    from ..bench.results import Line, ResultsFile

T = TypeVar("T", bound=str)

DEFAULT_OUTPUT = Path("results.jsonl")
LANES = ("single", "instrumented", "nightly")
_RUNS = 5


class BenchCommand:
    """Time VAE decodes by name: eight cases, in several configurations, under named cache conditions.

    Each run is a process of its own with cache folders of its own; each adds one line with every sample to the file of
    results. While another benchmark, a prompt of ComfyUI or other work on the GPU goes on, it says so and ends with 0.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add = parser.add_argument_group("what to run").add_argument
        add("--cases", metavar="NAME,…", help="cases, default all eight; --list shows them")
        add("--configurations", metavar="NAME,…", help="baseline, phase1, phase2, phase3, stock; default all there are")
        add("--scenarios", metavar="NAME,…", help="frozen, cold, warm, hot (default), all (no frozen), everything")
        add("--runs", type=int, metavar="N", help=f"samples of each run, default {_RUNS}")
        add("--warm-ups", type=int, default=1, metavar="N", help="decodes before the samples of a hot run, default 1")
        add("--smoke", action="store_true", help="a tiny picture and clip, once: whether it works, not how fast it is")
        add("--list", action="store_true", help="show the cases, and run nothing")
        add = parser.add_argument_group("on what").add_argument
        add("--vae", action="append", metavar="FILE", help="a VAE's file, or sd, flux, wan21, NAME/N, tiny; repeatable")
        add("--device", default="auto", metavar="NAME", help="device to decode on: auto, cpu, cuda, cuda:1, …")
        add("--threads", type=int, metavar="N", help="CPU threads, default torch's")
        add("--seed", type=int, default=0, metavar="N", help="of the latents and of random weights, default 0")
        add("--plan", choices=("auto", "strips", "tiles"), default="auto", help="shape of the engine's tiles")
        add("--comfyui", metavar="DIR=PYTHON", help="a ComfyUI and its Python, for the configuration stock")
        add("--ray", metavar="ADDRESS", help="run on every node of a Ray cluster (extra `ray`)")
        add = parser.add_argument_group("how").add_argument
        add("-o", "--output", type=Path, default=DEFAULT_OUTPUT, metavar="FILE", help=f"default: {DEFAULT_OUTPUT}")
        add("--lane", choices=LANES, default="single", help="results of different lanes are never mixed")
        add("--host", metavar="NAME", help="what results call this machine, default its host name")
        add("--time-limit", type=float, metavar="SECONDS", help="for one process, default 1800; smoke 120")
        add("--comfyui-url", metavar="URL", help="ComfyUI to ask, default http://127.0.0.1:8188; none: nobody")
        add("--purge-real-caches", action="store_true", help="also empty your own kernel caches before each cold run")
        add("--yes", action="store_true", help="do not ask before your own caches are emptied")

    def run(self, args: argparse.Namespace) -> ExitCode:
        """See Command."""
        from ..bench.cases import BenchError
        from ..bench.guard import BusyError
        from ..bench.invocation import check_results_path
        from ..bench.results import ResultsFile

        if args.list:
            return _list()
        try:
            request = request_from(args)
        except BenchError as error:
            raise CommandError(str(error)) from error
        if args.purge_real_caches:
            _confirm_purge(args)
        check_results_path(args.output)
        results = ResultsFile(args.output)
        try:
            with _ended_politely():
                return _on_nodes(args, request, results) if args.ray else _here(args, request, results)
        except BusyError as busy:
            sys.stdout.write(f"nothing was run: {busy}\n")
            return ExitCode.OK


def request_from(args: argparse.Namespace) -> BenchRequest:
    """What the flags ask for. BenchError, CommandError."""
    from ..bench.cases import CASES, CONFIGURATIONS, case_of, scenarios_of
    from ..bench.request import SMOKE_CASES, TIME_LIMIT_S, BenchRequest

    comfyui = _comfyui(args.comfyui)
    known = {case.key: case for case in SMOKE_CASES}
    cases: tuple[BenchCase, ...] = SMOKE_CASES if args.smoke else CASES
    if args.cases is not None:
        cases = tuple(known[key] if key in known else case_of(key) for key in _words(args.cases, "--cases"))
    usual: tuple[Configuration, ...] = ("baseline", "phase3") if args.smoke else CONFIGURATIONS[:-1]
    configurations = (*usual, CONFIGURATIONS[-1]) if comfyui is not None else usual
    if args.configurations is not None:
        configurations = _among(args.configurations, CONFIGURATIONS, "--configurations")
    asked = args.scenarios or ("all" if args.smoke else "hot")
    scenarios: tuple[Scenario, ...] = tuple(
        dict.fromkeys(s for word in _words(asked, "--scenarios") for s in scenarios_of(word))
    )
    return BenchRequest(
        host=args.host or platform.node() or "unnamed", cases=cases, configurations=configurations,
        scenarios=scenarios, runs=args.runs if args.runs is not None else 1 if args.smoke else _RUNS,
        warm_ups=args.warm_ups, threads=args.threads, device=args.device, seed=args.seed, lane=args.lane,
        vaes=tuple(args.vae or ()) or (("tiny",) if args.smoke else ()), plan=args.plan, comfyui=comfyui,
        time_limit_s=args.time_limit if args.time_limit is not None else 120.0 if args.smoke else TIME_LIMIT_S,
        purge_real_caches=args.purge_real_caches,
    )  # fmt: skip


def _words(text: str, flag: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise CommandError(f"{flag} names nothing; give words separated by commas")
    return words


def _among(text: str, allowed: Sequence[T], flag: str) -> tuple[T, ...]:
    words = _words(text, flag)
    if unknown := [word for word in words if word not in allowed]:
        raise CommandError(f"{flag} names {unknown[0]!r}; choose from {', '.join(allowed)}")
    return tuple(word for word in allowed if word in words)


def _comfyui(text: str | None) -> ComfyUI | None:
    from ..bench.request import ComfyUI

    if text is None:
        return None
    folder, found, python = text.rpartition("=")
    if not found or not folder or not python:
        raise CommandError(f"--comfyui is {text!r}; give DIR=PYTHON: ComfyUI's folder and the Python that runs it")
    if not (Path(folder) / "main.py").is_file():
        raise CommandError(f"{folder} holds no ComfyUI: it has no main.py; give ComfyUI's folder")
    return ComfyUI(folder=Path(folder).resolve(), python=python)


def _list() -> ExitCode:
    from ..bench.cases import CASES
    from ..bench.request import SMOKE_CASES

    for case in (*CASES, *SMOKE_CASES):
        batch = f", {case.batch} at once" if case.batch > 1 else ""
        frames = f", {case.asked_frames} frames (of {case.decoded_frames} decoded)" if case.is_video else ""
        precision = f", {case.precision}" if case.precision != "fp32" else ""
        sys.stdout.write(f"{case.key}: {case.title}, {case.width_px}x{case.height_px}{batch}{frames}{precision}\n")
    return ExitCode.OK


# -- running


def _here(args: argparse.Namespace, request: BenchRequest, results: ResultsFile) -> ExitCode:
    from ..bench.guard import COMFYUI_URL
    from ..bench.invocation import Guards, run_invocation
    from .bench_progress import BenchBar

    url = COMFYUI_URL if args.comfyui_url is None else args.comfyui_url
    with BenchBar() as bar:
        outcome = run_invocation(
            request, results.append, report=bar.report, guards=Guards(comfyui_url=None if url == "none" else url)
        )
    if outcome.cancelled:
        n = len(outcome.lines)
        raise CommandError(f"cancelled; {n} run(s) are kept in {results.path}", exit_code=ExitCode.CANCELLED)
    sys.stdout.write(f"{results.path}\n")
    return ExitCode.OK if all(line.status == "ok" for line in outcome.lines) else ExitCode.FAILED


def _on_nodes(args: argparse.Namespace, request: BenchRequest, results: ResultsFile) -> ExitCode:
    from ..bench.guard import COMFYUI_URL
    from ..bench.ray_nodes import run_on_nodes

    kept: list[Line] = []

    def keep(line: Line) -> None:
        results.append(line)
        kept.append(line)

    url = COMFYUI_URL if args.comfyui_url is None else args.comfyui_url
    reports = run_on_nodes(
        request, args.ray, keep, comfyui_url=None if url == "none" else url,
        tell=lambda text: print(text, file=sys.stderr),  # noqa: T201 (a line at a time, while others still run)
    )  # fmt: skip
    sys.stdout.write(f"{results.path}\n")
    whole = all(report.why_not is None for report in reports)
    return ExitCode.OK if whole and all(getattr(line, "status", "ok") == "ok" for line in kept) else ExitCode.FAILED


def _confirm_purge(args: argparse.Namespace) -> None:
    """CommandError unless the user agrees that these folders are emptied."""
    from ..bench.isolation import real_caches

    folders = real_caches()
    if args.yes or not folders:
        return
    listed = "\n".join(f"  {folder}" for folder in folders)
    if not sys.stdin.isatty():
        raise CommandError("--purge-real-caches empties your own caches; add --yes where nobody can be asked")
    sys.stderr.write(f"These folders will be emptied before each cold run:\n{listed}\nGo on? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError("nothing was run and no cache was emptied", exit_code=ExitCode.CANCELLED)


@contextlib.contextmanager
def _ended_politely() -> Iterator[None]:
    """A service manager's SIGTERM is as good as Ctrl-C: what is measured is kept, and no child lives on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
