"""Staging: the window of a tile with its halo, normalised, activated and padded, in a reused buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .costs import WIDEN_BYTES, needs_staging
from .kernels import torch_kernels as kernels
from .packing import DTYPES
from .plan import OpPlan
from .program import Conv
from .tiling import Tile

if TYPE_CHECKING:
    from .executor import PassRunner


class Stager:
    """Hands out staged tiles of one convolution, carrying halo rows from a strip to the next."""

    def __init__(self, runner: PassRunner, step: OpPlan, op: Conv) -> None:
        """Normalisation is known by now: the input's statistics are complete."""
        self._runner, self._step, self._op = runner, step, op
        self._src = runner.value(op.inputs[0])
        self._dtype = DTYPES[step.dtype]
        self._staged = needs_staging(op, runner.context.plan.dtypes) or self._src.dtype != self._dtype
        self._previous: tuple[Tile, Tensor] | None = None
        if not self._staged:
            return
        runner.context.observer.mark("stage")
        self._affine = self._norm_affine()
        b, c, h, w = self.shape(step.grid.tiles()[0])
        self._flat = runner.buffer(f"stage{step.index}", b * c * h * w * self._dtype.itemsize)
        direct = self._dtype == self._src.dtype == torch.float32
        wide = max(WIDEN_BYTES, b * c * w * 4)
        self._rows = None if direct else runner.buffer(f"rows{step.index}", wide).view(torch.float32)

    def _norm_affine(self) -> kernels.Affine | None:
        norm, runner = self._op.norm, self._runner
        if norm is None:
            return None
        device, packed = runner.context.device, runner.context.packed
        weight, bias = (packed.vector(name, torch.float32, device) for name in (norm.weight, norm.bias))
        assert weight is not None
        assert bias is not None
        return runner.moments[self._op.inputs[0]].affine(norm, weight, bias)

    def shape(self, tile: Tile) -> tuple[int, int, int, int]:
        """[B, C, H, W] handed to the kernel for a tile."""
        halo = self._op.halo
        return tile.images.size, self._op.in_channels, tile.rows.size + 2 * halo, tile.cols.size + 2 * halo

    def stage(self, tile: Tile) -> Tensor:
        """The tile with its halo, normalised, activated and padded."""
        src = self._src[tile.images.start : tile.images.stop]
        if not self._staged:
            return src[:, :, tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop]
        affine = self._affine
        if affine is not None:
            affine = affine[0][tile.images.start : tile.images.stop], affine[1][tile.images.start : tile.images.stop]
        halo, b_c_h_w = self._op.halo, self.shape(tile)
        if self._op.upsample == 2 and not self._step.fold:
            out = self._runner.map_view(self._flat, *b_c_h_w, self._dtype)
            kernels.stage_upsampled(src, tile, halo, affine, self._op.act, out)
            return out
        carried = self._carried(tile, halo)
        out = self._runner.map_view(self._flat, *b_c_h_w, self._dtype)
        if carried is not None:
            out[:, :, : 2 * halo].copy_(carried)
        kernels.stage(src, tile, halo, affine, self._op.act, out, self._rows, 0 if carried is None else 2 * halo)
        self._previous = tile, out
        return out

    def _carried(self, tile: Tile, halo: int) -> Tensor | None:
        """The rows this strip shares with the one above, if that was staged just before."""
        if self._previous is None or halo == 0 or not self._step.grid.is_strips:
            return None
        before, staged = self._previous
        if before.images != tile.images or before.rows.stop != tile.rows.start:
            return None
        # both strips use the same memory, so the rows are set aside first
        return staged[:, :, staged.shape[2] - 2 * halo :].clone()
