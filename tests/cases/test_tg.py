"""TG: tile geometry."""

from __future__ import annotations

import logging
import math
import threading

import pytest
import torch

from halo_vae.nodes.specs import SPECS
from halo_vae.optim.decode import Engine
from halo_vae.tests.cases.exact import exact_conv, exact_settings
from halo_vae.tests.cases.support import Recorder, decode, max_diff, record, settings, shapes, whole
from halo_vae.tests.fixtures import ConvDec, PointDec, latent


def test_tg_1_overlap_as_large_as_the_tile(caplog: pytest.LogCaptureFixture) -> None:
    model, z, results = PointDec(), latent((1, 4, 40, 40)), []
    # A thread, so that a decode that never ends fails the test instead of hanging it.
    worker = threading.Thread(target=lambda: results.append(decode(model, z, settings(128, 128))), daemon=True)
    with caplog.at_level(logging.WARNING):
        worker.start()
        worker.join(20)
    assert not worker.is_alive()
    assert max_diff(results[0], whole(PointDec(), z)) <= 1e-6
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "128 px" in warnings[0]
    assert "using 40 px" in warnings[0]


@pytest.mark.parametrize("overlap_px", [0, 64, 512])
def test_tg_3_picture_smaller_than_the_tile(overlap_px: int) -> None:
    model, z = ConvDec(), latent((1, 4, 20, 24))
    got, heard = record(model, z, settings(512, overlap_px))
    assert shapes(model) == [(1, 4, 20, 24)]
    assert torch.equal(got, whole(ConvDec(), z))
    assert not heard.plan.approximate


def test_tg_4_last_tile_slides_back() -> None:
    for height in range(1, 71):
        model, z = PointDec(), latent((1, 4, height, 16))
        got = decode(model, z, settings(128, 32))
        assert max_diff(got, whole(PointDec(), z)) <= 1e-6, height
        assert {s[-2] for s in shapes(model)} == {min(height, 16)}
        assert len(model.log) == max(1, math.ceil((height - 4) / 12))  # stock feeds a sliver of 5 rows at 17 and at 29


@pytest.mark.parametrize("plan", ["strips", "tiles"])
def test_tg_4_exact_covers_every_height(plan: str) -> None:
    model = ConvDec()
    decoder, engine = exact_conv(model), Engine()
    for height in range(1, 71):
        z, heard = latent((1, 4, height, 16)), Recorder()
        chosen = exact_settings(128, plan)
        raw = engine.decode(decoder, z, chosen, observer=heard, finish=lambda x: x)
        assert max_diff(raw.movedim(-1, 1), model.run(z)) <= 1e-5, height
        if plan == "tiles":  # tiles keep their shape and slide back; one pixel of halo on each side
            fed = [shape[-2] for _, _, shape, _ in heard.tiles]
            assert set(fed[: heard.tiles[0][1]]) == {min(height, 16) + 2}, height
            assert len(set(fed)) <= len(decoder.program.ops)
            assert heard.tiles[0][1] == math.ceil(height / 16)


@pytest.mark.parametrize("shape", [(1, 4, 33, 47), (1, 4, 1, 33, 47)])
def test_tg_6_no_overlap(shape: tuple[int, ...]) -> None:
    z = latent(shape)
    got = decode(PointDec(), z, settings(128, 0), dim=len(shape) - 2)
    assert torch.isfinite(got).all()
    assert max_diff(got, whole(PointDec(), z)) <= 1e-6


@pytest.mark.parametrize("size", [(16, 16), (80, 80), (400, 400), (272, 144), (1024, 576), (1200, 80), (2560, 1440)])
def test_tg_7_every_tile_size(size: tuple[int, int]) -> None:
    width, height = size
    z = latent((1, 4, height // 8, width // 8))
    want = whole(PointDec(out=1), z)
    for tile_px in range(64, 1025, 64):
        model = PointDec(out=1)  # one channel: the geometry is the same and the test is quicker
        got = decode(model, z, settings(tile_px, 96), out=1)
        assert max_diff(got, want) <= 1e-6, tile_px
        decoded = sum(s[-2] * s[-1] for s in shapes(model))
        if size == (2560, 1440) and tile_px >= 256:
            assert decoded <= 2.5 * z.shape[-2] * z.shape[-1], tile_px


@pytest.mark.parametrize(
    ("ratio", "shape", "edge"), [(8, (1, 4, 128, 128), 64), (16, (1, 4, 64, 64), 32), (1, (1, 3, 600, 600), 512)]
)
def test_tg_9_tile_size_is_in_pixels(ratio: int, shape: tuple[int, ...], edge: int) -> None:
    model, z = PointDec(r=ratio), latent(shape)
    got, heard = record(model, z, settings(512, 0), ratio=ratio, channels=shape[1])
    assert {s[-2:] for s in shapes(model)} == {(edge, edge)}
    assert max_diff(got, whole(PointDec(r=ratio), z)) <= 1e-6
    assert heard.plan.tile_px == (512, 512)
    assert {c.name: c.value for c in heard.plan.choices}["tile"] == "512x512 pixels"


def test_tg_9_tooltips_name_the_unit() -> None:
    sizes = [w for spec in SPECS for w in spec.widgets if w.id in ("tile_size", "overlap")]
    assert len(sizes) == 8  # both, of the three decode nodes and the benchmark
    assert all("pixels" in widget.tooltip.lower() for widget in sizes)
    assert not any("latent" in widget.tooltip.lower() for widget in sizes)
