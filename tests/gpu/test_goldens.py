"""The reference decodes through every backend and dtype, on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.optim.decode import Engine
from halo_vae.optim.kernels.backends import KITCHEN_PACKAGE
from halo_vae.optim.kernels.packages import missing
from halo_vae.tests.goldens import IMAGE_GOLDENS, NOISE_SEED, TOLERANCE, VIDEO_GOLDENS, golden
from halo_vae.tests.gpu.support import on_device
from halo_vae.tests.optim.helpers import EVERY_DTYPE, decode_raw, golden_decoder, max_diff, tolerance
from halo_vae.tests.optim.video.helpers import decode_clip
from halo_vae.tests.optim.video.helpers import golden_decoder as clip_decoder

pytestmark = pytest.mark.gpu
Note = Callable[[str, Any], None]
MODES = ("fp32", "bf16", "fp16", "mixed")
PICTURES = ("auto", "torch", "shifted_gemm", "winograd", "kitchen")
CLIPS = ("auto", "torch", "conv2d_sum", "shifted_gemm", "kitchen")
WIDE_CLIPS = ("wan21", "hunyuan_video", "ltx_plain", "mochi", "cogvideox", "svd", "taehv")
"""Goldens of clips that go through every backend and dtype; the others go through `auto`."""
DRAWS = ("ltx_timestep", "ltx_noise")


def check(raw: Tensor, expected: Tensor, mode: str, note: Note) -> None:
    """Close enough for what it was computed in, and noted."""
    error = max_diff(raw.cpu(), expected)
    note("max_error", error)
    note("spread", float(expected.std()))
    # twice what the CPU's kernels are held to: others add up in other orders
    assert error <= (TOLERANCE if mode == "fp32" else 2 * tolerance(mode, expected))


def needs(backend: str) -> None:
    """Skip where a backend's package is not there."""
    if backend == "kitchen" and (why := missing(KITCHEN_PACKAGE)):
        pytest.skip(f"comfy-kitchen: {why}")


def given(backend: str, mode: str) -> dict[str, Any]:
    """MIOpen and cuDNN stay off: tiny shapes that no user has are not worth a search."""
    return {
        "kernel_backend": backend, "precision_mode": mode, "fp16_accumulation": backend == "kitchen", "cudnn": "off"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "mode"), [(b, m) for b in PICTURES for m in MODES if m != "mixed" or b in ("auto", "torch")]
)
@pytest.mark.parametrize("name", [name for name in IMAGE_GOLDENS if name != "kl_diffusers"])  # the network of kl_sd
def test_pictures(name: str, backend: str, mode: str, record_property: Note) -> None:
    needs(backend)
    decoder, g = on_device(golden_decoder(name)), golden(name)
    decoder.program = widened(decoder.program)
    raw, heard = decode_raw(Engine(), decoder, g.latents["a"], plan="tiles", tile_size=16, **given(backend, mode))
    check(raw, g.expected["a"], mode, record_property)
    record_property("backends", sorted({report.backend for report in heard.ops}))
    assert {report.dtype for report in heard.ops} & set(EVERY_DTYPE)


def widened(program: Any) -> Any:
    """The program with every dtype allowed: what overflows is repaired, which is tested too."""
    from dataclasses import replace

    return replace(program, working_dtypes=EVERY_DTYPE)


@pytest.mark.parametrize("layout", [True, False], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize("plan", ["strips", "tiles"])
@pytest.mark.parametrize("name", ["kl_sd", "kl_flux"])
def test_plans_and_layouts(name: str, plan: str, layout: bool, record_property: Note) -> None:
    decoder, g = on_device(golden_decoder(name)), golden(name)
    for case, z in g.latents.items():
        raw, _ = decode_raw(
            Engine(), decoder, z, plan=plan, tile_size=24, tensor_layout_optimization=layout, cudnn="off"
        )
        check(raw, g.expected[case], "fp32", record_property)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_with_the_vendors_library(mode: str, record_property: Note) -> None:
    """cuDNN, which on ROCm is MIOpen: the one test here that may search."""
    decoder, g = on_device(golden_decoder("kl_sd")), golden("kl_sd")
    decoder.program = widened(decoder.program)
    raw, _ = decode_raw(Engine(), decoder, g.latents["a"], precision_mode=mode, cudnn="on")
    check(raw, g.expected["a"], mode, record_property)


@pytest.mark.parametrize("kind", ["sdpa", "matmul"])
def test_attention(kind: str, record_property: Note) -> None:
    from dataclasses import replace

    from halo_vae.optim.device import describe_device

    decoder, g = on_device(golden_decoder("kl_sd")), golden("kl_sd")
    engine = Engine(profile=replace(describe_device(decoder.device), attention=kind))
    raw, _ = decode_raw(engine, decoder, g.latents["a"], cudnn="off")
    check(raw, g.expected["a"], "fp32", record_property)


def clip(name: str, backend: str, mode: str, note: Note, **more: Any) -> None:
    needs(backend)
    decoder, g = on_device(clip_decoder(name)), golden(name)
    decoder.program = widened(decoder.program)
    case = next(iter(g.latents))
    torch.manual_seed(NOISE_SEED)
    raw, heard = decode_clip(Engine(), decoder, g.latents[case], **given(backend, mode), **more)
    check(raw, g.expected[case], mode, note)
    note("backends", sorted(heard.backends))


@pytest.mark.parametrize("name", VIDEO_GOLDENS)
def test_clips_of_every_family(name: str, record_property: Note) -> None:
    clip(name, "auto", "fp32", record_property)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("backend", CLIPS)
@pytest.mark.parametrize("name", WIDE_CLIPS)
def test_clips(name: str, backend: str, mode: str, record_property: Note) -> None:
    clip(name, backend, mode, record_property, chunk_lat=1)
