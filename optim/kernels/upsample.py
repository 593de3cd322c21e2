"""Nearest-2x upsampling and a 3x3 convolution as nine matrix products per source pixel.

Along one axis, output 2 y is a x[y - 1] + (b + c) x[y] and output 2 y + 1 is (a + b) x[y] + c x[y + 1]. With
s = a + b + c both are s x[y] plus one correction: a (x[y - 1] - x[y]) or c (x[y + 1] - x[y]). Three products serve
two outputs, and nine serve four in two dimensions, where a folded 2x2 convolution takes sixteen and the written form
thirty-six.
Exact up to rounding; float32 and channels_last only, as in `winograd`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..workers import Task, run_tasks
from .frame_groups import Group, Product, Taps, map_count, plan_groups, slot_count, sum_count
from .frame_products import add_up
from .scratch import carve
from .winograd_axes import FILTER_STEP, time_filters

BLOCK_PIXELS = 1024
"""Source pixels per block, at least one row."""


def filter_elements(channels: int, out_channels: int) -> int:
    """float32 elements of a transformed filter."""
    return 9 * channels * out_channels


def transform_filter(weight: Tensor, out: Tensor, workers: int) -> Tensor:
    """[K, C, 3, 3] float32 -> [9, K, C]: (a, s, c) along both axes, rows first, into flat `out` of `filter_elements`.

    The differences in use run downwards and rightwards only, so `a`, which needs the opposite sign, is negated.
    """
    del workers  # one small product
    k, c = weight.shape[:2]
    target = out[: filter_elements(c, k)].view(9, k * c)
    _transform_taps(weight.reshape(k * c, 9), target)
    return target.view(9, k, c)


def _transform_taps(taps: Tensor, out: Tensor) -> None:
    """Kernels [n, 9] -> [9, n]."""
    m = torch.tensor([[-1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]], dtype=torch.float64, device=taps.device)
    torch.mm(torch.kron(m, m).to(taps.dtype), taps.t(), out=out)


def _block_rows(height: int, width: int, workers: int, pixels: int = BLOCK_PIXELS) -> int:
    return max(1, min(-(-height // workers), pixels // width))


def _sizes(rows: int, width: int, c: int, k: int) -> tuple[tuple[int, ...], ...]:
    """Scratch of one block: three difference maps and nine products, rows of width + 2 pixels."""
    wide = width + 2
    return ((3, (rows + 2) * wide, c), (9, rows * wide, k), (3, rows * wide, k))


def _block_elements(channels: int, out_channels: int, height: int, width: int, workers: int) -> int:
    sizes = _sizes(_block_rows(height, width, workers), width, channels, out_channels)
    return sum(math.prod(size) for size in sizes)


def scratch_elements(channels: int, out_channels: int, height: int, width: int, workers: int) -> int:
    """float32 elements of scratch for one block per worker."""
    return workers * _block_elements(channels, out_channels, height, width, workers)


def convolve(x: Tensor, filters: Tensor, bias: Tensor | None, scratch: Tensor, out: Tensor, workers: int) -> Tensor:
    """x [B, C, h + 2, w + 2] (one row and column of context) -> out [B, K, 2 h, 2 w], both dense channels_last.

    `filters` [9, K, C] from `transform_filter`, `scratch` flat float32 of `scratch_elements`.
    """
    b, c, hp, wp = x.shape
    h, w = hp - 2, wp - 2
    step = _block_rows(h, w, workers)
    each = _block_elements(c, filters.shape[1], h, w, workers)

    def some(image: int, top: int) -> Task:
        rows = min(step, h - top)
        window = x[image, :, top : top + rows + 2].permute(1, 2, 0).reshape((rows + 2) * wp, c)
        target = out[image, :, 2 * top : 2 * (top + rows)].permute(1, 2, 0)
        return lambda i: _block(window, rows, w, filters, bias, scratch[i * each : (i + 1) * each], target)

    run_tasks([some(image, top) for image in range(b) for top in range(0, h, step)], workers)
    return out


def _block(x: Tensor, rows: int, w: int, filters: Tensor, bias: Tensor | None, scratch: Tensor, out: Tensor) -> None:
    """x [(rows + 2) * (w + 2), C] -> out [2 rows, 2 w, K].

    Maps stay flat: a neighbour below is w + 2 pixels on, and what wraps around a row's end falls on columns not used.
    """
    wide, c, k = w + 2, x.shape[1], out.shape[2]
    d_size, m_size, t_size = _sizes(rows, w, c, k)
    d, m, t = carve(scratch, (d_size, m_size, t_size))
    _subtract(x, wide, d)
    for i, (source, start) in enumerate(_operands(wide)):
        operand = (x if source == 0 else d[source - 1])[start : start + rows * wide - 2]
        target = m[i, : rows * wide - 2]
        if i == _CENTRE and bias is not None:
            torch.addmm(bias, operand, filters[i].t(), out=target)
        else:
            torch.mm(operand, filters[i].t(), out=target)
    _correct(m, t, rows, w, out)


_CENTRE = 4
"""The product that all four outputs of a pixel share."""


def _subtract(x: Tensor, wide: int, out: Tensor) -> None:
    """Rows of `wide` pixels, flat, [n, C] -> [3, n, C]: differences downwards, rightwards, and both."""
    n, (down, right, both) = len(x), out.unbind()
    torch.sub(x[wide:], x[:-wide], out=down[: n - wide])
    torch.sub(x[1:], x[:-1], out=right[: n - 1])
    torch.sub(right[wide : n - 1], right[: n - 1 - wide], out=both[: n - 1 - wide])


def _operands(wide: int) -> list[tuple[int, int]]:
    """Per product, its map (pixels, or one of the three differences) and the first pixel there.

    Pixel (y, x) of the block sits at (y + 1) * wide + x + 1; a difference sits at its upper or left pixel.
    """
    maps = ((3, 1, 3), (2, 0, 2), (3, 1, 3))
    return [(maps[i][j], min(i, 1) * wide + min(j, 1)) for i in range(3) for j in range(3)]


def _correct(m: Tensor, t: Tensor, rows: int, w: int, out: Tensor) -> None:
    """Nine products [9, rows * (w + 2), K] -> out [2 rows, 2 w, K]; `t` holds three of their size."""
    wide = w + 2
    used = rows * wide - 2
    m = m.view(3, 3, *m.shape[1:])
    for j in range(2):
        # columns: the common product and one correction each
        torch.add(m[:, 1, :used], m[:, 2 * j, :used], out=t[:, :used])
        for i in range(2):
            square = out[i::2, j::2]
            common, correction = (_rows_of(t[part], rows, w, wide) for part in (1, 2 * i))
            torch.add(common, correction, out=square)


def _rows_of(flat: Tensor, rows: int, w: int, wide: int) -> Tensor:
    """[rows, w, K] view of the used columns of flat products."""
    return flat[: rows * wide].view(rows, wide, -1)[:, :w]


# -- frames


def frames_filter_elements(channels: int, out_channels: int, kt: int) -> int:
    """float32 elements of a transformed filter over kt frames."""
    return map_count(kt) * filter_elements(channels, out_channels)


def transform_frames_filter(weight: Tensor, out: Tensor, workers: int) -> Tensor:
    """[K, C, kt, 3, 3] float32 -> [n, 9, K, C], a view of flat `out` of `frames_filter_elements`.

    n is kt, or 4 where kt is 3: the filters of F(2, 3), see `frame_groups`.
    """
    del workers  # a few small products
    k, c, kt = weight.shape[:3]
    target = out[: frames_filter_elements(c, k, kt)].view(map_count(kt), 9, k * c)
    step = max(1, FILTER_STEP // c)
    for start in range(0, k, step):
        some = weight[start : start + step].permute(2, 0, 1, 3, 4).reshape(kt, -1, 9)
        for i, taps in enumerate(time_filters(some)):
            _transform_taps(taps, target[i, :, start * c : start * c + len(taps)])
    return target.view(map_count(kt), 9, k, c)


def _frames_pixels(kt: int) -> int:
    """Source pixels per block; half of them take as long where more is held for each (measured)."""
    return BLOCK_PIXELS if kt == 1 else BLOCK_PIXELS // 2


def _frames_sizes(rows: int, width: int, c: int, k: int, kt: int, n_frames: int) -> tuple[tuple[int, ...], ...]:
    """Scratch of one block: maps of sources, sums of products, and what is used for a while."""
    wide = width + 2
    maps, result = 4 * (rows + 2) * wide * c, 9 * rows * wide * k
    return (
        (slot_count(kt, 1, n_frames), 4, (rows + 2) * wide, c),
        (sum_count(kt, n_frames), 9, rows * wide, k),
        (maps + result,),
    )


def frames_scratch_elements(
    channels: int, out_channels: int, height: int, width: int, kt: int, n_frames: int, workers: int
) -> int:
    """float32 elements of scratch for `convolve_frames` into `n_frames` frames from sources of this size."""
    rows = _block_rows(height, width, workers, _frames_pixels(kt))
    return workers * sum(math.prod(size) for size in _frames_sizes(rows, width, channels, out_channels, kt, n_frames))


def convolve_frames(
    frames: Sequence[Tensor],
    taps: Sequence[Taps],
    filters: Tensor,
    bias: Tensor | None,
    scratch: Tensor,
    outs: Sequence[Tensor],
    workers: int,
) -> None:
    """Frames [C, h + 2, w + 2] into outs [K, 2 h, 2 w]: `taps[i]` names the frames under the taps of `outs[i]`.

    Frames and outs are views in which a pixel's channels lie together; they never share memory. `filters` is what
    `transform_frames_filter` returned, `scratch` flat float32 of `frames_scratch_elements`.
    """
    k, c, kt = *filters.shape[2:], len(taps[0])
    h, w = outs[0].shape[1] // 2, outs[0].shape[2] // 2
    step = _block_rows(h, w, workers, _frames_pixels(kt))
    each = sum(math.prod(size) for size in _frames_sizes(step, w, c, k, kt, len(outs)))
    groups = plan_groups(taps, 1)

    def some(top: int) -> Task:
        rows = min(step, h - top)

        def run(worker: int) -> None:
            mine = scratch[worker * each : (worker + 1) * each]
            v, m, spare = carve(mine, _frames_sizes(rows, w, c, k, kt, len(outs)))
            for group in groups:
                for source, slot in group.loads:
                    pixels = v[slot, 0]
                    pixels.view(rows + 2, w + 2, c).copy_(frames[source].permute(1, 2, 0)[top : top + rows + 2])
                    _subtract(pixels, w + 2, v[slot, 1:])
                _sum_up(group, v, w + 2, filters, m, spare)
                for j in range(2 if group.pair else 1):
                    if bias is not None:
                        m[j, _CENTRE].add_(bias)
                    out = outs[group.outputs[0] + j].permute(1, 2, 0)[2 * top : 2 * (top + rows)]
                    _correct(m[j], spare[: 3 * rows * (w + 2) * k].view(3, -1, k), rows, w, out)

        return run

    run_tasks([some(top) for top in range(0, h, step)], workers)


def _sum_up(group: Group, v: Tensor, wide: int, filters: Tensor, m: Tensor, spare: Tensor) -> None:
    """Sum up the products of a group of one item: v [slots, 4, n, C] -> m [outputs, 9, n - 2 wide, K]."""
    stacked, product = carve(spare, (tuple(v.shape[1:]), tuple(m.shape[1:])))
    operands, used = _operands(wide), m.shape[2] - 2

    def multiply(p: Product, out: Tensor, add: int) -> None:
        maps = v[group.slots[0][p.first]]
        if p.second is not None:
            maps = torch.add(maps, v[group.slots[0][p.second]], alpha=p.sign, out=stacked)
        for i, (source, start) in enumerate(operands):
            x, f = maps[source, start : start + used], filters[p.filter, i].t()
            torch.addmm(out[i], x, f, beta=add, alpha=p.scale, out=out[i])

    add_up(group, multiply, m[0, :, :used], m[-1, :, :used], product[:, :used])
