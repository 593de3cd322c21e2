"""HunyuanImage decoders of other sizes than the published one, whole and damaged."""

from __future__ import annotations

import pytest
import torch

from halo_vae.optim.errors import WeightsError
from halo_vae.optim.families import detect, lower
from halo_vae.optim.kernels.eager import run_eager
from halo_vae.optim.program import Conv
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.optim.families.layouts import hunyuan_image, random_weights, specs

CASES = [
    (64, (1024, 1024, 512, 512, 256, 128), 2, 5),  # as published: x32
    (32, (128, 32, 32), 0, 2),  # shrinking by four, one block a level: no channel is repeated
    (16, (64, 32), 1, 2),  # as many doublings as levels
    (8, (32, 64), 1, 1),  # a level wider than the one before: each channel repeated eight times
]


@pytest.mark.parametrize(("z", "widths", "n_res", "doublings"), CASES)
def test_shapes_give_back_the_hyperparameters_built(
    z: int, widths: tuple[int, ...], n_res: int, doublings: int
) -> None:
    shapes = specs(hunyuan_image(z, widths, n_res=n_res, doublings=doublings))
    assert detect(shapes) == "hunyuan_image"
    program = lower(shapes)
    assert (program.latent_channels, program.out_channels, program.scale[1]) == (z, 3, 2**doublings)
    assert program.working_dtypes == ("float16", "bfloat16", "float32")
    convs = [op for op in program.ops if isinstance(op, Conv)]
    assert (convs[0].inputs, convs[0].residual_repeat) == ((0, 0), widths[0] // z)
    ups = [op for op in convs if op.depth_to_space == 2]
    assert len(ups) == doublings
    for op in ups:
        assert op.inputs[0] == op.inputs[1]
        assert op.residual_repeat * op.in_channels == op.out_channels == 4 * program.values[op.output].channels


def test_small_decoder_runs() -> None:
    weights = MappingWeights(random_weights(hunyuan_image(16, (64, 32), doublings=2)))
    picture = run_eager(lower(weights.specs), weights, torch.ones(1, 16, 2, 3))
    assert picture.shape == (1, 3, 8, 12)
    assert picture.isfinite().all()


def test_any_missing_tensor_is_named() -> None:
    shapes = hunyuan_image(32, (64, 32, 32))
    for gone in shapes:
        with pytest.raises(WeightsError, match="incomplete") as caught:
            lower(specs({name: shape for name, shape in shapes.items() if name != gone}))
        assert f"'{gone}'" in str(caught.value)


def test_latent_channels_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(WeightsError, match=r"decoder\.conv_in\.weight' gives 64 channels, to which 24 cannot be added"):
        lower(specs(hunyuan_image(24, (64, 32))))
