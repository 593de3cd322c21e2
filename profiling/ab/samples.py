"""Times of one side of a comparison, the ratio of two sides, and what is known of the machine meanwhile."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_RUNS = 5
"""Fewer runs than these make a figure doubtful."""
SPREAD_LIMIT = 0.10
"""(slowest - fastest) / median above which a figure is doubtful."""
LOAD_LIMIT = 0.3
"""Load average per core, before the first run, above which somebody else was computing too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Times of runs in order, nanoseconds; warm-ups are not among them. None where there are none."""

    ns: tuple[int, ...] = ()

    @property
    def n(self) -> int:
        """Number of runs."""
        return len(self.ns)

    @property
    def median_ns(self) -> float | None:
        """The figure."""
        return statistics.median(self.ns) if self.ns else None

    @property
    def min_ns(self) -> int | None:
        """The fastest run."""
        return min(self.ns, default=None)

    @property
    def max_ns(self) -> int | None:
        """The slowest run."""
        return max(self.ns, default=None)

    @property
    def spread(self) -> float | None:
        """(slowest - fastest) / median."""
        return spread_of(self.ns) if self.median_ns else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """How many times as fast the second side is as the first; below 1 it is slower."""

    ratio: float
    """Median of the first ÷ median of the second."""
    low: float
    """Fastest run of the first ÷ slowest of the second."""
    high: float
    """Slowest run of the first ÷ fastest of the second."""
    apart: bool
    """False where one side's median lies within the middle half of the other's runs (with fewer than four, within all
    of them): the difference may be chance."""
    overlap: bool
    """True where the two sides' runs overlap at all."""


def spread_of(ns: Sequence[int]) -> float:
    """(slowest - fastest) / median of at least one time above 0."""
    return (max(ns) - min(ns)) / statistics.median(ns)


def speedup_of(first: Samples, second: Samples) -> Speedup | None:
    """None where a side has no runs, or runs of no length."""
    if not first.ns or not second.ns or not min(first.ns) or not min(second.ns):
        return None
    one, other = statistics.median(first.ns), statistics.median(second.ns)
    return Speedup(
        ratio=one / other,
        low=min(first.ns) / max(second.ns),
        high=max(first.ns) / min(second.ns),
        apart=not (_within(one, second) or _within(other, first)),
        overlap=min(first.ns) <= max(second.ns) and min(second.ns) <= max(first.ns),
    )


def load_average() -> float | None:
    """Runnable threads over the last minute; None where the system does not tell (Windows)."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _within(value: float, samples: Samples) -> bool:
    low, high = float(min(samples.ns)), float(max(samples.ns))
    if samples.n >= 4:  # one run that was disturbed says nothing of the others
        low, _, high = statistics.quantiles(samples.ns, n=4, method="inclusive")
    return low <= value <= high
