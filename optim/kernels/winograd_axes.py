"""Winograd's minimal filtering F(4, 3) along one axis: the transforms that 2-D and frame kernels are made of.

Source: Lavin & Gray 2016, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..workers import Task, run_tasks

EDGE = 4
"""Output pixels per square and axis."""
TAPS = EDGE + 2
"""Input pixels per square and axis, and products per axis."""
FILTER_STEP = 8192
"""Kernels transformed at a time, so that one step's result stays in cache."""

_A, _B = math.sqrt(0.5), math.sqrt(2.0)
"""Interpolation points 0, +-sqrt(1/2), +-sqrt(2), infinity. The usual 0, +-1, +-2 lose five times as many digits
(measured at 512 channels); that points decide the error: Barabasz et al. 2020, arXiv:1803.10986."""
_G = (
    (1.0, 0.0, 0.0),
    (-2 / 3 * _A, -1 / 3, -1 / 3 * _A),
    (-2 / 3 * _A, 1 / 3, -1 / 3 * _A),
    (1 / 3, 1 / 3 * _B, 2 / 3),
    (1 / 3, -1 / 3 * _B, 2 / 3),
    (0.0, 0.0, 1.0),
)
"""Rows 1 and 2 times sqrt(1/2), 3 and 4 times 2: two outputs are then a sum with a single factor each."""


def transform_taps(taps: Tensor, out: Tensor, workers: int) -> None:
    """Kernels [n, 9] float32 (rows of any stride) -> [36, n]: G w G^T of each."""
    g = torch.tensor(_G, dtype=torch.float64, device=taps.device)
    both = torch.kron(g, g).to(taps.dtype)

    def some(start: int) -> Task:
        stop = start + FILTER_STEP
        return lambda _: torch.mm(both, taps[start:stop].t(), out=out[:, start:stop])

    run_tasks([some(start) for start in range(0, len(taps), FILTER_STEP)], workers)


def time_filters(taps: Tensor) -> list[Tensor]:
    """Taps over time [kt, ...] as the filters of `frame_groups`: themselves, or F(2, 3)'s four where kt is 3."""
    if len(taps) != 3:
        return list(taps)
    ends, middle = (taps[0] + taps[2]).mul_(0.5), taps[1] * 0.5
    return [taps[0], ends + middle, ends - middle, taps[2]]


def input_axis(d: Sequence[Tensor], out: Sequence[Tensor], temporaries: Sequence[Tensor]) -> None:
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


def output_axis(
    m: Sequence[Tensor], out: Sequence[Tensor | None], temporaries: Sequence[Tensor], *, accumulate: bool = False
) -> None:
    """A^T along one axis: six products to four outputs, written or added to; None is left out."""
    p, q, r, s = temporaries
    torch.add(m[1], m[2], out=p)
    torch.sub(m[1], m[2], out=q)
    torch.add(m[3], m[4], out=r)
    torch.sub(m[3], m[4], out=s)
    first, second, third, fourth = out
    if accumulate:
        if first is not None:
            first.add_(m[0]).add_(p, alpha=_B).add_(r, alpha=0.5)
        if second is not None:
            second.add_(q).add_(s, alpha=_A)
        if third is not None:
            third.add_(p, alpha=_A).add_(r)
        if fourth is not None:
            fourth.add_(m[5]).add_(q, alpha=0.5).add_(s, alpha=_B)
        return
    if first is not None:
        torch.add(m[0], p, alpha=_B, out=first).add_(r, alpha=0.5)
    if second is not None:
        torch.add(q, s, alpha=_A, out=second)
    if third is not None:
        torch.add(r, p, alpha=_A, out=third)
    if fourth is not None:
        torch.add(m[5], q, alpha=0.5, out=fourth).add_(s, alpha=_B)
