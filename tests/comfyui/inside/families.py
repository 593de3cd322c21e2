"""Decodes decoders of several kinds by ComfyUI's own VAE object and by ours. Needs a ComfyUI that loads any width."""

from __future__ import annotations

import sys
from typing import Any

from common import answer, compared, here, latent, start

start(sys.argv[3:])

import comfy.sd  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from halo_vae.benchmarks.plain_kl import random_sd_weights  # noqa: E402

SD_MULT = (1, 2, 4, 4)


def without_quant(weights: dict[str, Any]) -> dict[str, Any]:
    return {k: t for k, t in weights.items() if not k.startswith("post_quant_conv.")}


def latent_norm(channels: int) -> dict[str, Any]:
    return {"bn.running_mean": latent(channels) * 0.1, "bn.running_var": latent(channels).abs() + 0.5}


FILES = {
    "sd": random_sd_weights(ch=32, mult=SD_MULT),
    "flux": without_quant(random_sd_weights(ch=32, mult=SD_MULT, z=16)),
    "flux2": random_sd_weights(ch=32, mult=SD_MULT, z=32) | latent_norm(128),
    "x4": random_sd_weights(ch=32, mult=(1, 2, 4)),
    "taesd": {k[2:]: t for k, t in load_file(here("golden") / "taesd.safetensors").items() if k.startswith("w:")},
}
facts: dict[str, Any] = {}
for name, file in FILES.items():

    def make(file: dict[str, Any] = file) -> Any:
        return comfy.sd.VAE(sd={k: t.clone() for k, t in file.items()})

    z = latent(2, make().latent_channels, 6, 5)
    facts[name] = compared(make, z, precision_mode="fp32")
pixel = latent(1, 3, 37, 53).clamp(-1, 1)


def of_pixels() -> Any:
    return comfy.sd.VAE(sd={"pixel_space_vae": torch.tensor(1.0)})


facts["pixels"] = compared(of_pixels, pixel)
facts["pixels tiled"] = compared(of_pixels, pixel, tile_size=16, overlap=0)
answer(facts)
