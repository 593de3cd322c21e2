from __future__ import annotations

import builtins
import statistics
from typing import Any

import numpy as np
import pytest

from halo_vae.profiling.bench.stats import (
    MissingScipyError,
    bootstrap_ratio,
    describe,
    geometric_mean,
    mann_whitney,
    rank_effect,
    significance_of,
)

TIMES = (104, 100, 103, 101, 102, 150, 99)


def test_statistics_of_times() -> None:
    found = describe(TIMES)
    assert (found.n, found.median_ns, found.min_ns, found.max_ns) == (7, 102, 99, 150)
    assert found.mean_ns == pytest.approx(sum(TIMES) / 7)
    assert found.stdev_ns == pytest.approx(np.std(TIMES, ddof=1))
    assert (found.q1_ns, found.q3_ns) == pytest.approx(tuple(np.quantile(TIMES, (0.25, 0.75))))
    assert found.iqr_ns == pytest.approx(3.0)
    assert found.mad_ns == statistics.median([2, 2, 1, 1, 0, 48, 3])
    assert found.outliers == (150,)  # beyond 103.5 + 1.5 * 3
    assert found.ops == pytest.approx(1e9 * 7 / sum(TIMES))
    assert found.spread == pytest.approx(51 / 102)


def test_one_time_has_no_deviation() -> None:
    found = describe((5,))
    assert (found.n, found.median_ns, found.stdev_ns, found.iqr_ns, found.outliers) == (1, 5, None, 0, ())


@pytest.mark.parametrize("samples", [(), (0,), (5, -1)])
def test_times_that_are_none(samples: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="1 ns or more"):
        describe(samples)


def test_interval_of_a_ratio() -> None:
    slow, fast = [200, 202, 198, 201, 199], [100, 101, 99, 100, 100]
    found = bootstrap_ratio(slow, fast)
    assert found is not None
    assert 1.9 < found.low <= 2.0 <= found.high < 2.1
    assert bootstrap_ratio(slow, fast) == found  # seeded
    assert bootstrap_ratio([100, 100, 100], [50, 50, 50]) == bootstrap_ratio([2, 2, 2], [1, 1, 1], seed=3)
    assert bootstrap_ratio([1, 2], [1, 2, 3]) is None


def test_bootstrap_leaves_numpys_own_generator_alone() -> None:
    np.random.seed(1)
    before = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    bootstrap_ratio([1, 2, 3], [1, 2, 3])
    assert (np.random.get_state()[1] == before).all()  # type: ignore[index]


@pytest.mark.parametrize(
    ("first", "second", "effect"),
    [([3, 4], [1, 2], 1.0), ([1, 2], [3, 4], -1.0), ([1, 3], [2, 2], 0.0), ([2, 2], [1, 2], 0.5)],
)
def test_effect_by_pairs(first: list[int], second: list[int], effect: float) -> None:
    assert rank_effect(first, second) == effect
    with pytest.raises(ValueError, match="at least one"):
        rank_effect(first, [])


def test_mann_whitney() -> None:
    pytest.importorskip("scipy")
    found = mann_whitney([11, 12, 13, 14, 15], [1, 2, 3, 4, 5])
    assert (found.u, found.effect) == (25, 1.0)
    assert found.p_value == pytest.approx(2 / 252)  # both orders of 10 choose 5 that are as uneven
    assert significance_of([1, 2, 3], [3, 1, 2]).p_value > 0.9  # type: ignore[union-attr]
    assert significance_of([1], [1, 2]) is None


def test_without_scipy_only_the_test_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    there = builtins.__import__

    def hidden(name: str, *args: Any, **rest: Any) -> Any:
        if name.split(".")[0] == "scipy":
            raise ImportError(name)
        return there(name, *args, **rest)

    monkeypatch.setattr(builtins, "__import__", hidden)
    with pytest.raises(MissingScipyError, match=r"halo-vae\[bench\]"):
        mann_whitney([1, 2], [3, 4])
    assert significance_of([1, 2], [3, 4]) is None
    assert bootstrap_ratio([1, 2, 3], [1, 2, 3]) is not None
    assert describe(TIMES).n == 7


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([]) is None
    with pytest.raises(ValueError, match="above 0"):
        geometric_mean([1.0, 0.0])
