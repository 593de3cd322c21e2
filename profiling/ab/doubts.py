"""What makes the times of a comparison doubtful."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .run import SideRuns
from .samples import LOAD_LIMIT, MIN_RUNS, SPREAD_LIMIT, speedup_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """One reason not to trust a figure."""

    short: str
    """A few words, for the verdict."""
    sentence: str
    """What was seen, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was noticed beside the times."""

    load_before: float | None = None
    """Load average before the first run."""
    cores: int | None = None
    first_of_shape_runs: int = 0
    """Timed runs of ours that met a convolution shape new to the process."""
    emptied: int = 0
    """Timed runs of ours before which the host had taken back what is kept between decodes."""
    fallbacks: tuple[str, ...] = ()
    """Repairs in our last run."""
    said: tuple[str, ...] = ()
    """Warnings that the host logged while it decoded."""


def doubts_of(first: SideRuns, second: SideRuns, seen: Seen) -> tuple[Doubt, ...]:
    """Every reason, the gravest of a kind once; empty where there are none."""
    return (*_of_times(first, second), *_of_machine(seen), *_of_runs(first, seen))


def _of_times(first: SideRuns, second: SideRuns) -> Sequence[Doubt]:
    found = []
    counts = [side.samples.n for side in (first, second) if side.failure is None]
    n = min(counts, default=0)
    if 0 < n < MIN_RUNS:
        found.append(Doubt(short=f"n={n}", sentence=f"only {n} timed run(s) of each side: ask for {MIN_RUNS} or more"))
    if counts and not (first.warm_ups_ns or first.memory_run_ns or second.warm_ups_ns or second.memory_run_ns):
        found.append(
            Doubt(short="no warm-up", sentence="no warm-up: each side's first, cold run is among its timed ones")
        )
    for side in (first, second):
        spread = side.samples.spread
        if spread is not None and spread > SPREAD_LIMIT:
            percent = f"{100 * spread:.0f} %"
            sentence = f"{side.name}: slowest and fastest run are {percent} of the median apart; run it again on an "
            found.append(
                Doubt(short=f"spread {percent} ({side.name})", sentence=f"{sentence}idle machine, or with more runs")
            )
    ratio = speedup_of(first.samples, second.samples)
    if ratio is not None and ratio.overlap:
        sentence = "the slowest run of the faster side took longer than the fastest of the slower one"
        found.append(Doubt(short="runs overlap", sentence=sentence))
    return found


def _of_machine(seen: Seen) -> Sequence[Doubt]:
    load = seen.load_before
    if load is None or seen.cores is None or load <= LOAD_LIMIT * seen.cores:
        return ()
    sentence = f"the load average was {load:.2f} on {seen.cores} core(s) before the first run: something else was "
    return (Doubt(short=f"load {load:.1f}", sentence=f"{sentence}computing, or had just been"),)


def _of_runs(first: SideRuns, seen: Seen) -> Sequence[Doubt]:
    found = []
    if seen.first_of_shape_runs:
        found.append(
            Doubt(
                short="new shapes",
                sentence=f"{seen.first_of_shape_runs} timed run(s) of Halo met a convolution shape for the first time "
                "and may hold a search for kernels; use more warm-ups",
            )
        )
    if seen.emptied:
        found.append(
            Doubt(
                short="memory taken back",
                sentence=f"before {seen.emptied} timed run(s) of Halo the host took back what is kept between decodes, "
                "to make room for stock's: alone it would be faster",
            )
        )
    found += [Doubt(short="fallback", sentence=f"Halo did not go as planned: {text}") for text in seen.fallbacks]
    found += [Doubt(short=f"warning ({first.name})", sentence=f"the host said meanwhile: {text}") for text in seen.said]
    return found
