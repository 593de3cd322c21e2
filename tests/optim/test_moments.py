"""Statistics out of tiles equal those of the whole map, also where sums of squares would lose every digit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.optim.moments import Moments, tile_moments
from halo_vae.optim.program import Norm
from halo_vae.tests.optim.helpers import latent

CPU = torch.device("cpu")
NORM = Norm(weight="w", bias="b", groups=4, eps=1e-6)
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


def truth(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance [B, groups] in float64."""
    flat = x.double().reshape(x.shape[0], groups, -1)
    return flat.mean(-1), flat.var(-1, unbiased=False)


def merged(x: Tensor, groups: int, rows: list[int], cols: list[int], per_call: int = 1) -> Moments:
    moments = Moments(x.shape[0], groups, CPU)
    for n in range(0, x.shape[0], per_call):
        for (top, bottom), (left, right) in itertools.product(itertools.pairwise(rows), itertools.pairwise(cols)):
            part = x[n : n + per_call, :, top:bottom, left:right]
            mean, variance = tile_moments(part, groups)
            moments.merge(n, n + per_call, mean, variance, part[0].numel() // groups)
    return moments


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (1, 8, 1, 7), (2, 8, 9, 1), (3, 32, 6, 5), (2, 4, 33, 17)])
def test_moments_of_one_tile(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> None:
    x = (latent(*shape) * 3 + 5).to(dtype).contiguous(memory_format=LAYOUTS[layout])
    mean, variance = tile_moments(x, 4)
    expected_mean, expected_variance = truth(x, 4)
    assert mean.shape == variance.shape == (shape[0], 4)
    assert torch.allclose(mean.double(), expected_mean, rtol=1e-5, atol=1e-5)
    assert torch.allclose(variance.double(), expected_variance, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("offset", [0.0, 100.0, 3000.0])
def test_a_large_mean_does_not_eat_the_variance(offset: float, layout: str) -> None:
    """In float32, the mean of squares less the square of the mean would be zero or negative at 3000."""
    x = (latent(1, 8, 64, 48) * 0.5 + offset).contiguous(memory_format=LAYOUTS[layout])
    _, variance = tile_moments(x, 4)
    assert torch.allclose(variance.double(), truth(x, 4)[1], rtol=2e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("rows", "cols", "per_call"),
    [([0, 21], [0, 10], 2), ([0, 5, 10, 21], [0, 10], 1), ([0, 1, 2, 21], [0, 3, 10], 1), ([0, 7, 21], [0, 9, 10], 2)],
)
def test_merged_tiles_equal_the_whole(rows: list[int], cols: list[int], per_call: int, layout: str) -> None:
    x = latent(2, 8, 21, 10)
    x[:, :, 5:] += 40.0  # tiles differ in mean, which is most of the variance
    x[1] *= 0.01
    x = x.contiguous(memory_format=LAYOUTS[layout])
    moments = merged(x, 4, rows, cols, per_call)
    mean, variance = truth(x, 4)
    assert torch.allclose(moments.mean, mean, rtol=1e-6, atol=1e-6)
    assert torch.allclose(moments.m2 / moments.count, variance, rtol=1e-5)
    assert torch.equal(moments.count, torch.full((2, 1), 21 * 10 * 2, dtype=torch.float64))


def test_the_order_of_tiles_does_not_matter() -> None:
    x = latent(1, 8, 12, 6) + torch.arange(12.0)[:, None]
    down = merged(x, 4, [0, 3, 8, 12], [0, 6])
    across = merged(x.flip(2), 4, [0, 4, 9, 12], [0, 6])
    assert torch.allclose(down.mean, across.mean)
    assert torch.allclose(down.m2, across.m2)


def test_affine_is_group_norm() -> None:
    x, weight, bias = latent(2, 8, 9, 7) * 2 + 1, latent(8, seed=5), latent(8, seed=6)
    scale, shift = merged(x, 4, [0, 4, 9], [0, 7]).affine(NORM, weight, bias)
    assert scale.shape == shift.shape == (2, 8, 1, 1)
    assert scale.dtype == shift.dtype == torch.float32
    expected = torch.nn.functional.group_norm(x, 4, weight, bias, NORM.eps)
    assert torch.allclose(x * scale + shift, expected, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_flat_map_has_no_variance(dtype: torch.dtype, layout: str) -> None:
    x = torch.full((1, 8, 6, 5), 2.5).to(dtype).contiguous(memory_format=LAYOUTS[layout])
    mean, variance = tile_moments(x, 4)
    assert torch.allclose(mean.double(), torch.full((1, 4), 2.5, dtype=torch.float64), rtol=1e-6)
    assert float(variance.abs().max()) < 1e-10
    scale, shift = merged(x, 4, [0, 6], [0, 5]).affine(NORM, torch.ones(8), torch.zeros(8))
    assert float((x.float() * scale + shift).abs().max()) < 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_value_is_seen(dtype: torch.dtype, bad: float, layout: str) -> None:
    x = latent(2, 8, 9, 7).to(dtype).contiguous(memory_format=LAYOUTS[layout])
    assert bool(merged(x, 4, [0, 4, 9], [0, 3, 7]).is_finite())
    x[1, 6, 8, 6] = bad
    assert not bool(merged(x, 4, [0, 4, 9], [0, 3, 7]).is_finite())


def test_a_view_of_some_channels_is_measured_as_such() -> None:
    """Values share homes, so tiles of them are strided."""
    home = latent(1, 16, 9, 7).contiguous(memory_format=torch.channels_last)
    part = home[:, 8:]
    mean, variance = tile_moments(part, 4)
    expected: Any = truth(part, 4)
    assert torch.allclose(mean.double(), expected[0], atol=1e-6)
    assert torch.allclose(variance.double(), expected[1], rtol=1e-5)
