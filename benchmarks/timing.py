"""Times of several sides in one process, taken in turn, with what makes them doubtful."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from halo_vae.profiling.ab.samples import LOAD_LIMIT, MIN_RUNS, SPREAD_LIMIT, load_average, spread_of

__all__ = ["TimedCase", "best_ns", "doubts", "load_average", "time_in_turn"]

Clock = Callable[[], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCase:
    """All runs of one side at one thread count, in order."""

    engine: str
    threads: int
    samples_ns: tuple[int, ...]

    @property
    def median_ns(self) -> float:
        """The figure."""
        return statistics.median(self.samples_ns)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return spread_of(self.samples_ns)


def time_in_turn(
    sides: Mapping[str, Callable[[], object]], threads: Sequence[int], runs: int, clock: Clock = time.perf_counter_ns
) -> tuple[TimedCase, ...]:
    """Run every side once per round at each thread count, so that a change of the machine's mood hits all of them.

    The first runs of each side are the caller's to make. torch's thread count is put back afterwards.
    """
    before = torch.get_num_threads()
    samples: dict[tuple[str, int], list[int]] = {(name, n): [] for n in threads for name in sides}
    try:
        for _ in range(runs):
            for n in threads:
                torch.set_num_threads(n)
                for name, decode in sides.items():
                    start = clock()
                    decode()
                    samples[name, n].append(clock() - start)
    finally:
        torch.set_num_threads(before)
    return tuple(TimedCase(engine=name, threads=n, samples_ns=tuple(taken)) for (name, n), taken in samples.items())


def best_ns(cases: Sequence[TimedCase], engine: str) -> float:
    """An engine's median at the thread count that suits it best. ValueError if it was not timed."""
    medians = [case.median_ns for case in cases if case.engine == engine]
    if not medians:
        raise ValueError(f"{engine} was not timed; timed: {', '.join(dict.fromkeys(c.engine for c in cases))}")
    return min(medians)


def doubts(
    cases: Sequence[TimedCase],
    load_before: float | None,
    load_after: float | None,
    cores: int | None,
    wait_policy: str | None,
) -> tuple[str, ...]:
    """Reasons not to trust the times, as sentences; empty where there are none."""
    found = []
    few = min((len(c.samples_ns) for c in cases), default=MIN_RUNS)
    if few < MIN_RUNS:
        found.append(f"only {few} run(s) of each engine: ask for {MIN_RUNS} or more")
    for case in cases:
        if case.spread > SPREAD_LIMIT:
            found.append(
                f"{case.engine} at {case.threads} thread(s): slowest and fastest run are {case.spread:.0%} of "
                "the median apart; rerun on an idle machine"
            )
    if cores is not None and load_before is not None and load_before > LOAD_LIMIT * cores:
        found.append(f"the load average was {load_before:.2f} before the first run: something else was computing")
    own = max((c.threads for c in cases), default=0)
    if load_after is not None and load_after > own + 0.5:
        found.append(f"the load average was {load_after:.2f} after {own} thread(s) of our own: something else ran too")
    if cores is not None and own > cores:
        found.append(f"{own} threads on {cores} core(s) get in each other's way")
    if wait_policy != "passive":
        policy = wait_policy or "not set"
        found.append(f"OMP_WAIT_POLICY is {policy}: threads that spin while they wait distort times; set it to passive")
    return tuple(found)
