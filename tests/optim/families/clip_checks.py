"""What every family of clip decoders is checked for, on its golden; decoding by the interpreter; damaged shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

from halo_vae.optim.errors import WeightsError
from halo_vae.optim.families import detect, lower
from halo_vae.optim.families.keys import Family, Keys
from halo_vae.optim.program import Program
from halo_vae.optim.video.frames import frame_counts, output_frames
from halo_vae.optim.weights import MappingWeights, TensorSpec
from halo_vae.tests.goldens import Golden, golden
from halo_vae.tests.optim.families.layouts import Shapes
from halo_vae.tests.optim.video.reference import Interpreter

TOLERANCE = 1e-4
"""Largest difference from the reference in float32."""


def decode_clips(program: Program, weights: Mapping[str, Tensor], latents: Tensor) -> Tensor:
    """Each clip of [B, C, T, h, w] by itself, by the plain interpreter."""
    with torch.no_grad():
        return torch.cat([Interpreter(program, dict(weights)).run(latent) for latent in latents.split(1)])


def declared_sizes(program: Program, size: tuple[int, int, int]) -> list[tuple[int, ...]]:
    """[C, T, H, W] of every value for a latent of (T, h, w)."""
    counts = frame_counts(program, size[0])
    return [
        (value.channels, frames, size[1] * value.scale[1], size[2] * value.scale[2])
        for value, frames in zip(program.values, counts, strict=True)
    ]


# -- goldens


def specs_of(g: Golden) -> dict[str, TensorSpec]:
    """What a weight source says about the golden's tensors."""
    return dict(MappingWeights(g.weights).specs)


def program_of(name: str) -> Program:
    """The golden's decoder."""
    return lower(specs_of(golden(name)))


def golden_shapes(name: str, *, without: Iterable[str] = ()) -> Shapes:
    """Shapes of a golden's tensors, without those whose names contain one of the words."""
    shapes = {key: tuple(tensor.shape) for key, tensor in golden(name).weights.items()}
    return {key: shape for key, shape in shapes.items() if not any(word in key for word in without)}


def one_tensor_less(shapes: Shapes) -> Iterator[tuple[str, Shapes]]:
    """(name of the tensor that is gone, the others) for each tensor."""
    for gone in shapes:
        yield gone, {name: shape for name, shape in shapes.items() if name != gone}


def largest_error(program: Program, g: Golden, case: str) -> float:
    """Largest difference between the interpreter, clip by clip, and the reference."""
    clips, expected = decode_clips(program, g.weights, g.latents[case]), g.expected[case]
    assert clips.shape == expected.shape, case
    assert output_frames(program, g.latents[case].shape[2]) == expected.shape[2], case
    return float((clips - expected).abs().max())


# -- checks


def assert_golden_is_decoded(name: str, family: Family) -> None:
    """Every case of the golden equals the reference, under the family's name."""
    g = golden(name)
    assert detect(specs_of(g)) == family.name == g.metadata["family"]
    program = program_of(name)
    assert program.family == family.name
    assert program.latent_channels == int(g.metadata["latent_channels"])
    for case in g.latents:
        assert largest_error(program, g, case) <= TOLERANCE, case


def assert_missing_tensors_are_named(name: str, family: Family, *, spare: Iterable[str] = ()) -> None:
    """Without any one tensor but the spare ones, the family is still recognised and says what is missing."""
    whole = specs_of(golden(name))
    for gone in whole.keys() - set(spare):
        keys = Keys({key: spec for key, spec in whole.items() if key != gone})
        assert family.detect(keys), gone
        with pytest.raises(WeightsError, match="incomplete") as caught:
            family.lower(keys, {})
        assert f"'{gone}'" in str(caught.value)
