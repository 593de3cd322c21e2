"""The yardstick decodes as the references do, and its tiling is the three-pass one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halo_vae.benchmarks.plain_kl import (
    PlainKLDecoder,
    random_sd_weights,
    sd_shapes,
    three_pass_decode,
    tiled_decode,
)
from halo_vae.optim.families import lower
from halo_vae.optim.kernels.eager import run_eager
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.goldens import TOLERANCE, golden
from halo_vae.tests.optim.families.layouts import kl_ldm

SMALL = {"ch": 32, "mult": (1, 2, 1), "n_res": 1}


def _latent(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _nearest(z: Tensor) -> Tensor:
    """A decoder without neighbourhood, x8."""
    return z[:, :3].repeat_interleave(8, 2).repeat_interleave(8, 3)


@pytest.mark.parametrize("name", ["kl_sd", "kl_flux", "kl_x4"])
def test_plain_decoder_decodes_the_goldens(name: str) -> None:
    g = golden(name)
    module = PlainKLDecoder.from_weights(g.weights)
    for case, latent in g.latents.items():
        assert (module.decode(latent) - g.expected[case]).abs().max().item() <= TOLERANCE, case


def test_plain_decoder_and_the_engine_reference_agree_on_random_weights() -> None:
    tensors = random_sd_weights(3, **SMALL)
    weights = MappingWeights(tensors)
    latent = _latent(2, 4, 9, 14)
    plain = PlainKLDecoder.from_weights(tensors).decode(latent)
    assert plain.shape == (2, 3, 36, 56)
    assert (run_eager(lower(weights.specs), weights, latent) - plain).abs().max().item() <= 2e-5


def test_full_size_shapes_are_those_of_stable_diffusion() -> None:
    assert sd_shapes() == kl_ldm(4, (512, 512, 256, 128), embed=4)


def test_random_weights_are_seeded_and_keep_the_picture_in_range() -> None:
    first, again, other = (random_sd_weights(seed, **SMALL) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["decoder.conv_in.weight"], other["decoder.conv_in.weight"])
    picture = PlainKLDecoder.from_weights(first).decode(_latent(1, 4, 12, 12))
    assert 0.2 < picture.std().item() < 2.0


def test_float32_weights_are_shared_not_copied() -> None:
    tensors = random_sd_weights(**SMALL)
    module = PlainKLDecoder.from_weights(tensors)
    assert module.decoder.conv_in.weight.data_ptr() == tensors["decoder.conv_in.weight"].data_ptr()
    assert not any(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("gone", ["decoder.conv_in.weight", "decoder.up.1.block.1.norm2.bias"])
def test_missing_tensor_is_named(gone: str) -> None:
    tensors = random_sd_weights(**SMALL)
    del tensors[gone]
    with pytest.raises(ValueError, match=gone.replace(".", r"\.")):
        PlainKLDecoder.from_weights(tensors)


@pytest.mark.parametrize("size", [(5, 9), (16, 16), (17, 40), (33, 47)])
def test_tiling_of_a_decoder_without_neighbourhood_changes_nothing(size: tuple[int, int]) -> None:
    latent = _latent(2, 4, *size)
    got = three_pass_decode(_nearest, latent, tile=(16, 16), overlap=4)
    assert (got - _nearest(latent)).abs().max().item() <= 1e-5


def test_three_passes_use_tall_wide_and_given_tiles() -> None:
    seen: list[tuple[int, int]] = []

    def decode(z: Tensor) -> Tensor:
        seen.append((z.shape[2], z.shape[3]))
        return _nearest(z)

    three_pass_decode(decode, _latent(1, 4, 32, 32), tile=(16, 16), overlap=4)
    # Starts 0, 4, … 24 for tiles of 8, and 0, 12, 24 for tiles of 16; a tile of 32 spans the latent.
    assert [seen.count(shape) for shape in ((32, 8), (8, 32), (16, 16))] == [7, 7, 4]
    assert len(seen) == 7 + 7 + 9  # the nine less four are cut off at the edge


def test_neighbouring_tiles_are_cross_faded_linearly() -> None:
    calls = iter((0.0, 1.0))
    got = tiled_decode(
        lambda z: torch.full((1, 1, z.shape[2] * 2, z.shape[3] * 2), next(calls)),
        torch.zeros(1, 1, 4, 12), tile=(5, 8), overlap=4, scale=2,
    )  # fmt: skip
    fade = (torch.arange(8) + 1) / 9
    expected = torch.cat([torch.zeros(8), fade, torch.ones(8)]).expand(1, 1, 8, 24)
    assert torch.allclose(got, expected)


def test_tiling_a_decoder_with_global_norms_is_not_exact() -> None:
    """What the yardstick is for: the engine must do better than this."""
    module = PlainKLDecoder.from_weights(random_sd_weights(**SMALL))
    latent = _latent(1, 4, 24, 24)
    tiled = three_pass_decode(module.decode, latent, tile=(16, 16), overlap=4, scale=4)
    difference = (tiled - module.decode(latent)).abs()
    assert tiled.shape == (1, 3, 96, 96)
    assert 1e-3 < difference.mean().item() < 0.5


@pytest.mark.parametrize("overlap", [-1, 8, 9])
def test_overlap_without_a_step_is_refused(overlap: int) -> None:
    with pytest.raises(ValueError, match=f"overlap of {overlap}"):
        tiled_decode(_nearest, _latent(1, 4, 16, 16), tile=(16, 8), overlap=overlap, scale=8)
