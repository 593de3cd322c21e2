"""Reasons not to trust a figure: too few samples, spread, clocks, load, heat, and runs that are not of one kind."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from ..ab.doubts import Doubt
from ..ab.samples import LOAD_LIMIT, MIN_RUNS, SPREAD_LIMIT, spread_of
from .results import RunLine

MIN_RUNS_LARGE = 3
"""Enough of a decode that takes longer than `LARGE_NS`: noise of a scheduler is small beside it."""
LARGE_NS = 10_000_000_000
DRIFT_SHARE = 500e-6
"""Most that a clock is slewed: 500 ppm. Source: adjtimex(2), RFC 5905; beyond it somebody set it, or it was asleep."""
DRIFT_FLOOR_NS = 1_000_000
HOT_C = 90.0
"""At which many chips begin to lower their clock."""
TREND_LIMIT = 0.05
"""Second half of the samples slower than the first by this share of it: the machine was still warming up."""
TREND_MIN_RUNS = 6
_SHOWN_SHAPES = 4


def doubts_of(runs: Sequence[RunLine]) -> tuple[Doubt, ...]:
    """Every reason to doubt the figure made of these runs, each once; empty where there is none."""
    counted = [run for run in runs if run.counts]
    found = [*_of_samples([ns for run in counted for ns in run.samples_ns])]
    for run in counted:
        found += [*_of_one_kind(run), *_of_clock(run), *_of_load(run), *_of_heat(run)]
    found += _of_several(counted)
    return tuple(dict.fromkeys(found))


def _of_samples(samples_ns: Sequence[int]) -> Iterator[Doubt]:
    if not samples_ns:
        return
    n = len(samples_ns)
    enough = MIN_RUNS_LARGE if statistics.median(samples_ns) > LARGE_NS else MIN_RUNS
    if n < enough:
        yield Doubt(short=f"n={n}", sentence=f"{_n(n, 'sample')} only: take {enough} or more")
    spread = spread_of(samples_ns)
    if spread > SPREAD_LIMIT:
        yield Doubt(
            short=f"spread {spread:.0%}",
            sentence=f"slowest and fastest sample are {spread:.0%} of the median apart: rerun on an idle machine",
        )


def _of_one_kind(run: RunLine) -> Iterator[Doubt]:
    if run.status == "cancelled":
        asked = "" if run.asked_samples is None else f" of {run.asked_samples}"
        yield Doubt(short="cancelled", sentence=f"a run was cancelled after {len(run.samples_ns)}{asked} samples")
    if not run.is_verified:
        yield Doubt(
            short="not verified",
            sentence="the VAE's file may have been in memory all the same (frozen*): it is in no ratio",
        )
    strange = run.shapes.not_in_hot if run.shapes is not None and run.scenario == "warm" else ()
    if strange:
        more = len(strange) - _SHOWN_SHAPES
        words = ", ".join(strange[:_SHOWN_SHAPES]) + (f" and {more} more" if more > 0 else "")
        yield Doubt(
            short="new shapes",
            sentence=f"the warm run asked for {_n(len(strange), 'convolution shape')} that hot did not: {words}",
        )
    if run.served == "cached":
        yield Doubt(short="cached", sentence="the picture came from a cache of results and was not decoded again")


def _of_clock(run: RunLine) -> Iterator[Doubt]:
    facts = run.facts
    if facts.clock_drift_ns is None:
        return
    allowed = DRIFT_FLOOR_NS + DRIFT_SHARE * (facts.run_ns or 0)
    if abs(facts.clock_drift_ns) > allowed:
        way = "back" if facts.clock_drift_ns < 0 else "forward"
        yield Doubt(
            short="clock stepped",
            sentence=f"the wall clock moved {way} by {abs(facts.clock_drift_ns) / 1e6:.0f} ms against the monotonic "
            "one: somebody set it, or the machine slept; times are by the monotonic clock",
        )


def _of_load(run: RunLine) -> Iterator[Doubt]:
    facts = run.facts
    if facts.cores is not None and facts.load_before is not None and facts.load_before > LOAD_LIMIT * facts.cores:
        yield Doubt(
            short=f"load {facts.load_before:.1f}",
            sentence=f"the load average was {facts.load_before:.2f} on {_n(facts.cores, 'core')} before the first "
            "sample: something else was computing, or had just been",
        )
    if facts.load_after is not None and facts.load_after > run.threads + 0.5:
        yield Doubt(
            short=f"load {facts.load_after:.1f} after",
            sentence=f"the load average was {facts.load_after:.2f} after {_n(run.threads, 'thread')} of our own: "
            "something else ran too",
        )
    if facts.cores is not None and run.threads > facts.cores:
        yield Doubt(
            short="threads > cores",
            sentence=f"{run.threads} threads on {_n(facts.cores, 'core')} get in each other's way",
        )
    if run.device == "cpu" and facts.cores is not None and facts.wait_policy != "passive":
        yield Doubt(
            short="OMP_WAIT_POLICY",
            sentence=f"OMP_WAIT_POLICY was {facts.wait_policy or 'not set'}: threads that spin while they wait distort "
            "times; set it to passive",
        )


def _of_heat(run: RunLine) -> Iterator[Doubt]:
    facts = run.facts
    if facts.throttled:
        yield Doubt(short="throttled", sentence="the machine lowered its clock because of heat or power meanwhile")
    hottest = max((t for t in (facts.temperature_before_c, facts.temperature_after_c) if t is not None), default=None)
    if hottest is not None and hottest >= HOT_C:
        yield Doubt(
            short=f"{hottest:.0f} °C", sentence=f"it was {hottest:.0f} °C: at such a heat many chips lower their clock"
        )
    half = len(run.samples_ns) // 2
    if len(run.samples_ns) >= TREND_MIN_RUNS:
        first, last = statistics.median(run.samples_ns[:half]), statistics.median(run.samples_ns[-half:])
        if last > first * (1 + TREND_LIMIT):
            yield Doubt(
                short="slower and slower",
                sentence=f"the second half of the samples took {last / first - 1:.0%} longer than the first: the "
                "machine heats up, or something else began",
            )


def _of_several(runs: Sequence[RunLine]) -> Iterator[Doubt]:
    environments = {run.environment_id: None for run in runs}
    if len(environments) > 1:
        yield Doubt(
            short="environments",
            sentence=f"runs of {len(environments)} different environments ({', '.join(environments)}) in one figure",
        )
    for note in dict.fromkeys(run.note for run in runs if run.note):
        yield Doubt(short="note", sentence=note)


def _n(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
