"""Checks of latents before anything runs."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import LatentError
from .program import Program

LatentShape = tuple[int, int, int, int]
"""[B, C, H, W]."""


def check_latent_shape(shape: tuple[int, ...], program: Program) -> LatentShape:
    """The shape as [B, C, H, W]. LatentError if it does not fit the program."""
    if len(shape) != 4:
        why = f", as this {program.family} decoder makes pictures and no clips" if len(shape) == 5 else ""
        raise LatentError(
            f"the latent has shape {list(shape)}; give four dimensions [batch, channels, height, width]{why}"
        )
    b, c, h, w = shape
    if b < 1 or h < 1 or w < 1:
        raise LatentError(
            f"the latent has shape {list(shape)}, which holds no picture; give at least one image of one pixel"
        )
    if c != program.latent_channels:
        raise LatentError(
            f"the latent has {c} channels but this {program.family} decoder takes {program.latent_channels};"
            " use the VAE that belongs to the model that made the latent"
        )
    return b, c, h, w


def check_latent(latent: Tensor, program: Program) -> LatentShape:
    """Shape of a latent that can be decoded. LatentError if the shape does not fit or a value is not finite."""
    shape = check_latent_shape(tuple(latent.shape), program)
    check_values(latent)
    return shape


def check_values(latent: Tensor) -> None:
    """LatentError where a latent's values are not numbers that can be decoded."""
    if not latent.is_floating_point():
        raise LatentError(f"the latent holds {latent.dtype} values; give floating-point values")
    if not bool(torch.isfinite(latent).all()):
        raise LatentError(
            "the latent itself holds NaN or inf, so no decode can repair it; check the sampler that made it"
        )
