from __future__ import annotations

from typing import Any

import pytest

from halo_vae.profiling.bench.doubts import doubts_of
from halo_vae.profiling.bench.results import RunFacts, ShapeCounts
from halo_vae.tests.profiling.bench.lines import make_run

GOOD = RunFacts(
    load_before=0.1, load_after=2.0, cores=4, wait_policy="passive", clock_drift_ns=200_000, run_ns=10**9,
    temperature_before_c=50.0, temperature_after_c=60.0, throttled=False,
)  # fmt: skip


def facts(**changes: Any) -> dict[str, Any]:
    values = {name: getattr(GOOD, name) for name in RunFacts.__dataclass_fields__}
    return {"facts": RunFacts(**{**values, **changes})}


S = 10**9
CASES: list[tuple[dict[str, Any], str]] = [
    ({"samples_ns": (100, 100)}, "2 samples only: take 5 or more"),
    ({"samples_ns": (20 * S, 20 * S)}, "2 samples only: take 3 or more"),  # of a long decode fewer will do
    ({"samples_ns": (100, 100, 100, 100, 150)}, "50% of the median apart"),
    ({"samples_ns": (100, 100, 100, 107, 107, 107)}, "took 7% longer than the first"),
    ({"status": "cancelled", "error": "cancelled", "asked_samples": 9}, "cancelled after 5 of 9 samples"),
    ({"scenario": "frozen", "page_cache": "unverified"}, "it is in no ratio"),
    (
        {"scenario": "warm", "shapes": ShapeCounts(requested=9, not_in_hot=tuple("abcdef"))},
        "6 convolution shapes that hot did not: a, b, c, d and 2 more",
    ),
    ({"served": "cached"}, "was not decoded again"),
    (facts(clock_drift_ns=-3_600 * S), "moved back by 3600000 ms"),  # a wall clock set an hour back
    (facts(clock_drift_ns=10_000_000), "moved forward by 10 ms"),
    (facts(load_before=1.5), "load average was 1.50 on 4 cores before"),
    (facts(load_after=3.0), "3.00 after 2 threads of our own"),
    (facts(cores=1, load_before=None), "2 threads on 1 core "),
    (facts(wait_policy=None), "OMP_WAIT_POLICY was not set"),
    (facts(throttled=True), "lowered its clock"),
    (facts(temperature_after_c=95.0), "it was 95 °C"),
    ({"note": "bf16 in place of fp16"}, "bf16 in place of fp16"),
]


@pytest.mark.parametrize(("change", "sentence"), CASES)
def test_a_doubt(change: dict[str, Any], sentence: str) -> None:
    found = doubts_of([make_run(**{"facts": GOOD, **change})])
    assert [sentence in doubt.sentence for doubt in found] == [True]


def test_no_doubt() -> None:
    assert doubts_of([make_run(facts=GOOD)]) == ()
    assert doubts_of([make_run(facts=GOOD), make_run(1, facts=GOOD)]) == ()
    assert doubts_of([]) == ()


def test_drift_within_what_a_clock_may_be_slewed_is_none() -> None:
    assert doubts_of([make_run(**facts(clock_drift_ns=1_000_000 + 100_000, run_ns=S))]) == ()


def test_a_failed_run_casts_no_doubt_on_others() -> None:
    failed = make_run(1, status="failed", error="e", samples_ns=(1, 900), **facts(throttled=True))
    assert doubts_of([make_run(facts=GOOD), failed]) == ()


def test_a_gpu_does_not_wait_by_openmp() -> None:
    assert doubts_of([make_run(device="cuda", **facts(wait_policy=None))]) == ()


def test_two_environments_in_one_figure() -> None:
    found = doubts_of([make_run(facts=GOOD), make_run(1, facts=GOOD, environment_id="0123456789ab")])
    assert ["2 different environments" in doubt.sentence for doubt in found] == [True]
