"""TAESD of any size, with and without scale, and its Flux.2 form against an independent module."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from halo_vae.optim.errors import WeightsError
from halo_vae.optim.families import detect, lower
from halo_vae.optim.kernels.eager import run_eager
from halo_vae.optim.program import Conv, Pointwise, Rearrange
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.optim.families.layouts import random_weights, specs, taesd

CASES = [
    (4, 64, (3, 3, 3, 1)),  # TAESD, TAESDXL
    (16, 64, (3, 3, 3, 1)),  # TAESD3, TAEF1
    (5, 24, (1, 2)),  # x2
    (3, 8, (2,)),  # no doubling at all
]


@pytest.mark.parametrize(("z", "width", "blocks"), CASES)
@pytest.mark.parametrize("scaled", [True, False])
def test_shapes_give_back_the_hyperparameters_built(z: int, width: int, blocks: Sequence[int], scaled: bool) -> None:
    shapes = specs(taesd(z, width, blocks=blocks, scaled=scaled))
    assert detect(shapes) == "taesd"
    program = lower(shapes)
    assert (program.latent_channels, program.out_channels) == (z, 3)
    assert program.scale[1] == 2 ** (len(blocks) - 1)
    assert isinstance(program.ops[0], Pointwise) == scaled
    convs = [op for op in program.ops if isinstance(op, Conv)]
    assert len(convs) == 1 + 3 * sum(blocks) + len(blocks) - 1 + 1
    assert [op.upsample for op in convs].count(2) == len(blocks) - 1
    assert (convs[0].act, convs[-1].gain, convs[-1].offset) == ("tanh3", 2.0, -1.0)


def test_decoder_file_of_its_own_is_recognised_and_its_encoder_is_not_mistaken() -> None:
    bare = taesd(4, 8, blocks=(1, 1), scaled=False, scope="")
    program = lower(specs(bare))
    assert (program.family, program.ops[0].name, program.scale) == ("taesd", "1", (1, 2, 2))
    encoder = {"0.weight": (8, 3, 3, 3), "0.bias": (8,), **bare}
    with pytest.raises(WeightsError, match="no known decoder"):
        lower(specs(encoder))


class _Block(nn.Module):
    """relu(conv relu conv relu conv + x), x first raised by its pooled branch."""

    def __init__(self, width: int, pooled: bool) -> None:
        super().__init__()
        convs = [nn.Conv2d(width, width, 3, padding=1) for _ in range(3)]
        self.conv = nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU(), convs[2])
        wide = 4 * width
        self.pool = (
            nn.Sequential(
                nn.Conv2d(width, wide, 1, bias=False), nn.GroupNorm(4, wide), nn.ReLU(),
                nn.Conv2d(wide, width, 1, bias=False),
            )
            if pooled
            else None
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        if self.pool is not None:
            x = x + self.pool(x)
        return torch.relu(self.conv(x) + x)


class _TinyFlux2(nn.Module):
    """Packed latent [B, 4 * z, H, W] -> picture [B, 3, 8 * H, 8 * W] at two doublings after the unpacking."""

    def __init__(self, z: int, width: int) -> None:
        super().__init__()
        up1, up2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.taesd_decoder = nn.Sequential(
            nn.Identity(), nn.Conv2d(z, width, 3, padding=1), nn.ReLU(), _Block(width, True), _Block(width, True),
            nn.Upsample(scale_factor=2), up1, _Block(width, False), nn.Upsample(scale_factor=2), up2,
            _Block(width, False), nn.Conv2d(width, 3, 3, padding=1),
        )  # fmt: skip

    def forward(self, latent: Tensor) -> Tensor:
        z = nn.functional.pixel_shuffle(latent, 2)
        return self.taesd_decoder(torch.tanh(z / 3) * 3) * 2 - 1


def test_flux2_form_equals_an_independent_module() -> None:
    shapes = taesd(6, 12, blocks=(2, 1, 1), pooled=True, scaled=False)
    tensors = random_weights(shapes, seed=3)
    module = _TinyFlux2(6, 12)
    module.load_state_dict(tensors)  # strict: the names and shapes are the module's own
    weights = MappingWeights(tensors)
    program = lower(weights.specs)
    assert (program.latent_channels, program.scale) == (24, (1, 8, 8))
    latent = torch.randn(2, 24, 3, 5, generator=torch.Generator().manual_seed(4)) * 3
    with torch.no_grad():
        expected = module(latent)
    assert expected.std() > 0.1
    assert (run_eager(program, weights, latent) - expected).abs().max().item() <= 1e-5


def test_flux2_at_its_published_size_takes_128_channels() -> None:
    program = lower(specs(taesd(32, 64, pooled=True)))
    assert (program.latent_channels, program.scale) == (128, (1, 16, 16))
    assert [type(op) for op in program.ops[:3]] == [Pointwise, Rearrange, Conv]
    norms = [op.norm for op in program.ops if isinstance(op, Conv) and op.norm is not None]
    assert [(norm.groups, norm.eps) for norm in norms] == [(4, 1e-5)] * 3


def test_packed_latents_without_pooled_branches_follow_the_hint() -> None:
    shapes = specs(taesd(8, 16, blocks=(1, 1)))
    assert lower(shapes, hints={"tae_latent_channels": "32"}).latent_channels == 32
    assert lower(shapes, hints={"tae_latent_channels": "8"}).latent_channels == 8


@pytest.mark.parametrize("pooled", [True, False])
def test_any_missing_tensor_is_named(pooled: bool) -> None:
    shapes = taesd(4, 8, blocks=(2, 2, 1), pooled=pooled)
    for gone in shapes:
        with pytest.raises(WeightsError, match="incomplete") as caught:
            lower(specs({name: shape for name, shape in shapes.items() if name != gone}))
        assert f"'{gone}'" in str(caught.value)


def test_missing_block_is_named() -> None:
    shapes = taesd(4, 8, blocks=(3, 3), pooled=True)
    for gone in ("taesd_decoder.4.", "taesd_decoder.5.", "taesd_decoder.8.", "taesd_decoder.4.pool"):
        with pytest.raises(WeightsError, match=gone.replace(".", r"\.")):
            lower(specs({name: shape for name, shape in shapes.items() if not name.startswith(gone)}))


def test_scale_that_is_not_a_scalar_is_refused() -> None:
    with pytest.raises(WeightsError, match="scalar"):
        lower(specs(taesd(4, 8) | {"vae_scale": (4,)}))
