"""The order of a clip's steps and the place of every frame, walked with a model of memory and no tensor."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest

from halo_vae.benchmarks.plain_wan import wan_shapes
from halo_vae.optim.device import DeviceProfile
from halo_vae.optim.families import lower
from halo_vae.optim.program import Program
from halo_vae.optim.video.driver import Driver
from halo_vae.optim.video.ops import ClipConv
from halo_vae.optim.video.steps import Keep, Run
from halo_vae.tests.goldens import VIDEO_GOLDENS
from halo_vae.tests.optim.families.layouts import specs
from halo_vae.tests.optim.helpers import profile
from halo_vae.tests.optim.video.helpers import golden_decoder
from halo_vae.tests.optim.video.programs import LATENT, LENGTHS, random_program
from halo_vae.tests.optim.video.walk import Walk, plan_clip

TINY = profile(tile_bytes=1 << 12)
"""Portions of two frames, whatever a chunk would give."""


@cache
def program_of(name: str) -> Program:
    return lower(specs(wan_shapes())) if name == "wan" else golden_decoder(name).program


def walk(name: str, t: int, chunk: int, device: DeviceProfile, precision: str = "fp32", edge: int = 3) -> Walk:
    program = program_of(name)
    shape = (1, program.latent_channels, t, edge, edge + 1)
    return Walk(plan_clip(program, shape, device, chunk_lat=chunk, precision_mode=precision, tile_size=32)).walk()


@pytest.mark.parametrize("name", VIDEO_GOLDENS)
def test_every_frame_is_made_once_and_is_there_when_it_is_read(name: str) -> None:
    for t, (chunk, device) in zip(
        (1, 2, 3, 4, 5, 9), itertools.cycle(((1, profile()), (2, TINY), (1, TINY), (3, profile()))), strict=False
    ):
        walk(name, t, min(chunk, t), device)
    walk(name, 4, 4, TINY)


@pytest.mark.slow
@pytest.mark.parametrize("name", VIDEO_GOLDENS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "mixed"])
def test_every_frame_is_there_for_any_length_and_chunk(name: str, precision: str) -> None:
    for t in (*range(1, 10), 17):
        for chunk, device in itertools.product(range(1, t + 1), (profile(), TINY, profile(tile_bytes=1))):
            walk(name, t, chunk, device, precision)


@pytest.mark.parametrize("start", range(0, 40, 8))
def test_random_programs_too(start: int) -> None:
    for seed in range(start, start + 8):
        program = random_program(seed)[0]
        for t in (LENGTHS[seed % 6], LENGTHS[(seed + 3) % 6]):
            for chunk, device in ((1, TINY), (t, profile()), (max(1, t // 2), TINY)):
                plan = plan_clip(program, (1, LATENT, t, 3, 4), device, chunk_lat=chunk)
                Walk(plan).walk()


@pytest.mark.parametrize("name", ["wan21", "mochi"])
def test_sums_are_written_over_what_they_add_but_not_in_float16(name: str) -> None:
    assert walk(name, 4, 1, profile()).overs > 0
    assert walk(name, 4, 1, profile(), "bf16").overs > 0
    assert walk(name, 4, 1, profile(), "fp16").overs == 0


def test_a_run_is_all_over_its_skips_or_not_at_all() -> None:
    for seed in range(60):
        plan = plan_clip(random_program(seed)[0], (1, LATENT, 5, 3, 4), TINY, chunk_lat=2)
        for step in plan.driver().steps():
            assert not isinstance(step, Run) or len(set(step.over_skip)) <= 1


def test_history_is_used_and_only_for_what_is_reached_back_to() -> None:
    found = walk("wan21", 5, 1, profile())
    assert found.kept > 0
    reach = [op for op in found.program.ops if isinstance(op, ClipConv) and op.kernel[0] > 1]
    assert 0 < len(found.driver._slots) <= len(reach)
    assert walk("wan21", 1, 1, profile()).kept == 0
    assert walk("wan21", 1, 1, profile()).driver.history_bytes == 0
    assert walk("svd", 5, 5, profile(tile_bytes=64 << 20)).driver.carried_bytes == 0  # one chunk carries nothing


def test_chunks_and_portions_are_as_planned() -> None:
    for name, chunk in itertools.product(("wan21", "ltx_plain", "hunyuan_video"), (1, 2, 3)):
        found = walk(name, 7, chunk, profile())
        for index, runs in found.runs.items():
            if isinstance(found.program.ops[index], ClipConv):
                assert max(runs) <= found.plan.portions[index]
                assert len(runs) >= math.ceil(sum(runs) / found.plan.portions[index])
    single = walk("wan21", 7, 7, profile(tile_bytes=64 << 20))
    assert {len(runs) for runs in single.runs.values()} == {1}


def test_what_a_chunk_makes_leaves_before_the_next_is_fed() -> None:
    """A causal decoder: after the k-th chunk, all frames that its latents determine have been delivered."""
    program = program_of("wan21")
    plan = plan_clip(program, (1, 16, 5, 3, 4), chunk_lat=1)
    delivered, after = 0, []
    for step in plan.driver().steps():
        if isinstance(step, Run):
            delivered += len(step.over_skip) if program.ops[step.index].output == program.output else 0
        elif not isinstance(step, Keep):
            after.append(delivered)
    assert [*after[1:], delivered] == [1, 5, 9, 13, 17]


def test_a_driver_that_frees_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk sees what it is there for: a frame freed while a tap still reaches it, a slot used twice."""
    real = Driver._lowest
    monkeypatch.setattr(Driver, "_lowest", lambda self, index: real(self, index) + 1)
    with pytest.raises((AssertionError, KeyError)):
        walk("wan21", 5, 1, profile())
    monkeypatch.undo()
    place = Driver._place_history

    def overlapping(self: Driver, past: dict[int, int]) -> int:
        end = place(self, past)
        self._slots = {index: [slot // 2 for slot in slots] for index, slots in self._slots.items()}
        return end

    monkeypatch.setattr(Driver, "_place_history", overlapping)
    with pytest.raises(AssertionError):
        walk("wan21", 5, 1, profile())
    monkeypatch.undo()
    monkeypatch.setattr(Driver, "_may_take", lambda self, index, op, frame: True)
    with pytest.raises((AssertionError, KeyError)):
        walk("wan22", 5, 1, profile())


def test_the_same_steps_every_time() -> None:
    plan, again = (plan_clip(program_of("mochi"), (1, 12, 4, 3, 4), chunk_lat=1) for _ in range(2))
    steps = list(plan.driver().steps())
    assert list(plan.driver().steps()) == list(again.driver().steps()) == steps
    assert plan.summary == again.summary
