"""Clips through every convolution backend: what they decode to, what really ran, and what the record says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.kernels import kitchen
from halo_vae.tests.goldens import TOLERANCE, golden
from halo_vae.tests.optim.helpers import EVERY_DTYPE, max_diff, profile, tolerance
from halo_vae.tests.optim.kernels import fake_kitchen
from halo_vae.tests.optim.kernels.test_backends import HIP, lifted
from halo_vae.tests.optim.test_backend_goldens import PLANS, convolutions
from halo_vae.tests.optim.test_backend_goldens import heard_calls as heard_calls  # fixtures
from halo_vae.tests.optim.test_backend_goldens import package as package
from halo_vae.tests.optim.video.helpers import decode_clip
from halo_vae.tests.optim.video.helpers import golden_decoder as clip_decoder

CLIPS = ("wan21", "cogvideox", "svd", "ltx_plain", "cosmos", "taehv")
"""Causal and not, borders of every kind, norms of every kind."""
ASKED = ("torch", "conv2d_sum", "shifted_gemm", "kitchen")
EVERYDAY = [(name, asked, *how) for name in CLIPS for asked in ASKED for how in (("strips", True), ("tiles", False))]
SLOW = [
    (name, asked, plan, channels_last)
    for name in (*CLIPS, "hunyuan_video", "mochi")
    for asked in ASKED
    for plan in PLANS
    for channels_last in (True, False)
    if (name, asked, plan, channels_last) not in EVERYDAY
]


@pytest.mark.parametrize(("name", "asked", "plan", "channels_last"), EVERYDAY)
def test_clips_through_every_backend(
    name: str, asked: str, plan: str, channels_last: bool, package: fake_kitchen.Heard
) -> None:
    check_clip(name, asked, plan, channels_last)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "asked", "plan", "channels_last"), SLOW)
def test_more_clips_through_every_backend(
    name: str, asked: str, plan: str, channels_last: bool, package: fake_kitchen.Heard
) -> None:
    check_clip(name, asked, plan, channels_last)


def check_clip(name: str, asked: str, plan: str, channels_last: bool) -> None:
    decoder, z = clip_decoder(name), golden(name).latents["a"]
    engine = Engine(profile=profile(backends=(lifted("float32"),)))
    raw, heard = decode_clip(
        engine, decoder, z, kernel_backend=asked, plan=plan, tile_size=40, chunk_lat=2, fp16_accumulation=True,
        tensor_layout_optimization=channels_last,
    )  # fmt: skip
    assert max_diff(raw, golden(name).expected["a"]) <= TOLERANCE
    used = {"conv3d", "torch"} if asked == "torch" else {asked}
    takes = asked != "kitchen" or channels_last
    in_time = any(getattr(op, "kernel", (1,))[0] > 1 for op in decoder.program.ops)
    assert bool(used & set(heard.backends)) == (takes and (in_time or asked != "conv2d_sum"))
    assert ("refused" in convolutions(heard).reason) or set(heard.backends) <= {*used, "torch"}
    assert engine.pool.high_water_bytes == heard.plan.predicted.pool
    assert heard.plan.macs == sum(report.macs for report in heard.ops)


def small_clip(name: str, height: int = 3, width: int = 4) -> tuple[Decoder, Tensor, Tensor]:
    """A golden's decoder, a part of its latent, and what the default kernels make of it in float32."""
    z = golden(name).latents["a"][:1, :, :2, :height, :width].contiguous()
    truth, _ = decode_clip(Engine(profile=profile()), clip_decoder(name), z)
    return clip_decoder(name), z, truth


@pytest.mark.parametrize("asked", ASKED)
def test_upsampling_before_a_kernel_over_several_frames(asked: str, package: fake_kitchen.Heard) -> None:
    decoder, z, truth = small_clip("hunyuan_video")
    raw, heard = decode_clip(
        Engine(profile=profile(backends=(lifted("float32"),))), decoder, z, kernel_backend=asked, tile_size=16,
        fp16_accumulation=True,
    )  # fmt: skip
    assert max_diff(raw, truth) <= TOLERANCE
    grown = {op.name for op in decoder.program.ops if getattr(op, "upsample", 1) == 2}
    takes = asked in ("conv2d_sum", "shifted_gemm")
    assert {r.backend for r in heard.ops if r.name in grown} == {asked if takes else "conv2d_sum"}
    assert ("takes no upsampling" in convolutions(heard).reason) == (not takes)


def test_clips_in_float16_through_kitchen(heard_calls: fake_kitchen.Heard) -> None:
    decoder, z, truth = small_clip("cogvideox", 1, 2)  # a CPU takes long over float16
    decoder.loaded_dtype = torch.float16
    decoder.program = replace(decoder.program, working_dtypes=EVERY_DTYPE)
    raw, heard = decode_clip(
        Engine(profile=HIP), decoder, z, kernel_backend="kitchen", precision_mode="fp16", fp16_accumulation=True
    )
    assert max_diff(raw, truth) <= tolerance("mixed", truth)
    assert "kitchen" in heard.backends
    assert heard.plan.layout == "channels_last"
    assert any(shape[2] > 1 for shape, _ in heard_calls.convolved)  # all frames in one call
    assert heard.fallbacks == []


def test_a_call_of_a_clip_that_is_refused_runs_on_torch_and_is_told(
    package: fake_kitchen.Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, z, truth = small_clip("cogvideox")
    monkeypatch.setattr(kitchen, "call_refusals", lambda *tensors: ["of no use"])
    raw, heard = decode_clip(
        Engine(profile=profile(backends=(lifted("float32"),))), decoder, z, kernel_backend="kitchen",
        fp16_accumulation=True,
    )  # fmt: skip
    assert max_diff(raw, truth) <= TOLERANCE
    assert "kitchen" not in heard.backends
    assert package.convolved == []
    assert {(f.kind, f.given, f.used, f.reason) for f in heard.fallbacks} == {
        ("backend", "kitchen", "torch", "of no use")
    }
