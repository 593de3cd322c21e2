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
            _project_keys(src, norm, k, v, keys, values, dtype, step.grid.rows)
        observer.tile_started(i, len(tiles), (tile.rows.size, op.channels), step.dtype)
        observer.mark("stage")
        rows = src[tile.rows.start : tile.rows.stop]
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
    src: Tensor,
    norm: tuple[Tensor, Tensor],
    k: tuple[Tensor, Tensor | None],
    v: tuple[Tensor, Tensor | None],
    keys: Tensor,
    values: Tensor,
    dtype: torch.dtype,
    step: int,
) -> None:
    for start in range(0, src.shape[0], step):
        y = _normalised(src[start : start + step], norm, dtype)
        keys[start : start + step] = F.linear(y, *k)
        values[start : start + step] = F.linear(y, *v)
