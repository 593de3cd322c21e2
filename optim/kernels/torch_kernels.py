"""The executor's kernels in plain torch: stage, convolve, attend. They run on every device and in either layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import Tensor

from ..costs import WIDEN_BYTES
from ..program import Activation
from ..tiling import Tile

Affine = tuple[Tensor, Tensor]
"""(scale, shift) float32 [B, C, 1, 1] of a norm whose statistics are known."""


def activate_(x: Tensor, act: Activation) -> Tensor:
    """Apply an activation in place."""
    if act == "silu":
        return F.silu(x, inplace=True)
    if act == "relu":
        return x.relu_()
    if act == "tanh3":
        return x.div_(3).tanh_().mul_(3)
    return x


def stage(
    src: Tensor,
    tile: Tile,
    halo: int,
    affine: Affine | None,
    act: Activation,
    out: Tensor,
    rows: Tensor | None,
    carried: int,
) -> None:
    """Fill `out` [B, C, h + 2 halo, w + 2 halo] with act(norm(src)) under tile and halo, zero outside the picture.

    `src` [B, C, H, W] holds the tile's images. The first `carried` rows of `out` are already there. `rows` is flat
    float32 scratch for dtypes that arithmetic would round; None writes straight into `out`.
    """
    _, _, height, width = src.shape
    y0, x0 = tile.rows.start - halo, tile.cols.start - halo
    top, bottom = max(0, y0 + carried), min(height, tile.rows.stop + halo)
    left, right = max(0, x0), min(width, tile.cols.stop + halo)
    _zero_outside(out, carried, top - y0, bottom - y0, left - x0, right - x0)
    if bottom <= top:
        return
    window = out[:, :, top - y0 : bottom - y0, left - x0 : right - x0]
    source = src[:, :, top:bottom, left:right]
    if rows is None:
        _normalise(source, affine, act, window)
        return
    b, c, h, w = source.shape
    step = max(1, WIDEN_BYTES // (b * c * w * 4))
    for r in range(0, h, step):
        part = source[:, :, r : r + step]
        wide = _like(rows, part)
        wide.copy_(part)
        _normalise(wide, affine, act, wide)
        window[:, :, r : r + step].copy_(wide)


def _zero_outside(out: Tensor, first: int, top: int, bottom: int, left: int, right: int) -> None:
    """Zero the border rows and columns of `out` beyond [top, bottom) x [left, right), from row `first` on."""
    _, _, h, w = out.shape
    if top > first:
        out[:, :, first:top].zero_()
    if bottom < h:
        out[:, :, max(bottom, first) :].zero_()
    if left > 0:
        out[:, :, first:, :left].zero_()
    if right < w:
        out[:, :, first:, right:].zero_()


def _like(flat: Tensor, x: Tensor) -> Tensor:
    """The front of a flat buffer as a tensor of x's shape and layout."""
    b, c, h, w = x.shape
    if x.stride(1) == 1 and c > 1:
        return flat[: b * c * h * w].view(b, h, w, c).permute(0, 3, 1, 2)
    return flat[: b * c * h * w].view(b, c, h, w)


def _normalise(src: Tensor, affine: Affine | None, act: Activation, out: Tensor) -> None:
    if affine is not None:
        torch.addcmul(affine[1], src, affine[0], out=out)
    elif out.data_ptr() != src.data_ptr():
        out.copy_(src)
    activate_(out, act)


def stage_upsampled(src: Tensor, tile: Tile, halo: int, affine: Affine | None, act: Activation, out: Tensor) -> None:
    """As `stage`, with nearest-2x upsampling in between; the tile is in upsampled elements."""
    height, width = src.shape[2] * 2, src.shape[3] * 2
    y0, x0 = tile.rows.start - halo, tile.cols.start - halo
    top, bottom = max(0, y0), min(height, tile.rows.stop + halo)
    left, right = max(0, x0), min(width, tile.cols.stop + halo)
    _zero_outside(out, 0, top - y0, bottom - y0, left - x0, right - x0)
    source = src[:, :, top // 2 : (bottom + 1) // 2, left // 2 : (right + 1) // 2]
    wide = torch.empty_like(source, dtype=torch.float32)
    wide.copy_(source)
    _normalise(wide, affine, act, wide)
    grown = wide.repeat_interleave(2, 2).repeat_interleave(2, 3)
    y, x = top % 2, left % 2
    out[:, :, top - y0 : bottom - y0, left - x0 : right - x0].copy_(
        grown[:, :, y : y + bottom - top, x : x + right - left]
    )


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Valid convolution, stride 1."""
    return F.conv2d(x, weight, bias)


def attend(q: Tensor, k: Tensor, v: Tensor, method: str) -> Tensor:
    """softmax(q k^T / sqrt(C)) v of q [n, C] against k, v [m, C]: one head."""
    if method == "sdpa":
        return F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])[0, 0]
    scores = torch.matmul(q * q.shape[1] ** -0.5, k.t())
    return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype), v)


def is_finite_sum(x: Tensor) -> Tensor:
    """Scalar bool tensor: no inf or NaN in x (their sum would not be finite)."""
    # bf16 has float32's range, and its sum is taken in float32 anyway, without a copy of x
    return torch.isfinite(x.sum(dtype=None if x.dtype == torch.bfloat16 else torch.float32))
