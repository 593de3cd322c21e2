"""One convolution of a pass: stage each tile, convolve it, finish it, write it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .convolvers import Computed, Convolver
from .costs import phase_bytes
from .events import ConvShape
from .kernels import torch_kernels as kernels
from .packing import DTYPES
from .plan import OpPlan
from .program import Conv
from .staging import Stager
from .store import interleave
from .tiling import Tile

if TYPE_CHECKING:
    from .executor import PassRunner

Packed = tuple[Tensor, Tensor | None]


class ConvStep:
    """Runs a convolution, and the shortcut that shares its sweep where the plan narrows its input in place."""

    def __init__(self, runner: PassRunner, step: OpPlan, op: Conv) -> None:
        """Nothing runs yet."""
        self._runner, self._step, self._op = runner, step, op
        self._context = runner.context
        self._phases: Tensor | None = None

    def run(self) -> str:
        """All tiles, in order; the backends that ran them."""
        step, op, observer = self._step, self._op, self._context.observer
        observer.mark("load")
        weight, bias = self._weights(op, fold=step.folds_weight)
        partner = self._weights(step.partner, fold=False) if step.partner is not None else None
        stager = Stager(self._runner, step, op)
        convolve = Convolver(self._runner, step, op, weight, bias)
        if nbytes := phase_bytes(step, op):
            self._phases = self._runner.buffer(f"phases{step.index}", nbytes)
        tiles = step.grid.tiles()
        for i, tile in enumerate(tiles):
            observer.tile_started(i, len(tiles), stager.shape(tile), step.dtype)
            observer.mark("stage")
            staged = stager.stage(tile)
            observer.mark("compute")
            self._request(staged, weight)
            done = convolve(staged, tile)
            if partner is not None and step.partner is not None:
                beside = self._shortcut(step.partner, tile, partner)
                observer.mark("stitch")
                self._finish(step.partner, tile, Computed(y=beside), fold=False, folded=False)
                del beside
            observer.mark("stitch")
            self._finish(op, tile, done, fold=step.fold, folded=step.folded)
            del done  # or it would live through the next tile's convolution
            self._context.progress.add(step.macs // len(tiles))
        return "+".join(sorted(convolve.ran))

    def _weights(self, op: Conv, *, fold: bool) -> Packed:
        context = self._context
        return context.packed.conv(
            op,
            fold=fold,
            dtype=DTYPES[self._step.dtype],
            device=context.device,
            layout=context.plan.layout,
            keep=context.plan.cache_weights,
            observer=context.observer,
        )

    def _request(self, x: Tensor, weight: Tensor) -> None:
        layout, dtype = self._context.plan.layout, self._step.dtype
        shape = ConvShape(input=tuple(x.shape), weight=tuple(weight.shape), dtype=dtype, layout=layout)
        self._context.observer.conv_requested(shape)

    def _shortcut(self, op: Conv, tile: Tile, weights: Packed) -> Tensor:
        """The 1x1 convolution of the raw input under a strip."""
        images, rows = tile.images, tile.rows
        src = self._runner.value(op.inputs[0])[images.start : images.stop, :, rows.start : rows.stop]
        src = self._runner.near(op.inputs[0], src).to(DTYPES[self._step.dtype])
        self._request(src, weights[0])
        return kernels.convolve(src, *weights)

    # -- finishing

    def _finish(self, op: Conv, tile: Tile, done: Computed, *, fold: bool, folded: bool) -> None:
        """Residual, activation, depth-to-space, and into the value's home or the picture.

        `fold`: the result has twice the tile's resolution; `folded`: it still lies in four phases.
        """
        rows, cols, y = tile.new_rows, tile.new_cols, done.y
        if not tile.is_whole_new:
            grow = 2 if fold and not folded else 1
            y = y[:, :, (rows.start - tile.rows.start) * grow :, (cols.start - tile.cols.start) * grow :]
        if folded:
            y = self._interleaved(op, y, tile, shifted=True)
        if op.residual is not None and not done.has_residual:
            y = self._add_residual(op, tile, y)
        y = kernels.activate_(y, op.post_act)
        if op.depth_to_space == 2:
            y = self._interleaved(op, y, tile, shifted=False)
        if op.gain != 1.0 or op.offset != 0.0:
            y = y.mul_(op.gain).add_(op.offset)
        if done.is_home:
            self._runner.written(op.output, y, tile.images.start)
            return
        grow = op.depth_to_space * (2 if fold else 1)
        self._runner.store(op.output, y, tile.images.start, rows.start * grow, cols.start * grow)

    def _interleaved(self, op: Conv, y: Tensor, tile: Tile, *, shifted: bool) -> Tensor:
        """Four phases side by side in the channels become a map of twice the size."""
        h, w, channels = tile.new_rows.size, tile.new_cols.size, self._runner.program.values[op.output].channels
        nbytes = y.shape[0] * channels * 4 * h * w * y.element_size()
        memory = self._phases
        if memory is None or memory.numel() < nbytes:  # a sum in a wider dtype than was planned for
            memory = torch.empty(nbytes, dtype=torch.uint8, device=y.device)
        out = self._runner.map_view(memory, y.shape[0], channels, 2 * h, 2 * w, y.dtype)
        return interleave(y, h, w, shifted=shifted, out=out)

    def _add_residual(self, op: Conv, tile: Tile, y: Tensor) -> Tensor:
        assert op.residual is not None
        images, rows, cols = tile.images, tile.new_rows, tile.new_cols
        whole = self._runner.value(op.residual)
        res = whole[images.start : images.stop, :, rows.start : rows.stop, cols.start : cols.stop]
        res = self._runner.near(op.residual, res)
        if op.residual_repeat > 1:
            res = res.repeat_interleave(op.residual_repeat, 1)
        if y.dtype == res.dtype:
            return y.add_(res)
        # a wider stream takes the sum unrounded
        self._context.observer.converted(y.numel() * 4)
        return y.float().add_(res)
