"""Loads tests/golden/*.safetensors: tiny seeded decoders and their decodes by the reference implementations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

GOLDEN_DIR = Path(__file__).parent / "golden"
IMAGE_GOLDENS = ("kl_sd", "kl_diffusers", "kl_flux", "kl_flux2", "kl_x4", "hunyuan_image", "taesd")
"""Every golden of a picture decoder."""
VIDEO_GOLDENS = (
    "wan21", "wan22", "hunyuan_video", "hunyuan15", "hunyuan_refiner", "ltx_plain", "ltx_causal", "ltx_timestep",
    "ltx_noise", "ltx_split", "mochi", "cosmos", "cogvideox", "svd", "taehv", "taehv32", "taehv_wan",
)  # fmt: skip
"""Goldens of clip decoders; a batch is as many clips, each decoded by itself."""
NOISE_SEED = 7
"""Seed of torch's global generator just before each decode of `ltx_timestep` and `ltx_noise`, which add noise."""
_ONE_OF_SEVERAL = ("kl_", "ltx_", "taehv")
GOLDEN_FAMILY = {
    name: next((f.rstrip("_") for f in _ONE_OF_SEVERAL if name.startswith(f)), name)
    for name in (*IMAGE_GOLDENS, *VIDEO_GOLDENS)
}
"""Family that each golden must be recognised as."""
TOLERANCE = 2e-4
"""Largest difference from the reference in float32: its own rounding against float64 is a tenth of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """One tiny decoder: weights under their real names, latents and what they decode to, raw, by case.

    Pictures: latents [B, C, h, w] to [B, 3, H, W]. Clips: latents [B, C, T, h, w] to [B, 3, frames, H, W].
    """

    name: str
    weights: Mapping[str, Tensor]
    latents: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    @property
    def config(self) -> str | None:
        """JSON of the decoder's hyperparameters, None where names and shapes tell them all."""
        return self.metadata.get("config") or None

    @property
    def hints(self) -> dict[str, str]:
        """The metadata of a real file with these weights, as `lower` takes it."""
        if self.config is None:
            return {}
        config = json.loads(self.config)
        return {"config": json.dumps(config if "vae" in config else {"vae": config})}


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
