"""3x3 convolution as nine accumulated matrix products of shifted rows, without an im2col buffer.

A staged tile [C, h + 2, w + 2] is padded already. Seen as one long row of (h + 2)(w + 2) pixels, the pixel under tap
(i, j) of any output lies i (w + 2) + j further on: each tap is one matrix product of a slice of that row, and the nine
add up. Results that wrap around a row's end fall on two columns per row that nobody reads. Either layout is natural:
channels_last multiplies [pixels, C] by [C, K], contiguous [K, C] by [C, pixels].

After nearest-2x upsampling the kernel is folded into four phases of four taps each (`fold_nearest`), and each phase is
written to its own rows and columns of the result.

Sums are kept in float32. A 16-bit product of one tap is rounded to its dtype before it is added, because the
framework's products give back what they were given; float32 products are added without rounding in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .scratch import carve

BAND_BYTES = 8 << 20
"""Bytes of the sums of one band of rows, which every tap reads and writes: they stay in a CPU's caches or nearly so."""


def filter_elements(channels: int, out_channels: int, *, fold: bool) -> int:
    """Elements of a laid-out filter; `out_channels` before folding."""
    return (16 if fold else 9) * channels * out_channels


def transform_filter(weight: Tensor, out: Tensor, *, fold: bool, channels_last: bool) -> Tensor:
    """[K, C, 3, 3], or [4 K, C, 2, 2] folded, as one matrix per phase and tap, in flat `out`.

    [phases, taps, C, K] for channels_last, else [phases, taps, K, C].
    """
    phases, edge = (4, 2) if fold else (1, 3)
    k, c = weight.shape[0] // phases, weight.shape[1]
    parts = weight.view(phases, k, c, edge, edge)
    order, shape = ((0, 3, 4, 2, 1), (c, k)) if channels_last else ((0, 3, 4, 1, 2), (k, c))
    target = out[: weight.numel()].view(phases, edge, edge, *shape).copy_(parts.permute(*order))
    return target.view(phases, edge * edge, *shape)


def band_rows(out_channels: int, height: int, width: int) -> int:
    """Rows of outputs whose sums are added up at a time."""
    return max(1, min(height, BAND_BYTES // (4 * out_channels * (width + 2))))


def scratch_bytes(out_channels: int, height: int, width: int, itemsize: int) -> int:
    """Bytes of sums, and of one product where it is narrower than they are."""
    elements = band_rows(out_channels, height, width) * (width + 2) * out_channels
    return elements * (max(itemsize, 4) + (itemsize if itemsize < 4 else 0))


def products(height: int, width: int, out_channels: int, *, fold: bool) -> int:
    """Pixels multiplied for one picture's tile, over all taps."""
    bands = -(-height // band_rows(out_channels, height, width))
    return (16 if fold else 9) * (height * (width + 2) - 2 * bands)


def convolve(
    x: Tensor, filters: Sequence[Tensor], bias: Tensor | None, scratch: Tensor, out: Tensor, *, channels_last: bool
) -> Tensor:
    """Valid convolution of x [B, C, h + 2, w + 2] into out [B, K, h, w], or [B, K, 2 h, 2 w] by folded filters.

    x and out are dense and of one layout, that of `filters`; `bias` is [K]; `scratch` is flat bytes of
    `scratch_bytes`. `filters` has one entry for pictures; with kt of them x holds the kt - 1 frames before as well,
    and frame i of `out` is the sum of `filters[j]` over frames i + j.
    """
    _, c, hp, wp = x.shape
    k, h, w = out.shape[1], hp - 2, wp - 2
    bands = _Bands(x, filters, bias, scratch, h, w, channels_last=channels_last)
    step = band_rows(k, h, w)
    flat = [p.permute(1, 2, 0).view(hp * wp, c) if channels_last else p.view(c, hp * wp) for p in x]
    for image, target in enumerate(out):
        for top in range(0, h, step):
            bands.add_up(flat[image : image + len(filters)], target, top, min(step, h - top))
    return out


class _Bands:
    """Sums of bands of rows, in one piece of memory."""

    def __init__(
        self, x: Tensor, filters: Sequence[Tensor], bias: Tensor | None, scratch: Tensor, h: int, w: int, *,
        channels_last: bool,
    ) -> None:  # fmt: skip
        self.filters, self.last, self.width, self.wide = filters, channels_last, w, w + 2
        self.k = filters[0].shape[3 if channels_last else 2]
        self.edge = math.isqrt(filters[0].shape[1])
        self.bias = bias if bias is None or channels_last else bias[:, None]
        size = band_rows(self.k, h, w) * self.wide * self.k
        wide_dtype = x.dtype if x.dtype.itemsize >= 4 else torch.float32
        (self.sums,) = carve(scratch[: size * wide_dtype.itemsize].view(wide_dtype), ((size,),))
        self.product = scratch[size * wide_dtype.itemsize :].view(x.dtype)[:size] if wide_dtype != x.dtype else None

    def add_up(self, frames: Sequence[Tensor], out: Tensor, top: int, rows: int) -> None:
        """Output rows [top, top + rows) of one picture, all phases; `frames` are what the filters' taps lie over."""
        pixels, phases = rows * self.wide, len(self.filters[0])
        used, grow = pixels - 2, 2 if phases == 4 else 1
        sums = self._view(self.sums, pixels)
        for phase in range(phases):
            i, j = divmod(phase, 2)
            for k, (flat, taps) in enumerate(zip(frames, self.filters, strict=True)):
                for tap, matrix in enumerate(taps[phase]):
                    row, col = divmod(tap, self.edge)
                    start = (top + i + row) * self.wide + j + col
                    first = k == tap == 0
                    self._add(self._slice(flat, start, used), matrix, self._slice(sums, 0, used), first=first)
            target = out[:, grow * top + i : grow * (top + rows) : grow, j::grow]
            target.copy_(self._as_map(sums, rows))

    def _add(self, pixels: Tensor, matrix: Tensor, sums: Tensor, *, first: bool) -> None:
        left, right = (pixels, matrix) if self.last else (matrix, pixels)
        if self.product is not None:
            product = torch.mm(left, right, out=self._view(self.product, sums.shape[0 if self.last else 1]))
            if not first:
                sums.add_(product)
                return
            sums.copy_(product)
            if self.bias is not None:
                sums.add_(self.bias)
        elif not first:
            torch.addmm(sums, left, right, out=sums)
        elif self.bias is not None:
            torch.addmm(self.bias, left, right, out=sums)
        else:
            torch.mm(left, right, out=sums)

    def _view(self, flat: Tensor, pixels: int) -> Tensor:
        """The front of flat memory as a matrix of `pixels`."""
        part = flat[: pixels * self.k]
        return part.view(pixels, self.k) if self.last else part.view(self.k, pixels)

    def _slice(self, matrix: Tensor, start: int, n: int) -> Tensor:
        return matrix[start : start + n] if self.last else matrix[:, start : start + n]

    def _as_map(self, sums: Tensor, rows: int) -> Tensor:
        """[K, rows, w] view of the columns that are outputs."""
        if self.last:
            return sums.view(rows, self.wide, self.k)[:, : self.width].permute(2, 0, 1)
        return sums.view(self.k, rows, self.wide)[:, :, : self.width]
