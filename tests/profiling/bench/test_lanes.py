from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from halo_vae.profiling.bench.lanes import MixedError, figures_of, in_lane, may_compare, ratio_of
from halo_vae.profiling.bench.results import Results
from halo_vae.profiling.bench.verdict import verdict_of
from halo_vae.tests.profiling.bench.lines import make_run, make_series


def one(**changes: Any) -> Any:
    (figure,) = figures_of([make_run(**changes)])
    return figure


def test_lanes_are_never_mixed() -> None:
    runs = (make_run(1), make_run(2, lane="nightly"))
    results = Results(runs=runs, series=(make_series(),))
    with pytest.raises(MixedError, match="lanes nightly and single are never mixed"):
        figures_of(runs)
    with pytest.raises(MixedError, match="lanes single and instrumented and nightly, which are never mixed; choose"):
        in_lane(results)
    with pytest.raises(MixedError, match="lane single and nightly"):
        ratio_of(one(), one(lane="nightly"))
    assert in_lane(results, "nightly").runs == runs[1:]
    assert in_lane(results, "single").series == ()
    assert in_lane(Results(runs=runs[:1])).runs == runs[:1]
    assert in_lane(Results()) == Results()


@pytest.mark.parametrize(
    "change",
    [
        {"arch": "gfx1151"}, {"host": "other"}, {"device": "cuda"}, {"threads": 1}, {"vae": "random:sd"},
        {"case": "large_image"}, {"latent_shape": (1, 4, 8, 8)},
    ],
)  # fmt: skip
def test_no_ratio_across(change: dict[str, Any]) -> None:
    base, figure = one(), one(**change)
    with pytest.raises(MixedError, match=next(iter(change)).replace("_", " ")):
        ratio_of(base, figure)
    assert not may_compare(base, figure)


def test_frozen_that_is_not_verified_is_in_no_ratio() -> None:
    sure = one(scenario="frozen", page_cache="dropped")
    unsure = one(scenario="frozen", page_cache="unverified")
    for base, figure in ((one(), unsure), (unsure, one()), (sure, unsure)):
        with pytest.raises(MixedError, match=r"frozen\* is not verified and is in no ratio"):
            ratio_of(base, figure)
    assert ratio_of(one(), sure) is not None
    both = figures_of([make_run(1, scenario="frozen", page_cache=c) for c in ("dropped", "unverified")])
    assert [figure.key.scenario for figure in both] == ["frozen", "frozen*"]  # nor in one median


def test_a_ratio_says_how_many_times_as_fast() -> None:
    slower = one(samples_ns=tuple(3 * ns for ns in make_run().samples_ns), configuration="phase2")
    ratio = ratio_of(one(configuration="baseline"), slower)
    assert ratio is not None
    assert ratio.value == pytest.approx(1 / 3)
    assert (ratio.n_base, ratio.n, ratio.is_clear) == (5, 5, True)
    same = ratio_of(one(), one())
    assert same is not None
    assert not same.is_clear
    assert ratio_of(one(), one(status="failed", error="e")) is None


@pytest.mark.parametrize("change", [{"case": "k"}, {"host": "h"}, {"arch": "a"}, {"dtype": "bf16"}, {"threads": 9}])
def test_medians_are_keyed(change: dict[str, Any]) -> None:
    assert len(figures_of([make_run(1), make_run(2, **change), make_run(3)])) == 2


def test_runs_of_a_key_are_one_figure() -> None:
    (figure,) = figures_of(
        [
            make_run(1, samples_ns=(5, 6), max_error=0.1, psnr_db=40.0, peak_bytes=7),
            make_run(2, samples_ns=(7,), status="cancelled", error="e", max_error=0.2, psnr_db=30.0, peak_bytes=8),
            make_run(3, samples_ns=(99,), status="failed", error="e", max_error=None, psnr_db=None),
        ]
    )
    assert figure.samples_ns == (5, 6, 7)  # warm-ups and failed runs are none
    assert (figure.max_error, figure.psnr_db, figure.peak_bytes, figure.psnr_infinite) == (0.2, 30.0, 50_000_000, False)
    assert [run.status for run in figure.failed] == ["failed"]


def test_order_is_that_of_the_cases() -> None:
    keys = [
        {"case": "small_image", "configuration": "baseline", "scenario": "cold"}, {"case": "small_image"},
        {"case": "large_image"}, {"case": "batch_video"}, {"case": "another"},
    ]  # fmt: skip
    figures = figures_of(make_run(n, **change) for n, change in reversed(list(enumerate(keys))))
    assert [int(f.runs[0].run_id, 16) for f in figures] == [0, 1, 2, 3, 4]


def test_verdict() -> None:
    assert verdict_of(one()).passed
    assert verdict_of(one(max_error=None, mean_error=None)).passed is None
    assert verdict_of(one(max_error=0.1, mean_error=0.0005)).sentence.startswith("FAIL: max error 0.1 (at most 0.01)")
    assert verdict_of(one(max_error=0.1, mean_error=0.005, dtype="bf16")).passed  # rounding
    assert verdict_of(one(max_error=0.1, mean_error=0.1, dtype="bf16")).passed is False
    broken = one(status="not_finite", error="e", samples_ns=(), max_error=None, mean_error=None)
    assert verdict_of(broken).sentence == "FAIL: the picture holds inf or nan"
    assert replace(broken, runs=(*broken.runs, make_run())).samples_ns  # a good run of the key
    assert verdict_of(replace(broken, runs=(*broken.runs, make_run()))).passed is False
