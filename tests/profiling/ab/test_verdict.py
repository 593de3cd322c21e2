"""What is said of a comparison: wrong before fast, slower as slower, and every doubt."""

from __future__ import annotations

import json
import math

import pytest
import torch

from halo_vae.profiling.ab.doubts import Seen
from halo_vae.profiling.ab.quality import APPROXIMATE, EXACT, NARROW, Reference, limits_for, measure_quality
from halo_vae.profiling.ab.samples import Samples, Speedup, speedup_of
from halo_vae.profiling.render.ab import render_comparison
from halo_vae.tests.profiling.ab.sides import compared

STOCK = (2.0, 1.0, 1.02, 0.98, 1.0, 1.01)
FAST = (1.0, 0.5, 0.51, 0.49, 0.5, 0.5)
SLOW = (6.0, 3.0, 3.1, 2.9, 3.0, 3.0)


def test_bm_3_a_wrong_picture_fails_however_fast() -> None:
    result = compared(STOCK, FAST, runs=5, error=0.1).comparison
    assert (result.verdict.kind, result.verdict.passed) == ("wrong", False)
    assert result.verdict.sentence == (
        "FAIL: max error 0.1 (at most 0.01), mean error 0.1 (at most 0.001); its speed, 2.00 × stock's, does not count"
    )
    text = render_comparison(result)
    assert "verdict    FAIL: max error 0.1" in text
    assert "max error      1.00e-01" in text
    assert "mean error     1.00e-01" in text


def test_bm_3_a_slower_one_is_called_slower() -> None:
    result = compared(STOCK, SLOW, runs=5).comparison
    assert (result.verdict.kind, result.verdict.passed) == ("slower", True)
    assert result.verdict.sentence == "slower: 0.33 × stock's speed (0.32–0.35), takes 3.00 × stock's time"
    assert "stock ÷ Halo        0.33 ×" in render_comparison(result)


def test_bm_3_a_right_and_faster_one_passes_with_its_errors() -> None:
    result = compared(STOCK, FAST, runs=5, error=1e-5).comparison
    assert (result.verdict.kind, result.verdict.passed) == ("faster", True)
    assert result.verdict.sentence == "2.00 × faster (1.92–2.08)"
    text = render_comparison(result)
    assert "max error      1.00e-05" in text
    assert "mean error     1.00e-05" in text
    assert "an untiled float32 decode: an error is Halo's" in text


def test_few_runs_are_a_doubt_in_the_verdict() -> None:
    result = compared((2.0, 1.0, 1.0, 1.0), (1.0, 0.5, 0.5, 0.5), runs=3).comparison
    assert result.verdict.sentence == "2.00 × faster (2.00–2.00), doubt: n=3"
    assert "only 3 timed run(s) of each side" in render_comparison(result)


def test_runs_that_overlap_show_no_difference() -> None:
    result = compared((2.0, 1.0, 1.2, 1.0, 1.1, 1.1), (2.0, 1.05, 1.1, 1.0, 0.9, 0.95), runs=5).comparison
    assert result.verdict.kind == "unclear"
    assert result.verdict.sentence.startswith("no clear difference: 1.10 × stock's speed (0.91–1.33), doubt: ")
    assert {d.short for d in result.doubts} == {"spread 18 % (stock)", "spread 20 % (Halo)", "runs overlap"}


def test_one_outlier_does_not_hide_a_difference() -> None:
    ratio = speedup_of(Samples(ns=(100, 100, 100, 100, 40)), Samples(ns=(50, 50, 50, 50, 50)))
    assert ratio == Speedup(ratio=2.0, low=0.8, high=2.0, apart=True, overlap=True)
    assert speedup_of(Samples(), Samples(ns=(1,))) is None
    assert speedup_of(Samples(ns=(0, 1)), Samples(ns=(1,))) is None


@pytest.mark.parametrize(
    ("seen", "load", "short"),
    [
        (Seen(first_of_shape_runs=1), 0.0, "new shapes"),
        (Seen(emptied=2), 0.0, "memory taken back"),
        (Seen(fallbacks=("float16 → float32: inf",)), 0.0, "fallback"),
        (Seen(said=("Ran out of memory, retrying with tiled decoding",)), 0.0, "warning (stock)"),
        (Seen(), 1e6, "load 1000000.0"),
    ],
)
def test_what_was_noticed_is_a_doubt(seen: Seen, load: float, short: str) -> None:
    result = compared(STOCK, FAST, runs=5, seen=seen, load=load).comparison
    assert [doubt.short for doubt in result.doubts] == [short]
    assert result.verdict.sentence.endswith(f", doubt: {short}")
    assert result.doubts[0].sentence in render_comparison(result)


def test_a_load_that_cannot_be_read_is_no_doubt() -> None:
    assert compared(STOCK, FAST, runs=5, load=None).comparison.doubts == ()


def test_identical_pictures_have_no_finite_psnr_and_valid_json() -> None:
    result = compared(STOCK, FAST, runs=5).comparison
    assert result.quality is not None
    assert (result.quality.psnr_db, result.quality.identical) == (None, True)
    line = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert (line["quality"]["psnr_db"], line["quality"]["max_error"], line["schema_version"]) == (None, 0.0, 1)
    text = render_comparison(result)
    assert "infinite" in text
    assert "all black" in text


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_picture_that_is_not_finite_fails(bad: float) -> None:
    error = torch.zeros(1, 4, 4, 3)
    error[0, 1, 2, 0] = bad
    result = compared(STOCK, FAST, runs=5, error=error).comparison
    assert result.verdict.kind == "wrong"
    assert result.verdict.sentence.startswith("FAIL: the picture holds inf or nan; its speed, 2.00 × stock's,")
    line = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert line["quality"]["max_error"] is None
    assert "cyan" in render_comparison(result)


def test_a_stock_picture_that_is_not_finite_is_no_reference() -> None:
    made = compared(STOCK, FAST, runs=5, truth=torch.full((1, 4, 4, 3), math.nan))
    assert made.comparison.verdict.kind == "stock_failed"
    assert "its picture holds inf or nan" in made.comparison.verdict.sentence
    assert made.comparison.quality is None
    assert made.stock is None
    assert "no picture to compare" in " ".join(render_comparison(made.comparison).replace("gave ", "").split())


def test_our_failure_is_a_fail() -> None:
    made = compared(STOCK, (RuntimeError("no kernel image"),), runs=5)
    assert (made.comparison.verdict.kind, made.comparison.verdict.passed) == ("halo_failed", False)
    assert made.comparison.verdict.sentence == "FAIL: Halo failed: no kernel image"
    assert made.ours is None
    assert made.comparison.stock.samples.n == 5
    assert made.comparison.to_json()["figures"]["halo_median_ns"] is None


def test_pictures_of_two_sizes_are_wrong() -> None:
    found = measure_quality(torch.zeros(1, 4, 4, 3), torch.zeros(2, 4, 4, 3), EXACT)
    assert found.is_wrong
    assert found.problem == "the picture is 1×4×4×3 and stock's 2×4×4×3"


def test_the_worst_frame_is_named() -> None:
    truth = torch.rand(5, 4, 4, 3)
    ours = truth.clone()
    ours[3, 1, 1] += 0.005
    found = measure_quality(ours, truth, EXACT)
    assert (found.worst_picture, found.is_wrong) == (3, False)
    assert found.psnr_db is not None
    assert found.max_error == pytest.approx(0.005, abs=1e-6)


@pytest.mark.parametrize(
    ("limits", "error", "wrong"),
    [
        (EXACT, 0.0009, False), (EXACT, 0.002, True), (NARROW, 0.009, False), (NARROW, 0.011, True),
        (APPROXIMATE, 0.019, False), (APPROXIMATE, 0.021, True),
    ],
)  # fmt: skip
def test_limits(limits: object, error: float, wrong: bool) -> None:
    assert isinstance(limits, type(EXACT))
    truth = torch.full((1, 4, 4, 3), 0.5, dtype=torch.float64)
    assert measure_quality(truth + error, truth, limits).is_wrong is wrong


def test_a_single_pixel_far_off_is_wrong_unless_tiles_are_blended() -> None:
    truth = torch.zeros(1, 64, 64, 3)
    ours = truth.clone()
    ours[0, 0, 0, 0] = 1.0
    assert measure_quality(ours, truth, EXACT).is_wrong
    assert measure_quality(ours, truth, NARROW).is_wrong
    assert not measure_quality(ours, truth, APPROXIMATE).is_wrong


def test_limits_go_by_what_both_sides_compute_in() -> None:
    assert limits_for({"float32"}, approximate=False) is EXACT
    assert limits_for({"float32", "bfloat16"}, approximate=False) is NARROW
    assert limits_for({"float32"}, approximate=True) is APPROXIMATE


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (Reference(dtype="float32", untiled=True), "an untiled float32 decode: an error is Halo's"),
        (Reference(dtype="bfloat16", untiled=True), "bfloat16 decode; rounding of stock's own is part of it"),
        (Reference(dtype="float32", untiled=False), "a tiled float32 decode; tiling of stock's own is part of it"),
        (Reference(dtype="float16", untiled=None), "that the host had to tile; tiling and rounding of stock's own are"),
    ],
)
def test_the_reference_is_stated(reference: Reference, words: str) -> None:
    assert words in reference.sentence
    result = compared(STOCK, FAST, runs=5, reference=reference).comparison
    assert words in render_comparison(result)
