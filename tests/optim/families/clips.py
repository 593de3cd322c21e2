"""What the tests of clip decoders share: decoding with the plain interpreter, and damaging a golden's shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from halo_vae.optim.program import Program
from halo_vae.optim.video.frames import frame_counts
from halo_vae.tests.goldens import golden
from halo_vae.tests.optim.families.layouts import Shapes
from halo_vae.tests.optim.video.reference import Interpreter

TOLERANCE = 1e-4
"""Largest difference from the reference in float32."""


def decode_clips(program: Program, weights: Mapping[str, Tensor], latents: Tensor) -> Tensor:
    """Each clip of [B, C, T, h, w] by itself, by the plain interpreter."""
    with torch.no_grad():
        return torch.cat([Interpreter(program, dict(weights)).run(latent) for latent in latents.split(1)])


def golden_shapes(name: str, *, without: Iterable[str] = ()) -> Shapes:
    """Shapes of a golden's tensors, without those whose names contain one of the words."""
    shapes = {key: tuple(tensor.shape) for key, tensor in golden(name).weights.items()}
    return {key: shape for key, shape in shapes.items() if not any(word in key for word in without)}


def one_tensor_less(shapes: Shapes) -> Iterator[tuple[str, Shapes]]:
    """(name of the tensor that is gone, the others) for each tensor."""
    for gone in shapes:
        yield gone, {name: shape for name, shape in shapes.items() if name != gone}


def declared_sizes(program: Program, size: tuple[int, int, int]) -> list[tuple[int, ...]]:
    """[C, T, H, W] of every value for a latent of (T, h, w)."""
    counts = frame_counts(program, size[0])
    return [
        (value.channels, frames, size[1] * value.scale[1], size[2] * value.scale[2])
        for value, frames in zip(program.values, counts, strict=True)
    ]
