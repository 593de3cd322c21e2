"""Readings of machines that nobody has at hand, and decoders of full size without their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halo_vae.benchmarks.plain_kl import sd_shapes
from halo_vae.benchmarks.plain_wan import wan_shapes
from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.device import DeviceProfile, profile_from
from halo_vae.optim.device_readers import PoolReading, Readings, Versions
from halo_vae.optim.events import PlanSummary
from halo_vae.optim.families import lower
from halo_vae.optim.plan import Plan
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.video.plan import ClipPlan
from halo_vae.optim.weights import TensorSpec

GIB, MIB = 1 << 30, 1 << 20
ROCM = Versions(
    torch="2.9.1+rocm7.1", hip="7.1.25424", rocm="7.1.0", miopen="3005001", driver="Linux 6.17.0-generic"
)


def pool(free: float, total: float) -> PoolReading:
    """In GiB."""
    return PoolReading(free_bytes=int(free * GIB), total_bytes=int(total * GIB))


GFX1151_CARVE_OUT = Readings(
    kind="hip", name="cuda:0", versions=ROCM, product="Radeon 8060S Graphics", arch="gfx1151:sramecc-:xnack-",
    driver_gfx="gfx1151", integrated=True, compute_units=40, device_pool=pool(63, 64), carve_out=pool(63, 64),
    gtt=pool(31, 31.2), host=pool(55, 62.4),
)  # fmt: skip
"""A Strix Halo with 128 GiB, half of it set aside for the GPU."""
GFX1151_GTT = Readings(
    kind="hip", name="cuda:0", versions=ROCM, product="Radeon 8060S Graphics", arch="gfx1151", driver_gfx="gfx1151",
    integrated=True, compute_units=40, device_pool=pool(118, 120), carve_out=pool(0.3, 0.5), gtt=pool(119, 120),
    host=pool(110, 124.9),
)  # fmt: skip
"""The same with the least carve-out, and nearly all memory open to the GPU."""
GFX1151_WINDOWS = Readings(
    kind="hip", name="cuda:0", versions=Versions(torch="2.9.1+rocm7.1", hip="7.1.51803", miopen="3005001"),
    product="AMD Radeon(TM) 8060S Graphics", arch="gfx1151", integrated=True, compute_units=40,
    device_pool=pool(78, 80), host=pool(40, 64),
)  # fmt: skip
"""Windows: no /sys, so nobody tells carve-out and shared memory apart."""
GFX1100 = Readings(
    kind="hip", name="cuda:0", versions=ROCM, product="AMD Radeon RX 7900 XTX", arch="gfx1100", driver_gfx="gfx1100",
    integrated=False, compute_units=96, device_pool=pool(23, 24), carve_out=pool(23.2, 24), gtt=pool(31, 31.3),
    host=pool(50, 62.7),
)  # fmt: skip
GFX1030 = Readings(
    kind="hip", name="cuda:0", versions=ROCM, product="AMD Radeon RX 6900 XT", arch="gfx1030", driver_gfx="gfx1030",
    integrated=False, compute_units=80, device_pool=pool(15, 16), carve_out=pool(15.1, 16), gtt=pool(31, 31.3),
    host=pool(50, 62.7),
)  # fmt: skip
GFX942 = Readings(
    kind="hip", name="cuda:0", versions=ROCM, product="AMD Instinct MI300X", arch="gfx942:sramecc+:xnack-",
    driver_gfx="gfx942", integrated=False, compute_units=304, device_pool=pool(190, 192), carve_out=pool(190, 192),
    gtt=pool(1000, 1007), host=pool(1900, 2015),
)  # fmt: skip
CUDA = Readings(
    kind="cuda", name="cuda:0", versions=Versions(torch="2.9.1+cu128", cuda="12.8", cudnn="91002", driver="570.86"),
    product="NVIDIA GeForce RTX 4090", integrated=False, compute_units=128, capability=(8, 9),
    device_pool=pool(22.5, 24), host=pool(50, 62.7),
)  # fmt: skip
CPU = Readings(
    kind="cpu", name="cpu", versions=Versions(torch="2.9.1+cpu"), native_dtypes=("bfloat16", "float32"), workers=4,
    integrated=True, host=pool(24, 31),
)  # fmt: skip
MACHINES: Mapping[str, Readings] = {
    "gfx1151": GFX1151_CARVE_OUT, "gfx1151-gtt": GFX1151_GTT, "gfx1151-windows": GFX1151_WINDOWS, "gfx1100": GFX1100,
    "gfx1030": GFX1030, "gfx942": GFX942, "cuda": CUDA, "cpu": CPU,
}  # fmt: skip


def profile_of(machine: str) -> DeviceProfile:
    """The profile of one of MACHINES."""
    return profile_from(MACHINES[machine])


@dataclass(frozen=True)
class SpecsOnly:
    """Weights that say their shapes and hold nothing."""

    specs: Mapping[str, TensorSpec]
    content_hash: str = "0" * 16
    metadata: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        raise AssertionError(f"planning asked for the values of {name}")


def decoder_of(shapes: Mapping[str, tuple[int, ...]], loaded: torch.dtype) -> Decoder:
    """A decoder for planning only, its weights stored in the dtype they are loaded in."""
    weights = SpecsOnly({name: TensorSpec(shape=shape, dtype=loaded) for name, shape in shapes.items()})
    return Decoder(weights=weights, program=lower(weights.specs), loaded_dtype=loaded)


def sd(loaded: torch.dtype = torch.float32) -> Decoder:
    """SD's decoder: 4 latent channels, survives float16 only under the guard."""
    return decoder_of(sd_shapes(), loaded)


def flux(loaded: torch.dtype = torch.float32) -> Decoder:
    """Flux's decoder: 16 latent channels and no convolution after the latent."""
    return decoder_of({k: s for k, s in sd_shapes(z=16).items() if not k.startswith("post_quant_conv")}, loaded)


def wan(loaded: torch.dtype = torch.float32) -> Decoder:
    """Wan 2.1's decoder."""
    return decoder_of(wan_shapes(), loaded)


DECODERS = {"sd": sd, "flux": flux, "wan": wan}
LATENTS: Mapping[str, tuple[int, ...]] = {
    "sd": (16, 4, 128, 128), "flux": (1, 16, 128, 128), "wan": (1, 16, 5, 128, 128)
}  # fmt: skip
"""1024x1024: a batch of SD, one picture of Flux, a clip of Wan of 17 frames."""


def plan_on(
    profile: DeviceProfile, decoder: Decoder, shape: tuple[int, ...], settings: DecodeSettings | None = None
) -> Plan | ClipPlan:
    """What the engine would run there."""
    return Engine(profile=profile).plan(decoder, shape, settings or DecodeSettings())


def reasons_of(summary: PlanSummary) -> dict[str, tuple[str, str]]:
    """Choices as name: (value, reason)."""
    return {choice.name: (choice.value, choice.reason) for choice in summary.choices}
