"""Convolutions of frames that are gathered side by side: the framework's, shifted matrix products, a package's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import Tensor

from ..events import Fallback
from ..kernels import kitchen, shifted_gemm
from ..store import interleave
from ..tiling import Tile
from .backends import CONV_3D, KITCHEN, SHIFTED
from .ops import ClipConv

if TYPE_CHECKING:
    from .runner import ClipRunner

Convolve = Callable[[Tile, list[int], list[Tensor] | None], Sequence[Tensor] | Tensor]
"""(tile, conv frames among the run's, output windows to write or add to) -> the result [n, K, h, w] without these."""
Gather = Callable[[Tile, list[int]], Tensor]
"""(tile, conv frames) -> the frames under all their taps, [n + kt - 1, C, h + 2 halo, w + 2 halo]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """One run's convolution of gathered frames."""

    runner: ClipRunner
    op: ClipConv
    backend: str
    dtype: torch.dtype
    parts: Mapping[str, Tensor]
    """Work memory by use."""
    gather: Gather
    ran: Counter[str]
    """Tiles by what they really ran on."""

    def convolver(self) -> Convolve:
        """The convolution by the planned backend, its filter laid out."""
        make = {SHIFTED: self._shifted, KITCHEN: self._kitchen}.get(self.backend, self._framework)()

        def convolve(tile: Tile, frames: list[int], into: list[Tensor] | None) -> Tensor:
            del into
            window = self.gather(tile, frames)
            self.runner.context.observer.mark("compute")
            return make(window, len(frames), tile)

        return convolve

    @property
    def _folds(self) -> bool:
        return self.op.upsample == 2 and self.op.halo > 0

    def _taps(self) -> list[Tensor]:
        """For each frame of the kernel [K, C, kh, kw], or [4 K, C, 2, 2] with an upsampling folded in."""
        weights = self.runner.weights
        if self._folds:
            return weights.folded(self.op, self.dtype)
        return list(weights.kernel(self.op, self.dtype).unbind(2))

    def _framework(self) -> Callable[[Tensor, int, Tile], Tensor]:
        """One 2-D convolution per tap on shifted frames, or the framework's 3-D one."""
        bias = self.runner.weights.bias(self.op, self.dtype)
        if self.backend == CONV_3D:
            kernel = self.runner.weights.kernel(self.op, self.dtype)

            def run(window: Tensor, n: int, tile: Tile) -> Tensor:
                del n, tile
                self.ran[self.backend] += 1
                return F.conv3d(window.transpose(0, 1)[None], kernel, bias)[0].transpose(0, 1)

            return run
        taps = self._taps()

        def run_taps(window: Tensor, n: int, tile: Tile) -> Tensor:
            self.ran[self.backend] += 1
            return self._sum(window, taps, bias, n, tile)

        return run_taps

    def _sum(self, window: Tensor, taps: list[Tensor], bias: Tensor | None, n: int, tile: Tile) -> Tensor:
        """One 2-D convolution per tap, added up."""
        if bias is not None and self._folds:
            bias = bias.repeat(4)
        kt, grow = self.op.kernel[0], self.op.upsample
        y = F.conv2d(window[kt - 1 : kt - 1 + n], taps[-1], bias)
        for k in range(kt - 1):
            y += F.conv2d(window[k : k + n], taps[k])
        if not self._folds:
            # a 1x1 convolution may come before the doubling
            return y if grow == 1 else y.repeat_interleave(2, 2).repeat_interleave(2, 3)
        h, w = tile.rows.size, tile.cols.size
        out = torch.empty_like(y[:, : self.op.out_channels, :1, :1].expand(-1, -1, 2 * h, 2 * w))
        return interleave(y, h, w, shifted=True, out=out)

    def _out(self, n: int, tile: Tile) -> Tensor:
        """The result's memory [n, K, h, w]."""
        h, w = tile.rows.size * self.op.upsample, tile.cols.size * self.op.upsample
        return self.runner.batch_view(self.parts["result"], n, self.op.out_channels, h, w, self.dtype)

    def _shifted(self) -> Callable[[Tensor, int, Tile], Tensor]:
        """One matrix product per tap in space and time."""
        bias, last = self.runner.weights.bias(self.op, self.dtype), self.runner.plan.layout == "channels_last"
        memory, start, filters = self.parts["filter"].view(self.dtype), 0, []
        for tap in self._taps():
            stop = start + tap.numel()
            laid = shifted_gemm.transform_filter(tap, memory[start:stop], fold=self._folds, channels_last=last)
            filters.append(laid)
            start = stop

        def run(window: Tensor, n: int, tile: Tile) -> Tensor:
            self.ran[SHIFTED] += 1
            out, scratch = self._out(n, tile), self.parts["scratch"]
            return shifted_gemm.convolve(window, filters, bias, scratch, out, channels_last=last)

        return run

    def _kitchen(self) -> Callable[[Tensor, int, Tile], Tensor]:
        """The package's 3-D convolution over all frames at once."""
        bias, kernel = self.runner.weights.bias(self.op, self.dtype), self.runner.weights.kernel(self.op, self.dtype)
        weight = kernel.contiguous(memory_format=torch.channels_last_3d)

        def run(window: Tensor, n: int, tile: Tile) -> Tensor:
            out = self._out(n, tile)
            x, target = window.transpose(0, 1)[None], out.transpose(0, 1)[None]
            if why := kitchen.call_refusals(x, weight, bias, None, target):
                self._refused(why)
                return self._sum(window, list(kernel.unbind(2)), bias, n, tile)
            self.ran[KITCHEN] += 1
            kitchen.convolve(x, weight, bias, None, target)
            return out

        return run

    def _refused(self, why: list[str]) -> None:
        """Tell it once per run."""
        if not self.ran["torch"]:
            event = Fallback(kind="backend", where=self.op.name, given=KITCHEN, used="torch", reason="; ".join(why))
            self.runner.context.observer.fallback(event)
        self.ran["torch"] += 1
