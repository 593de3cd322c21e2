"""The mid-block attention: keys and values of the whole picture, queries a few rows of pixels at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import Tensor

from ..packing import DTYPES
from ..plan import OpPlan
from ..program import Attention
from ..store import pixels_of
from . import torch_kernels as kernels

if TYPE_CHECKING:
    from ..executor import PassRunner


def run_attention(runner: PassRunner, step: OpPlan) -> None:
    """src + proj(attention(norm(src))) for every picture of the pass; reads only rows it has not overwritten."""
    op, context = step.op, runner.context
    assert isinstance(op, Attention)
    observer, device, dtype = context.observer, context.device, DTYPES[step.dtype]
    observer.mark("load")
    q, k, v, proj = (
        context.packed.linear(part, dtype=dtype, device=device, keep=context.plan.cache_weights, observer=observer)
        for part in (op.q, op.k, op.v, op.proj)
    )
    weight, bias = (context.packed.vector(name, torch.float32, device) for name in (op.norm.weight, op.norm.bias))
    assert weight is not None
    assert bias is not None
    scale, shift = runner.moments[op.inputs[0]].affine(op.norm, weight, bias)
    tiles = step.grid.tiles()
    pixels = step.grid.height
    keys, values = (
        runner.buffer(f"{name}{step.index}", pixels * op.channels * dtype.itemsize)[
            : pixels * op.channels * dtype.itemsize
        ]
        .view(dtype)
        .view(pixels, op.channels)
        for name in ("keys", "vals")
    )
    for i, tile in enumerate(tiles):
        image = tile.images.start
        src = pixels_of(runner.value(op.inputs[0])[image])
        norm = scale[image].view(1, -1), shift[image].view(1, -1)
        if tile.rows.start == 0:
            observer.mark("compute")
            _project_keys(runner, op.inputs[0], src, norm, (k, v), (keys, values), step)
        observer.tile_started(i, len(tiles), (tile.rows.size, op.channels), step.dtype)
        observer.mark("stage")
        rows = runner.near(op.inputs[0], src[tile.rows.start : tile.rows.stop])
        y = _normalised(rows, norm, dtype)
        observer.mark("compute")
        y = F.linear(kernels.attend(F.linear(y, *q), keys, values, context.plan.attention), *proj)
        y = y.add_(rows) if y.dtype == rows.dtype else y.float().add_(rows)
        observer.mark("stitch")
        runner.store_pixels(op.output, y, image, tile.rows.start)
        context.progress.add(step.macs // len(tiles))


def _normalised(rows: Tensor, norm: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    return torch.addcmul(norm[1], rows.float(), norm[0]).to(dtype)


def _project_keys(
    runner: PassRunner,
    source: int,
    src: Tensor,
    norm: tuple[Tensor, Tensor],
    weights: tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]],
    results: tuple[Tensor, Tensor],
    step: OpPlan,
) -> None:
    """Keys and values [pixels, C] of the whole picture, a tile's rows of its pixels `src` [pixels, C] at a time."""
    (k, v), (keys, values), rows = weights, results, step.grid.rows
    for start in range(0, src.shape[0], rows):
        y = _normalised(runner.near(source, src[start : start + rows]), norm, DTYPES[step.dtype])
        keys[start : start + rows] = F.linear(y, *k)
        values[start : start + rows] = F.linear(y, *v)
