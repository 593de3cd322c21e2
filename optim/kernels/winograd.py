"""3x3 convolution by Winograd's minimal filtering F(4x4, 3x3): 36 matrix products in place of 144 taps per 4x4 outputs.

Exact up to rounding in float32 (no worse than a direct convolution's own); 16-bit dtypes would round the transformed
values and are refused. Needs channels_last, where a pixel's channels lie together and a transform sums long rows.
Source: Lavin & Gray 2016, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..workers import Task, run_tasks
from .scratch import carve

EDGE = 4
"""Output pixels per square and axis."""
TAPS = EDGE + 2
"""Input pixels per square and axis, and products per axis."""
BLOCK_BYTES, MIN_SQUARES, MAX_SQUARES = 8 << 20, 128, 512
"""A block holds as many squares as this many bytes of transformed input and products: few enough to stay in a CPU's
caches, but never so few that the products get slow."""
FILTER_STEP = 8192
"""Kernels transformed at a time, so that one step's result stays in cache."""

_A, _B = math.sqrt(0.5), math.sqrt(2.0)
"""Interpolation points 0, +-sqrt(1/2), +-sqrt(2), infinity. The usual 0, +-1, +-2 lose five times as many digits
(measured at 512 channels); that points decide the error: Barabasz et al. 2020, arXiv:1803.10986."""
_G = (
    (1.0, 0.0, 0.0),
    (-2 / 3, -2 / 3 * _A, -1 / 3),
    (-2 / 3, 2 / 3 * _A, -1 / 3),
    (1 / 6, 1 / 6 * _B, 1 / 3),
    (1 / 6, -1 / 6 * _B, 1 / 3),
    (0.0, 0.0, 1.0),
)


def filter_elements(channels: int, out_channels: int) -> int:
    """float32 elements of a transformed filter."""
    return TAPS * TAPS * channels * out_channels


def transform_filter(weight: Tensor, out: Tensor, workers: int) -> Tensor:
    """[K, C, 3, 3] float32 -> [36, K, C]: G w G^T, into flat `out` of `filter_elements`."""
    k, c = weight.shape[:2]
    g = torch.tensor(_G, dtype=torch.float64, device=weight.device)
    both = torch.kron(g, g).to(weight.dtype)
    taps, target = weight.reshape(k * c, 9), out[: filter_elements(c, k)].view(TAPS * TAPS, k * c)

    def some(start: int) -> Task:
        stop = start + FILTER_STEP
        return lambda _: torch.mm(both, taps[start:stop].t(), out=target[:, start:stop])

    run_tasks([some(start) for start in range(0, k * c, FILTER_STEP)], workers)
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
    _input_axis([x[i : i + h : EDGE] for i in range(TAPS)], list(r), [a.view(down, w + 2, c) for a in t])
    n = TAPS * down * across * c
    temporaries = [a[:n].view(TAPS, down, across, c) for a in u[:2]]
    _input_axis([r[:, :, j : j + w : EDGE] for j in range(TAPS)], [v[:, j] for j in range(TAPS)], temporaries)
    flat_v, flat_m = v.view(TAPS * TAPS, -1, c), m.view(TAPS * TAPS, -1, k)
    for i in range(TAPS * TAPS):
        torch.mm(flat_v[i], filters[i].t(), out=flat_m[i])
    n = TAPS * down * across * k
    _output_axis(list(m), list(s), [a[:n].view(TAPS, down, across, k) for a in u])
    n = down * across * k
    for i in range(EDGE):
        row = out[i::EDGE]
        last = [row[:, j::EDGE] for j in range(EDGE)]
        _output_axis([s[i, j] for j in range(TAPS)], last, [a[:n].view(down, across, k) for a in u])
    if bias is not None:
        out.add_(bias)


def _input_axis(d: Sequence[Tensor], out: Sequence[Tensor], temporaries: Sequence[Tensor]) -> None:
    """B^T along one axis: six inputs to six outputs."""
    a, b = temporaries
    torch.add(d[4], d[2], alpha=-2.5, out=out[0]).add_(d[0])
    torch.add(d[4], d[2], alpha=-2, out=a)
    torch.add(d[3], d[1], alpha=-2, out=b)
    torch.add(a, b, alpha=_A, out=out[1])
    torch.add(a, b, alpha=-_A, out=out[2])
    torch.add(d[4], d[2], alpha=-0.5, out=a)
    torch.add(d[3], d[1], alpha=-0.5, out=b)
    torch.add(a, b, alpha=_B, out=out[3])
    torch.add(a, b, alpha=-_B, out=out[4])
    torch.add(d[5], d[3], alpha=-2.5, out=out[5]).add_(d[1])


def _output_axis(m: Sequence[Tensor], out: Sequence[Tensor], temporaries: Sequence[Tensor]) -> None:
    """A^T along one axis: six products to four outputs."""
    p, q, r, s = temporaries
    torch.add(m[1], m[2], out=p)
    torch.sub(m[1], m[2], out=q)
    torch.add(m[3], m[4], out=r)
    torch.sub(m[3], m[4], out=s)
    torch.add(m[0], p, out=out[0]).add_(r)
    torch.mul(q, _A, out=out[1]).add_(s, alpha=_B)
    torch.mul(p, 0.5, out=out[2]).add_(r, alpha=2)
    torch.add(m[5], q, alpha=_A**3, out=out[3]).add_(s, alpha=_B**3)
