"""Nearest-2x upsampling and a 3x3 convolution as nine matrix products per source pixel.

Along one axis, output 2 y is a x[y - 1] + (b + c) x[y] and output 2 y + 1 is (a + b) x[y] + c x[y + 1]. With
s = a + b + c both are s x[y] plus one correction: a (x[y - 1] - x[y]) or c (x[y + 1] - x[y]). Three products serve
two outputs, and nine serve four in two dimensions, where a folded 2x2 convolution takes sixteen and the written form
thirty-six.
Exact up to rounding; float32 and channels_last only, as in `winograd`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..workers import Task, run_tasks
from .scratch import carve

BLOCK_PIXELS = 1024
"""Source pixels per block, at least one row."""


def filter_elements(channels: int, out_channels: int) -> int:
    """float32 elements of a transformed filter."""
    return 9 * channels * out_channels


def transform_filter(weight: Tensor, out: Tensor, workers: int) -> Tensor:
    """[K, C, 3, 3] float32 -> [9, K, C]: (a, s, c) along both axes, rows first, into flat `out` of `filter_elements`.

    The differences in use run downwards and rightwards only, so `a`, which needs the opposite sign, is negated.
    """
    del workers  # one small product
    k, c = weight.shape[:2]
    m = torch.tensor([[-1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]], dtype=torch.float64, device=weight.device)
    target = out[: filter_elements(c, k)].view(9, k * c)
    torch.mm(torch.kron(m, m).to(weight.dtype), weight.reshape(k * c, 9).t(), out=target)
    return target.view(9, k, c)


def _block_rows(height: int, width: int, workers: int) -> int:
    return max(1, min(-(-height // workers), BLOCK_PIXELS // width))


def _sizes(rows: int, width: int, c: int, k: int) -> tuple[tuple[int, ...], ...]:
    """Scratch of one block: three difference maps and nine products, rows of width + 2 pixels."""
    wide = width + 2
    return ((3, (rows + 2) * wide, c), (3, 3, rows * wide, k), (3, rows * wide, k))


def _block_elements(channels: int, out_channels: int, height: int, width: int, workers: int) -> int:
    sizes = _sizes(_block_rows(height, width, workers), width, channels, out_channels)
    return sum(math.prod(size) for size in sizes)


def scratch_elements(channels: int, out_channels: int, height: int, width: int, workers: int) -> int:
    """float32 elements of scratch for one block per worker."""
    return workers * _block_elements(channels, out_channels, height, width, workers)


def convolve(x: Tensor, filters: Tensor, bias: Tensor | None, scratch: Tensor, out: Tensor, workers: int) -> Tensor:
    """x [B, C, h + 2, w + 2] (one row and column of context) -> out [B, K, 2 h, 2 w], both dense channels_last.

    `filters` [9, K, C] from `transform_filter`, `scratch` flat float32 of `scratch_elements`.
    """
    b, c, hp, wp = x.shape
    h, w = hp - 2, wp - 2
    step = _block_rows(h, w, workers)
    each = _block_elements(c, filters.shape[1], h, w, workers)

    def some(image: int, top: int) -> Task:
        rows = min(step, h - top)
        window = x[image, :, top : top + rows + 2].permute(1, 2, 0).reshape((rows + 2) * wp, c)
        target = out[image, :, 2 * top : 2 * (top + rows)].permute(1, 2, 0)
        return lambda i: _block(window, rows, w, filters, bias, scratch[i * each : (i + 1) * each], target)

    run_tasks([some(image, top) for image in range(b) for top in range(0, h, step)], workers)
    return out


def _block(x: Tensor, rows: int, w: int, filters: Tensor, bias: Tensor | None, scratch: Tensor, out: Tensor) -> None:
    """x [(rows + 2) * (w + 2), C] -> out [2 rows, 2 w, K].

    Maps stay flat: a neighbour below is w + 2 pixels on, and what wraps around a row's end falls on columns not used.
    """
    wide, c, k = w + 2, x.shape[1], out.shape[2]
    d_size, m_size, t_size = _sizes(rows, w, c, k)
    d, m, t = carve(scratch, (d_size, m_size, t_size))
    n = x.shape[0]
    down, right, both = d[0], d[1], d[2]
    torch.sub(x[wide:], x[:-wide], out=down[: n - wide])
    torch.sub(x[1:], x[:-1], out=right[: n - 1])
    torch.sub(right[wide : n - 1], right[: n - 1 - wide], out=both[: n - 1 - wide])
    # pixel (y, x) of the block sits at (y + 1) * wide + x + 1; a difference sits at its upper or left pixel
    used = rows * wide - 2
    for i, row_map in enumerate(((down, both), (x, right), (down, both))):
        for j, column_map in enumerate((row_map[1], row_map[0], row_map[1])):
            start = (0 if i == 0 else 1) * wide + (0 if j == 0 else 1)
            target = m[i, j, :used]
            if i == j == 1 and bias is not None:
                torch.addmm(bias, column_map[start : start + used], filters[4].t(), out=target)
            else:
                torch.mm(column_map[start : start + used], filters[3 * i + j].t(), out=target)
    for j in range(2):
        # columns: the common product and one correction each
        torch.add(m[:, 1, :used], m[:, 2 * j, :used], out=t[:, :used])
        for i in range(2):
            square = out[i::2, j::2]
            common, correction = (_rows_of(t[part], rows, w, wide) for part in (1, 2 * i))
            torch.add(common, correction, out=square)


def _rows_of(flat: Tensor, rows: int, w: int, wide: int) -> Tensor:
    """[rows, w, K] view of the used columns of flat products."""
    return flat[: rows * wide].view(rows, wide, -1)[:, :w]
