"""Staging: the window of a tile with its halo, normalised, activated and padded, in a reused buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .costs import WIDEN_BYTES, needs_staging
from .kernels import kitchen
from .kernels import torch_kernels as kernels
from .offload import fetch_window
from .packing import DTYPES
from .plan import OpPlan
from .program import Conv, Norm
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
        first = step.grid.tiles()[0]
        b, c, h, w = self.shape(first)
        self._flat = runner.buffer(f"stage{step.index}", b * c * h * w * self._dtype.itemsize)
        self._by_package = step.staging == "kitchen" and kitchen.can_stage(
            self._src, runner.map_view(self._flat, b, c, h, w, self._dtype)
        )
        self._given = self._norm_rows() if self._by_package else None
        if self._by_package:
            return
        self._affine = self._norm_affine()
        direct = self._dtype == self._src.dtype == torch.float32
        wide = max(WIDEN_BYTES, b * c * w * 4)
        self._rows = None if direct else runner.buffer(f"rows{step.index}", wide).view(torch.float32)

    def _norm_affine(self) -> kernels.Affine | None:
        norm = self._op.norm
        if norm is None:
            return None
        return self._runner.moments[self._op.inputs[0]].affine(norm, *self._norm_vectors(norm))

    def _norm_rows(self) -> tuple[Norm, Tensor, Tensor, Tensor] | None:
        """The norm as a package takes it: its vectors and the statistics of the whole maps."""
        norm = self._op.norm
        if norm is None:
            return None
        return norm, *self._norm_vectors(norm), self._runner.moments[self._op.inputs[0]].rows(norm)

    def _norm_vectors(self, norm: Norm) -> tuple[Tensor, Tensor]:
        context = self._runner.context
        weight, bias = (
            context.packed.vector(name, torch.float32, context.device) for name in (norm.weight, norm.bias)
        )
        assert weight is not None
        assert bias is not None
        return weight, bias

    def shape(self, tile: Tile) -> tuple[int, int, int, int]:
        """[B, C, H, W] handed to the kernel for a tile."""
        halo = self._op.halo
        return tile.images.size, self._op.in_channels, tile.rows.size + 2 * halo, tile.cols.size + 2 * halo

    def stage(self, tile: Tile) -> Tensor:
        """The tile with its halo, normalised, activated and padded."""
        src = self._src[tile.images.start : tile.images.stop]
        if not self._staged:
            part = src[:, :, tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop]
            return self._runner.near(self._op.inputs[0], part)
        if self._by_package:
            return self._stage_by_package(src, tile)
        affine = self._affine
        if affine is not None:
            affine = affine[0][tile.images.start : tile.images.stop], affine[1][tile.images.start : tile.images.stop]
        halo, b_c_h_w = self._op.halo, self.shape(tile)
        if self._op.upsample == 2 and not self._step.fold:
            src, seen = self._near(src, tile, 0, grow=2)
            out = self._runner.map_view(self._flat, *b_c_h_w, self._dtype)
            kernels.stage_upsampled(src, seen, halo, affine, self._op.act, out)
            return out
        carried = self._carried(tile, halo)
        n_carried = 0 if carried is None else 2 * halo
        src, seen = self._near(src, tile, n_carried)
        out = self._runner.map_view(self._flat, *b_c_h_w, self._dtype)
        if carried is not None:
            out[:, :, : 2 * halo].copy_(carried)
        kernels.stage(src, seen, halo, affine, self._op.act, out, self._rows, n_carried)
        self._previous = tile, out
        return out

    def _stage_by_package(self, src: Tensor, tile: Tile) -> Tensor:
        out, given = self._runner.map_view(self._flat, *self.shape(tile), self._dtype), self._given
        if given is not None:
            given = (*given[:3], given[3][tile.images.start : tile.images.stop])
        kitchen.stage(src, tile, self._op.halo, given, self._op.act, out)
        return out

    def _near(self, src: Tensor, tile: Tile, carried: int, grow: int = 1) -> tuple[Tensor, Tile]:
        """The source where kernels can read it, and the tile in it: all of it, or what the tile needs of the host's."""
        runner = self._runner
        if not runner.is_far(self._op.inputs[0]):
            return src, tile
        runner.context.observer.mark("transfer")
        found = fetch_window(src, tile, self._op.halo, carried, grow, runner.context.device)
        runner.context.observer.mark("stage")
        return found

    def _carried(self, tile: Tile, halo: int) -> Tensor | None:
        """The rows this strip shares with the one above, if that was staged just before."""
        if self._previous is None or halo == 0 or not self._step.grid.is_strips:
            return None
        before, staged = self._previous
        if before.images != tile.images or before.rows.stop != tile.rows.start:
            return None
        # both strips use the same memory, so the rows are set aside first
        return staged[:, :, staged.shape[2] - 2 * halo :].clone()
