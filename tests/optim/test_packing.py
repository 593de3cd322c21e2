"""Weights as kernels want them: what must be converted is, once, and the rest is not copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from halo_vae.optim.packing import DTYPES, PackedWeights, dtype_name, fold_nearest
from halo_vae.optim.program import Conv, Linear
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.optim.helpers import Recorder, latent

CPU = torch.device("cpu")
LINEAR = Linear(weight="l", bias="c")
OP = Conv(
    name="op", inputs=(0,), output=1, weight="w", bias="b", in_channels=6, out_channels=5, kernel=(1, 3, 3), upsample=2
)


def packed_of(dtype: torch.dtype = torch.float32) -> tuple[PackedWeights, dict[str, Tensor]]:
    tensors = {
        "w": latent(5, 6, 3, 3, seed=1).to(dtype),
        "b": latent(5, seed=2).to(dtype),
        "l": latent(4, 6, 1, 1, seed=3).to(dtype),
        "c": latent(4, seed=4).to(dtype),
    }
    return PackedWeights(MappingWeights(tensors)), tensors


def how(dtype: torch.dtype, observer: Recorder, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "device": CPU, "keep": True, "observer": observer} | more


def test_dtype_names() -> None:
    assert all(dtype_name(dtype) == name for name, dtype in DTYPES.items())


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (5, 3)])
def test_folding_is_upsampling_and_convolving(size: tuple[int, int]) -> None:
    x, w = latent(2, 6, *size), latent(5, 6, 3, 3, seed=1)
    up = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    expected = functional.conv2d(up, w, padding=1)
    folded = functional.conv2d(functional.pad(x, (1, 1, 1, 1)), fold_nearest(w))
    h, _ = size
    for i in range(2):
        for j in range(2):
            phase = folded[:, 5 * (2 * i + j) : 5 * (2 * i + j + 1), i : i + h, j : j + size[1]]
            assert torch.allclose(phase, expected[:, :, i::2, j::2], atol=1e-5)
    assert fold_nearest(w.half()).dtype == torch.float16


def test_sixteen_bit_weights_are_summed_before_they_are_rounded() -> None:
    packed, tensors = packed_of(torch.float32)
    weight, _ = packed.conv(OP, fold=True, layout="contiguous", **how(torch.bfloat16, Recorder()))
    assert torch.equal(weight, fold_nearest(tensors["w"]).bfloat16())


def test_a_weight_that_fits_is_not_copied_or_counted() -> None:
    packed, tensors = packed_of()
    heard = Recorder()
    weight, bias = packed.conv(OP, fold=False, layout="channels_last", **how(torch.float32, heard))
    matrix, _ = packed.linear(LINEAR, **how(torch.float32, heard))
    assert weight.data_ptr() == tensors["w"].data_ptr()
    assert bias is not None
    assert bias.data_ptr() == tensors["b"].data_ptr()
    assert matrix.data_ptr() == tensors["l"].data_ptr()
    assert matrix.shape == (4, 6)
    assert (packed.nbytes, heard.lookups, heard.converted_bytes) == (0, [], 0)


@pytest.mark.parametrize(("fold", "dtype"), [(True, torch.float32), (False, torch.bfloat16), (True, torch.float16)])
def test_a_converted_weight_is_kept(fold: bool, dtype: torch.dtype) -> None:
    packed, _ = packed_of()
    heard = Recorder()
    first, bias = packed.conv(OP, fold=fold, layout="contiguous", **how(dtype, heard))
    again, _ = packed.conv(OP, fold=fold, layout="contiguous", **how(dtype, heard))
    assert again.data_ptr() == first.data_ptr()
    assert heard.lookups == [("packed", False), ("packed", True)]
    assert packed.nbytes == heard.converted_bytes == first.numel() * first.element_size()
    assert first.dtype == dtype
    assert bias is not None
    assert bias.shape == ((20,) if fold else (5,))
    packed.clear()
    assert packed.nbytes == 0
    packed.conv(OP, fold=fold, layout="contiguous", **how(dtype, heard))
    assert heard.lookups[-1] == ("packed", False)


def test_forms_and_dtypes_are_kept_apart() -> None:
    packed, _ = packed_of()
    sizes = set()
    for fold in (True, False):
        for dtype in (torch.bfloat16, torch.float16):
            weight, _ = packed.conv(OP, fold=fold, layout="contiguous", **how(dtype, Recorder()))
            sizes.add((tuple(weight.shape), weight.dtype))
    assert len(sizes) == 4


def test_nothing_is_kept_where_caching_is_off() -> None:
    packed, _ = packed_of()
    heard = Recorder()
    for _ in range(2):
        packed.conv(OP, fold=True, layout="contiguous", **how(torch.float32, heard, keep=False))
    assert heard.lookups == [("packed", False)] * 2
    assert packed.nbytes == 0
    packed.conv(OP, fold=True, layout="contiguous", **how(torch.float32, heard))
    packed.conv(OP, fold=True, layout="contiguous", **how(torch.float32, heard, keep=False))
    assert heard.lookups[-1] == ("packed", False)  # nor used


def test_kept_weights_are_ordinary_tensors_even_if_made_in_inference_mode() -> None:
    packed, _ = packed_of()
    with torch.inference_mode():
        weight, _ = packed.conv(OP, fold=True, layout="contiguous", **how(torch.float32, Recorder()))
    assert not weight.is_inference()
    assert not weight.requires_grad


def test_a_missing_bias_stays_missing() -> None:
    packed, _ = packed_of()
    assert packed.vector(None, torch.float32, CPU) is None
