"""Runs a benchmark: every case in every configuration under every cache condition, each in processes of its own.

What a time holds: `hot`, a decode in a process that has decoded the same shape before; `warm`, opening the VAE's file
and decoding a size that was not decoded before, in a new process with the disk caches that the hot run left; `cold`,
the same with empty disk caches and the hot run's size; `frozen`, cold with the VAE's file dropped from memory. Every
warm, cold and frozen sample is a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..run import new_record_id
from .cases import BenchCase, BenchError, Configuration, Scenario
from .configurations import Precision, warm_shape
from .isolation import CacheSet, empty_caches, purge, real_caches
from .lines import RunContext, hidden_paths, line_from, session_name, utc_now
from .page_cache import bring_in, drop
from .protocol import ChildEvent, ChildRequest, Described
from .request import BenchRequest
from .results import PageCache, RunLine
from .spawn import ChildOutcome, ChildStoppedError, Interpreter, run_child
from .vaes import VaeFile, find_vaes

SPARED = frozenset({"bench", "bench.lock", ".bench.lock"})
"""What a purge of the user's cache folder leaves: this benchmark's own."""
_ORDER: tuple[Scenario, ...] = ("frozen", "cold", "hot", "warm")
"""Warm runs use the caches that the hot one leaves."""
Spawn = Callable[..., ChildOutcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a benchmark is."""

    done: float
    """Work done, in pixels times decodes."""
    total: float
    text: str
    line: RunLine | None = None
    """The run that has just ended."""


Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a benchmark works with; tests pass fakes."""

    spawn: Spawn = run_child
    drop: Callable[[Path], PageCache] = drop
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    new_id: Callable[[], str] = new_record_id
    before_device: Callable[[Described], None] = lambda described: None
    """Called once it is known which device is meant; raises BusyError where others use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOutcome:
    """What a benchmark gave."""

    lines: tuple[RunLine, ...]
    cancelled: bool


def run_bench(
    request: BenchRequest, work: Path, keep: Callable[[RunLine], None], *, report: Report = lambda progress: None,
    tools: Tools | None = None, session: str | None = None,
) -> BenchOutcome:  # fmt: skip
    """Run everything that is asked for; `keep` gets each line as soon as it is there.

    `work` is a folder for weights, pictures and caches, which the caller removes. After Ctrl-C the samples that are
    whole are kept and the rest is left out. BenchError where nothing can be run, BusyError, OSError; what `keep`
    raises.
    """
    bench = _Bench(request, work, keep, report, tools or Tools(), session or session_name(utc_now()))
    try:
        bench.prepare()
        bench.run_all()
    except (KeyboardInterrupt, ChildStoppedError):
        return BenchOutcome(lines=tuple(bench.lines), cancelled=True)
    return BenchOutcome(lines=tuple(bench.lines), cancelled=False)


class _Bench:
    """One invocation."""

    def __init__(
        self, request: BenchRequest, work: Path, keep: Callable[[RunLine], None], report: Report, tools: Tools,
        session: str,
    ) -> None:  # fmt: skip
        self.request, self.work, self.lines = request, work.resolve(), list[RunLine]()
        self._keep, self._report, self._tools, self._session = keep, report, tools, session
        self._references: dict[tuple[str, tuple[int, ...]], Path | None] = {}
        self._vaes: dict[str, VaeFile] = {}
        self._described: dict[bool, Described] = {}
        self._done = self._shown = 0.0
        self._total = sum(self._work_of(c, s) for c in request.cases for s in self._scenarios()) * len(
            request.configurations
        )

    # -- before the first run

    def prepare(self) -> None:
        """Look at the device, make the VAEs."""
        self._tell("looking at the device")
        ours = self._describe(self._ours())
        self._described[False] = ours
        self._tools.before_device(ours)
        if "stock" in self.request.configurations:
            self._described[True] = self._describe(self._stock())
        families = tuple(case.family for case in self.request.cases)
        self._vaes = dict(find_vaes(self.request.vaes, families, self.request.seed, self.work, self._tell).items())

    def _describe(self, interpreter: Interpreter) -> Described:
        ask = ChildRequest(task="describe", device=self.request.device, threads=self.request.threads)
        with self._caches("describe") as caches:
            outcome = self._spawn(ask, interpreter, caches)
        if outcome.described is None:
            raise BenchError(f"{interpreter.python} cannot bench: {outcome.sentence}")
        return outcome.described

    def _ours(self) -> Interpreter:
        return Interpreter()

    def _stock(self) -> Interpreter:
        host = self.request.comfyui
        assert host is not None  # the request says so
        return Interpreter(python=host.python, folder=host.folder)

    # -- the runs

    def run_all(self) -> None:
        """Case by case."""
        for case in self.request.cases:
            for configuration in self.request.configurations:
                self._run_one(case, configuration)

    def _scenarios(self) -> tuple[Scenario, ...]:
        return tuple(s for s in _ORDER if s in self.request.scenarios)

    def _run_one(self, case: BenchCase, configuration: Configuration) -> None:
        hot_shapes: frozenset[str] | None = None
        with self._caches(f"{case.key}-{configuration}") as caches:
            for scenario in self._scenarios():
                context = self._context(case, configuration, scenario)
                if scenario == "hot":
                    hot_shapes = self._hot(context, caches, self.request.runs)
                elif scenario == "warm":
                    if "hot" not in self.request.scenarios:  # nobody has filled the caches yet
                        hot_shapes = self._hot(context, caches, 0)
                    self._warm(context, caches, hot_shapes)
                else:
                    self._fresh(context, None, None)
                self._done += self._work_of(case, scenario)

    def _warm(self, context: RunContext, caches: CacheSet, hot_shapes: frozenset[str] | None) -> None:
        """New processes with the hot run's caches, if there are any."""
        if hot_shapes is None:
            why = "the hot run, which fills the caches, did not end well, so nothing is warm"
            self._finish(context, [ChildOutcome(ending="failed", sentence=why)], None, "kept")
        else:
            self._fresh(context, caches, hot_shapes)

    def _context(self, case: BenchCase, configuration: Configuration, scenario: Scenario) -> RunContext:
        vae, described = self._vaes[case.family], self._described[configuration == "stock"]
        precision: Precision = "fp32"
        notes = [] if vae.note is None else [vae.note]
        if case.precision == "fp16":
            precision = "fp16" if described.has_fp16 else "bf16"
            if precision == "bf16":
                notes.append("bf16 in place of fp16")
        shape = case.shape_for(vae.latent_channels)
        return RunContext(
            run_id=self._tools.new_id(), session=self._session, request=self.request, case=case,
            configuration=configuration, scenario=scenario, vae=vae, precision=precision,
            latent_shape=warm_shape(shape) if scenario == "warm" else shape, described=described,
            started_at=utc_now().isoformat(timespec="milliseconds"), notes=tuple(notes),
            hidden=hidden_paths(vae.path, self.work),
        )  # fmt: skip

    def _hot(self, context: RunContext, caches: CacheSet, runs: int) -> frozenset[str] | None:
        """One process that decodes again and again; the shapes it asked for, None where it failed.

        With 0 runs it fills the caches and leaves no line.
        """
        shape = context.case.shape_for(context.vae.latent_channels)
        context = replace(context, latent_shape=shape)
        ask = self._ask(context, warm_ups=self.request.warm_ups, runs=runs, compare=runs > 0)
        bring_in(context.vae.path)
        outcome = self._child(context, ask, caches, () if runs else None)
        if runs:
            self._finish(context, [outcome], None, "kept")
        return None if outcome.measured is None else frozenset(outcome.measured.shapes)

    def _fresh(self, context: RunContext, filled: CacheSet | None, hot_shapes: frozenset[str] | None) -> None:
        """A process per sample, each with caches of its own: a copy of those that are filled, or empty ones."""
        ask = self._ask(context, warm_ups=0, runs=1, compare=True)
        outcomes: list[ChildOutcome] = []
        page_cache: PageCache = "dropped" if context.scenario == "frozen" else "kept"
        for _ in range(self.request.runs):
            if filled is None and self.request.purge_real_caches:
                purge(real_caches(self._tools.environ), SPARED)
            with self._caches("fresh", filled) as caches:
                if context.scenario == "frozen":
                    page_cache = "unverified" if self._tools.drop(context.vae.path) != "dropped" else page_cache
                else:
                    bring_in(context.vae.path)
                outcomes.append(self._child(context, ask, caches, outcomes, hot_shapes, page_cache))
            if outcomes[-1].ending != "ok":
                break
        self._finish(context, outcomes, hot_shapes, page_cache)

    def _ask(self, context: RunContext, *, warm_ups: int, runs: int, compare: bool) -> ChildRequest:
        request = self.request
        reference = self._reference(context) if compare else None
        return ChildRequest(
            task="run", device=context.described.device, threads=request.threads, vae=str(context.vae.path),
            latent_shape=context.latent_shape, seed=request.seed, configuration=context.configuration,
            precision=context.precision, plan=request.plan, kernel_backend=request.kernel_backend, warm_ups=warm_ups,
            runs=runs, with_loading=context.scenario != "hot" and runs > 0,
            reference=None if reference is None else str(reference),
            comfyui=None if request.comfyui is None else str(request.comfyui.folder),
            probe=None if request.probe is None else str(request.probe.resolve()),
        )  # fmt: skip

    def _reference(self, context: RunContext) -> Path | None:
        """The untiled float32 picture of the same latent; None where it could not be made, which is told once."""
        key = (context.vae.label, context.latent_shape)
        if key not in self._references:
            self._tell(f"{context.case.key}: decoding the picture to compare with")
            path = self.work / f"reference-{len(self._references)}.npy"
            ask = ChildRequest(
                task="reference", device=context.described.device, threads=self.request.threads,
                vae=str(context.vae.path), latent_shape=context.latent_shape, seed=self.request.seed,
                reference=str(path),
            )  # fmt: skip
            with self._caches("reference") as caches:
                outcome = self._spawn(ask, self._ours(), caches)
            self._references[key] = path if outcome.ending == "ok" else None
            if outcome.ending != "ok":
                self._tell(f"{context.case.key}: there is no picture to compare with: {outcome.sentence}")
        return self._references[key]

    # -- child processes

    def _child(
        self, context: RunContext, ask: ChildRequest, caches: CacheSet, before: list[ChildOutcome] | tuple[()] | None,
        hot_shapes: frozenset[str] | None = None, page_cache: PageCache = "kept",
    ) -> ChildOutcome:  # fmt: skip
        """One process of a run; after Ctrl-C the run's line is kept if it has samples. `before` None keeps none."""
        interpreter = self._stock() if context.configuration == "stock" else self._ours()
        text = f"{context.case.key} {context.configuration} {context.scenario}"
        n_samples = len(before or ())

        def heard(event: ChildEvent) -> None:
            nonlocal n_samples
            if event.event == "sample":
                n_samples += 1
                done = self._done + self._work_of(context.case, context.scenario) * n_samples / self.request.runs
                self._tell(text, done)

        self._tell(text)
        try:
            return self._spawn(ask, interpreter, caches, heard)
        except ChildStoppedError as stopped:
            outcomes = [*(before or ()), stopped.outcome]
            if before is not None and any(o.samples_ns for o in outcomes):
                self._finish(context, outcomes, hot_shapes, page_cache, cancelled=True)
            raise

    def _spawn(
        self, ask: ChildRequest, interpreter: Interpreter, caches: CacheSet,
        heard: Callable[[ChildEvent], None] = lambda event: None,
    ) -> ChildOutcome:  # fmt: skip
        environment = caches.environment(self._tools.environ)
        if self.request.threads is not None:
            environment["OMP_NUM_THREADS"] = str(self.request.threads)
        try:
            return self._tools.spawn(ask, interpreter, environment, self.request.time_limit_s, heard)
        except OSError as error:
            return ChildOutcome(ending="failed", sentence=f"{interpreter.python} cannot be started ({error.strerror})")

    @contextlib.contextmanager
    def _caches(self, name: str, filled: CacheSet | None = None) -> Iterator[CacheSet]:
        root = self.work / "caches" / f"{name}-{self._tools.new_id()[:8]}"
        root.parent.mkdir(parents=True, exist_ok=True)
        caches = empty_caches(root) if filled is None else filled.copy(root)
        try:
            yield caches
        finally:
            caches.remove()

    # -- telling

    def _finish(
        self, context: RunContext, outcomes: list[ChildOutcome], hot_shapes: frozenset[str] | None,
        page_cache: PageCache, *, cancelled: bool = False,
    ) -> None:  # fmt: skip
        line = line_from(context, outcomes, hot_shapes=hot_shapes, page_cache=page_cache, cancelled=cancelled)
        self._keep(line)
        self.lines.append(line)
        done = self._done + self._work_of(context.case, context.scenario)
        text = f"{context.case.key} {context.configuration} {context.scenario}"
        self._tell(text, done, line)

    def _work_of(self, case: BenchCase, scenario: Scenario) -> float:
        decodes = self.request.runs + (self.request.warm_ups if scenario == "hot" else 0)
        return float(case.width_px * case.height_px * case.batch * case.decoded_frames * decodes)

    def _tell(self, text: str, done: float = 0.0, line: RunLine | None = None) -> None:
        """What is done never falls."""
        self._shown = min(self._total, max(self._shown, self._done, done))
        self._report(Progress(done=self._shown, total=self._total, text=text, line=line))


def remove_leftovers(folder: Path) -> None:
    """What benchmarks that were killed left in the folder that work is done in. Call it while holding the lock."""
    with contextlib.suppress(OSError):
        for left in folder.iterdir():
            shutil.rmtree(left, ignore_errors=True)
