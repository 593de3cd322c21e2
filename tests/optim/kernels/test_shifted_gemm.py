"""Shifted matrix products against float64 convolutions written down plainly."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import Tensor

from halo_vae.optim.kernels import shifted_gemm
from halo_vae.optim.packing import fold_nearest
from halo_vae.tests.optim.helpers import max_diff

SHAPES = [(1, 3, 5, 1, 1), (2, 4, 3, 7, 9), (1, 33, 17, 4, 31), (3, 16, 16, 12, 5), (1, 1, 1, 6, 6), (1, 8, 1, 3, 2)]
"""(B, C, K, h, w)."""
ERRORS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
"""Largest error of values of size 1: the roundings of the dtype's products, which are added up in float32."""
FOLDED = 1e-6
"""The same where taps were added up before: in float32."""


def in_layout(x: Tensor, channels_last: bool) -> Tensor:
    """Dense with the channels inside or outside, whatever the sizes."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if channels_last else x.contiguous()


def shifted(x: Tensor, weights: list[Tensor], bias: Tensor | None, *, fold: bool, channels_last: bool) -> Tensor:
    """The kernel in memory full of NaN; `weights` has an entry for each frame of the kernel."""
    k, c = weights[0].shape[:2]
    h, w, kt, dtype = x.shape[2] - 2, x.shape[3] - 2, len(weights), x.dtype
    filters = []
    for weight in weights:
        flat = torch.full((shifted_gemm.filter_elements(c, k, fold=fold),), torch.nan, dtype=dtype)
        kernel = fold_nearest(weight) if fold else weight
        filters.append(shifted_gemm.transform_filter(kernel, flat, fold=fold, channels_last=channels_last))
    scratch = torch.full((shifted_gemm.scratch_bytes(k, h, w, dtype.itemsize),), 255, dtype=torch.uint8)
    grow = 2 if fold else 1
    out = in_layout(torch.full((len(x) - kt + 1, k, grow * h, grow * w), torch.nan, dtype=dtype), channels_last)
    done = shifted_gemm.convolve(in_layout(x, channels_last), filters, bias, scratch, out, channels_last=channels_last)
    assert done is out
    return done


def plain(x: Tensor, weights: list[Tensor], bias: Tensor | None, *, fold: bool) -> Tensor:
    x = x.double()
    if fold:
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)[:, :, 1:-1, 1:-1]
    n = len(x) - len(weights) + 1
    y = sum(F.conv2d(x[j : j + n], w.double()) for j, w in enumerate(weights))
    assert isinstance(y, Tensor)
    return y if bias is None else y + bias.double()[:, None, None]


def random_case(
    b: int, c: int, k: int, h: int, w: int, kt: int, dtype: torch.dtype
) -> tuple[Tensor, list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(b + 10 * c + 100 * k + h)
    x = torch.randn((b + kt - 1, c, h + 2, w + 2), generator=g).to(dtype)
    weights = [(torch.randn((k, c, 3, 3), generator=g) / (9 * c * kt) ** 0.5).to(dtype) for _ in range(kt)]
    return x, weights, torch.randn(k, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("kt", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_shifted_products_are_the_convolution(
    shape: tuple[int, int, int, int, int], kt: int, fold: bool, channels_last: bool, dtype: torch.dtype
) -> None:
    x, weights, bias = random_case(*shape, kt, dtype)
    for given in (bias, None):
        y = shifted(x, weights, given, fold=fold, channels_last=channels_last)
        expected = plain(x, weights, given, fold=fold)
        assert y.dtype == dtype
        error = max(ERRORS[dtype], FOLDED if fold else 0.0)
        assert max_diff(y.double(), expected) <= error * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_bands_of_rows_change_nothing(
    rows: int, fold: bool, channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weights, bias = random_case(2, 6, 5, 7, 4, 1, torch.float64)
    monkeypatch.setattr(shifted_gemm, "BAND_BYTES", rows * 4 * 5 * 6)
    assert shifted_gemm.band_rows(5, 7, 4) == rows
    y = shifted(x, weights, bias, fold=fold, channels_last=channels_last)
    assert max_diff(y, plain(x, weights, bias, fold=fold)) < (FOLDED if fold else 1e-12)
    bands = -(-7 // rows)
    assert shifted_gemm.products(7, 4, 5, fold=fold) == (16 if fold else 9) * (7 * 6 - 2 * bands)


def test_narrow_sums_are_kept_wide() -> None:
    """Nine equal products: added up in bfloat16, 1 + 1/512 nine times over would lose every fraction but the first."""
    x = torch.full((1, 1, 3, 3), 1.0, dtype=torch.bfloat16)
    weight = torch.full((1, 1, 3, 3), 2.0**-9, dtype=torch.bfloat16)
    weight[0, 0, 0, 0] = 1.0
    y = shifted(x, [weight], None, fold=False, channels_last=True)
    assert float(y) == float(torch.tensor(1 + 8 * 2.0**-9).bfloat16()) > 1.0
