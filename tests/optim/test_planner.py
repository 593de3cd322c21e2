"""Plans: few convolution shapes, capped passes, smaller tiles when memory is short."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from halo_vae.optim.errors import PlanError
from halo_vae.optim.families import lower
from halo_vae.optim.plan import DtypePlan, Plan, is_conv3
from halo_vae.optim.pool import slab_bytes
from halo_vae.optim.program import Attention, Conv, program_macs
from halo_vae.tests.optim.families import layouts
from halo_vae.tests.optim.helpers import PROFILE, kl_program, plan_of, profile, settings

SD = kl_program(512, 512, 256, 128)
FLUX = lower(layouts.specs(layouts.kl_ldm(16, (512, 512, 256, 128))))
HUNYUAN = lower(layouts.specs(layouts.hunyuan_image(64, (1024, 1024, 512, 512, 256, 128), n_res=2)))
SMALL = kl_program(64, 32, n_res=1)
GPU = profile(
    kind="hip",
    name="cuda:0",
    native_dtypes=("float16", "bfloat16"),
    strategy="tiles",
    layout="contiguous",
    batch_cap=8,
    pass_pixels=1024 * 1024,
    tile_bytes=64 << 20,
    attention="matmul",
)
RESOLUTIONS = [
    (512, 512), (512, 768), (768, 512), (640, 640), (768, 768), (576, 1024), (1024, 576), (832, 1216), (1216, 832),
    (896, 1152), (1152, 896), (768, 1344), (1344, 768), (640, 1536), (1536, 640), (1024, 1024), (1280, 720),
    (720, 1280), (1920, 1080), (1080, 1920), (1408, 1408), (1536, 1536), (1600, 900), (1664, 928), (2048, 2048),
    (2048, 1152), (520, 776), (1000, 1000), (1448, 1256), (4096, 2304),
]  # fmt: skip


def latent_shape(program: Any, height: int, width: int, batch: int = 1) -> tuple[int, int, int, int]:
    return batch, program.latent_channels, height // program.scale[1], width // program.scale[2]


@pytest.mark.parametrize("program", [SD, FLUX], ids=["sd", "flux"])
def test_tiles_ask_for_few_convolution_shapes_at_thirty_resolutions(program: Any) -> None:
    assert len(set(RESOLUTIONS)) == 30
    seen: dict[Any, int] = {}
    new = []
    for i, (width, height) in enumerate(RESOLUTIONS):
        plan = plan_of(program, latent_shape(program, height, width), settings(), GPU, native="float16")
        assert plan.strategy == "tiles"
        before = len(seen)
        for shape in plan.conv_shapes:
            seen.setdefault(shape, i)
        new.append(len(seen) - before)
    assert len(seen) <= 16
    assert new[0] > 0
    assert new[1:] == [0] * 29


def test_strips_ask_for_new_shapes_at_every_width() -> None:
    """What the promise of the tiles is measured against."""
    shapes = {
        shape
        for width, height in RESOLUTIONS[:10]
        for shape in plan_of(SD, latent_shape(SD, height, width), settings(plan="strips")).conv_shapes
    }
    assert len(shapes) > 60


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (7, 31), (13, 17), (97, 3)])
@pytest.mark.parametrize("strategy", ["strips", "tiles"])
@pytest.mark.parametrize("program", [SMALL, HUNYUAN], ids=["kl", "hunyuan"])
def test_odd_sizes_are_covered(program: Any, size: tuple[int, int], strategy: str) -> None:
    plan = plan_of(program, (1, program.latent_channels, *size), settings(plan=strategy, tile_size=64))
    assert [s.op.output for s in plan.ops][-1] == program.output
    for step in plan.ops:
        scale = program.values[step.op.inputs[0]].scale[1]
        up = step.op.upsample if isinstance(step.op, Conv) and not step.fold else 1
        if not isinstance(step.op, Attention):
            assert (step.grid.height, step.grid.width) == (size[0] * scale * up, size[1] * scale * up)
        if isinstance(step.op, Conv) and strategy == "tiles":
            assert max(step.tile) * program.scale[1] <= max(64, program.scale[1]) * scale * up


@pytest.mark.parametrize(
    ("batch", "cap", "pixels", "on", "expected"),
    [
        (1, 16, 1 << 20, True, (1, 1, [1])),  # nothing to put together
        (5, 16, 1 << 20, True, (5, 5, [5])),  # all at once
        (5, 2, 1 << 20, True, (5, 2, [2, 2, 1])),  # capped by the device, the last pass holds what is left
        (6, 4, 1 << 20, True, (6, 4, [4, 2])),
        (5, 16, 3 * 32 * 16, True, (5, 3, [3, 2])),  # three pictures of 32x16 pixels
        (5, 16, 3 * 32 * 16 - 1, True, (5, 2, [2, 2, 1])),  # one pixel short of three
        (5, 16, 1, True, (5, 1, [1] * 5)),  # never none
        (5, 16, 1 << 20, False, (5, 1, [1] * 5)),  # turned off
    ],
)
def test_pictures_per_pass(batch: int, cap: int, pixels: int, on: bool, expected: tuple[int, int, list[int]]) -> None:
    device = profile(batch_cap=cap, pass_pixels=pixels)
    plan = plan_of(SMALL, (batch, 4, 16, 8), settings(batch_optimization=on), device)
    total, n, sizes = expected
    assert [p.n_images for p in plan.passes] == sizes
    assert sum(sizes) == total
    assert (plan.summary.images_per_pass, plan.summary.n_passes) == (n, len(sizes))
    choice = next(c for c in plan.summary.choices if c.name == "images_per_pass")
    assert choice.value == str(n)
    assert ("off" in choice.reason) == (not on)


def test_short_memory_puts_fewer_pictures_into_a_pass() -> None:
    free = plan_of(SMALL, (8, 4, 64, 64), settings(), profile())
    assert free.summary.images_per_pass == 8
    budget = free.passes[0].arena.nbytes
    short = plan_of(SMALL, (8, 4, 64, 64), settings(), profile(budget_bytes=budget))
    assert 1 < short.summary.images_per_pass < 8
    assert short.passes[0].arena.nbytes <= budget // 2
    assert "limited by free memory" in {c.reason for c in short.summary.choices}


@pytest.mark.parametrize("strategy", ["strips", "tiles"])
def test_short_memory_makes_tiles_smaller_and_then_an_error(strategy: str) -> None:
    shape, chosen = (1, 4, 64, 64), settings(plan=strategy, tile_size=0)
    free = plan_of(SD, shape, chosen)
    short = plan_of(SD, shape, chosen, profile(budget_bytes=free.predicted.total - 1))
    assert short.predicted.total < free.predicted.total
    assert short.summary.n_tiles > free.summary.n_tiles
    largest = [max(math.prod(s.tile) for s in p.ops if is_conv3(s.op)) for p in (short, free)]
    assert largest[0] < largest[1]
    same = plan_of(SD, shape, chosen, profile(budget_bytes=free.predicted.total))
    assert same.summary.n_tiles == free.summary.n_tiles
    smallest = plan_of(SD, shape, chosen, profile(tile_bytes=profile().tile_bytes // 16)).predicted.total
    fits = plan_of(SD, shape, chosen, profile(budget_bytes=smallest))
    assert fits.predicted.total <= smallest
    with pytest.raises(PlanError) as caught:
        plan_of(SD, shape, chosen, profile(budget_bytes=smallest - 1))
    assert (caught.value.need_bytes, caught.value.free_bytes) == (smallest, smallest - 1)
    given = [int(n) for n in re.findall(r"(\d+) MiB", str(caught.value))]
    assert given == [smallest >> 20, (smallest - 1) >> 20]
    assert "1 latents of 64x64" in str(caught.value)


@pytest.mark.parametrize("plan", ["strips", "tiles"])
@pytest.mark.parametrize("edge", [16, 40, 64, 256, 0])
def test_tile_size_bounds_every_tile(plan: str, edge: int) -> None:
    made = plan_of(SD, (1, 4, 64, 48), settings(plan=plan, tile_size=edge))
    rows, cols = made.summary.tile_px
    if plan == "tiles":
        limit = edge or 256
        assert max(rows, cols) <= limit
        assert max(rows, cols) > limit - 8
    elif edge:
        for step in made.ops:
            if is_conv3(step.op):
                scale = 8 // SD.values[step.op.inputs[0]].scale[1]
                area = step.tile[0] * step.tile[1] * scale**2
                assert area <= max(edge**2, 384 * scale)  # one row at least
                assert step.tile[1] == step.grid.width


def test_a_plan_counts_itself() -> None:
    plan = plan_of(SD, (3, 4, 20, 24), settings(plan="tiles", tile_size=64), profile(batch_cap=2))
    assert plan.summary.n_tiles == sum(s.n_tiles for p in plan.passes for s in p.steps)
    assert plan.summary.macs == sum(s.macs for p in plan.passes for s in p.steps)
    assert plan.summary.tile_grid == (3, 3)
    assert plan.prefetch
    assert not plan_of(SD, (3, 4, 20, 24), settings()).prefetch  # one pass: nothing to prepare
    assert (plan.summary.method, plan.summary.approximate, plan.summary.overlap_px) == ("exact", False, 0)
    assert [s.index for s in plan.ops] == list(range(len(plan.ops)))


def test_slid_back_tiles_and_context_cost_operations_and_folding_saves_some() -> None:
    def macs(**given: Any) -> int:
        return plan_of(SD, (1, 4, 30, 30), settings(**given), profile(convolution="direct")).summary.macs

    written = program_macs(SD, (1, 30, 30))
    whole = macs(tile_size=0)
    assert whole < 0.95 * written  # three doublings by four ninths of the work
    assert macs(plan="tiles", tile_size=240) <= whole * 1.001
    assert macs(plan="tiles", tile_size=128) > 1.1 * whole  # 16 + 16 for 30


def test_prediction_has_its_parts() -> None:
    device = profile(convolution="direct")
    plan = plan_of(SD, (1, 4, 16, 16), settings(), device)
    predicted = plan.predicted
    assert predicted.total == predicted.pool + predicted.scratch + predicted.packed + predicted.output
    assert predicted.output == 128 * 128 * 3 * 4
    assert predicted.pool == plan.pool_bytes == slab_bytes(predicted.pool) >= plan.passes[0].arena.nbytes
    folded = 4 * 4 * (512 * 512 + 512 * 512 + 256 * 256) * 4
    assert predicted.packed == folded
    without = plan_of(SD, (1, 4, 16, 16), settings(advanced_caching=False), device)
    assert without.predicted.packed == 0
    assert without.predicted.scratch > predicted.scratch


def modes(plan: Plan) -> set[str]:
    return {step.in_place for step in plan.ops}


@pytest.mark.parametrize("program", [SD, HUNYUAN], ids=["sd", "hunyuan"])
def test_real_decoders_work_in_place_where_that_may_be_redone(program: Any) -> None:
    shape = (1, program.latent_channels, 32, 32)
    assert {"residual", "tail"} <= modes(plan_of(program, shape, settings(plan="strips")))
    for stream in ("float32", "float16"):
        half = DtypePlan(native="float32", stream=stream, compute="float16")
        assert modes(plan_of(program, shape, settings(plan="strips"), dtypes=half)) == {"no"}


def test_a_widened_op_is_planned_in_float32_and_the_others_are_not() -> None:
    name = SD.ops[5].name
    dtypes = DtypePlan(native="float16", stream="float16", compute="float16", widened=frozenset({name}))
    plan = plan_of(SD, (1, 4, 16, 16), settings(precision_mode="fp16"), dtypes=dtypes)
    assert {s.name for s in plan.ops if s.dtype == "float32"} == {name}
    assert {s.dtype for s in plan.ops} == {"float16", "float32"}


def test_settings_are_given_as_reasons() -> None:
    asked = plan_of(SMALL, (1, 4, 8, 8), settings(plan="tiles", tensor_layout_optimization=False)).summary
    default = plan_of(SMALL, (1, 4, 8, 8), settings()).summary
    reasons = {c.name: (c.value, c.reason) for c in asked.choices}
    assert reasons["plan"] == ("tiles", "asked for")
    assert reasons["layout"] == ("contiguous", "layout optimisation is off")
    reasons = {c.name: (c.value, c.reason) for c in default.choices}
    assert reasons["plan"] == ("strips", f"default: {PROFILE.reasons.strategy}")
    assert reasons["layout"] == ("channels_last", f"default: {PROFILE.reasons.layout}")
