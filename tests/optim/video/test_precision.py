"""Narrow arithmetic of clips, and how a result that is not finite is repaired."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.errors import NonFiniteError
from halo_vae.optim.moments import tile_moments
from halo_vae.optim.pool import MemoryPool
from halo_vae.optim.store import keep_raw
from halo_vae.optim.video import engine as engine_module
from halo_vae.optim.video.runner import ClipContext, ClipRunner
from halo_vae.tests.goldens import golden
from halo_vae.tests.optim.families.clip_checks import decode_clips
from halo_vae.tests.optim.helpers import EVERY_DTYPE, PROFILE, latent, max_diff, profile, settings
from halo_vae.tests.optim.video.helpers import ClipRecorder, decode_clip, decoder_of, golden_decoder

HOT = "decoder.middle.0.residual.2"
"""A convolution of Wan whose result is normalised at once, so that it may be large."""
HOTTER = "decoder.upsamples.1.residual.2"
FACTOR = 1e6
Z = latent(1, 16, 3, 3, 4)
LIMITS = {"fp16": 0.02, "bf16": 0.16, "mixed": 0.1}
"""Rounding through some forty ops, as part of the clip's spread."""


def wan(*hot: str, plant: str | None = None, factor: float = FACTOR) -> Decoder:
    """The golden with results beyond float16 in some ops, or with a NaN among a weight."""
    weights = dict(golden("wan21").weights)
    for op in hot:
        weights[f"{op}.weight"] = (weights[f"{op}.weight"].float() * factor).float()
    weights = {name: tensor.float() for name, tensor in weights.items()}
    if plant is not None:
        weights[f"{plant}.weight"] = weights[f"{plant}.weight"].clone()
        weights[f"{plant}.weight"].view(-1)[3] = float("nan")
    program = replace(golden_decoder("wan21").program, working_dtypes=EVERY_DTYPE)
    return decoder_of(program, weights)


@cache
def expected(*hot: str) -> Tensor:
    decoder = wan(*hot)
    weights = {name: decoder.weights.get(name, torch.float32, torch.device("cpu")) for name in decoder.weights.specs}
    return decode_clips(decoder.program, weights, Z)


def deferred(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Look at flags when frames are handed on until one was bad, as on a GPU; gives what each attempt did."""
    attempts: list[bool] = []

    def context(**given: Any) -> ClipContext:
        careful = len(attempts) > 0
        attempts.append(careful)
        return ClipContext(**(given | {"check_each_op": careful}))

    monkeypatch.setattr(engine_module, "ClipContext", context)
    return attempts


# -- rounding


@pytest.mark.parametrize("mode", ["fp16", "bf16", "mixed"])
@pytest.mark.parametrize("plan", ["tiles", "strips"])
def test_narrow_decodes_are_close(mode: str, plan: str) -> None:
    raw, heard = decode_clip(
        Engine(profile=PROFILE), wan(), Z, precision_mode=mode, plan=plan, chunk_lat=2, tile_size=16
    )
    name = {"fp16": "float16"}.get(mode, "bfloat16")
    assert {report.dtype for report in heard.ops if report.kind != "pointwise"} == {name}
    assert {shape.dtype for _, shape in heard.convs} == {name}
    error = max_diff(raw, expected())
    assert 1e-5 < error <= LIMITS[mode] * float(expected().std()) * 5
    assert float((raw - expected()).std()) <= LIMITS[mode] * float(expected().std()) / 2
    assert heard.fallbacks == heard.redone == []


@pytest.mark.parametrize("name", ["ltx_plain", "taehv", "mochi", "cosmos"])
@pytest.mark.parametrize("mode", ["bf16", "mixed"])
def test_other_families_too(name: str, mode: str) -> None:
    g = golden(name)
    raw, heard = decode_clip(
        Engine(profile=PROFILE), golden_decoder(name), g.latents["a"], precision_mode=mode, chunk_lat=1
    )
    spread = float(g.expected["a"].std())
    assert float((raw - g.expected["a"]).std()) <= 0.06 * spread
    assert max_diff(raw, g.expected["a"]) > 1e-4
    assert {"bfloat16"} <= {report.dtype for report in heard.ops}


@pytest.mark.parametrize("shape", [(6, 5, 7), (6, 1, 7), (6, 5, 1), (2, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_statistics_of_one_frame_in_any_dtype_and_layout(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    c, h, w = shape
    wide = (latent(c, h + 2, w + 2) * 3 + 1).to(dtype)
    for page in (wide, wide.permute(1, 2, 0).contiguous().permute(2, 0, 1)):
        for frame in (page[:, 1:-1, 1:-1], page[:, 1 : 1 + h, 1 : 1 + w].clone()):
            mean, variance = tile_moments(frame[None], 2)
            groups = frame.double().reshape(2, -1)
            assert max_diff(mean[0], groups.mean(1)) <= 1e-5
            assert max_diff(variance[0], groups.var(1, correction=0)) <= 1e-3


def test_mixed_rounds_less_than_narrow_throughout() -> None:
    errors = {}
    for mode in ("mixed", "bf16", "fp16"):
        raw, _ = decode_clip(Engine(profile=PROFILE), wan(), Z, precision_mode=mode)
        errors[mode] = float((raw - expected()).std())
    assert errors["mixed"] < 0.95 * errors["bf16"]
    assert errors["fp16"] < 0.5 * errors["bf16"]


def test_the_loaded_dtype_is_kept_for_small_frames() -> None:
    plan = Engine(profile=PROFILE).plan(golden_decoder("wan21", torch.bfloat16), (1, 16, 2, 4, 4))
    assert (plan.dtypes.native, plan.dtypes.stream, plan.dtypes.compute) == ("bfloat16",) * 3
    decoder, z = golden_decoder("wan21", torch.bfloat16), Z
    raw, heard = decode_clip(Engine(profile=PROFILE), decoder, z, precision_mode="auto")
    assert {report.native_dtype for report in heard.ops} == {"bfloat16"}
    assert raw.dtype == torch.float32


# -- overflow


@pytest.mark.parametrize("mode", ["fp16", "mixed"])
@pytest.mark.parametrize("plan", ["tiles", "strips"])
def test_an_overflow_is_redone_wider_and_remembered(mode: str, plan: str) -> None:
    decoder = wan(HOT)
    engine = Engine(profile=profile(native_dtypes=("float16", "bfloat16")))
    given = {"precision_mode": mode, "plan": plan, "tile_size": 16, "chunk_lat": 1}
    raw, heard = decode_clip(engine, decoder, Z, **given)
    assert max_diff(raw, expected(HOT)) <= 0.25 * float(expected(HOT).std())
    assert [(name, dtype) for name, dtype, _ in heard.redone] == [(HOT, "float16")]
    assert heard.redone[0][2] > 0
    (fallback,) = heard.fallbacks
    assert (fallback.kind, fallback.where, fallback.given, fallback.used) == ("non_finite", HOT, "float16", "float32")
    assert len(heard.plans) == 2  # the decode began again
    assert heard.dtype_of(HOT) == "float32"
    done = [done for done, _ in heard.steps]
    assert done == sorted(done)
    assert heard.steps[-1] == (1000, 1000)

    again, second = decode_clip(engine, decoder, Z, **given)
    assert second.redone == second.fallbacks == []
    assert len(second.plans) == 1
    assert torch.equal(again, raw)
    n_ops = len(decoder.program.ops)
    others = {report.dtype for report in second.ops if report.name != HOT and report.kind != "pointwise"}
    assert others == {"float16"}
    assert n_ops > 30


def test_two_overflows_in_one_decode() -> None:
    raw, heard = decode_clip(Engine(profile=PROFILE), wan(HOT, HOTTER), Z, precision_mode="fp16", chunk_lat=1)
    assert [name for name, *_ in heard.redone] == [HOT, HOTTER]
    assert len(heard.plans) == 3
    assert max_diff(raw, expected(HOT, HOTTER)) <= 0.25 * float(expected(HOT, HOTTER).std())


def test_an_overflow_in_the_last_chunk_hands_no_frame_on_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that were handed on before it stay as they are; the others follow, each once."""
    real, planted = ClipRunner._flag, []

    def flag(self: ClipRunner, run: Any, op: Any) -> None:
        if op.name == HOT and run.start == 2 and not planted:
            planted.append(taken[-1])
            raise self._restart(run)
        real(self, run, op)

    monkeypatch.setattr(ClipRunner, "_flag", flag)
    taken: list[tuple[int, Tensor]] = []
    heard = ClipRecorder()
    n = Engine(profile=PROFILE).decode_frames(
        wan(), Z, settings(precision_mode="fp16", chunk_lat=1), observer=heard, finish=keep_raw,
        on_frames=lambda first, frames: taken.append((first, frames.clone())),
    )  # fmt: skip
    assert [name for name, *_ in heard.redone] == [HOT]
    assert len(heard.plans) == 2
    assert [(first, part.shape[0]) for first, part in taken] == [(0, 1), (1, 4), (5, 4)]
    assert planted[0][0] == 1  # five frames had been handed on
    assert n == 9
    clip = torch.cat([frames for _, frames in taken]).movedim(-1, 0)[None]
    assert max_diff(clip, expected()) <= 0.1 * float(expected().std())


def test_the_guard_can_be_turned_off() -> None:
    engine = Engine(profile=PROFILE)
    with pytest.raises(
        NonFiniteError, match=f"^{re.escape(HOT)} is not finite in float16; turn adaptive precision on or choose"
    ) as caught:
        decode_clip(engine, wan(HOT), Z, precision_mode="fp16", adaptive_precision=False)
    assert (caught.value.op, caught.value.dtype) == (HOT, "float16")
    assert engine.widened.of(wan(HOT).content_hash, "float16") == frozenset()


# -- NaN in the weights


@pytest.mark.parametrize("mode", ["fp32", "fp16", "bf16"])
def test_nan_in_the_weights_is_an_error_that_names_the_op(mode: str) -> None:
    engine, keep = Engine(profile=PROFILE), 4 << 20
    good, _ = decode_clip(engine, wan(), Z, precision_mode=mode, keep_bytes=keep)
    held = engine.pool.held_bytes
    heard = ClipRecorder()
    with pytest.raises(NonFiniteError, match=f"^{re.escape(HOT)} is not finite even in float32") as caught:
        decode_clip(engine, wan(plant=HOT), Z, heard, precision_mode=mode, keep_bytes=keep)
    assert (caught.value.op, caught.value.dtype) == (HOT, "float32")
    assert len(heard.plans) == (1 if mode == "fp32" else 2)
    assert heard.boundaries == []
    assert engine.pool.held_bytes == held
    again, _ = decode_clip(engine, wan(), Z, precision_mode=mode, keep_bytes=keep)
    assert torch.equal(again, good)


def test_a_failed_decode_keeps_no_memory() -> None:
    given: list[int] = []

    def source(nbytes: int, device: torch.device) -> Tensor:
        given.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    engine = Engine(profile=PROFILE, pool=MemoryPool(source))
    for _ in range(3):
        with pytest.raises(NonFiniteError):
            decode_clip(engine, wan(plant=HOT), Z)
    assert len(given) == 1  # one slab, used again
    with pytest.raises(NonFiniteError):
        decode_clip(engine, wan(plant=HOT), Z, keep_bytes=0)
    assert engine.pool.held_bytes == 0


@pytest.mark.parametrize(
    "op", ["decoder.conv1", "decoder.middle.1.proj", "decoder.head.2", "decoder.upsamples.3.time_conv"]
)
def test_whichever_op_it_is(op: str) -> None:
    with pytest.raises(NonFiniteError) as caught:
        decode_clip(Engine(profile=PROFILE), wan(plant=op), Z, chunk_lat=1)
    assert caught.value.op == op.replace(".proj", "")


# -- flags looked at later


@pytest.mark.parametrize("plan", ["tiles", "strips"])
def test_an_overflow_found_when_frames_are_handed_on_starts_the_decode_again(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = deferred(monkeypatch)
    decoder = wan(HOT, HOTTER)
    raw, heard = decode_clip(
        Engine(profile=PROFILE), decoder, Z, precision_mode="fp16", plan=plan, tile_size=16, chunk_lat=1
    )
    assert attempts == [False, True, True]
    assert [name for name, *_ in heard.redone] == [HOT, HOTTER]
    assert max_diff(raw, expected(HOT, HOTTER)) <= 0.25 * float(expected(HOT, HOTTER).std())
    # it was seen at the end of the first frames only, as the last run before the next attempt's first op tells
    again = next(i for i, run in enumerate(heard.runs) if i and run.index == 0)
    assert heard.runs[again - 1].index == len(decoder.program.ops) - 1


def test_no_bad_frame_is_handed_on_before_the_flags_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    deferred(monkeypatch)
    taken: list[Tensor] = []
    Engine(profile=PROFILE).decode_frames(
        wan(HOT), Z, settings(precision_mode="fp16", chunk_lat=1), finish=keep_raw,
        on_frames=lambda first, frames: taken.append(frames.clone()),
    )  # fmt: skip
    frames = torch.cat(taken)
    assert frames.shape[0] == 9
    assert bool(torch.isfinite(frames).all())
    with pytest.raises(NonFiniteError, match=re.escape(HOT)):
        Engine(profile=PROFILE).decode_frames(
            wan(plant=HOT), Z, settings(chunk_lat=1), on_frames=lambda first, frames: taken.append(frames)
        )
    assert sum(part.shape[0] for part in taken) == 9
