"""Latents in the shape that video programs take."""

from __future__ import annotations

from torch import Tensor

from ..program import Program

BATCH_IS_TIME = ("svd",)
"""Families whose latents have the frames of one clip in the batch."""


def as_clips(program: Program, latent: Tensor) -> Tensor:
    """The latent as clips [B, C, T, H, W]; shares its memory, and another rank than 4 is given back as it is.

    Pictures [B, C, H, W] are clips of one frame each, or the frames of one clip where the family has it so.
    """
    if latent.ndim != 4:
        return latent
    return latent.movedim(0, 1).unsqueeze(0) if program.family in BATCH_IS_TIME else latent.unsqueeze(2)
