"""Where finished tiles go: the final image, and rearrangements on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .program import BlockOrder, Program

Finish = Callable[[Tensor], Tensor]
"""Takes a float32 tile [B, C, h, w] of the decoder's raw output and returns it in picture range; may work in place."""


def to_unit_range(x: Tensor) -> Tensor:
    """The usual ending: -1..1 becomes 0..1, clamped."""
    return x.add_(1.0).div_(2.0).clamp_(0.0, 1.0)


def clamp_unit(x: Tensor) -> Tensor:
    """The ending of decoders whose raw picture spans 0 to 1."""
    return x.clamp_(0.0, 1.0)


def finish_of(program: Program) -> Finish:
    """The usual ending of a decoder's pictures."""
    return clamp_unit if program.unit_range else to_unit_range


def keep_raw(x: Tensor) -> Tensor:
    """No ending: the decoder's raw output."""
    return x


class ImageSink:
    """Writes finished tiles into the final image [B, H, W, C]."""

    def __init__(self, image: Tensor, finish: Finish) -> None:
        """`image` is on the output device in the output dtype."""
        self.image = image
        self._finish = finish

    def write(self, y: Tensor, image: int, row: int, col: int) -> None:
        """Finish a raw tile [m, C, h, w] and put it at its place."""
        m, _, h, w = y.shape
        # a copy of its own: `finish` may work in place, and y may be somebody's memory
        done = self._finish(y.float() if y.dtype != torch.float32 else y.clone())
        self.image[image : image + m, row : row + h, col : col + w].copy_(done.permute(0, 2, 3, 1))


def expand(x: Tensor, factor: int, order: BlockOrder) -> Tensor:
    """Depth-to-space [B, C f f, h, w] -> [B, C, h f, w f]."""
    b, cff, h, w = x.shape
    c = cff // (factor * factor)
    if order == "channel_major":
        parts = x.reshape(b, c, factor, factor, h, w).permute(0, 1, 4, 2, 5, 3)
    else:
        parts = x.reshape(b, factor, factor, c, h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(b, c, h * factor, w * factor)


def interleave(y: Tensor, h: int, w: int, *, shifted: bool, out: Tensor) -> Tensor:
    """Blocks [m, 4 C, h, w] into out [m, C, 2 h, 2 w]: block i * 2 + j holds rows 2 y + i and columns 2 x + j.

    `shifted`: y is [m, 4 C, h + 1, w + 1], and block (i, j) starts at its row i and column j (a folded upsampling).
    """
    c = out.shape[1]
    for phase in range(4):
        i, j = divmod(phase, 2)
        top, left = (i, j) if shifted else (0, 0)
        out[:, :, i::2, j::2] = y[:, phase * c : (phase + 1) * c, top : top + h, left : left + w]
    return out


def pixels_of(x: Tensor) -> Tensor:
    """[C, H, W] as a view [H * W, C]; never a copy, so that rows can be overwritten as they are done."""
    c, h, w = x.shape
    return x.permute(1, 2, 0).view(h * w, c) if x.stride(0) == 1 else x.view(c, h * w).t()


def reduce_finite(flags: Sequence[Tensor]) -> Tensor:
    """All of several scalar bool tensors."""
    result = flags[0]
    for flag in flags[1:]:
        result = result & flag
    return result
