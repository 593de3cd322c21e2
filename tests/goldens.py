"""Loads tests/golden/*.safetensors: tiny seeded decoders and their decodes by the reference implementations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

GOLDEN_DIR = Path(__file__).parent / "golden"
IMAGE_GOLDENS = ("kl_sd", "kl_diffusers", "kl_flux", "kl_flux2", "kl_x4", "hunyuan_image", "taesd")
"""Every golden of a picture decoder."""
GOLDEN_FAMILY = {name: "kl" if name.startswith("kl_") else name for name in IMAGE_GOLDENS}
"""Family that each golden must be recognised as."""
TOLERANCE = 2e-4
"""Largest difference from the reference in float32: its own rounding against float64 is a tenth of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One tiny decoder: weights under their real names, latents [B, C, h, w] and raw pictures [B, 3, H, W] by case."""

    name: str
    weights: Mapping[str, Tensor]
    latents: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]
    metadata: Mapping[str, str]


@cache
def golden(name: str) -> Golden:
    """The golden of that name; read once, so treat its tensors as constants."""
    with safe_open(str(GOLDEN_DIR / f"{name}.safetensors"), framework="pt") as file:
        parts: dict[str, dict[str, Tensor]] = {"w": {}, "z": {}, "x": {}}
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            kind, short = key.split(":", 1)
            parts[kind][short] = file.get_tensor(key)
        metadata = dict(file.metadata())
    return Golden(name=name, weights=parts["w"], latents=parts["z"], expected=parts["x"], metadata=metadata)
