"""The convolution of one staged tile by each backend, in the memory that was planned for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .costs import kernel_buffers
from .events import Fallback
from .kernels import kitchen, shifted_gemm, upsample, winograd
from .kernels import torch_kernels as kernels
from .plan import OpPlan
from .program import Conv
from .tiling import Tile

if TYPE_CHECKING:
    from .executor import PassRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """The result of a tile."""

    y: Tensor
    """[B, K, h, w], four phases side by side where the step is `folded`."""
    has_residual: bool = False
    """The residual is in it."""
    is_home: bool = False
    """It lies in the value's home."""


Convolve = Callable[[Tensor, Tile], Computed]


class Convolver:
    """Convolves the tiles of one step and counts what they ran on."""

    def __init__(self, runner: PassRunner, step: OpPlan, op: Conv, weight: Tensor, bias: Tensor | None) -> None:
        """Lays the filter out; `bias` is that of a folded weight where the step has one."""
        self._runner, self._step, self._op, self._weight, self._bias = runner, step, op, weight, bias
        self.ran: Counter[str] = Counter()
        sizes = kernel_buffers(step, op, runner.context.plan.workers)
        names = (f"filter{step.index}", f"block{step.index}", f"result{step.index}")
        self._filter, self._block, self._result = (
            runner.buffer(name, size) if size else None for name, size in zip(names, sizes, strict=True)
        )
        self._convolve = self._of_backend()

    def __call__(self, x: Tensor, tile: Tile) -> Computed:
        """The valid convolution of a staged tile."""
        return self._convolve(x, tile)

    def _of_backend(self) -> Convolve:
        make = {"winograd": self._winograd, "shifted_gemm": self._shifted, "kitchen": self._kitchen}
        return make.get(self._step.backend, self._torch)()

    def _torch(self) -> Convolve:
        def run(x: Tensor, tile: Tile) -> Computed:
            del tile
            self.ran["torch"] += 1
            return Computed(y=kernels.convolve(x, self._weight, self._bias))

        return run

    def _out(self, x: Tensor, channels: int, grow: int, dtype: torch.dtype) -> Tensor:
        """The result's memory for a staged tile with a halo of one, in the plan's layout."""
        assert self._result is not None
        b, _, h, w = x.shape
        return self._runner.map_view(self._result, b, channels, (h - 2) * grow, (w - 2) * grow, dtype)

    def _winograd(self) -> Convolve:
        assert self._filter is not None
        assert self._block is not None
        workers, fold, op = self._runner.context.plan.workers, self._step.fold, self._op
        transform = upsample.transform_filter if fold else winograd.transform_filter
        multiply = upsample.convolve if fold else winograd.convolve
        filters = transform(self._weight, self._filter.view(torch.float32), workers)
        block, grow = self._block.view(torch.float32), 2 if fold else 1

        def run(x: Tensor, tile: Tile) -> Computed:
            del tile
            self.ran["winograd"] += 1
            out = self._out(x, op.out_channels, grow, torch.float32)
            return Computed(y=multiply(x, filters, self._bias, block, out, workers))

        return run

    def _shifted(self) -> Convolve:
        assert self._filter is not None
        assert self._block is not None
        op, fold, dtype, block = self._op, self._step.fold, self._weight.dtype, self._block
        last = self._runner.context.plan.layout == "channels_last"
        memory = self._filter.view(dtype)
        filters = (shifted_gemm.transform_filter(self._weight, memory, fold=fold, channels_last=last),)
        bias = self._bias if self._bias is None else self._bias[: op.out_channels]

        def run(x: Tensor, tile: Tile) -> Computed:
            del tile
            self.ran["shifted_gemm"] += 1
            out = self._out(x, op.out_channels, 2 if fold else 1, dtype)
            return Computed(y=shifted_gemm.convolve(x, filters, bias, block, out, channels_last=last))

        return run

    # -- kitchen

    def _kitchen(self) -> Convolve:
        weight = self._weight.contiguous(memory_format=torch.channels_last).unsqueeze(2)

        def run(x: Tensor, tile: Tile) -> Computed:
            residual = self._residual(tile, x.dtype) if self._step.adds_residual else None
            out = self._home(tile) if self._step.writes_home else self._phases(x)
            added = None if residual is None else residual.unsqueeze(2)
            clip, target = x.unsqueeze(2), out.unsqueeze(2)
            if why := kitchen.call_refusals(clip, weight, self._bias, added, target):
                self._refused(why)
                return Computed(y=kernels.convolve(x, self._weight, self._bias))
            self.ran["kitchen"] += 1
            kitchen.convolve(clip, weight, self._bias, added, target)
            return Computed(y=out, has_residual=residual is not None, is_home=self._step.writes_home)

        return run

    def _phases(self, x: Tensor) -> Tensor:
        assert self._result is not None
        k, _, edge, _ = self._weight.shape
        b, _, h, w = x.shape
        return self._runner.map_view(self._result, b, k, h - edge + 1, w - edge + 1, x.dtype)

    def _home(self, tile: Tile) -> Tensor:
        whole = self._runner.value(self._op.output)
        images, rows, cols = tile.images, tile.rows, tile.cols
        return whole[images.start : images.stop, :, rows.start : rows.stop, cols.start : cols.stop]

    def _residual(self, tile: Tile, dtype: torch.dtype) -> Tensor | None:
        """What is added under the whole tile; None where it lies in another dtype than planned."""
        assert self._op.residual is not None
        whole = self._runner.value(self._op.residual)
        images, rows, cols = tile.images, tile.rows, tile.cols
        if whole.dtype != dtype:
            return None
        return whole[images.start : images.stop, :, rows.start : rows.stop, cols.start : cols.stop]

    def _refused(self, why: list[str]) -> None:
        if not self.ran["torch"]:
            self._runner.context.observer.fallback(
                Fallback(
                    kind="backend", where=self._op.name, given="kitchen", used="torch", reason="; ".join(why)
                )
            )  # fmt: skip
        self.ran["torch"] += 1
