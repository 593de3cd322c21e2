"""What every family of clip decoders is checked for, on its golden."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from halo_vae.optim.errors import WeightsError
from halo_vae.optim.families import detect, lower
from halo_vae.optim.families.keys import Family, Keys
from halo_vae.optim.program import Program
from halo_vae.optim.video.frames import output_frames
from halo_vae.optim.weights import MappingWeights, TensorSpec
from halo_vae.tests.goldens import Golden, golden
from halo_vae.tests.optim.video.reference import Interpreter

TOLERANCE = 1e-4


def specs_of(g: Golden) -> dict[str, TensorSpec]:
    """What a weight source says about the golden's tensors."""
    return dict(MappingWeights(g.weights).specs)


def program_of(name: str) -> Program:
    """The golden's decoder."""
    return lower(specs_of(golden(name)))


def largest_error(program: Program, g: Golden, case: str) -> float:
    """Largest difference between the interpreter, clip by clip, and the reference."""
    worst = 0.0
    for latent, expected in zip(g.latents[case].split(1), g.expected[case].split(1), strict=True):
        with torch.no_grad():
            clip = Interpreter(program, dict(g.weights)).run(latent)
        assert clip.shape == expected.shape, case
        assert output_frames(program, latent.shape[2]) == expected.shape[2], case
        worst = max(worst, (clip - expected).abs().max().item())
    return worst


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
