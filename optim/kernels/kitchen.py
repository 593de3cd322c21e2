"""Convolution, norm and padding by the optional package comfy-kitchen, whose kernels run on AMD's RDNA 3 and later.

Pictures are clips of one frame there, [B, C, 1, H, W]. Its calls fall back to plain torch without a word where an
argument does not suit them, so everything they look at is looked at here first. Its convolution adds up in float16.
Statistics are always given: a tile is never normalised by its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..program import Activation, Norm
from ..tiling import Tile
from .backends import KITCHEN_PACKAGE, MAX_ELEMENTS
from .packages import load

ALIGNMENT = 16
"""Bytes: kernels load so much at a time."""


def call_refusals(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> list[str]:
    """Why the package would not run its kernel on these tensors [B, C, T, H, W], or would copy them first."""
    why = []
    if {t.dtype for t in (x, weight, bias, residual, out) if t is not None} != {x.dtype}:
        why.append("the tensors are of different dtypes")
    if any(t.data_ptr() % ALIGNMENT for t in (x, weight, out)):
        why.append(f"memory is not aligned to {ALIGNMENT} bytes")
    if not all(_is_dense(t) for t in (x, weight, out)):  # of a single picture also a window of its rows or frames
        why.append("memory is not dense in channels_last order")
    if max(x.numel(), out.numel()) > MAX_ELEMENTS:
        why.append(f"a tensor has more than {MAX_ELEMENTS} elements")
    if any(t is not None and _share(t, out) for t in (x, weight, bias, residual)):
        why.append("the result would overwrite what is read")
    return why


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> Tensor:
    """Valid convolution of x [B, C, T, H, W] with [K, C, kt, kh, kw], plus a residual, into out; `call_refusals` is
    empty."""
    load(KITCHEN_PACKAGE).fp16_conv3d(x, weight, bias, residual, 1, out)
    return out


def map_statistics(x: Tensor, norm: Norm) -> Tensor:
    """(mean, 1 / deviation) float32 [B, G, 2] of whole maps [B, C, H, W] that lie dense."""
    rows: Tensor = load(KITCHEN_PACKAGE).group_norm_stats3d(x.unsqueeze(2), norm.groups, norm.eps)
    return rows


def stage(
    src: Tensor,
    tile: Tile,
    halo: int,
    norm: tuple[Norm, Tensor, Tensor, Tensor] | None,
    act: Activation,
    out: Tensor,
) -> None:
    """Fill `out` [B, C, h + 2 halo, w + 2 halo] with act(norm(src)) under tile and halo, zero outside the picture.

    `src` [B, C, H, W] holds the tile's pictures; `norm` is (norm, weight, bias, statistics [B, G, 2] of whole maps).
    """
    _, _, height, width = src.shape
    y0, x0 = tile.rows.start - halo, tile.cols.start - halo
    top, bottom = max(0, y0), min(height, tile.rows.stop + halo)
    left, right = max(0, x0), min(width, tile.cols.stop + halo)
    pad = (left - x0, tile.cols.stop + halo - right, top - y0, tile.rows.stop + halo - bottom, 0)
    run = load(KITCHEN_PACKAGE).group_norm_silu_pad3d
    for i in range(src.shape[0]):  # rows of several pictures do not lie one after the other
        window, target = src[i : i + 1, :, top:bottom, left:right].unsqueeze(2), out[i : i + 1].unsqueeze(2)
        if norm is None:
            run(window, None, None, 1, 0.0, pad, False, True, target)
        else:
            of, weight, bias, rows = norm
            run(window, weight, bias, of.groups, of.eps, pad, act == "silu", True, target, rows[i : i + 1])


def can_stage(src: Tensor, out: Tensor) -> bool:
    """True where the package's kernel reads and writes this memory as it is."""
    steps = src.stride(1) == 1 and src.stride(3) == src.shape[1] and src.stride(2) % 8 == 0
    aligned = src.data_ptr() % ALIGNMENT == out.data_ptr() % ALIGNMENT == 0
    return src.dtype == out.dtype and steps and aligned and _is_dense(out.unsqueeze(2))


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last_3d)


def _share(a: Tensor, b: Tensor) -> bool:
    """May the tensors have an element in common?"""
    first, second = _span(a), _span(b)
    return a.device == b.device and first[0] < second[1] and second[0] < first[1]


def _span(x: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the one after the last."""
    extent = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
    return x.data_ptr(), x.data_ptr() + extent * x.element_size()
