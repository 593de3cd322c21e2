"""Plans of clips: chunks, tiles, budgets, and that what is promised is what a decode then does."""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import Any

import pytest
import torch

from halo_vae.optim.costs import ITEMSIZE
from halo_vae.optim.decode import Engine
from halo_vae.optim.errors import LatentError, PlanError, SettingsError
from halo_vae.optim.program import Op, Value
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.video.engine import check_clip_shape
from halo_vae.optim.video.frames import boundaries, output_frames
from halo_vae.optim.video.ops import ClipConv
from halo_vae.optim.video.planner import AUTO_FRAMES, PAIR, chunk_of, spans_clip
from halo_vae.optim.video.steps import Run
from halo_vae.tests.goldens import VIDEO_GOLDENS, golden
from halo_vae.tests.optim.helpers import PROFILE, latent, narrow_winograd, profile, settings
from halo_vae.tests.optim.video.helpers import (
    ClipRecorder,
    clip_plan,
    decode_clip,
    golden_decoder,
    program_of,
)
from halo_vae.tests.optim.video.walk import plan_clip

WAN = golden_decoder("wan21").program
LTX = golden_decoder("ltx_causal").program


def choice(plan: Any, name: str) -> Any:
    return next(c for c in plan.summary.choices if c.name == name)


# -- chunks


@pytest.mark.parametrize(
    ("given", "t", "chunk"),
    [
        ({}, 40, AUTO_FRAMES // 4),
        ({}, 3, 3),  # what the clip has
        ({"chunk_frames": 32}, 40, 8),
        ({"chunk_frames": 35}, 40, 8),  # whole latent frames
        ({"chunk_frames": 1}, 40, 1),
        ({"chunk_frames": 4096}, 40, 40),
        ({"chunk_lat": 5}, 40, 5),
        ({"chunk_lat": 5, "chunk_frames": 8}, 40, 5),  # latent frames are the more exact wish
        ({"chunk_lat": 99}, 40, 40),
    ],
)
def test_latent_frames_of_a_chunk(given: dict[str, int], t: int, chunk: int) -> None:
    assert chunk_of(WAN, DecodeSettings(**given), t) == chunk  # type: ignore[arg-type]
    plan = plan_clip(WAN, (1, 16, t, 2, 2), **given)
    assert plan.chunk_lat == chunk
    assert plan.summary.n_chunks == -(-t // chunk)
    assert plan.summary.boundaries == boundaries(WAN, range(0, t, chunk), t)
    assert plan.summary.chunk_frames == (4 * chunk if chunk < t else output_frames(WAN, t))
    assert choice(plan, "chunks").value == f"{chunk} latent frames"
    assert ("asked for" in choice(plan, "chunks").reason) == bool(given)


def test_the_rate_is_the_familys() -> None:
    assert chunk_of(LTX, DecodeSettings(), 40) == AUTO_FRAMES // 8
    assert chunk_of(golden_decoder("svd").program, DecodeSettings(), 40) == AUTO_FRAMES


def test_ops_that_wait_for_the_whole_clip_are_named() -> None:
    program = golden_decoder("hunyuan_video").program
    waits = [op.name for op in program.ops if spans_clip(op)]
    assert waits
    assert waits[-1] in choice(plan_clip(program, (1, 16, 4, 3, 3), chunk_lat=2), "chunks").reason
    assert "wait" not in choice(plan_clip(program, (1, 16, 4, 3, 3), chunk_lat=4), "chunks").reason
    assert "wait" not in choice(plan_clip(WAN, (1, 16, 4, 3, 3), chunk_lat=2), "chunks").reason
    assert not any(spans_clip(op) for op in WAN.ops)


def test_portions_follow_from_the_bytes_of_frames() -> None:
    shape = (1, 16, 8, 6, 6)
    for tile_bytes, chunk in itertools.product((1, 1 << 14, 1 << 17, 64 << 20), (1, 2, 8)):
        plan = plan_clip(WAN, shape, profile(tile_bytes=tile_bytes), chunk_lat=chunk)
        for op, portion in zip(WAN.ops, plan.portions, strict=True):
            rate = WAN.values[op.inputs[0]].scale[0]
            rate *= 2 if isinstance(op, ClipConv) and op.upsample_time != "none" else 1
            assert 1 <= portion <= chunk * rate
            if tile_bytes == 1:
                assert portion == min(PAIR, chunk * rate)
            if tile_bytes == 64 << 20:
                assert portion == chunk * rate


# -- memory


def budgets(program: Any, shape: tuple[int, int, int, int, int], n: int = 6) -> list[int]:
    whole = plan_clip(program, shape, profile(tile_bytes=1 << 20)).predicted.total
    return [whole - i * (whole // n) for i in range(n)]


def test_smaller_tiles_then_shorter_chunks_when_memory_is_short() -> None:
    shape = (1, 16, 12, 24, 24)

    def planned(budget: int | None) -> Any:
        return plan_clip(WAN, shape, profile(tile_bytes=1 << 20, budget_bytes=budget))

    roomy = planned(None)
    assert planned(roomy.predicted.total).summary == roomy.summary
    tight = planned(roomy.predicted.total - 1)
    assert tight.predicted.total < roomy.predicted.total
    assert tight.summary.n_tiles > roomy.summary.n_tiles
    assert tight.chunk_lat == roomy.chunk_lat == 4
    tighter = planned(int(0.83 * roomy.predicted.total))
    assert tighter.predicted.total <= 0.83 * roomy.predicted.total
    assert (tighter.chunk_lat, tighter.summary.n_chunks) == (1, 12)
    assert choice(tighter, "chunks").reason.startswith("limited by free memory")


def test_a_clip_that_cannot_fit_is_refused_with_its_figures() -> None:
    with pytest.raises(
        PlanError,
        match=r"^decoding 2 clips of 5 latent frames of 20x16 takes \d+ MiB but 1 MiB are free \(a test says so\); "
        r"tried: smaller tiles, shorter chunks; free memory, choose a narrower precision or decode a smaller or "
        r"shorter clip$",
    ) as caught:
        plan_clip(WAN, (2, 16, 5, 16, 20), profile(budget_bytes=1 << 20, budget_reason="a test says so"))
    assert caught.value.free_bytes == 1 << 20
    need = caught.value.need_bytes
    assert need is not None
    assert need > 1 << 20
    assert plan_clip(WAN, (2, 16, 5, 16, 20), profile(budget_bytes=need)).predicted.total == need
    assert int(re.findall(r"takes (\d+)", str(caught.value))[0]) == need >> 20


def test_every_budget_gives_a_plan_within_it_or_an_error() -> None:
    shape = (1, 16, 8, 12, 12)
    fits = 0
    for budget in budgets(WAN, shape):
        with contextlib.suppress(PlanError):
            plan = plan_clip(WAN, shape, profile(tile_bytes=1 << 20, budget_bytes=budget))
            assert plan.predicted.total <= budget
            fits += 1
    assert 2 <= fits < len(budgets(WAN, shape))


def test_a_known_plan_is_used_again_and_not_beyond_the_budget() -> None:
    decoder, shape = golden_decoder("wan21"), (1, 16, 4, 8, 8)
    engine, heard = Engine(profile=profile(tile_bytes=1 << 18)), ClipRecorder()
    first = engine.plan(decoder, shape, settings(), observer=heard)
    again = engine.plan(decoder, shape, settings(), observer=heard)
    assert [hit for name, hit in heard.lookups if name == "plan"] == [False, True]
    assert again.conv_shapes is first.conv_shapes
    engine._profile = profile(tile_bytes=1 << 18, budget_bytes=first.predicted.total - 1)
    smaller = engine.plan(decoder, shape, settings(), observer=heard)
    assert smaller.predicted.total < first.predicted.total
    heard.lookups.clear()
    engine._profile = profile(tile_bytes=1 << 18)
    engine.plan(decoder, shape, settings(advanced_caching=False), observer=heard)
    assert [hit for name, hit in heard.lookups if name == "plan"] == [False]


# -- what is promised is done


HOWS: list[dict[str, Any]] = [
    {"chunk_lat": 1, "plan": "tiles", "tile_size": 32},
    {"chunk_lat": 2, "plan": "strips", "tile_size": 32},
    {"chunk_lat": 2, "plan": "strips", "tile_size": 0, "precision_mode": "bf16"},
    {"chunk_lat": 3, "plan": "tiles", "tile_size": 40, "memory_prefetching": False},
]


@pytest.mark.parametrize(("name", "how", "device"), [
    ("wan21", 0, {}), ("wan21", 3, {"convolution": "winograd"}), ("wan22", 1, {"convolution": "winograd"}),
    ("ltx_plain", 2, {}), ("cosmos", 3, {}), ("taehv", 0, {"convolution3d": "conv3d"}), ("mochi", 1, {}),
    ("cogvideox", 0, {}), ("hunyuan15", 2, {}), ("ltx_noise", 1, {"convolution": "winograd"}),
])  # fmt: skip
def test_a_decode_is_what_its_plan_says(
    name: str, how: int, device: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow_winograd(monkeypatch, 4)
    decoder = golden_decoder(name)
    z = latent(1, decoder.program.latent_channels, 2 if name == "hunyuan15" else 3, 5, 4)
    engine, given = Engine(profile=profile(tile_bytes=1 << 16, **device)), HOWS[how]
    plan = clip_plan(engine, decoder, tuple(z.shape), **given)
    _, heard = decode_clip(engine, decoder, z, **given)
    assert set(plan.conv_shapes) == {shape for _, shape in heard.convs}
    assert plan.summary.n_tiles == len(heard.tiles) == sum(n for *_, n in heard.started)
    assert plan.summary.macs == sum(report.macs for report in heard.ops) > 0
    assert engine.pool.high_water_bytes == plan.pool_bytes == plan.predicted.pool
    if name not in ("cogvideox", "ltx_noise"):  # matrices of modulations, whose width no program tells
        assert decoder.packed.nbytes == plan.predicted.packed
    assert heard.plan == plan.summary
    assert heard.passes == [(1, 1)] * z.shape[0]


def test_cost_of_a_batch_is_that_of_its_clips() -> None:
    one, three = (plan_clip(WAN, (b, 16, 4, 5, 5), chunk_lat=2) for b in (1, 3))
    assert three.summary.macs == 3 * one.summary.macs
    assert three.summary.n_tiles == 3 * one.summary.n_tiles
    assert three.predicted.output == 3 * one.predicted.output
    assert three.predicted.pool == one.predicted.pool
    assert (three.summary.n_passes, three.summary.n_chunks) == (3, one.summary.n_chunks)


@pytest.mark.parametrize("name", VIDEO_GOLDENS)
def test_output_is_promised_to_the_byte(name: str) -> None:
    g, decoder = golden(name), golden_decoder(name)
    for case, z in g.latents.items():
        plan = plan_clip(decoder.program, tuple(z.shape))  # type: ignore[arg-type]
        assert plan.predicted.output == 4 * g.expected[case].numel()
        assert plan.clip_frames == g.expected[case].shape[2]


@pytest.mark.parametrize("name", ["wan21", "wan22", "cosmos", "ltx_plain", "taehv"])
def test_chunks_do_not_change_the_arithmetic(name: str) -> None:
    """Nothing is computed twice: as many products for any chunk, keys of the past included."""
    program = golden_decoder(name).program
    shape = (1, program.latent_channels, 6, 3, 3)
    macs = {plan_clip(program, shape, chunk_lat=c).summary.macs for c in (1, 2, 3, 6)}
    assert len(macs) == 1


def test_a_bypassed_frame_costs_nothing() -> None:
    """Wan's time convolutions: a clip of one frame never runs them."""
    plan = plan_clip(WAN, (1, 16, 1, 3, 3))
    runs = [step for step in plan.driver().steps() if isinstance(step, Run)]
    past_first = [WAN.ops[run.index].name for run in runs if plan.backends.macs(run) == 0]
    assert past_first == [op.name for op in WAN.ops if "time_conv" in op.name] != []


# -- kernels


def layer(k: int, **fields: Any) -> tuple[Any, tuple[int, int, int, int, int]]:
    op: dict[str, Any] = {
        "name": "conv", "inputs": (0,), "output": 1, "weight": "w", "bias": None, "in_channels": k, "out_channels": k,
        "kernel": (3, 3, 3), "front": 2,
    } | fields  # fmt: skip
    last = ClipConv(
        name="last", inputs=(1,), output=2, weight="v", bias=None, in_channels=k, out_channels=3, kernel=(1, 1, 1)
    )
    ops: list[Op] = [ClipConv(**op), last]
    grow = op.get("upsample", 1)
    values = [Value(channels=c, scale=(1, s, s)) for c, s in ((k, 1), (k, grow), (3, grow))]
    return program_of(ops, values), (1, k, 4, 40, 40)


@pytest.mark.parametrize(
    ("fields", "device", "given", "backend"),
    [
        ({}, {"convolution": "winograd"}, {}, "winograd"),
        ({"upsample": 2, "kernel": (1, 3, 3), "front": 0}, {"convolution": "winograd"}, {}, "winograd"),
        ({"kernel": (1, 3, 3), "front": 0}, {"convolution": "winograd"}, {}, "winograd"),
        ({}, {"convolution": "winograd"}, {"tensor_layout_optimization": False}, "conv2d_sum"),
        ({}, {"convolution": "winograd"}, {"precision_mode": "bf16"}, "conv2d_sum"),
        ({"kernel": (3, 1, 1)}, {"convolution": "winograd"}, {}, "conv2d_sum"),
        ({}, {}, {}, "conv2d_sum"),
        ({}, {"convolution3d": "conv3d"}, {}, "conv3d"),
        ({"upsample": 2}, {"convolution3d": "conv3d"}, {}, "conv2d_sum"),  # a folded upsampling exists in 2-D only
        ({"kernel": (1, 3, 3), "front": 0}, {"convolution3d": "conv3d"}, {}, "torch"),
    ],
)
def test_which_kernel(fields: dict[str, Any], device: dict[str, Any], given: dict[str, Any], backend: str) -> None:
    program, shape = layer(32, **fields)
    plan = plan_clip(program, shape, profile(**device), **given)
    assert plan.backends.plans[0].backend == backend
    assert f"{backend} 1" in choice(plan, "convolutions").value or backend == "torch"


def test_transforms_do_not_pay_for_narrow_or_tiny_ops() -> None:
    device = profile(convolution="winograd")
    program, shape = layer(32)
    assert plan_clip(program, shape, device).backends.plans[0].backend == "winograd"
    narrow, shape_31 = layer(31)
    assert plan_clip(narrow, shape_31, device).backends.plans[0].backend == "conv2d_sum"
    assert plan_clip(program, (1, 32, 4, 3, 40), device).backends.plans[0].backend != "winograd"
    assert plan_clip(program, (1, 32, 4, 18, 18), device).backends.plans[0].backend != "winograd"


def test_small_maps_are_one_convolution_on_a_cpu() -> None:
    """Whatever the device's default for 3-D kernels: laying a weight out once per tap costs more than the products."""
    program, shape = layer(8)
    for edge, backend in ((4, "conv3d"), (16, "conv3d"), (48, "conv2d_sum")):
        assert plan_clip(program, (*shape[:3], edge, edge)).backends.plans[0].backend == backend
    on_gpu = plan_clip(program, (*shape[:3], 4, 4), profile(kind="hip", name="cuda:0"))
    assert on_gpu.backends.plans[0].backend == "conv2d_sum"


@pytest.mark.parametrize("plan", ["strips", "tiles"])
@pytest.mark.parametrize("tile_size", [16, 48, 96])
def test_the_setting_bounds_tiles(plan: str, tile_size: int) -> None:
    found = plan_clip(WAN, (1, 16, 2, 12, 14), plan=plan, tile_size=tile_size)
    height, width = found.summary.tile_px
    if plan == "tiles":
        assert height <= tile_size
        assert width <= tile_size
        assert found.summary.tile_grid[0] >= 96 // tile_size
    else:
        assert width == 14 * 8
        assert height * width <= max(tile_size**2, 32 * width)  # strips of whole squares
    assert found.strategy == found.summary.strategy == plan


def test_bytes_bound_tiles_too() -> None:
    for tile_bytes in (1 << 14, 1 << 16, 1 << 18):
        found = plan_clip(WAN, (1, 16, 2, 12, 14), profile(tile_bytes=tile_bytes), tile_size=0)
        for index, plan in found.backends.plans.items():
            op = WAN.ops[index]
            assert isinstance(op, ClipConv)
            widest = max(op.in_channels, op.out_channels * op.upsample**2) * ITEMSIZE["float32"]
            assert plan.rows <= 4 or (plan.rows - 3) * plan.cols * widest <= tile_bytes


# -- what cannot be planned


@pytest.mark.parametrize("method", ["stock", "blended"])
def test_other_methods_are_not_its_own(method: str) -> None:
    with pytest.raises(SettingsError, match=f"method {method} is not the exact engine's; choose auto or exact"):
        Engine(profile=PROFILE).plan(golden_decoder("wan21"), (1, 16, 2, 4, 4), settings(method=method))


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((1, 16, 4), r"shape \[1, 16, 4\]; give \[batch, channels, frames, height, width\], or four dimensions"),
        ((1, 1, 16, 4, 4, 4), r"or four dimensions for clips of one frame"),
        ((1, 16, 0, 4, 4), "holds no frame; give at least one of one pixel"),
        ((0, 16, 1, 4, 4), "holds no frame"),
        ((1, 16, 1, 4, 0), "holds no frame"),
        ((1, 4, 1, 4, 4), r"has 4 channels but this wan21 decoder takes 16; use the VAE that belongs to the model"),
    ],
)
def test_shapes_that_are_no_clips(shape: tuple[int, ...], match: str) -> None:
    engine, decoder = Engine(profile=PROFILE), golden_decoder("wan21")
    with pytest.raises(LatentError, match=match):
        engine.plan(decoder, shape, settings())
    with pytest.raises(LatentError, match=match):
        engine.decode(decoder, torch.zeros(shape), settings())


def test_pictures_are_clips_of_one_frame_or_the_frames_of_one_clip() -> None:
    assert check_clip_shape((3, 16, 4, 5), WAN) == (3, 16, 1, 4, 5)
    assert check_clip_shape((3, 4, 4, 5), golden_decoder("svd").program) == (1, 4, 3, 4, 5)
    assert check_clip_shape((3, 16, 2, 4, 5), WAN) == (3, 16, 2, 4, 5)


def test_latents_that_are_not_finite_are_refused() -> None:
    z = latent(1, 16, 2, 3, 3)
    z[0, 3, 1, 2, 2] = float("nan")
    engine, heard = Engine(profile=PROFILE), ClipRecorder()
    with pytest.raises(LatentError, match="NaN or inf"):
        engine.decode(golden_decoder("wan21"), z, settings(), observer=heard)
    with pytest.raises(LatentError, match="floating-point"):
        engine.decode(golden_decoder("wan21"), torch.zeros(1, 16, 1, 3, 3, dtype=torch.int64), settings())
    assert heard.plans == []
