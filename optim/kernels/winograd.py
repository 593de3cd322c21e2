"""3x3 convolution by Winograd's minimal filtering F(4x4, 3x3): 36 matrix products in place of 144 taps per 4x4 outputs.

Exact up to rounding in float32 (no worse than a direct convolution's own); 16-bit dtypes would round the transformed
values and are refused. Needs channels_last, where a pixel's channels lie together and a transform sums long rows.
Source: Lavin & Gray 2016, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..workers import Task, run_tasks
from .scratch import carve
from .winograd_axes import EDGE as EDGE  # others ask here for them
from .winograd_axes import TAPS as TAPS
from .winograd_axes import input_axis, output_axis, transform_taps

BLOCK_BYTES, MIN_SQUARES, MAX_SQUARES = 8 << 20, 128, 512
"""A block holds as many squares as this many bytes of transformed input and products: few enough to stay in a CPU's
caches, but never so few that the products get slow."""


def filter_elements(channels: int, out_channels: int) -> int:
    """float32 elements of a transformed filter."""
    return TAPS * TAPS * channels * out_channels


def transform_filter(weight: Tensor, out: Tensor, workers: int) -> Tensor:
    """[K, C, 3, 3] float32 -> [36, K, C]: G w G^T, into flat `out` of `filter_elements`."""
    k, c = weight.shape[:2]
    target = out[: filter_elements(c, k)].view(TAPS * TAPS, k * c)
    transform_taps(weight.reshape(k * c, 9), target, workers)
    return target.view(TAPS * TAPS, k, c)


def block_shape(channels: int, out_channels: int, height: int, width: int, workers: int) -> tuple[int, int]:
    """(rows, columns) of squares per block for an output of this size; small outputs have a block for each worker."""
    per_square = 4 * TAPS * TAPS * (channels + out_channels)
    each = -(-(height // EDGE) * (width // EDGE) // workers)
    most = max(1, min(MAX_SQUARES, max(MIN_SQUARES, BLOCK_BYTES // per_square), each))
    across = min(width // EDGE, most)
    return max(1, min(height // EDGE, most // across)), across


def _sizes(down: int, across: int, c: int, k: int) -> tuple[tuple[int, ...], ...]:
    """Scratch of one block: input with rows transformed, temporaries, input, products, output with rows transformed."""
    wide = EDGE * across + 2
    rows = (TAPS, down, wide, c)
    return (
        rows,
        (2, down, wide * c),
        (TAPS, TAPS, down, across, c),
        (TAPS, TAPS, down, across, k),
        (EDGE, TAPS, down, across, k),
        (4, down * TAPS * across * max(c, k)),
    )


def scratch_elements(channels: int, out_channels: int, height: int, width: int, workers: int) -> int:
    """float32 elements of scratch for one block per worker."""
    return workers * _block_elements(channels, out_channels, height, width, workers)


def _block_elements(channels: int, out_channels: int, height: int, width: int, workers: int) -> int:
    return sum(
        math.prod(size)
        for size in _sizes(*block_shape(channels, out_channels, height, width, workers), channels, out_channels)
    )


def convolve(x: Tensor, filters: Tensor, bias: Tensor | None, scratch: Tensor, out: Tensor, workers: int) -> Tensor:
    """Valid convolution of x [B, C, h + 2, w + 2] with transformed filters [36, K, C] into out [B, K, h, w].

    Both are channels_last; `scratch` is flat float32 of `scratch_elements`. h and w are at least 4.
    """
    b, c, hp, wp = x.shape
    h, w, k = hp - 2, wp - 2, filters.shape[1]
    down, across = block_shape(c, k, h, w, workers)
    each = _block_elements(c, k, h, w, workers)

    def block(image: int, top: int, n_rows: int, left: int, n_cols: int) -> Task:
        window = x[image, :, top : top + n_rows + 2, left : left + n_cols + 2].permute(1, 2, 0)
        target = out[image, :, top : top + n_rows, left : left + n_cols].permute(1, 2, 0)
        return lambda i: _block(window, filters, bias, scratch[i * each : (i + 1) * each], target)

    (rows, last_row), (cols, last_col) = _blocks(h, EDGE * down), _blocks(w, EDGE * across)
    # squares that slid back write over their neighbours' outputs, so they wait until those are done
    for some_rows in (rows, last_row):
        for some_cols in (cols, last_col):
            tasks = [block(image, *row, *col) for image in range(b) for row in some_rows for col in some_cols]
            run_tasks(tasks, workers)
    return out


def _blocks(extent: int, block: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(start, length) of the blocks along an axis, lengths multiples of EDGE, and of a last square that slid back."""
    whole = extent - extent % EDGE
    spans = [(start, min(block, whole - start)) for start in range(0, whole, block)]
    return spans, [(extent - EDGE, EDGE)] if extent % EDGE else []


def _block(x: Tensor, filters: Tensor, bias: Tensor | None, scratch: Tensor, out: Tensor) -> None:
    """One block: x [4 r + 2, 4 s + 2, C] -> out [4 r, 4 s, K]."""
    down, across, c, k = out.shape[0] // EDGE, out.shape[1] // EDGE, x.shape[2], out.shape[2]
    r, t, v, m, s, u = carve(scratch, _sizes(down, across, c, k))
    h, w = EDGE * down, EDGE * across
    input_axis([x[i : i + h : EDGE] for i in range(TAPS)], list(r), [a.view(down, w + 2, c) for a in t])
    n = TAPS * down * across * c
    temporaries = [a[:n].view(TAPS, down, across, c) for a in u[:2]]
    input_axis([r[:, :, j : j + w : EDGE] for j in range(TAPS)], [v[:, j] for j in range(TAPS)], temporaries)
    flat_v, flat_m = v.view(TAPS * TAPS, -1, c), m.view(TAPS * TAPS, -1, k)
    for i in range(TAPS * TAPS):
        torch.mm(flat_v[i], filters[i].t(), out=flat_m[i])
    n = TAPS * down * across * k
    output_axis(list(m), list(s), [a[:n].view(TAPS, down, across, k) for a in u])
    n = down * across * k
    for i in range(EDGE):
        row = out[i::EDGE]
        last = [row[:, j::EDGE] for j in range(EDGE)]
        output_axis([s[i, j] for j in range(TAPS)], last, [a[:n].view(down, across, k) for a in u])
    if bias is not None:
        out.add_(bias)
