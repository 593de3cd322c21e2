"""Scratch of a kernel, cut out of one flat buffer."""

from __future__ import annotations

import math

from torch import Tensor


def carve(flat: Tensor, sizes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    """Views of these sizes, one after the other from the front of `flat`."""
    views, start = [], 0
    for size in sizes:
        n = math.prod(size)
        views.append(flat[start : start + n].view(size))
        start += n
    return views
