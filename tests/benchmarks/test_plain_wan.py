"""Random Wan weights have the published layout and decode to something like a clip."""

from __future__ import annotations

import math

import pytest
import torch

from halo_vae.benchmarks.plain_wan import PlainWanDecoder, random_wan_weights, wan_shapes
from halo_vae.optim.families import lower
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.goldens import TOLERANCE, golden
from halo_vae.tests.optim.families.clip_checks import decode_clips


def test_names_and_shapes_are_those_of_the_reference() -> None:
    assert wan_shapes(dim=8) == {name: tuple(tensor.shape) for name, tensor in golden("wan21").weights.items()}


def test_published_size_has_73_million_weights_in_the_decoder() -> None:
    count = sum(math.prod(shape) for name, shape in wan_shapes().items() if name.startswith("decoder."))
    assert round(count / 1e6) == 73


def test_weights_are_seeded_and_decode_to_a_clip_of_moderate_deviation() -> None:
    weights = random_wan_weights(dim=16, seed=1)
    again, other = random_wan_weights(dim=16, seed=1), random_wan_weights(dim=16, seed=2)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not torch.equal(weights["decoder.conv1.weight"], other["decoder.conv1.weight"])
    latent = torch.randn(1, 16, 3, 6, 7, generator=torch.Generator().manual_seed(0))
    clip = decode_clips(lower(MappingWeights(weights).specs), weights, latent)
    assert clip.shape == (1, 3, 9, 48, 56)
    assert 0.2 < clip.std().item() < 1.5


def test_plain_decoder_decodes_the_golden() -> None:
    g = golden("wan21")
    module = PlainWanDecoder.from_weights(g.weights)
    for case, latent in g.latents.items():
        decoded = module.decode(latent)
        assert decoded.shape == g.expected[case].shape, case
        assert (decoded - g.expected[case]).abs().max().item() <= TOLERANCE, case


def test_plain_decoder_tells_what_is_missing() -> None:
    weights = random_wan_weights(dim=8)
    with pytest.raises(ValueError, match=r"not a whole Wan 2\.1 decoder"):
        PlainWanDecoder.from_weights({"decoder.conv1.weight": weights["decoder.conv1.weight"]})
    del weights["decoder.middle.1.proj.bias"]
    with pytest.raises(ValueError, match=r"proj\.bias"):
        PlainWanDecoder.from_weights(weights)
