"""One run of a convolution of frames: stage what is new, convolve tile by tile, finish, write."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import upsample, winograd_frames
from ..packing import DTYPES
from ..tiling import Tile
from .backends import WINOGRAD
from .conv_kernels import Convolve, Gathered
from .layout import FrameShape, stored_border
from .ops import ClipConv
from .stage import activate_, fill_border, in_columns, stage_frame
from .steps import Page, Run
from .unpack import first_alone, skip_frame, unpack

if TYPE_CHECKING:
    from .runner import ClipRunner


class ClipConvStep:
    """Runs one convolution for the frames of one run."""

    def __init__(self, runner: ClipRunner, run: Run, op: ClipConv) -> None:
        """Nothing runs yet."""
        self._runner, self._run, self._op = runner, run, op
        plan = runner.plan
        self._plan = plan.backends.plans[run.index]
        self._mode = plan.layouts.modes[run.index]
        self._source = plan.layouts.staged[run.index] if self._mode == "copies" else plan.layouts.frames[op.inputs[0]]
        self._dtype = DTYPES[plan.dtypes.of(op.name)]
        self._observer = runner.context.observer
        self._parts = self._work_parts()
        self._dropped = runner.driver.dropped(run.index)
        self._ran: Counter[str] = Counter()

    def _work_parts(self) -> dict[str, Tensor]:
        """The run's work memory, by use."""
        run, start, parts = self._run, self._run.work, {}
        for name, nbytes in self._runner.plan.backends.work_parts(run.index, run.stop - run.start).items():
            parts[name] = self._runner.take_bytes(start, nbytes)
            start += nbytes
        return parts

    def run(self) -> str:
        """All tiles, in order; the backends that ran them."""
        runner, run, op = self._runner, self._run, self._op
        self._stage()
        frames = [i for i in range(run.stop - run.start) if not self._is_bypassed(i)]
        convolve = self._convolver() if frames else None
        tiles = runner.plan.backends.grid(run.index, run.stop - run.start).tiles()
        dtype = runner.plan.dtypes.of(op.name)
        macs = runner.plan.backends.macs(run)
        for i, tile in enumerate(tiles):
            n = run.stop - run.start
            shape = (n, op.in_channels, tile.rows.size + 2 * op.halo, tile.cols.size + 2 * op.halo)
            self._observer.tile_started(i, len(tiles), shape, dtype)
            if convolve is not None:
                self._observer.conv_requested(
                    runner.plan.backends.conv_shape(run.index, len(frames), tile.rows.size, tile.cols.size)
                )
                self._tile(tile, frames, convolve)
            if len(frames) < n:
                self._bypass(tile)
            runner.context.progress.add(macs // len(tiles))
        return "+".join(sorted(self._ran)) or self._plan.backend

    def _is_bypassed(self, i: int) -> bool:
        return self._op.first_frame == "bypass" and self._run.start + i == 0

    # -- staging

    def _stage(self) -> None:
        """Normalise the frames that the taps see for the first time, and lay their border."""
        runner, run, op = self._runner, self._run, self._op
        if not run.stage:
            return
        self._observer.mark("stage")
        stored = runner.plan.layouts.frames[op.inputs[0]]
        for source, target in run.stage:
            if self._mode == "copies":
                runner.take(target, self._source)
            x, page = runner.inner(source, stored), runner.page(target, self._source)
            if self._mode != "frames":
                norm = runner.normaliser(run.index, source.frame)
                stage_frame(x, runner.inner(target, self._source), norm, op.act, source.frame, runner.plan.workers)
            if op.halo:
                fill_border(page, self._source.halo, stored_border(op))

    def _window(self, page: Page, tile: Tile) -> Tensor:
        """[C, h + 2 halo, w + 2 halo] of a staged frame."""
        off, halo = self._source.halo, self._op.halo
        whole = self._runner.page(page, self._source)
        return whole[
            :,
            tile.rows.start + off - halo : tile.rows.stop + off + halo,
            tile.cols.start + off - halo : tile.cols.stop + off + halo,
        ]

    # -- kernels

    def _convolver(self) -> Convolve:
        self._observer.mark("load")
        if self._plan.backend == WINOGRAD:
            return self._winograd()
        return Gathered(
            runner=self._runner, op=self._op, backend=self._plan.backend, dtype=self._dtype, parts=self._parts,
            gather=self._gather, ran=self._ran,
        ).convolver()  # fmt: skip

    def _winograd(self) -> Convolve:
        """Sums and matrix products: frames are read where they lie."""
        runner, run, op, workers = self._runner, self._run, self._op, self._runner.plan.workers
        kernel, bias = runner.weights.kernel(op, torch.float32), runner.weights.bias(op, torch.float32)
        memory, scratch = self._parts["filter"].view(torch.float32), self._parts["scratch"].view(torch.float32)
        grow = op.upsample
        if grow == 2:
            filters = upsample.transform_frames_filter(kernel, memory, workers)
        else:
            filters = winograd_frames.transform_filter(kernel, memory, workers)

        def convolve(tile: Tile, frames: list[int], into: list[Tensor] | None) -> list[Tensor]:
            self._ran[WINOGRAD] += 1
            pages = list(dict.fromkeys(p for i in frames for p in run.taps[i] if p is not None))
            at = {page: j for j, page in enumerate(pages)}
            taps = [tuple(None if p is None else at[p] for p in run.taps[i]) for i in frames]
            windows = [self._window(page, tile) for page in pages]
            out = into
            if out is None:
                h, w = tile.rows.size * grow, tile.cols.size * grow
                out = list(runner.batch_view(self._parts["result"], len(frames), op.out_channels, h, w, torch.float32))
            if grow == 2:
                upsample.convolve_frames(windows, taps, filters, bias, scratch, out, workers)
            else:
                adds = into is not None and self._adds()
                winograd_frames.convolve(windows, taps, filters, bias, scratch, out, workers, accumulate=adds)
            return out

        return convolve

    def _gather(self, tile: Tile, frames: list[int]) -> Tensor:
        """The frames under all taps side by side, [n + kt - 1, C, h + 2 halo, w + 2 halo]."""
        runner, run, op = self._runner, self._run, self._op
        self._observer.mark("stage")
        n, kt, halo = len(frames), op.kernel[0], op.halo
        h, w = tile.rows.size + 2 * halo, tile.cols.size + 2 * halo
        window = runner.batch_view(self._parts["window"], n + kt - 1, op.in_channels, h, w, self._dtype)
        for slot in range(n + kt - 1):
            i = min(slot, n - 1)
            page = run.taps[frames[i]][slot - i]
            if page is None:
                window[slot].zero_()
            elif self._mode == "tiles":
                norm = in_columns(runner.normaliser(run.index, page.frame), tile.cols)
                stage_frame(
                    self._window(page, tile), window[slot], norm, op.act, page.frame, runner.plan.workers,
                    tile.rows.start,
                )  # fmt: skip
            else:
                window[slot].copy_(self._window(page, tile))
        return window

    # -- tiles

    def _adds(self) -> bool:
        return bool(self._run.over_skip) and self._run.over_skip[0]

    def _tile(self, tile: Tile, frames: list[int], convolve: Convolve) -> None:
        """Compute one tile of all the run's frames and write it."""
        op, run = self._op, self._run
        same = len(set(run.over_skip)) <= 1 and len(run.over_skip) == len(frames)
        self._observer.mark("compute")
        if self._plan.direct and tile.is_whole_new and same:
            self._tile_direct(tile, frames, convolve)
            return
        results = convolve(tile, frames, None)
        self._observer.mark("stitch")
        grow = op.upsample
        rows, cols = tile.new_rows, tile.new_cols
        top, left = (rows.start - tile.rows.start) * grow, (cols.start - tile.cols.start) * grow
        for i, y in zip(frames, results, strict=True):
            self._finish(i, y[:, top:, left:], tile)

    def _tile_direct(self, tile: Tile, frames: list[int], convolve: Convolve) -> None:
        """The kernel writes into the output frames, or adds to the skips whose place they take."""
        runner, run, op = self._runner, self._run, self._op
        shape = runner.plan.layouts.frames[op.output]
        grow = op.upsample
        row, col = tile.rows.start * grow, tile.cols.start * grow
        height, width = tile.rows.size * grow, tile.cols.size * grow
        windows = [runner.inner(page, shape)[:, row : row + height, col : col + width] for page in run.outs]
        convolve(tile, frames, windows)
        self._observer.mark("stitch")
        for o, window in enumerate(windows):
            if op.skip is not None and not run.over_skip[o]:
                window += self._skip_window(o, tile)
            runner.count(op.output, run.first_out + o, window)

    def _finish(self, i: int, y: Tensor, tile: Tile) -> None:
        """Everything after the convolution for conv frame i of the run: y [K, h, w] under the tile's new elements."""
        op, runner = self._op, self._runner
        c = self._run.start + i
        if op.gain is not None:
            y = y.float() * torch.sigmoid(runner.weights.vector(op.gain).reshape(()))
        if op.noise is not None:
            y = self._with_noise(y, tile)
        t, alone = op.frames_per_conv, op.first_frame == "single" and c == 0
        if op.unpack is None:
            parts = y[None]
        elif alone:
            parts = unpack(y, first_alone(op.unpack))[:, : op.out_channels // (t * op.unpack.s**2)]
        else:
            parts = unpack(y, op.unpack)
        for phase in range(t):
            o = c * t + phase - self._dropped - self._run.first_out
            if o >= 0:
                self._finish_frame(o, parts[0 if alone else phase], tile)

    def _finish_frame(self, o: int, y: Tensor, tile: Tile) -> None:
        """Skip, activation and range for the o-th output frame of the run."""
        op = self._op
        if op.skip is not None:
            added = self._skip_window(o, tile)
            y = y + added if y.dtype == added.dtype else y.float() + added.float()
        elif op.post_act != "none" or op.out_gain != 1.0 or op.out_offset != 0.0:
            y = y.clone()
        y = activate_(y, op.post_act)
        if op.out_gain != 1.0 or op.out_offset != 0.0:
            y = y.mul_(op.out_gain).add_(op.out_offset)
        grow = op.upsample * (op.unpack.s if op.unpack else 1)
        self._runner.store(self._run, o, y, tile.new_rows.start * grow, tile.new_cols.start * grow)

    def _skip_window(self, o: int, tile: Tile) -> Tensor:
        """What the o-th output frame is added of the skipped value, under the tile's new elements."""
        op, run, runner = self._op, self._run, self._runner
        assert op.skip is not None
        shape = runner.plan.layouts.frames[op.inputs[1]]
        page = run.skips[o]
        # pixels of the skipped value per pixel that the kernel reads
        ratio = self._ratio(shape)
        rows, cols = tile.new_rows.scaled(ratio), tile.new_cols.scaled(ratio)
        x = runner.inner(page, shape)[:, rows.start : rows.stop, cols.start : cols.stop]
        phase, alone = 0, False
        if op.skip.unpack is not None:
            t = op.skip.unpack.t
            lead = t * runner.driver.counts[op.inputs[1]] - runner.driver.counts[op.output]
            raw = run.first_out + o + lead
            phase, alone = raw % t, op.first_frame == "single" and page.frame == 0
        return skip_frame(x, op.skip, op, phase, alone=alone)

    def _ratio(self, shape: FrameShape) -> int:
        return shape.height // self._runner.plan.layouts.frames[self._op.inputs[0]].height

    def _with_noise(self, y: Tensor, tile: Tile) -> Tensor:
        op, runner = self._op, self._runner
        assert op.noise is not None
        shape, grow = self._source, op.upsample
        drawn = runner.noise.map(self._run.index, shape.height * grow, shape.width * grow)
        rows, cols = tile.new_rows.scaled(grow), tile.new_cols.scaled(grow)
        part = drawn[rows.start : rows.stop, cols.start : cols.stop].float()
        return y.float() + part * runner.weights.vector(op.noise).reshape(-1, 1, 1)

    def _bypass(self, tile: Tile) -> None:
        """The first frame passes the convolution as it is stored."""
        page = self._run.taps[0][-1]
        assert page is not None
        x = self._runner.inner(page, self._runner.plan.layouts.frames[self._op.inputs[0]])
        rows, cols = tile.new_rows, tile.new_cols
        self._finish_frame(0, x[:, rows.start : rows.stop, cols.start : cols.stop], tile)
