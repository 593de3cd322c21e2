"""Staging of frames: normalise, activate, write, and lay the border around; band by band, so that it stays in cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import Tensor

from ..limits import LARGEST_TENSOR
from ..tiling import Span
from ..workers import run_tasks
from .ops import Border, ClipActivation

BAND_BYTES = 1 << 20
"""float32 bytes of a band: its few passes stay in one core's cache."""
DEVICE_BAND_BYTES = 64 << 20
"""The same on devices whose kernels use the whole chip."""
LatentRows = Callable[[int, int, int], tuple[Tensor, Tensor]]
"""(first row, row after the last, frame) -> (scale, shift) [C, rows, W] out of the latent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Normaliser:
    """A normalisation whose constants are known: y = x * inv(x) * gain + shift, per pixel or with inv = 1."""

    kind: str
    """`none`, `affine` (statistics folded into gain and shift), `rms`, `pixel` or `layer`."""
    eps: float = 0.0
    gain: Tensor | None = None
    """[C, 1, 1] float32."""
    shift: Tensor | None = None
    latent: LatentRows | None = None


def in_columns(norm: Normaliser, cols: Span) -> Normaliser:
    """The same for these columns of every row alone."""
    if norm.latent is None:
        return norm
    of_rows = norm.latent

    def rows(top: int, stop: int, frame: int) -> tuple[Tensor, Tensor]:
        scale, shift = of_rows(top, stop, frame)
        return scale[:, :, cols.start : cols.stop], shift[:, :, cols.start : cols.stop]

    return replace(norm, latent=rows)


def activate_(x: Tensor, act: ClipActivation) -> Tensor:
    """Apply an activation in place."""
    if act == "silu":
        return F.silu(x, inplace=True)
    if act == "relu":
        return x.relu_()
    if act == "leaky_relu":
        return F.leaky_relu_(x, 0.2)
    if act == "tanh3":
        return x.div_(3).tanh_().mul_(3)
    return x


def stage_frame(
    src: Tensor, out: Tensor, norm: Normaliser, act: ClipActivation, frame: int, workers: int, top: int = 0
) -> None:
    """out = act(norm(src)), both [C, h, w] views of any dtype; they may be the same memory.

    `frame` and `top` say where src lies in the clip and its picture, for norms that read the latent.
    """
    c, h, w = src.shape
    cpu = src.device.type == "cpu"
    rows = max(1, (BAND_BYTES if cpu else DEVICE_BAND_BYTES) // (c * w * 4))

    def band(start: int) -> Callable[[int], None]:
        return lambda _: _stage_band(
            src[:, start : start + rows], out[:, start : start + rows], norm, act, frame, top + start
        )

    run_tasks([band(start) for start in range(0, h, rows)], workers if cpu else 1)


def _stage_band(src: Tensor, out: Tensor, norm: Normaliser, act: ClipActivation, frame: int, top: int) -> None:
    direct = out.dtype == torch.float32
    x = src if src.dtype == torch.float32 else src.float()
    y = out if direct else x if x is not src else torch.empty_like(x)
    _normalise(x, y, norm)
    if norm.latent is not None:
        scale, shift = norm.latent(top, top + src.shape[1], frame)
        y.mul_(scale).add_(shift)
    activate_(y, act)
    if not direct:
        out.copy_(y)


def _normalise(x: Tensor, y: Tensor, norm: Normaliser) -> None:
    if norm.kind == "none":
        if y.data_ptr() != x.data_ptr():
            y.copy_(x)
        return
    if norm.kind == "affine":
        assert norm.gain is not None
        assert norm.shift is not None
        torch.addcmul(norm.shift, x, norm.gain, out=y)
        return
    if norm.kind == "layer":
        mean = x.mean(0, keepdim=True)
        inverse = x.var(0, correction=0, keepdim=True).add_(norm.eps).rsqrt_()
        torch.sub(x, mean, out=y)
        y.mul_(inverse)
    elif norm.kind == "rms":
        length = torch.linalg.vector_norm(x, dim=0, keepdim=True).clamp_min_(norm.eps)
        torch.mul(x, length.reciprocal_().mul_(math.sqrt(x.shape[0])), out=y)
    else:
        inverse = torch.linalg.vector_norm(x, dim=0, keepdim=True).square_().div_(x.shape[0]).add_(norm.eps).rsqrt_()
        torch.mul(x, inverse, out=y)
    if norm.gain is not None:
        y.mul_(norm.gain)
    if norm.shift is not None:
        y.add_(norm.shift)


def copy_frame(src: Tensor, dst: Tensor) -> None:
    """dst = src, both [C, h, w]; in bands of rows where a whole frame has too many elements for one kernel."""
    c, h, w = src.shape
    rows = max(1, LARGEST_TENSOR // (c * w))
    for top in range(0, h, rows):
        dst[:, top : top + rows].copy_(src[:, top : top + rows])


def fill_border(page: Tensor, halo: int, border: Border) -> None:
    """Lay the border around the picture inside page [C, H + 2 halo, W + 2 halo]; `reflect` of one pixel repeats it."""
    if halo == 0:
        return
    h, w = page.shape[1] - 2 * halo, page.shape[2] - 2 * halo
    if border == "zero":
        page[:, :halo].zero_()
        page[:, h + halo :].zero_()
        page[:, :, :halo].zero_()
        page[:, :, w + halo :].zero_()
        return
    for i in range(halo):
        up, down = _mirrored(i, halo, h, border)
        page[:, i, halo : w + halo].copy_(page[:, up, halo : w + halo])
        page[:, h + 2 * halo - 1 - i, halo : w + halo].copy_(page[:, down, halo : w + halo])
    for i in range(halo):
        left, right = _mirrored(i, halo, w, border)
        page[:, :, i].copy_(page[:, :, left])
        page[:, :, w + 2 * halo - 1 - i].copy_(page[:, :, right])


def _mirrored(i: int, halo: int, extent: int, border: Border) -> tuple[int, int]:
    """Rows whose copies lie at distance halo - i outside either end."""
    step = min(halo - i, extent - 1) if border == "reflect" else 0
    return halo + step, halo + extent - 1 - step
