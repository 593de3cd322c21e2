"""3x3 convolution by Winograd's minimal filtering F(4x4, 3x3): 36 matrix products in place of 144 taps per 4x4 outputs.

Exact up to rounding in float32 (no worse than a direct convolution's own); 16-bit dtypes would round the transformed
values and are refused. Needs channels_last, where a pixel's channels lie together and a transform sums long rows.
Source: Lavin & Gray 2016, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308.
"""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

from ..workers import Task, run_tasks
from .scratch import carve
from .winograd_axes import EDGE as EDGE  # others ask here for them
from .winograd_axes import TAPS as TAPS
from .winograd_axes import transform_taps
from .winograd_squares import Span, enter, even_part, leave, spans, stage_elements

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
    rows, cols = -(-height // EDGE), -(-width // EDGE)
    most = max(1, min(MAX_SQUARES, max(MIN_SQUARES, BLOCK_BYTES // per_square), -(-rows * cols // workers)))
    across = even_part(cols, most)
    return even_part(rows, max(1, most // across)), across


def _sizes(down: int, across: int, c: int, k: int) -> tuple[tuple[int, ...], ...]:
    """Scratch of one block: transformed input, products, and what the transforms use."""
    n = down * across
    return (TAPS * TAPS, n, c), (TAPS * TAPS, n, k), (stage_elements(c, k, down, across),)


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

    def block(image: int, rows: Span, cols: Span) -> Task:
        def run(worker: int) -> None:
            sizes = _sizes(rows.n_squares, cols.n_squares, c, k)
            v, m, spare = carve(scratch[worker * each : (worker + 1) * each], sizes)
            enter(x[image], rows, cols, v, spare)
            for i in range(TAPS * TAPS):
                torch.mm(v[i], filters[i].t(), out=m[i])
            leave(m, rows, cols, bias, spare, out[image], accumulate=False)

        return run

    run_tasks([block(i, *sides) for i in range(b) for sides in product(spans(h, down), spans(w, across))], workers)
    return out
