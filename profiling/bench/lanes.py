"""Runs gathered into figures, and what may be compared with what: never two lanes, never two architectures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace

from ..ab.doubts import Doubt
from .cases import CASES, CONFIGURATIONS, LANES, SCENARIOS, BenchError, Lane
from .doubts import doubts_of
from .results import Results, RunLine
from .stats import Interval, Significance, Stats, bootstrap_ratio, describe, significance_of


class MixedError(BenchError):
    """Runs that must not meet in one figure or ratio were asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a median belongs to. Runs that differ in any of it are other figures."""

    lane: Lane
    case: str
    configuration: str
    scenario: str
    """With a star where a frozen run is not verified: such runs are figures of their own."""
    host: str
    arch: str
    device: str
    dtype: str
    threads: int
    vae: str
    latent_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """All runs of one key: their samples as one, in the order of the file."""

    key: Key
    runs: tuple[RunLine, ...]
    """At least one; those that failed are among them."""
    doubts: tuple[Doubt, ...]

    @property
    def samples_ns(self) -> tuple[int, ...]:
        """Samples of the runs that count; empty where none does."""
        return tuple(ns for run in self.runs if run.counts for ns in run.samples_ns)

    @property
    def stats(self) -> Stats | None:
        """None where no run counts."""
        return describe(self.samples_ns) if self.samples_ns else None

    @property
    def max_error(self) -> float | None:
        """The worst of the runs; None where none was compared."""
        return max((r.max_error for r in self.runs if r.max_error is not None), default=None)

    @property
    def mean_error(self) -> float | None:
        """The worst of the runs."""
        return max((r.mean_error for r in self.runs if r.mean_error is not None), default=None)

    @property
    def psnr_db(self) -> float | None:
        """The worst of the runs; None where none was compared, and where all are perfect (`psnr_infinite`)."""
        return min((r.psnr_db for r in self.runs if r.psnr_db is not None), default=None)

    @property
    def psnr_infinite(self) -> bool:
        """True where every run that was compared gave the very same picture."""
        return self.psnr_db is None and any(r.psnr_infinite for r in self.runs)

    @property
    def peak_bytes(self) -> int | None:
        """The largest of the runs."""
        return max((r.peak_bytes for r in self.runs if r.peak_bytes is not None), default=None)

    @property
    def failed(self) -> tuple[RunLine, ...]:
        """Runs whose samples are no figure."""
        return tuple(run for run in self.runs if not run.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times as fast one figure is as another: above 1 it is faster, below 1 slower."""

    value: float
    """Median of the base ÷ median of the figure."""
    interval: Interval | None
    significance: Significance | None
    """None without SciPy, or with too few samples. Its effect is above 0 where the base takes longer."""
    n_base: int
    n: int

    @property
    def is_clear(self) -> bool:
        """True where the interval leaves out 1; False where there is none."""
        return self.interval is not None and not self.interval.low <= 1 <= self.interval.high


def key_of(run: RunLine) -> Key:
    """The key of a run's figure."""
    return Key(
        lane=run.lane, case=run.case, configuration=run.configuration, scenario=run.scenario_label, host=run.host,
        arch=run.arch, device=run.device, dtype=run.dtype, threads=run.threads, vae=run.vae,
        latent_shape=run.latent_shape,
    )  # fmt: skip


def lanes_in(results: Results) -> tuple[Lane, ...]:
    """The lanes there are, in their order."""
    there = {run.lane for run in results.runs} | {line.lane for line in results.series}
    return tuple(lane for lane in LANES if lane in there)


def in_lane(results: Results, lane: Lane | None = None) -> Results:
    """The runs of one lane. With None the only one there is; MixedError where there are several."""
    lanes = lanes_in(results)
    if lane is None and len(lanes) > 1:
        raise MixedError(f"the results are of the lanes {' and '.join(lanes)}, which are never mixed; choose one")
    chosen = lane or (lanes[0] if lanes else None)
    return replace(
        results,
        runs=tuple(run for run in results.runs if run.lane == chosen),
        series=tuple(line for line in results.series if line.lane == chosen),
    )


def figures_of(runs: Iterable[RunLine]) -> tuple[Figure, ...]:
    """One figure per key, in the order of tables. MixedError where the runs are of several lanes."""
    gathered: dict[Key, list[RunLine]] = {}
    for run in runs:
        gathered.setdefault(key_of(run), []).append(run)
    lanes = {key.lane for key in gathered}
    if len(lanes) > 1:
        raise MixedError(f"runs of the lanes {' and '.join(sorted(lanes))} are never mixed; choose one")
    return tuple(
        Figure(key=key, runs=tuple(gathered[key]), doubts=doubts_of(gathered[key]))
        for key in sorted(gathered, key=_order)
    )


def ratio_of(base: Figure, figure: Figure) -> Ratio | None:
    """Speed of a figure relative to another. None where one has no samples.

    MixedError across lanes, machines, architectures, devices, thread counts, VAEs or cases, and for a frozen run that
    is not verified. Configurations, cache conditions and dtypes may differ: that is what is compared. So may the latent
    of a warm run, which has a size of its own, against one that is not warm.
    """
    one, other = base.key, figure.key
    sizes_may_differ = (one.scenario == "warm") != (other.scenario == "warm")
    same = ("lane", "arch", "host", "device", "threads", "vae", "case", "latent_shape")
    for name in same[:-1] if sizes_may_differ else same:
        if getattr(one, name) != getattr(other, name):
            raise MixedError(
                f"{name.replace('_', ' ')} {getattr(one, name)} and {getattr(other, name)} have no ratio: their times "
                "say nothing about each other"
            )
    for key in (one, other):
        if key.scenario not in SCENARIOS:
            raise MixedError(f"{key.scenario} is not verified and is in no ratio; run it where the file can be dropped")
    if not base.samples_ns or not figure.samples_ns:
        return None
    return Ratio(
        value=describe(base.samples_ns).median_ns / describe(figure.samples_ns).median_ns,
        interval=bootstrap_ratio(base.samples_ns, figure.samples_ns),
        significance=significance_of(base.samples_ns, figure.samples_ns),
        n_base=len(base.samples_ns),
        n=len(figure.samples_ns),
    )


def may_compare(base: Figure, figure: Figure) -> bool:
    """True where `ratio_of` gives a ratio."""
    try:
        return ratio_of(base, figure) is not None
    except MixedError:
        return False


def _order(key: Key) -> tuple[object, ...]:
    cases = [case.key for case in CASES]
    words: Sequence[Sequence[str]] = (cases, CONFIGURATIONS, SCENARIOS)
    given = (key.case, key.configuration, key.scenario.rstrip("*"))
    places = [list(all_).index(word) if word in all_ else len(all_) for all_, word in zip(words, given, strict=True)]
    return (key.host, key.arch, key.device, places[0], key.case, places[1], places[2], astuple(key))
