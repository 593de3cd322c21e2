from __future__ import annotations

import pytest

from halo_vae.profiling.bench.cases import CASES, BenchCase, BenchError, case_of, scenarios_of, title_of

NAMED = [
    # title, latent, frames that come out, frames asked for, precision
    ("Small Image", (1, 4, 32, 32), 1, 1, "fp32"),
    ("Medium Image", (1, 4, 64, 64), 1, 1, "fp32"),
    ("Large Image", (1, 4, 128, 128), 1, 1, "fp32"),
    ("Batch Processing", (4, 4, 32, 32), 1, 1, "fp32"),
    ("Precision Test", (1, 4, 64, 64), 1, 1, "fp16"),
    ("Memory Optimization Test", (1, 4, 128, 128), 1, 1, "fp32"),
    ("Video Processing", (1, 16, 5, 32, 32), 17, 16, "fp32"),
    ("Batch Video", (4, 16, 3, 64, 64), 9, 8, "fp32"),
]


def test_the_eight_cases() -> None:
    assert [(c.title, c.latent_shape, c.decoded_frames, c.asked_frames, c.precision) for c in CASES] == NAMED
    assert [c.key for c in CASES] == [title.lower().replace(" ", "_") for title, *_ in NAMED]


@pytest.mark.parametrize(("asked", "decoded"), [(1, 1), (2, 5), (5, 5), (6, 9), (8, 9), (9, 9), (16, 17), (17, 17)])
def test_a_clip_has_the_frames_or_the_next_more(asked: int, decoded: int) -> None:
    case = BenchCase(key="k", title="t", family="wan21", width_px=8, height_px=8, asked_frames=asked)
    assert case.decoded_frames == decoded


def test_other_channels() -> None:
    assert case_of("batch_processing").shape_for(16) == (4, 16, 32, 32)


@pytest.mark.parametrize("change", [{"width_px": 12}, {"batch": 0}, {"asked_frames": 2}])
def test_a_case_that_cannot_be(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="k: "):
        BenchCase(**{"key": "k", "title": "t", "family": "kl", "width_px": 8, "height_px": 8, **change})  # type: ignore[arg-type]


def test_words() -> None:
    assert scenarios_of("all") == ("cold", "warm", "hot")
    assert scenarios_of("everything") == ("frozen", "cold", "warm", "hot")
    assert scenarios_of("warm") == ("warm",)
    assert title_of("smoke_image") == "smoke_image"
    with pytest.raises(BenchError, match=r"lukewarm.*frozen, cold, warm, hot, all, everything"):
        scenarios_of("lukewarm")
    with pytest.raises(BenchError, match="small_image, medium_image"):
        case_of("tiny")
