"""Causal 3-D convolution (kt x 3 x 3, kt = 1 to 3) of separate frames by Winograd's minimal filtering.

In space F(4x4, 3x3) as in `winograd`; in time F(2, 3) where two neighbouring output frames read neighbouring sources,
see `frame_groups`: 36 * 2 products per 4x4 outputs in place of 432. A block of squares is taken through all frames
before the next, so that each source is transformed once; products of all taps add up before the one transform back.
float32 and channels_last only. Exact up to rounding.
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
from .winograd_axes import EDGE, FILTER_STEP, TAPS, time_filters, transform_taps
from .winograd_squares import Span, enter, even_part, leave, spans, stage_elements

BLOCK_BYTES, MIN_SQUARES, MAX_SQUARES = 24 << 20, 128, 256
"""A block holds as many squares as this many bytes of transformed sources and products: with fewer, filters are read
more often than products take; with more, what is read again has left a CPU's caches."""
MIN_ROWS, MAX_ITEMS = 64, 4
"""Blocks with fewer squares than this take several frames, or pairs of them, into each product; at most so many."""
BATCH = 12
"""Products per call, of 36: few, so that what one call writes the next finds in a cache."""
_PRODUCTS = TAPS * TAPS


def filter_elements(channels: int, out_channels: int, kt: int) -> int:
    """float32 elements of a transformed filter."""
    return map_count(kt) * _PRODUCTS * channels * out_channels


def transform_filter(weight: Tensor, out: Tensor, workers: int) -> Tensor:
    """[K, C, kt, 3, 3] float32 -> [n, 36, K, C], a view of flat `out` of `filter_elements`.

    n is kt, or 4 where kt is 3: the filters of F(2, 3), see `frame_groups`.
    """
    k, c, kt = weight.shape[:3]
    target = out[: filter_elements(c, k, kt)].view(map_count(kt), _PRODUCTS, c * k)
    step = max(1, FILTER_STEP // k)

    def some(start: int) -> Task:
        return lambda _: _transform_some(weight[:, start : start + step], target[:, :, start * k :])

    run_tasks([some(start) for start in range(0, c, step)], workers)
    return target.view(map_count(kt), _PRODUCTS, c, k).transpose(2, 3)


def _transform_some(weight: Tensor, out: Tensor) -> None:
    """[K, c, kt, 3, 3] -> the first c * K columns of out [n, 36, ...]."""
    for target, taps in zip(out, time_filters(weight.permute(2, 1, 0, 3, 4).flatten(3).flatten(1, 2)), strict=True):
        transform_taps(taps, target[:, : len(taps)], 1)


def _block_shape(c: int, k: int, height: int, width: int, kt: int, n_frames: int, workers: int) -> tuple[int, int, int]:
    """(rows, columns) of squares per block, and items per group; small outputs have a block for each worker."""
    rows, cols = -(-height // EDGE), -(-width // EDGE)
    per_square = 4 * _PRODUCTS * (slot_count(kt, 1, n_frames) * c + sum_count(kt, n_frames) * k)
    fitting = max(MIN_SQUARES, min(MAX_SQUARES, BLOCK_BYTES // per_square))
    most = max(1, min(fitting, -(-rows * cols // workers)))
    across = even_part(cols, most)
    down = even_part(rows, max(1, most // across))
    items = -(-MIN_ROWS // (down * across))
    return down, across, max(1, min(items, MAX_ITEMS, -(-n_frames // sum_count(kt, n_frames))))


def _sizes(c: int, k: int, down: int, across: int, kt: int, items: int, n_frames: int) -> tuple[tuple[int, ...], ...]:
    """Scratch of one block: transformed sources, sums of products, and what is used for a while."""
    squares = down * across
    multiplying = BATCH * items * squares * (c + k)
    return (
        (_PRODUCTS, slot_count(kt, items, n_frames), squares, c),
        (sum_count(kt, n_frames), _PRODUCTS, items * squares, k),
        (max(stage_elements(c, k, down, across), multiplying),),
    )


def scratch_elements(
    channels: int, out_channels: int, height: int, width: int, kt: int, n_frames: int, workers: int
) -> int:
    """float32 elements of scratch for `convolve` into `n_frames` frames of this size."""
    down, across, items = _block_shape(channels, out_channels, height, width, kt, n_frames, workers)
    sizes = _sizes(channels, out_channels, down, across, kt, items, n_frames)
    return workers * sum(math.prod(size) for size in sizes)


def convolve(
    frames: Sequence[Tensor],
    taps: Sequence[Taps],
    filters: Tensor,
    bias: Tensor | None,
    scratch: Tensor,
    outs: Sequence[Tensor],
    workers: int,
    *,
    accumulate: bool,
) -> None:
    """Convolve frames [C, h + 2, w + 2] into outs [K, h, w]: `taps[i]` names the frames under the taps of `outs[i]`.

    Frames and outs are views in which a pixel's channels lie together; they never share memory. `filters` is what
    `transform_filter` returned, `scratch` flat float32 of `scratch_elements`. With `accumulate`, outs are added to.
    h and w are at least 4.
    """
    k, h, w = outs[0].shape
    c, kt = filters.shape[3], len(taps[0])
    down, across, items = _block_shape(c, k, h, w, kt, len(outs), workers)
    sizes = _sizes(c, k, down, across, kt, items, len(outs))
    each = sum(math.prod(size) for size in sizes)
    groups = plan_groups(taps, items)
    maps = filters.transpose(2, 3)

    def block(rows: Span, cols: Span) -> Task:
        def run(worker: int) -> None:
            v, m, spare = carve(scratch[worker * each : (worker + 1) * each], sizes)
            n = rows.n_squares * cols.n_squares
            inputs = v.flatten()[: math.prod(v.shape[:2]) * n * c].view(*v.shape[:2], n, c)
            for group in groups:
                for source, slot in group.loads:
                    enter(frames[source], rows, cols, inputs[:, slot], spare)
                sums = _multiply(group, inputs, maps, m, spare)
                for i, output in enumerate(group.outputs):
                    for j in range(2 if group.pair else 1):
                        leave(sums[j][:, i], rows, cols, bias, spare, outs[output + j], accumulate=accumulate)

        return run

    run_tasks([block(rows, cols) for rows in spans(h, down) for cols in spans(w, across)], workers)


def _multiply(group: Group, v: Tensor, maps: Tensor, m: Tensor, spare: Tensor) -> list[Tensor]:
    """Sum up the products of a group: v [36, slots, squares, C] -> per output of an item [36, items, squares, K]."""
    n, (_, _, squares, c), k = len(group.slots), v.shape, maps.shape[3]
    count = _PRODUCTS * n * squares * k
    sums = [part.flatten()[:count].view(_PRODUCTS, n * squares, k) for part in m[: 2 if group.pair else 1]]
    stacked, product = carve(spare, ((BATCH, n, squares, c), (BATCH, n * squares, k)))
    for start in range(0, _PRODUCTS, BATCH):
        batch = slice(start, start + BATCH)

        def multiply(p: Product, out: Tensor, add: int, batch: slice = batch) -> None:
            x = _operand(group, p, v[batch], stacked)
            torch.baddbmm(out, x, maps[p.filter, batch], beta=add, alpha=p.scale, out=out)

        add_up(group, multiply, sums[0][batch], sums[-1][batch], product)
    return [part.view(_PRODUCTS, n, squares, k) for part in sums]


def _operand(group: Group, p: Product, v: Tensor, stacked: Tensor) -> Tensor:
    """What a product multiplies, for all items: [batch, items * squares, C], in place or put together in `stacked`."""
    firsts = [slots[p.first] for slots in group.slots]
    if p.second is None and firsts == list(range(firsts[0], firsts[0] + len(firsts))):
        return v[:, firsts[0] : firsts[0] + len(firsts)].flatten(1, 2)
    for i, slots in enumerate(group.slots):
        if p.second is None:
            stacked[:, i].copy_(v[:, slots[p.first]])
        else:
            torch.add(v[:, slots[p.first]], v[:, slots[p.second]], alpha=p.sign, out=stacked[:, i])
    return stacked.flatten(1, 2)
