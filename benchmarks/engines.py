"""The sides of a comparison, each a function from a latent to a picture [B, H, W, 3] in 0-1."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from halo_vae.benchmarks.plain_kl import PlainKLDecoder, three_pass_decode
from halo_vae.optim.decode import Engine, open_decoder
from halo_vae.optim.plan import Plan
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.weights import MappingWeights

STOCK = ("plain", "three_pass")
THREE_PASS_TILE, THREE_PASS_OVERLAP = (32, 32), 8
"""Latents: "VAE Decode (Tiled)" at 256 px, whose overlap is 64 px."""
"""The untiled contiguous decode, and three averaged passes over tiles of 64x64 latents that overlap by 16."""
PLANS = ("strips", "tiles")
"""The two plans of the engine."""
ENGINES = (*STOCK, *PLANS)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LATENT_CHANNELS = 4
SCALE = 8
"""Picture pixels per latent pixel."""


class StockSide:
    """A decode as hosts do it, in contiguous layout."""

    def __init__(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Weights in the dtype to decode in; they are shared, not copied."""
        self.name = name
        self._dtype = weights["decoder.conv_in.weight"].dtype
        self._decoder = PlainKLDecoder.from_weights(weights, dtype=self._dtype)

    def decode(self, latent: Tensor) -> Tensor:
        """float32 [B, 4, h, w] -> float32 [B, 8 h, 8 w, 3] in 0-1."""
        with torch.inference_mode():
            picture = (
                three_pass_decode(self._raw, latent, tile=THREE_PASS_TILE, overlap=THREE_PASS_OVERLAP)
                if self.name == "three_pass"
                else self._raw(latent)
            )
            return picture.add_(1.0).div_(2.0).clamp_(0.0, 1.0).movedim(1, -1)

    def _raw(self, latent: Tensor) -> Tensor:
        return self._decoder.decode(latent.to(self._dtype)).float()


class HaloSide:
    """The engine under one of its plans, with its defaults."""

    def __init__(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Weights in the dtype to decode in; they are shared, not copied."""
        dtype = weights["decoder.conv_in.weight"].dtype
        precision = next(name for name, known in DTYPES.items() if known == dtype)
        self.name = name
        self.engine = Engine()
        self.decoder = open_decoder(MappingWeights(weights), loaded_dtype=dtype)
        self.settings = DecodeSettings(plan=name, precision_mode=precision)  # type: ignore[arg-type]

    def decode(self, latent: Tensor) -> Tensor:
        """float32 [B, 4, h, w] -> float32 [B, 8 h, 8 w, 3] in 0-1."""
        return self.engine.decode(self.decoder, latent, self.settings)

    def plan(self, latent: Tensor) -> Plan:
        """What `decode` would run."""
        b, c, h, w = latent.shape
        return self.engine.plan(self.decoder, (b, c, h, w), self.settings)


def make_side(name: str, weights: Mapping[str, Tensor]) -> StockSide | HaloSide:
    """One of ENGINES over these weights. ValueError for another name."""
    if name in STOCK:
        return StockSide(name, weights)
    if name in PLANS:
        return HaloSide(name, weights)
    raise ValueError(f"there is no engine {name!r}; choose from {', '.join(ENGINES)}")


def random_latent(size_px: int, batch: int = 1, seed: int = 1) -> Tensor:
    """Seeded latents [batch, 4, size / 8, size / 8] of a square picture. ValueError unless 8 divides the size."""
    if size_px < SCALE or size_px % SCALE:
        raise ValueError(f"the size is {size_px} pixels; give a positive multiple of {SCALE}")
    edge = size_px // SCALE
    return torch.randn(batch, LATENT_CHANNELS, edge, edge, generator=torch.Generator().manual_seed(seed))


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write weights for other processes to load."""
    from safetensors.torch import save_file

    save_file(dict(weights), str(path))


def load_weights(path: Path) -> dict[str, Tensor]:
    """Every tensor in memory of its own: a mapped file's pages would count as resident only once touched."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
