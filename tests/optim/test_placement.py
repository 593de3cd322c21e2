"""A shadow run of plans: every byte a tile reads still holds what was written for it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from halo_vae.optim import placement
from halo_vae.optim.costs import ITEMSIZE
from halo_vae.optim.families import lower
from halo_vae.optim.plan import DtypePlan, OpPlan, PassPlan, Plan
from halo_vae.optim.program import Attention, Conv, Program
from halo_vae.optim.tiling import Tile
from halo_vae.tests.optim.families import layouts
from halo_vae.tests.optim.helpers import kl_program, plan_of, profile, settings

IN_PLACE = ("residual", "narrow", "pixel", "tail")


class Shadow:
    """One pass on a memory whose elements hold the name of what was last written there."""

    def __init__(self, plan: Plan, a_pass: PassPlan) -> None:
        self.plan, self.a_pass, self.program = plan, a_pass, plan.program
        self.item = ITEMSIZE[plan.dtypes.stream]
        self.memory = np.full(a_pass.arena.nbytes // self.item, -1, np.int64)
        self.maps: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.carried: tuple[Tile, int] | None = None

    def map(self, v: int) -> tuple[np.ndarray, np.ndarray]:
        """(addresses, names) of a value, both [n, C, H, W]."""
        if v not in self.maps:
            place, scale = self.a_pass.slices[v], self.program.values[v].scale
            h, w = self.a_pass.latent[1] * scale[1], self.a_pass.latent[2] * scale[2]
            n, c = self.a_pass.n_images, place.home_channels
            assert n * c * h * w * self.item <= self.a_pass.buffer_bytes[place.home]
            flat = np.arange(n * c * h * w) + self.a_pass.arena.offsets[place.home] // self.item
            if self.plan.layout == "channels_last":
                home = flat.reshape(n, h, w, c).transpose(0, 3, 1, 2)
            else:
                home = flat.reshape(n, c, h, w)
            addresses = home[:, place.offset : place.offset + place.channels]
            names = (v + 1) * 10**9 + np.arange(addresses.size).reshape(addresses.shape)
            self.maps[v] = addresses, names
        return self.maps[v]

    def read(self, v: int, *where: slice, why: str) -> None:
        if v == 0:
            return
        addresses, names = self.map(v)
        assert (self.memory[addresses[where]] == names[where]).all(), why

    def write(self, v: int, *where: slice) -> None:
        if v == self.program.output:
            return
        addresses, names = self.map(v)
        self.memory[addresses[where]] = names[where]

    def scribble(self, key: str) -> None:
        """A work buffer is filled."""
        start = self.a_pass.arena.offsets[key] // self.item
        self.memory[start : start + self.a_pass.buffer_bytes[key] // self.item] = -2

    def run(self) -> None:
        for step in self.a_pass.steps:
            if isinstance(step.op, Conv):
                self.conv(step, step.op)
            elif isinstance(step.op, Attention):
                self.attention(step)
            else:
                self.read(step.op.inputs[0], slice(None), why=step.name)
                self.write(step.op.output, slice(None))
        assert self.program.output not in self.a_pass.slices

    def conv(self, step: OpPlan, op: Conv) -> None:
        previous: Tile | None = None
        up = op.upsample if op.upsample == 2 and not step.fold else 1
        for tile in step.grid.tiles():
            # without a halo, pixels that a tile computes again are dropped, so they may hold anything
            rows, cols = (tile.rows, tile.cols) if op.halo else (tile.new_rows, tile.new_cols)
            images = tile.images
            carries = (
                previous is not None and step.grid.is_strips and op.halo > 0 and up == 1
                and previous.images == images and previous.rows.stop == rows.start
            )  # fmt: skip
            first = rows.start + op.halo if carries else rows.start - op.halo
            self.read(
                op.inputs[0], slice(images.start, images.stop), slice(None),
                slice(max(0, first) // up, max(0, math.ceil((rows.stop + op.halo) / up))),
                slice(max(0, cols.start - op.halo) // up, math.ceil((cols.stop + op.halo) / up)),
                why=f"{step.name} ({step.in_place}) at {tile}",
            )  # fmt: skip
            previous = tile
            for key in step.buffers:
                self.scribble(key)
            inner = slice(images.start, images.stop), slice(None), slice(rows.start, rows.stop)
            if step.partner is not None:
                self.read(step.partner.inputs[0], *inner, why=f"shortcut of {step.name} at {tile}")
                self.write(step.partner.output, *inner)
            new = slice(images.start, images.stop), slice(None)
            r, c = tile.new_rows, tile.new_cols
            if op.residual is not None:
                where = slice(r.start, r.stop), slice(c.start, c.stop)
                self.read(op.residual, *new, *where, why=f"residual of {step.name} at {tile}")
            grow = op.depth_to_space * (2 if step.fold else 1)
            r, c = r.scaled(grow), c.scaled(grow)
            self.write(op.output, *new, slice(r.start, r.stop), slice(c.start, c.stop))

    def attention(self, step: OpPlan) -> None:
        src, dst = step.op.inputs[0], step.op.output
        for tile in step.grid.tiles():
            picture = slice(tile.images.start, tile.images.stop)
            if tile.rows.start == 0:
                self.read(src, picture, why=f"keys of {step.name}")
                for key in step.buffers:
                    self.scribble(key)
            _, _, h, w = self.map(src)[0].shape
            pixels = np.zeros(h * w, bool)
            pixels[tile.rows.start : tile.rows.stop] = True
            (addresses, names), (out, out_names) = self.map(src), self.map(dst)
            mask = pixels.reshape(h, w)
            assert (self.memory[addresses[picture][:, :, mask]] == names[picture][:, :, mask]).all(), step.name
            self.memory[out[picture][:, :, mask]] = out_names[picture][:, :, mask]


def shadow_run(plan: Plan) -> None:
    for a_pass in plan.passes:
        Shadow(plan, a_pass).run()


KL = kl_program(64, 64, 32, n_res=1)
NARROWING = lower(layouts.specs(layouts.kl_ldm(4, (128, 64, 32), n_res=2)))
FLUX2 = lower(
    layouts.specs(layouts.kl_ldm(32, (64, 32), n_res=1) | {"bn.running_mean": (128,), "bn.running_var": (128,)})
)
HUNYUAN = lower(layouts.specs(layouts.hunyuan_image(64, (64, 64, 32), n_res=1)))
TAESD = lower(layouts.specs(layouts.taesd(4, 8, blocks=(1, 1, 1, 1))))
PROGRAMS = {"kl": KL, "narrowing": NARROWING, "flux2": FLUX2, "hunyuan": HUNYUAN, "taesd": TAESD}
SIZES = [(1, 1), (1, 5), (5, 1), (3, 7), (6, 5), (7, 8)]
DTYPES = {
    "float32": DtypePlan(native="float32", stream="float32", compute="float32"),
    "bfloat16": DtypePlan(native="bfloat16", stream="bfloat16", compute="bfloat16"),
    "float16": DtypePlan(native="float16", stream="float16", compute="float16"),
    "mixed bf16": DtypePlan(native="float32", stream="float32", compute="bfloat16"),
    "mixed fp16": DtypePlan(native="float32", stream="float32", compute="float16"),
}


def plans(program: Program, **fixed: Any) -> Iterator[Plan]:
    """Plans over sizes, batches, strip heights, layouts and dtypes."""
    for i, (h, w) in enumerate(SIZES):
        for strategy in ("strips", "tiles"):
            for tile_bytes in (3_000, 40_000)[i % 2 :] if i < 5 else (9_000,):
                n, layout = (1, 2, 3)[i % 3], i % 2 == 0
                yield plan_of(
                    program,
                    (n, program.latent_channels, h, w),
                    settings(plan=strategy, tensor_layout_optimization=layout, tile_size=(0, 16, 32)[i % 3]),
                    profile(tile_bytes=tile_bytes),
                    **fixed,
                )


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [*((name, "float32") for name in PROGRAMS), ("narrowing", "bfloat16"), ("hunyuan", "bfloat16"), ("kl", "float16")],
)
def test_no_byte_is_overwritten_before_its_last_reader(name: str, dtypes: str) -> None:
    for plan in plans(PROGRAMS[name], dtypes=DTYPES[dtypes]):
        shadow_run(plan)


@pytest.mark.parametrize("name", PROGRAMS)
def test_channels_of_one_home_are_never_shared_by_two_living_values(name: str) -> None:
    for plan in plans(PROGRAMS[name]):
        for a_pass in plan.passes:
            assert_slices_are_apart(a_pass)


def assert_slices_are_apart(a_pass: PassPlan) -> None:
    written, last = {0: -1}, {}
    for step in a_pass.steps:
        for op in (step.op, step.partner):
            if op is not None:
                written[op.output] = step.index
                last |= dict.fromkeys(op.inputs, step.index)
    homes = defaultdict(list)
    for v, place in a_pass.slices.items():
        assert 0 <= place.offset <= place.offset + place.channels <= place.home_channels
        homes[place.home].append(v)
    for values in homes.values():
        for i, a in enumerate(values):
            for b in values[i + 1 :]:
                one, two = a_pass.slices[a], a_pass.slices[b]
                touch = one.offset < two.offset + two.channels and two.offset < one.offset + one.channels
                # a value that takes over in place is written in the step that reads the other for the last time
                both = written[a] < last[b] and written[b] < last[a]
                assert not (touch and both), (a, b)


@pytest.mark.parametrize("name", PROGRAMS)
def test_in_place_modes_occur_where_they_may(name: str) -> None:
    seen = {s.in_place for plan in plans(PROGRAMS[name]) for p in plan.passes for s in p.steps}
    expected = {
        "kl": {"residual", "narrow", "tail", "pixel"},
        "narrowing": {"residual", "narrow", "tail", "pixel"},
        "flux2": {"residual", "narrow", "tail", "pixel"},
        "hunyuan": {"residual", "tail"},
        "taesd": {"residual", "tail"},
    }[name]
    assert expected <= seen
    for dtypes in ("bfloat16", "mixed bf16"):
        assert seen == {s.in_place for p in plans(PROGRAMS[name], dtypes=DTYPES[dtypes]) for s in p.ops}, dtypes


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dtypes", ["float16", "mixed fp16"])
def test_half_precision_never_works_in_place(name: str, dtypes: str) -> None:
    """An op that overflowed is redone, which needs its inputs."""
    for plan in plans(PROGRAMS[name], dtypes=DTYPES[dtypes]):
        assert {s.in_place for s in plan.ops} == {"no"}
        assert all(s.partner is None for s in plan.ops)


def test_strips_carry_rows_only_in_channels_last_tails() -> None:
    for plan in plans(KL):
        modes = {s.in_place for s in plan.ops}
        if plan.layout == "contiguous":
            assert "tail" not in modes
        if plan.strategy == "tiles" and plan.summary.tile_grid[1] > 1:
            assert not modes & {"tail", "narrow"}


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_tail_keeps_its_distance_although_buffers_are_aligned(name: str) -> None:
    """Maps one pixel wide: a row is shorter than what alignment shifts a buffer by."""
    for h in (3, 4):
        for n in (1, 2):
            for w in (1, 2):
                shadow_run(plan_of(TAESD, (n, 4, h, w), settings(), profile(tile_bytes=1), dtypes=DTYPES[name]))


def test_in_place_halves_the_peak_of_a_narrowing_decoder() -> None:
    chosen, device = settings(plan="strips"), profile(tile_bytes=200_000)
    in_place = plan_of(NARROWING, (1, 4, 32, 32), chosen, device)
    apart = plan_of(NARROWING, (1, 4, 32, 32), chosen, device, dtypes=DTYPES["mixed fp16"])
    maps = [sum(p.buffer_bytes[b] for s in p.steps for b in s.buffers) for p in (in_place.passes[0], apart.passes[0])]
    assert in_place.passes[0].arena.nbytes < 0.7 * apart.passes[0].arena.nbytes, maps


def shadow_run_all() -> None:
    for program in PROGRAMS.values():
        for plan in plans(program):
            shadow_run(plan)


def forgetful_last_steps(self: placement.Placer) -> dict[int, int]:
    last = {}
    for step in self._steps:
        last[step.op.inputs[0]] = step.index
        for op in (step.op, step.partner):
            if op is not None:
                last.setdefault(op.output, step.index)
    return last


def any_channels(self: Any, channels: int, first: int, last: int) -> int | None:
    return 0 if channels <= self.channels else None


def any_tail(self: placement.Placer, op: Conv, step: OpPlan, home: Any) -> bool:
    inner = self._homes[self.slices[op.inputs[0]].home]
    if op.inputs[0] == 0 or inner.tail_of is not None or inner.last != step.index:
        return False
    inner.tail_of = home.key
    return True


UNSAFE = {
    "a residual": (placement.Placer, "_last_steps", forgetful_last_steps),
    "channels that are in use": (placement._Home, "free_offset", any_channels),
    "the tail of any output": (placement.Placer, "_nests_in_tail", any_tail),
}


@pytest.mark.parametrize("rule", UNSAFE)
def test_the_shadow_run_sees_writing_over(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*UNSAFE[rule])
    with pytest.raises(AssertionError, match=r"decoder\."):
        shadow_run_all()
