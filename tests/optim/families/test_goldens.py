"""Every picture golden: recognised, lowered from shapes alone, and decoded as the reference implementation does."""

from __future__ import annotations

import pytest
import torch

from halo_vae.optim.families import detect, lower
from halo_vae.optim.kernels.eager import run_eager
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.goldens import GOLDEN_FAMILY, IMAGE_GOLDENS, TOLERANCE, golden


@pytest.mark.parametrize("name", IMAGE_GOLDENS)
def test_golden_is_decoded_as_by_the_reference(name: str) -> None:
    g = golden(name)
    weights = MappingWeights(g.weights)
    program = lower(weights.specs)
    assert detect(weights.specs) == program.family == GOLDEN_FAMILY[name]
    assert program.latent_channels == int(g.metadata["latent_channels"])
    for case, latent in g.latents.items():
        expected = g.expected[case]
        picture = run_eager(program, weights, latent)
        assert picture.shape == expected.shape, case
        assert (picture - expected).abs().max().item() <= TOLERANCE, case
        assert picture.shape[2] == latent.shape[2] * program.scale[1]


@pytest.mark.parametrize("name", IMAGE_GOLDENS)
def test_golden_uses_every_decoder_tensor_once_and_no_other(name: str) -> None:
    g = golden(name)
    source = MappingWeights(g.weights)

    class Recorder:
        specs, content_hash = source.specs, source.content_hash

        def __init__(self) -> None:
            self.asked: list[str] = []

        def get(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            self.asked.append(name)
            return source.get(name, dtype, device)

    recorder = Recorder()
    run_eager(lower(source.specs), recorder, g.latents["a"])
    assert sorted(recorder.asked) == sorted(g.weights)


@pytest.mark.parametrize("name", IMAGE_GOLDENS)
@pytest.mark.parametrize("prefix", ["first_stage_model.", "vae."])
def test_golden_inside_a_full_checkpoint_is_found_under_its_prefix(name: str, prefix: str) -> None:
    g = golden(name)
    other = {
        "model.diffusion_model.input_blocks.0.0.weight": torch.zeros(8, 4, 3, 3),
        "model.diffusion_model.middle.decoder.weight": torch.zeros(2, 2, 3, 3, 3),
        "cond_stage_model.decoder.0.weight": torch.zeros(3, 3),
        "model_ema.decay": torch.zeros(()),
        f"{prefix}encoder.conv_in.weight": torch.zeros(8, 3, 3, 3),
        f"{prefix}quant_conv.weight": torch.zeros(8, 8, 1, 1),
    }
    weights = MappingWeights({**other, **{prefix + key: tensor for key, tensor in g.weights.items()}})
    program = lower(weights.specs)
    plain = MappingWeights(g.weights)
    assert all(op.name.startswith(prefix) for op in program.ops)
    picture = run_eager(program, weights, g.latents["a"])
    assert torch.equal(picture, run_eager(lower(plain.specs), plain, g.latents["a"]))
