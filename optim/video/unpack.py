"""Channels to frames and pixels, and what a skipped value goes through on its way to a sum."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops import ClipConv, Skip, Unpack


def unpack(x: Tensor, how: Unpack) -> Tensor:
    """[C t s s, h, w] of one conv frame -> [t, C, h s, w s]."""
    if how.haar:
        return _haar(x, how.haar)
    y = _split(x, how)
    # [c, t, h offset, w offset, h, w] -> [t, c, h, h offset, w, w offset]
    t, c, s, (h, w) = how.t, y.shape[0], how.s, x.shape[1:]
    return y.permute(1, 0, 4, 2, 5, 3).reshape(t, c, h * s, w * s)


def unpack_phase(x: Tensor, how: Unpack, phase: int) -> Tensor:
    """Frame `phase` alone of `unpack`, [C, h s, w s]."""
    if how.haar:
        return _haar(x, how.haar)[phase]
    y = _split(x, how)[:, phase]
    c, s, (h, w) = y.shape[0], how.s, x.shape[1:]
    return y.permute(0, 3, 1, 4, 2).reshape(c, h * s, w * s)


def _split(x: Tensor, how: Unpack) -> Tensor:
    """[C t s s, h, w] as a view [C, t, s, s, h, w]."""
    sizes = {"c": x.shape[0] // (how.t * how.s**2), "t": how.t, "h": how.s, "w": how.s}
    y = x.reshape(*(sizes[axis] for axis in how.order), *x.shape[1:])
    return y.permute(*(how.order.index(axis) for axis in "cthw"), 4, 5)


def _haar(x: Tensor, levels: int) -> Tensor:
    """Inverse 3-D Haar: sub-bands, slowest in the channels, to [2**levels, C, h 2**levels, w 2**levels].

    Source: Haar wavelets with orthonormal filters and the reference's factor sqrt(8) per level, which leaves sums and
    differences of the eight sub-bands without a factor.
    """
    y = x[:, None]
    for _ in range(levels):
        bands = list(y.chunk(8))
        for axis in (3, 2, 1):
            bands = _pairs(bands, axis)
        y = bands[0]
    return y.transpose(0, 1)


def _pairs(bands: list[Tensor], axis: int) -> list[Tensor]:
    """Neighbouring sub-bands (low, high) along one axis become samples of twice the number."""
    return [_merge(bands[i], bands[i + 1], axis) for i in range(0, len(bands), 2)]


def _merge(low: Tensor, high: Tensor, axis: int) -> Tensor:
    return torch.stack((low + high, low - high), axis + 1).flatten(axis, axis + 1)


def first_alone(how: Unpack) -> Unpack:
    """The unpacking of a first frame that stands for one frame only."""
    return Unpack(t=1, s=how.s, order=how.order)


def skip_frame(x: Tensor, skip: Skip, op: ClipConv, phase: int, *, alone: bool) -> Tensor:
    """What output frame is added of a skipped frame's window x [C, h, w]: [C_out, h', w'].

    `phase` is the frame among those that unpacking gives; `alone`: the first frame of a clip whose rule is `single`.
    """
    if skip.upsampled:
        return x.repeat_interleave(2, 1).repeat_interleave(2, 2) if op.upsample == 2 else x
    if skip.unpack is None:
        return _repeated(x, skip.repeat, skip.tile)
    if alone and skip.unpack.t > 1:
        return unpack_phase(_repeated(x, skip.repeat // skip.unpack.t, False), first_alone(skip.unpack), 0)
    if skip.tile:
        return _repeated(unpack_phase(x, skip.unpack, phase), skip.repeat, True)
    return unpack_phase(_repeated(x, skip.repeat, False), skip.unpack, phase)


def _repeated(x: Tensor, n: int, tile: bool) -> Tensor:
    if n == 1:
        return x
    return x.repeat(n, 1, 1) if tile else x.repeat_interleave(n, 0)
