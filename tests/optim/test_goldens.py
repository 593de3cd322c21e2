"""Tiled decodes equal the reference implementations' untiled ones, and really were tiled."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from halo_vae.optim import executor, planner, staging
from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.moments import Moments
from halo_vae.optim.plan import is_conv3
from halo_vae.optim.pool import MemoryPool
from halo_vae.optim.program import Conv
from halo_vae.optim.tiling import Tile
from halo_vae.tests.goldens import IMAGE_GOLDENS, TOLERANCE, golden
from halo_vae.tests.optim.helpers import PROFILE, Recorder, decode_raw, golden_decoder, max_diff, profile

CASES = [(name, case) for name in IMAGE_GOLDENS for case in golden(name).latents]
EDGES = (2, 3, 5, 8, 0)
"""Tile edges in latent pixels; 0 leaves the tile to the planner, which holds these latents whole."""
CHEAP = {
    "a": (("strips", 5, True), ("strips", 8, False), ("strips", 0, True), ("tiles", 3, False), ("tiles", 5, True)),
    "batch": (("strips", 3, True), ("strips", 0, False), ("tiles", 2, True), ("tiles", 3, False)),
}
"""(plan, edge, channels_last) of the everyday run; the whole product runs with `--with slow`."""
ALWAYS = [
    (name, case, *how)
    for name, case in CASES
    for how in CHEAP["a" if case == "a" else "batch"]
    if name != "kl_diffusers" or how[1] == 5 or case != "a"  # the network of kl_sd
]  # fmt: skip
PRODUCT = [
    (*case, *how)
    for case in CASES
    for how in itertools.product(("strips", "tiles"), EDGES, (True, False))
    if (*case, *how) not in ALWAYS
]


def tile_px(edge: int, decoder: Decoder) -> int:
    """The setting that gives tiles of that many latent pixels; at least the smallest allowed."""
    return max(16, edge * decoder.program.scale[1]) if edge else 0


def expected_tiles(decoder: Decoder, op: Conv, size: tuple[int, int], n: int, plan: str, setting: int) -> int:
    """Tiles of a 3x3 convolution, worked out from the meaning of the settings alone."""
    h, w = size
    if setting == 0:
        return 1  # the planner's own tile holds these latents, all pictures at once
    out_scale = decoder.program.scale[1]
    if plan == "tiles":
        edge = max(1, setting // out_scale)
        return math.ceil(h / edge) * math.ceil(w / edge) if h > edge or w > edge else 1
    scale = decoder.program.values[op.inputs[0]].scale[1]
    area = setting**2 * scale**2 // out_scale**2  # a strip covers as much as a square tile of the setting
    if h * w * scale**2 <= area:
        pictures = max(d for d in range(1, n + 1) if n % d == 0 and d * h * w * scale**2 <= area)
        return n // pictures
    return n * math.ceil(h * scale / max(1, area // (w * scale)))


def check(name: str, case: str, plan: str, edge: int, channels_last: bool) -> Recorder:
    g, decoder = golden(name), golden_decoder(name)
    z, setting = g.latents[case], tile_px(edge, decoder)
    before = z.clone()
    # the other algorithm pays for large tiles only, and has tests of its own
    device = profile(convolution="direct" if 0 < edge < 5 else "winograd")
    raw, heard = decode_raw(
        Engine(profile=device), decoder, z, plan=plan, tile_size=setting, tensor_layout_optimization=channels_last
    )
    assert max_diff(raw, g.expected[case]) <= TOLERANCE
    assert torch.equal(z, before)
    n, _, h, w = z.shape
    counts = {op.name: heard.tiles_of(op.name) for op in decoder.program.ops if is_conv3(op)}
    for op in decoder.program.ops:
        if isinstance(op, Conv) and op.halo:
            per_picture = expected_tiles(decoder, op, (h, w), n, plan, setting)
            allowed = {per_picture} if plan == "strips" else {per_picture * k for k in range(1, n + 1)}
            assert counts[op.name] in allowed, op.name
    down, across = heard.plan.tile_grid
    assert (heard.plan.strategy, heard.plan.layout) == (plan, "channels_last" if channels_last else "contiguous")
    assert min(counts.values()) >= down * across
    assert sum(n for *_, n in heard.started) == len(heard.tiles) == heard.plan.n_tiles
    assert {d for *_, d in heard.tiles} == {"float32"}
    if not edge:
        assert (down, across) == (1, 1)
    elif plan == "tiles":
        e = max(1, setting // decoder.program.scale[1])
        assert (down, across) == (math.ceil(h / e), math.ceil(w / e))
        least = (3, 2) if n == 1 else (2, 2)
        if e <= min(h // least[0], w // least[1]):
            assert down >= least[0]
            assert across >= least[1]
    else:
        convs = [op for op in decoder.program.ops if isinstance(op, Conv) and op.halo]
        assert (down, across) == (min(expected_tiles(decoder, op, (h, w), 1, plan, setting) for op in convs), 1)
        assert down >= 3 or edge > h // 3
    return heard


@pytest.mark.parametrize(("name", "case", "plan", "edge", "channels_last"), ALWAYS)
def test_golden_in_tiles(name: str, case: str, plan: str, edge: int, channels_last: bool) -> None:
    check(name, case, plan, edge, channels_last)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case", "plan", "edge", "channels_last"), PRODUCT)
def test_golden_in_every_kind_of_tile(name: str, case: str, plan: str, edge: int, channels_last: bool) -> None:
    check(name, case, plan, edge, channels_last)


@pytest.mark.parametrize("name", ["kl_sd", "hunyuan_image", "taesd"])
@pytest.mark.parametrize(("plan", "convolution"), [("strips", "direct"), ("strips", "winograd"), ("tiles", "direct")])
def test_golden_with_tiles_of_the_device(
    name: str, plan: str, convolution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles bounded by bytes, not by the setting: other strip heights at every resolution, uneven last strips."""
    monkeypatch.setattr(planner, "BASE_TILE_LAT", 5)
    g, decoder = golden(name), golden_decoder(name)
    engine = Engine(profile=profile(tile_bytes=100_000, convolution=convolution))
    raw, heard = decode_raw(engine, decoder, g.latents["a"], plan=plan, tile_size=0)
    assert max_diff(raw, g.expected["a"]) <= TOLERANCE
    conv3 = [op.name for op in decoder.program.ops if is_conv3(op)]
    assert len({heard.tiles_of(op) for op in conv3}) > (2 if plan == "strips" else 1)
    assert ("winograd" in {report.backend for report in heard.ops}) == (convolution == "winograd")


@pytest.mark.parametrize("plan", ["strips", "tiles"])
@pytest.mark.parametrize("convolution", ["direct", "winograd"])
def test_what_fresh_memory_holds_does_not_matter(plan: str, convolution: str) -> None:
    def rubbish(nbytes: int, device: torch.device) -> Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8, device=device)  # NaN in every float dtype

    g = golden("kl_x4")
    engine = Engine(profile=profile(convolution=convolution, tile_bytes=400_000), pool=MemoryPool(rubbish))
    raw, heard = decode_raw(engine, golden_decoder("kl_x4"), g.latents["a"], plan=plan)
    assert max_diff(raw, g.expected["a"]) <= TOLERANCE
    assert convolution == "direct" or "winograd" in {report.backend for report in heard.ops}


@pytest.mark.parametrize(("plan", "edge"), [("strips", 8), ("tiles", 8)])
def test_a_missing_row_of_context_is_seen(plan: str, edge: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance is tight enough: with the last halo row of each tile zeroed, the error is far above it."""
    real = staging.Stager.stage

    def starved(self: staging.Stager, tile: Tile) -> Tensor:
        out = real(self, tile)
        if self._op.halo and tile.rows.stop < self._src.shape[2]:
            out = out.clone()
            out[:, :, -1:] = 0
        return out

    monkeypatch.setattr(staging.Stager, "stage", starved)
    g, decoder = golden("kl_sd"), golden_decoder("kl_sd")
    raw, _ = decode_raw(Engine(profile=PROFILE), decoder, g.latents["a"], plan=plan, tile_size=tile_px(edge, decoder))
    assert max_diff(raw, g.expected["a"]) > 50 * TOLERANCE


@pytest.mark.parametrize(("plan", "edge"), [("strips", 8), ("tiles", 8)])
def test_a_missing_column_of_context_is_seen_by_tiles_only(
    plan: str, edge: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = staging.Stager.stage

    def starved(self: staging.Stager, tile: Tile) -> Tensor:
        out = real(self, tile)
        if self._op.halo and tile.cols.stop < self._src.shape[3]:
            out = out.clone()
            out[:, :, :, -1:] = 0
        return out

    monkeypatch.setattr(staging.Stager, "stage", starved)
    g, decoder = golden("kl_sd"), golden_decoder("kl_sd")
    raw, _ = decode_raw(Engine(profile=PROFILE), decoder, g.latents["a"], plan=plan, tile_size=tile_px(edge, decoder))
    error = max_diff(raw, g.expected["a"])
    assert error > 50 * TOLERANCE if plan == "tiles" else error <= TOLERANCE


@pytest.mark.parametrize(("plan", "edge"), [("strips", 8), ("tiles", 8)])
def test_statistics_without_the_spread_between_tiles_are_seen(
    plan: str, edge: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def merge(self: Moments, start: int, stop: int, mean: Tensor, variance: Tensor, count: int) -> None:
        seen = self.count[start:stop]
        self.m2[start:stop] += variance.double() * count
        self.mean[start:stop] += (mean.double() - self.mean[start:stop]) * (count / (seen + count))
        seen += count

    monkeypatch.setattr(Moments, "merge", merge)
    g, decoder = golden("kl_sd"), golden_decoder("kl_sd")
    engine = Engine(profile=PROFILE)
    raw, _ = decode_raw(engine, decoder, g.latents["a"], plan=plan, tile_size=tile_px(edge, decoder))
    assert max_diff(raw, g.expected["a"]) > 50 * TOLERANCE


@pytest.mark.parametrize("how", ["counts tiles that slid back twice", "counts the first tile only"])
def test_statistics_of_wrongly_counted_elements_are_seen(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = executor.PassRunner._count

    def count(self: executor.PassRunner, v: int, y: Tensor, start: int, stop: int) -> None:
        first = float(self.moments[v].count[start, 0]) == 0
        if how == "counts the first tile only":
            if first:
                real(self, v, y, start, stop)
            return
        real(self, v, y, start, stop)
        if y.shape[3] % 5:  # the last tile of five latent pixels shows a part of its width only
            real(self, v, y, start, stop)

    monkeypatch.setattr(executor.PassRunner, "_count", count)
    g, decoder = golden("kl_sd"), golden_decoder("kl_sd")
    z = g.latents["a"][..., :18].contiguous()
    engine = Engine(profile=PROFILE)
    raw, _ = decode_raw(engine, decoder, z, plan="tiles", tile_size=40)
    monkeypatch.undo()
    good, _ = decode_raw(engine, decoder, z, plan="tiles", tile_size=40)
    assert max_diff(raw, good) > 10 * TOLERANCE
