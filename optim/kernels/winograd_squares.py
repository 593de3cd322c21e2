"""Blocks of 4x4 squares of a map, and Winograd's transforms of a block's input and output.

A last square that is not whole slides back over its neighbour, but only its new outputs are written, so that blocks
can run in any order and can be added to what is there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .scratch import carve
from .winograd_axes import EDGE, TAPS, input_axis, output_axis


@dataclass(frozen=True, slots=True)
class Piece:
    """Squares along one axis that lie EDGE pixels apart."""

    offset: int
    """Of the first one's input in the block's."""
    first: int
    """Number of the first one."""
    count: int
    skipped: int = 0
    """Leading outputs of each that are another square's."""

    @property
    def squares(self) -> slice:
        """Numbers of the squares."""
        return slice(self.first, self.first + self.count)

    def inputs(self, tap: int) -> slice:
        """Pixels under one tap of every square."""
        start = self.offset + tap
        return slice(start, start + EDGE * (self.count - 1) + 1, EDGE)

    def outputs(self, out: Tensor, dim: int) -> Tensor:
        """The axis of a block's output as two: squares, and outputs of each that are not skipped."""
        new = EDGE - self.skipped
        return torch.unflatten(out.narrow(dim, EDGE * self.first, self.count * new), dim, (self.count, new))


@dataclass(frozen=True, slots=True)
class Span:
    """Outputs [start, stop) of a block along one axis; a last square that is not whole slides back."""

    start: int
    stop: int

    @property
    def base(self) -> int:
        """First input pixel."""
        return min(self.start, self.stop - EDGE)

    @property
    def n_squares(self) -> int:
        """Whole squares, and the one that slides back."""
        return -(-(self.stop - self.start) // EDGE)

    def pieces(self) -> list[Piece]:
        """Whole squares, and the one that slides back."""
        whole, rest = divmod(self.stop - self.start, EDGE)
        pieces = [Piece(0, 0, whole)] if whole else []
        if rest:
            pieces.append(Piece(self.stop - EDGE - self.base, whole, 1, EDGE - rest))
        return pieces


def spans(extent: int, squares: int) -> list[Span]:
    """Blocks of up to so many squares along an axis of at least EDGE outputs."""
    step = EDGE * squares
    return [Span(start, min(extent, start + step)) for start in range(0, extent, step)]


def even_part(n: int, most: int) -> int:
    """Size of the least number of even parts."""
    return -(-n // -(-n // most))


def stage_elements(c: int, k: int, down: int, across: int) -> int:
    """float32 elements that `enter` and `leave` use for a while in a block of squares."""
    squares, wide = down * across, EDGE * across + 2
    return max(TAPS * down * (wide + 2 * max(wide, TAPS * across)) * c, (EDGE + 4) * TAPS * squares * k)


def enter(image: Tensor, rows: Span, cols: Span, out: Tensor, spare: Tensor) -> None:
    """Transform a block of an input [C, h + 2, w + 2] into out [36, squares, C]."""
    x = image.permute(1, 2, 0)[rows.base : rows.stop + 2, cols.base : cols.stop + 2]
    wide, c = x.shape[1:]
    down, across = rows.n_squares, cols.n_squares
    r, rest = spare[: TAPS * down * wide * c].view(TAPS, down, wide, c), spare[TAPS * down * wide * c :]
    for piece in rows.pieces():
        temporaries = carve(rest, ((piece.count, wide, c),) * 2)
        input_axis([x[piece.inputs(i)] for i in range(TAPS)], list(r[:, piece.squares]), temporaries)
    out = out.view(TAPS, TAPS, down, across, c)
    for piece in cols.pieces():
        temporaries = carve(rest, ((TAPS, down, piece.count, c),) * 2)
        columns = [r[:, :, piece.inputs(j)] for j in range(TAPS)]
        input_axis(columns, [out[:, j, :, piece.squares] for j in range(TAPS)], temporaries)


def leave(
    m: Tensor, rows: Span, cols: Span, bias: Tensor | None, spare: Tensor, image: Tensor, *, accumulate: bool
) -> None:
    """Transform products m [36, squares, K] back into a block of an output [K, h, w], written or added to."""
    out = image.permute(1, 2, 0)[rows.start : rows.stop, cols.start : cols.stop]
    down, across, k = rows.n_squares, cols.n_squares, m.shape[2]
    n = TAPS * down * across * k
    s = spare[: EDGE * n].view(EDGE, TAPS, down, across, k)
    rest = spare[EDGE * n :]
    output_axis(list(m.view(TAPS, TAPS, down, across, k)), list(s), carve(rest, ((TAPS, down, across, k),) * 4))
    for row in rows.pieces():
        lines = row.outputs(out, 0)
        for col in cols.pieces():
            y = col.outputs(lines, 2).permute(1, 3, 0, 2, 4)
            targets = [*(None,) * col.skipped, *y.unbind(1)]
            columns = [s[row.skipped :, j, row.squares, col.squares] for j in range(TAPS)]
            temporaries = carve(rest, (tuple(columns[0].shape),) * 4)
            output_axis(columns, targets, temporaries, accumulate=accumulate)
    if bias is not None:
        out.add_(bias)
