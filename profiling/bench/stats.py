"""Statistics of times, computed when results are read and never stored. Only the significance test needs SciPy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from ..ab.samples import spread_of
from .cases import BenchError

FENCE = 1.5
"""IQRs beyond the quartiles at which a sample is an outlier. Source: Tukey, Exploratory Data Analysis, 1977."""
RESAMPLES = 2000
CONFIDENCE = 0.95
MIN_FOR_INTERVAL = 3
"""Samples of each side below which an interval would say more than is known."""
SCIPY_HINT = "the significance test needs SciPy; install it (pip install 'halo-vae[bench]')"


class MissingScipyError(BenchError):
    """SciPy is not installed; everything but the significance test works without it."""

    def __init__(self) -> None:
        """With what to install."""
        super().__init__(SCIPY_HINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What at least one time says. Nanoseconds; None where one sample is too few."""

    n: int
    median_ns: float
    """The figure of every table and ratio."""
    mean_ns: float
    min_ns: int
    max_ns: int
    stdev_ns: float | None
    """Of a sample: divided by n - 1."""
    q1_ns: float
    """Quartiles by linear interpolation. Source: Hyndman & Fan 1996, definition 7, as numpy's."""
    q3_ns: float
    mad_ns: float
    """Median of the distances from the median, not scaled."""
    outliers: tuple[int, ...]
    """Samples more than `FENCE` × IQR outside the quartiles, in order. They stay in every statistic."""

    @property
    def iqr_ns(self) -> float:
        """The middle half of the samples lies within it."""
        return self.q3_ns - self.q1_ns

    @property
    def ops(self) -> float:
        """Decodes per second: 1 ÷ mean, as pytest-benchmark counts it."""
        return 1e9 / self.mean_ns

    @property
    def spread(self) -> float:
        """(slowest - fastest) ÷ median."""
        return (self.max_ns - self.min_ns) / self.median_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Where a ratio lies."""

    low: float
    high: float
    confidence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Significance:
    """A Mann–Whitney U test of two sets of times, two-sided."""

    u: float
    """Pairs in which the first side's time is the longer one, ties as halves."""
    p_value: float
    """How likely ranks at least as uneven are where both sides are alike."""
    effect: float
    """See `rank_effect`."""


def describe(samples_ns: Sequence[int]) -> Stats:
    """All statistics of times. ValueError without any, or for a time below 1 ns."""
    if not samples_ns or min(samples_ns) < 1:
        raise ValueError("at least one time of 1 ns or more is needed")
    n, median = len(samples_ns), statistics.median(samples_ns)
    q1, q3 = quartiles(samples_ns)
    low, high = q1 - FENCE * (q3 - q1), q3 + FENCE * (q3 - q1)
    return Stats(
        n=n,
        median_ns=median,
        mean_ns=statistics.fmean(samples_ns),
        min_ns=min(samples_ns),
        max_ns=max(samples_ns),
        stdev_ns=statistics.stdev(samples_ns) if n > 1 else None,
        q1_ns=q1,
        q3_ns=q3,
        mad_ns=statistics.median(abs(s - median) for s in samples_ns),
        outliers=tuple(s for s in samples_ns if not low <= s <= high),
    )


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """First and third quartile of at least one value."""
    if len(samples) == 1:
        return float(samples[0]), float(samples[0])
    q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return q1, q3


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """The mean of ratios; None without any. ValueError for one that is not above 0."""
    if ratios and min(ratios) <= 0:
        raise ValueError(f"a ratio is {min(ratios)}; ratios are above 0")
    return statistics.geometric_mean(ratios) if ratios else None


def bootstrap_ratio(
    first: Sequence[int], second: Sequence[int], *, seed: int = 0, resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> Interval | None:  # fmt: skip
    """Interval of median(first) ÷ median(second), by resampling both sides; equal for an equal seed.

    None where a side has fewer than `MIN_FOR_INTERVAL` samples. Source: Efron 1979, the percentile bootstrap.
    """
    if min(len(first), len(second)) < MIN_FOR_INTERVAL:
        return None
    import numpy as np

    random = np.random.default_rng(seed)
    one, other = (
        np.median(random.choice(np.asarray(side, dtype=np.float64), (resamples, len(side))), axis=1)
        for side in (first, second)
    )
    low, high = np.quantile(one / other, ((1 - confidence) / 2, (1 + confidence) / 2))
    return Interval(low=float(low), high=float(high), confidence=confidence)


def rank_effect(first: Sequence[int], second: Sequence[int]) -> float:
    """Share of pairs in which the first side takes longer, less the share in which it takes less long: -1 to 1.

    0 = alike, 1 = each time of the first is longer than each of the second. Source: Cliff 1993 (delta), which is the
    rank-biserial correlation. ValueError where a side has no samples.
    """
    if not first or not second:
        raise ValueError("both sides need at least one sample")
    pairs = [(a > b) - (a < b) for a in first for b in second]
    return sum(pairs) / len(pairs)


def has_scipy() -> bool:
    """True where `mann_whitney` works."""
    return find_spec("scipy") is not None


def mann_whitney(first: Sequence[int], second: Sequence[int]) -> Significance:
    """Test whether one side tends to take longer. MissingScipyError without SciPy, ValueError for an empty side."""
    effect = rank_effect(first, second)
    try:
        from scipy import stats
    except ImportError as error:
        raise MissingScipyError from error
    found = stats.mannwhitneyu(first, second, alternative="two-sided")
    return Significance(u=float(found.statistic), p_value=float(found.pvalue), effect=effect)


def significance_of(first: Sequence[int], second: Sequence[int]) -> Significance | None:
    """The same, None where SciPy is missing or a side has fewer than 2 samples."""
    if min(len(first), len(second)) < 2:
        return None
    try:
        return mann_whitney(first, second)
    except MissingScipyError:
        return None


__all__ = [
    "CONFIDENCE", "FENCE", "SCIPY_HINT", "Interval", "MissingScipyError", "Significance", "Stats", "bootstrap_ratio",
    "describe", "geometric_mean", "has_scipy", "mann_whitney", "quartiles", "rank_effect", "significance_of",
    "spread_of",
]  # fmt: skip
