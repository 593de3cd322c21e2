"""A decoder of which only its call is known: the host's own, or one that no family recognises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .errors import HaloError, LatentError
from .packing import dtype_name

Decode = Callable[[Tensor], Tensor]
"""Latent tile [B, C, H, W] or [B, C, T, H, W] -> raw picture tile [B, C, (T,) H, W], before any finish."""


class PrecisionMemory:
    """Dtypes in which most tiles of one decoder came out non-finite. Lives and dies with that decoder."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._failing: set[torch.dtype] = set()

    def record(self, dtype: torch.dtype, *, n_calls: int, n_failed: int) -> None:
        """Remember `dtype` where at least half of the calls of a decode failed; fewer are cheaper to repair."""
        if n_failed and 2 * n_failed >= n_calls:
            self._failing.add(dtype)

    def fails_in(self, dtype: torch.dtype) -> bool:
        """True where an earlier decode showed that this dtype is not worth trying."""
        return dtype in self._failing


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueDecoder:
    """A callable decoder and the little that must be known to tile it."""

    name: str
    """What records call it, e.g. the class of the model."""
    decode: Decode
    """The call in the decoder's own dtype (`dtype`)."""
    decode_as: Callable[[torch.dtype], Decode] | None = None
    """Gives the same decoder in another dtype, weights included; None where it runs in `dtype` only."""
    latent_dim: Literal[1, 2, 3]
    """1 = sound, 2 = pictures [B, C, H, W], 3 = clips [B, C, T, H, W]."""
    latent_channels: int | None
    """Channels of the latent, or None where any will do."""
    output_channels: int = 3
    scale: int
    """Picture pixels per latent element along H and W."""
    time_ratio: int = 1
    """Frames per latent frame after the first."""
    frames: Callable[[int], int] = lambda n: n
    """Output frames of a clip of n latent frames."""
    dtype: torch.dtype = torch.float32
    """Compute dtype: the latent is cast to it."""
    working_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    """Dtypes the decoder is known to survive, preferred first."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the weights are; tiles of the latent are moved there."""
    content_hash: str | None = None
    """Hash of the weights, or None where it cannot be taken."""
    estimate_bytes: Callable[[tuple[int, ...], torch.dtype], int] | None = None
    """Bytes that a call with a latent of this shape takes, by the decoder's own account; None = unknown."""
    memory: PrecisionMemory = field(default_factory=PrecisionMemory)

    def call_in(self, dtype: torch.dtype) -> Decode:
        """The call in `dtype`. HaloError where the decoder cannot be widened."""
        if dtype == self.dtype:
            return self.decode
        if self.decode_as is None:
            raise HaloError(f"{self.name} runs in {dtype_name(self.dtype)} only; {dtype_name(dtype)} was asked of it")
        return self.decode_as(dtype)


def fit_latent(opaque: OpaqueDecoder, latent: Tensor) -> Tensor:
    """The latent in the rank that the decoder takes: [B, C, H, W] or [B, C, T, H, W]; shares its memory.

    A one-frame clip goes to a picture decoder as a picture, and a picture to a video decoder as a clip of one frame.
    LatentError on any other rank, on an empty latent, and on a wrong number of channels. Values are not looked at.
    """
    shape = tuple(latent.shape)
    if opaque.latent_dim == 1:
        raise LatentError(f"{opaque.name} is an audio VAE and makes no pictures; use the VAE Decode Audio node")
    if latent.ndim not in (4, 5):
        raise LatentError(f"the latent has shape {shape}; give [B, C, H, W] or [B, C, T, H, W]")
    if 0 in shape:
        raise LatentError(f"the latent of shape {shape} is empty; every dimension must be at least 1")
    wanted = opaque.latent_channels
    if wanted is not None and shape[1] != wanted:
        raise LatentError(
            f"the latent has {shape[1]} channels but {opaque.name} decodes {wanted}; "
            "use the VAE that belongs to the model"
        )
    if opaque.latent_dim == 3:
        return latent.unsqueeze(2) if latent.ndim == 4 else latent
    if latent.ndim == 5 and shape[2] != 1:
        raise LatentError(
            f"the latent holds clips of {shape[2]} frames but {opaque.name} decodes single pictures; use a video VAE"
        )
    return latent.squeeze(2) if latent.ndim == 5 else latent


def check_finite(latent: Tensor) -> None:
    """LatentError where the latent holds NaN or inf: no precision can repair what the sampler got wrong."""
    if not is_finite(latent):
        n_bad = int((~torch.isfinite(latent)).sum())
        raise LatentError(
            f"the latent itself holds {n_bad} NaN or infinite values of {latent.numel()}, so the fault lies before "
            "the VAE: check the sampler, its model and their precision"
        )


def is_finite(values: Tensor) -> bool:
    """True where no value is NaN or inf; one pass, no temporary of the same size."""
    if not values.is_floating_point():
        return True
    low, high = torch.aminmax(values)  # both propagate NaN
    return bool(torch.isfinite(low) & torch.isfinite(high))
