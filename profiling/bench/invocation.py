"""One invocation of the benchmark on one machine: guarded, sampled where asked, its results in one file."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...optim.device_readers import SYS, find_card
from ...optim.errors import HaloError
from ...optim.files import user_dir
from ..energy import read_number
from .cases import BenchError
from .guard import COMFYUI_URL, LOCK_NAME, bench_lock, check_comfyui, check_device
from .lines import session_name, utc_now
from .protocol import Described
from .request import BenchRequest
from .results import Line, ResultsFile
from .runner import BenchOutcome, Report, Tools, remove_leftovers, run_bench
from .sampler import Sampler, sensors_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Guards:
    """What keeps a benchmark from a device that is in use."""

    comfyui_url: str | None = COMFYUI_URL
    """None asks no ComfyUI."""
    sys_root: Path = SYS
    cache_folder: Path | None = None
    """Where the lock and the work lie; None = the user's cache folder."""


def run_invocation(
    request: BenchRequest, keep: Callable[[Line], None], *, report: Report = lambda progress: None,
    guards: Guards | None = None, tools: Tools | None = None, session: str | None = None,
) -> BenchOutcome:  # fmt: skip
    """Run a benchmark unless something else uses the device; `keep` gets each line.

    BusyError where something does, before anything is run. BenchError, OSError.
    """
    guards, tools = guards or Guards(), tools or Tools()
    session = session or session_name(utc_now())
    folder = guards.cache_folder or _cache_folder()
    check_comfyui(guards.comfyui_url)
    with bench_lock(folder / LOCK_NAME), _work_folder(folder / "bench") as work, contextlib.ExitStack() as stack:

        def before_device(described: Described) -> None:
            card = find_card(described.pci, guards.sys_root) if described.pci is not None else None
            if card is not None:
                check_device(lambda: read_number(card / "gpu_busy_percent"))
            if request.lane == "instrumented":
                stack.enter_context(_sampled(card, session, request.host, keep))

        return run_bench(
            request, work, keep, report=report, tools=replace(tools, before_device=before_device), session=session
        )


@contextlib.contextmanager
def _sampled(card: Path | None, session: str, host: str, keep: Callable[[Line], None]) -> Iterator[None]:
    """Keep what the sensors showed, however the benchmark ends."""
    sampler = Sampler(sensors_for(card))
    sampler.start()
    try:
        yield
    finally:
        for series in sampler.finish(session, host):
            keep(series)


def _cache_folder() -> Path:
    try:
        return user_dir("cache")
    except HaloError:
        return Path(tempfile.gettempdir())


@contextlib.contextmanager
def _work_folder(folder: Path) -> Iterator[Path]:
    """A new folder, removed at the end: below the cache folder, which lies on a disk, else wherever there is room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        work = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=folder))
    except OSError:
        work = Path(tempfile.mkdtemp(prefix="halo-vae-bench-"))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_results_path(path: Path) -> None:
    """BenchError where no line could be added, so that nobody waits an hour to learn it.

    Leaves an empty file at most.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"), open(path.with_name(path.name + ".lock"), "ab"):
            pass
    except OSError as error:
        raise BenchError(
            f"results cannot be written to {path} ({error.strerror or error}); name another file with --output"
        ) from error


def keep_in(results: ResultsFile) -> Callable[[Line], None]:
    """Append each line as it comes."""
    return results.append
