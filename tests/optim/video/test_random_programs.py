"""Programs nobody trained: the engine equals the plain interpreter on any composition of ops, however it is cut."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.optim.decode import Engine
from halo_vae.optim.program import Op, Program, Value
from halo_vae.optim.video import backends, frames
from halo_vae.optim.video.ops import ClipAttention, ClipConv, ClipNorm, ClipScale, LatentModulation, Skip, Unpack
from halo_vae.tests.optim.families.clip_checks import decode_clips
from halo_vae.tests.optim.helpers import latent, max_diff, narrow_winograd, profile
from halo_vae.tests.optim.video.helpers import ClipRecorder, ProgramWeights, decode_clip, decoder_of
from halo_vae.tests.optim.video.helpers import program_of as program_with
from halo_vae.tests.optim.video.programs import LATENT, LENGTHS, random_program

TOLERANCE = 1e-4
"""Of the largest value, which is 1 to 30."""
EVERYDAY = range(20)
MANY = range(20, 400)


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to cut a decode; the sizes of tiles follow from bytes, as pictures this small are below any setting."""

    settings: dict[str, Any]
    device: dict[str, Any]
    base_tile: int


def way(rng: random.Random, t: int) -> Way:
    return Way(
        settings={
            "chunk_lat": rng.randint(1, t), "plan": rng.choice(("tiles", "strips")), "tile_size": 0,
            "tensor_layout_optimization": rng.random() < 0.7, "memory_prefetching": rng.random() < 0.5,
        },
        device={
            "tile_bytes": rng.choice((1 << 10, 1 << 12, 1 << 20)), "convolution": rng.choice(("winograd", "direct")),
            "convolution3d": rng.choice(("conv3d", "conv2d_sum")), "attention": rng.choice(("sdpa", "matmul")),
        },
        base_tile=rng.choice((1, 2, 3)),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _kernels_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither too narrow for Winograd nor too small for sums of 2-D convolutions."""
    narrow_winograd(monkeypatch, 1)
    monkeypatch.setattr(backends, "SMALL_MAP", {True: 0, False: 0})


def check(
    program: Program, weights: dict[str, Tensor], z: Tensor, how: Way, monkeypatch: pytest.MonkeyPatch
) -> ClipRecorder:
    """Equal to the interpreter, with as much memory as planned and as many tiles."""
    monkeypatch.setattr(backends, "BASE_TILE_LAT", how.base_tile)
    torch.manual_seed(1)
    expected = decode_clips(program, weights, z)
    torch.manual_seed(1)
    engine = Engine(profile=profile(**how.device))
    raw, heard = decode_clip(engine, decoder_of(program, weights), z, **how.settings)
    assert raw.shape[2] == frames.output_frames(program, z.shape[2])
    assert max_diff(raw, expected) <= TOLERANCE * max(1.0, float(expected.abs().max())), how
    assert engine.pool.high_water_bytes == heard.plan.predicted.pool
    assert heard.plan.n_tiles == len(heard.tiles)
    assert heard.plan.macs == sum(report.macs for report in heard.ops)
    return heard


def run_seed(seed: int, n_ways: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program, weights = random_program(seed)
    rng, t = random.Random(seed), LENGTHS[seed % len(LENGTHS)]
    size = rng.choice(((3, 5), (2, 2), (5, 3)))
    z = latent(1 if t > 2 else 2, LATENT, t, *size, seed=seed)
    if any(getattr(op, "noise", None) or getattr(op, "noise_share", 0) for op in program.ops):
        z = z[:1]
    for _ in range(n_ways):
        check(program, weights, z, way(rng, t), monkeypatch)


@pytest.mark.parametrize("seed", EVERYDAY)
def test_random_program(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_seed(seed, 2, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("start", MANY[::47])
def test_many_random_programs(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(start, min(start + 47, MANY.stop)):
        run_seed(seed, 4, monkeypatch)


def test_programs_are_cut_in_time_and_space(monkeypatch: pytest.MonkeyPatch) -> None:
    program, weights = random_program(4)
    z = latent(1, LATENT, 6, 3, 5)
    small = {"tile_bytes": 1 << 10}
    cut = {"chunk_lat": 1, "plan": "tiles", "tile_size": 0}
    heard = check(program, weights, z, Way(settings=cut, device=small, base_tile=1), monkeypatch)
    convs = [i for i, op in enumerate(program.ops) if isinstance(op, ClipConv)]
    assert all(len(run.tiles) >= 15 for i in convs for run in heard.runs_of(i))
    assert len(heard.runs_of(convs[-1])) >= 3
    assert len(heard.chunks) == 6


def test_everyday_programs_meet_every_field() -> None:
    """What the generator can draw, it draws within the programs that run every day."""
    ops: list[Op] = [op for seed in EVERYDAY for op in random_program(seed)[0].ops]
    every = [op for seed in (*EVERYDAY, *MANY) for op in random_program(seed)[0].ops]
    for some, all_rare in ((ops, False), (every, True)):
        convs = [op for op in some if isinstance(op, ClipConv)]
        norms = [op.norm for op in some if isinstance(op, (ClipConv, ClipAttention)) and op.norm is not None]
        skips = [op.skip for op in convs if op.skip is not None]
        assert {op.kernel for op in convs} == {(3, 3, 3), (3, 1, 1), (1, 3, 3), (1, 1, 1), (2, 3, 3)}
        assert {op.form for op in convs} == {"conv3d", "conv2d", "linear", "past"}
        assert {norm.kind for norm in norms} == {"group", "rms", "pixel", "layer"}
        assert {norm.scope for norm in norms} == {0, 1, 2, 3, 4}
        assert {norm.scope_offset for norm in norms} == {0, 1, 3}
        assert {op.border for op in convs} == {"zero", "replicate", "reflect"}
        assert {op.time_border for op in convs} == {"zero", "replicate"}
        assert {op.upsample_time for op in convs} == {"none", "first_single", "odd_single"}
        assert {op.upsample for op in convs} == {1, 2}
        assert {op.first_frame for op in convs} == {"same", "drop", "single", "bypass"}
        assert {op.back for op in convs} == {0, 1, 2}
        assert {op.scope for op in some if isinstance(op, ClipAttention)} == {"frame", "clip", "past"}
        assert {(skip.unpack is None, skip.upsampled) for skip in skips} == {
            (True, False), (True, True), (False, False)
        }  # fmt: skip
        assert any(isinstance(op, ClipScale) and op.period > 1 for op in some)
        assert any(norm.modulation for norm in norms)
        assert any(norm.latent for norm in norms)
        assert any(op.noise for op in convs)
        assert any(op.gain for op in convs)
        if all_rare:
            units = {(op.first_frame, op.unpack.t, op.unpack.s, op.unpack.haar) for op in convs if op.unpack}
            assert {unit[:3] for unit in units} >= {
                (first, 2, s) for first in ("same", "drop", "single") for s in (1, 2)
            } | {("bypass", 2, 1), ("same", 1, 2), ("same", 1, 1)}
            assert any(haar for *_, haar in units)
            assert {(skip.tile, skip.repeat > 1) for skip in skips} >= {(True, True), (False, True), (False, False)}
            assert any(skip.unpack and op.first_frame == "bypass" for op in convs if (skip := op.skip))
            assert any(op.drop and op.skip for op in convs)
            assert any(op.last_of_one for op in convs)


# -- compositions that no decoder has, one by one


def conv(source: int, output: int, c: int, k: int, w: ProgramWeights, **fields: Any) -> ClipConv:
    name = f"conv{output}"
    kt, kh, kw = fields.get("kernel", (3, 3, 3))
    full = {
        "name": name, "inputs": (source,), "output": output, "bias": w.normal(f"{name}.bias", k, scale=0.2),
        "weight": w.normal(f"{name}.weight", k, c, kt, kh, kw, scale=(c * kt * kh * kw) ** -0.5),
        "in_channels": c, "out_channels": k, "kernel": (kt, kh, kw), "front": kt - 1,
    } | fields  # fmt: skip
    return ClipConv(**full)


def same_size(n: int, c: int) -> list[Value]:
    return [Value(channels=c, scale=(1, 1, 1)) for _ in range(n)]


WINOGRAD = Way(settings={"chunk_lat": 2, "tile_size": 0}, device={"convolution": "winograd"}, base_tile=8)


def test_a_value_whose_past_is_kept_takes_no_sum_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution reads the very frames that a later one adds, so some may be overwritten and some may not."""
    w = ProgramWeights()
    ops: list[Op] = [
        conv(0, 1, 4, 8, w),
        conv(1, 2, 8, 8, w),  # reads the stored frames of value 1, this one and two before
        conv(2, 3, 8, 8, w, act="silu", inputs=(2, 1), skip=Skip()),
        conv(3, 4, 8, 3, w),
    ]
    program = program_with(ops, [*same_size(1, 4), *same_size(3, 8), *same_size(1, 3)])
    for chunk in (1, 2, 6):
        how = replace(WINOGRAD, settings=WINOGRAD.settings | {"chunk_lat": chunk})
        heard = check(program, w.tensors, latent(1, 4, 6, 8, 8), how, monkeypatch)
        assert "winograd" in heard.backends


@pytest.mark.parametrize("upsample", [1, 2])
@pytest.mark.parametrize("convolution", ["winograd", "direct"])
def test_reflection_lies_beyond_the_upsampled_edge(
    upsample: int, convolution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = ProgramWeights()
    ops: list[Op] = [conv(0, 1, 4, 8, w), conv(1, 2, 8, 8, w, border="reflect", upsample=upsample)]
    ops.append(conv(2, 3, 8, 3, w, border="reflect"))
    values = [*same_size(1, 4), *same_size(1, 8), Value(channels=8, scale=(1, upsample, upsample))]
    program = program_with(ops, [*values, Value(channels=3, scale=(1, upsample, upsample))])
    how = replace(WINOGRAD, device={"convolution": convolution})
    check(program, w.tensors, latent(1, 4, 3, 5, 6), how, monkeypatch)


@pytest.mark.parametrize("mode", ["frames", "copies", "tiles"])
def test_a_bypassed_first_frame_skips_only_the_convolution(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added and what follows is for it too, and it is not normalised."""
    w = ProgramWeights()
    kernel = (1, 1, 1) if mode == "tiles" else (3, 3, 3)
    norm = None if mode == "frames" else ClipNorm(kind="pixel", eps=1e-3)
    pairs = Unpack(t=2, order="tchw")
    ops: list[Op] = [
        conv(0, 1, 4, 6, w),
        conv(
            1, 2, 6, 12, w, kernel=kernel, norm=norm, act="none" if norm is None else "silu", unpack=pairs,
            first_frame="bypass", inputs=(1, 0), skip=Skip(repeat=3, unpack=pairs), post_act="leaky_relu",
        ),
        conv(2, 3, 6, 3, w),
    ]  # fmt: skip
    twice = [Value(channels=c, scale=(2, 1, 1)) for c in (6, 3)]
    program = program_with(ops, [*same_size(1, 4), *same_size(1, 6), *twice])
    for t, chunk in ((1, 1), (4, 1), (4, 3)):
        how = replace(WINOGRAD, settings={"chunk_lat": chunk, "tile_size": 0, "plan": "tiles"}, base_tile=3)
        check(program, w.tensors, latent(1, 4, t, 4, 5), how, monkeypatch)


@pytest.mark.parametrize("drop", [1, 2])
def test_dropped_frames_are_dropped_of_what_is_added_too(drop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = ProgramWeights()
    ops: list[Op] = [
        conv(0, 1, 4, 8, w),
        conv(1, 2, 8, 8, w, act="silu"),
        conv(2, 3, 8, 8, w, inputs=(2, 1), skip=Skip(), drop=drop),
        conv(3, 4, 8, 3, w),
    ]
    program = program_with(ops, [*same_size(1, 4), *same_size(3, 8), *same_size(1, 3)])
    for chunk in (1, 2, 5):
        how = replace(WINOGRAD, settings=WINOGRAD.settings | {"chunk_lat": chunk})
        check(program, w.tensors, latent(1, 4, 5, 4, 4), how, monkeypatch)


@pytest.mark.parametrize("scope", ["frame", "clip"])
def test_a_narrow_tile_of_a_1x1_convolution_reads_its_own_columns_of_the_latent(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = ProgramWeights()

    def linear(name: str) -> Any:
        from halo_vae.optim.program import Linear

        return Linear(weight=w.normal(name, 6, 4, scale=0.3), bias=w.normal(f"{name}.bias", 6, scale=0.3))

    norm = ClipNorm(
        kind="group", weight=w.normal("n", 6), bias=w.normal("b", 6), groups=2, eps=1e-3,
        scope=1 if scope == "frame" else 0, latent=LatentModulation(scale=linear("scale"), shift=linear("shift")),
    )  # fmt: skip
    ops: list[Op] = [conv(0, 1, 4, 6, w), conv(1, 2, 6, 6, w, kernel=(1, 1, 1), norm=norm), conv(2, 3, 6, 3, w)]
    program = program_with(ops, [*same_size(1, 4), *same_size(2, 6), *same_size(1, 3)])
    how = Way(settings={"chunk_lat": 1, "tile_size": 0, "plan": "tiles"}, device={}, base_tile=2)
    heard = check(program, w.tensors, latent(1, 4, 3, 3, 7), how, monkeypatch)
    assert {len(run.tiles) for run in heard.runs_of(1)} == {8}
