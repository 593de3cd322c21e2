"""Attention over frames, clips, or each pixel's past: keys and values first, then queries band by band."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import Tensor

from ..kernels import torch_kernels as kernels
from ..packing import DTYPES, dtype_name
from .ops import ClipAttention
from .stage import stage_frame
from .steps import Page, Run

if TYPE_CHECKING:
    from .runner import ClipRunner

PAST_BYTES = 16 << 20
"""Bytes of scores and keys at a time of an attention over the past."""


class ClipAttentionStep:
    """Runs one attention for the frames of one run."""

    def __init__(self, runner: ClipRunner, run: Run, op: ClipAttention) -> None:
        """Fetches the projections."""
        self._runner, self._run, self._op = runner, run, op
        plan = runner.plan
        self._shape = plan.layouts.frames[op.inputs[0]]
        self._dtype = DTYPES[plan.dtypes.of(op.name)]
        self._observer = runner.context.observer
        self._observer.mark("load")
        self._q, self._k, self._v, self._proj = runner.weights.projections(op, self._dtype)
        self._pages = [tap[0] for tap in run.taps if tap[0] is not None]
        self._macs = plan.backends.macs(run)

    def run(self) -> None:
        """All frames."""
        if self._op.scope == "past":
            self._over_past()
        elif self._op.scope == "clip":
            self._over(self._pages, 0)
        else:
            for o, page in enumerate(self._pages):
                self._over([page], o)

    # -- pieces

    def _normalised(self, page: Page, top: int, stop: int) -> Tensor:
        """Pixels [n, C] of rows [top, stop) of a frame."""
        x = self._runner.inner(page, self._shape)[:, top:stop]
        y = torch.empty((stop - top, self._shape.width, self._op.channels), dtype=self._dtype, device=x.device)
        norm = self._runner.normaliser(self._run.index, page.frame)
        stage_frame(x, y.permute(2, 0, 1), norm, "none", page.frame, self._runner.plan.workers, top)
        return y.view(-1, self._op.channels)

    def _over(self, pages: list[Page], first: int) -> None:
        """Full attention over the pixels of these frames, which are the run's from `first` on."""
        runner, op = self._runner, self._op
        pixels = self._shape.height * self._shape.width
        tokens = pixels * len(pages)
        keys, values = self._memory(tokens)
        bands = runner.plan.backends.bands(self._run.index, len(self._pages))
        self._observer.mark("compute")
        for f, page in enumerate(pages):
            for top, stop in bands:
                y = self._normalised(page, top, stop)
                start = f * pixels + top * self._shape.width
                keys[start : start + y.shape[0]] = F.linear(y, *self._k)
                values[start : start + y.shape[0]] = F.linear(y, *self._v)
        total = len(bands) * len(self._pages)
        for f, page in enumerate(pages):
            for i, (top, stop) in enumerate(bands):
                n = (stop - top) * self._shape.width
                done = (first + f) * len(bands) + i
                self._observer.tile_started(done, total, (n, op.channels), dtype_name(self._dtype))
                self._observer.mark("stage")
                y = self._normalised(page, top, stop)
                self._observer.mark("compute")
                y = kernels.attend(F.linear(y, *self._q), keys, values, runner.plan.attention)
                self._finish(first + f, page, F.linear(y, *self._proj), top, stop)
                runner.context.progress.add(self._macs // total)

    def _finish(self, o: int, page: Page, y: Tensor, top: int, stop: int) -> None:
        """Add the source and write rows [top, stop) of the o-th frame."""
        self._observer.mark("stitch")
        source = self._runner.inner(page, self._shape)[:, top:stop]
        y = y.view(stop - top, self._shape.width, -1).permute(2, 0, 1)
        y = y + source if y.dtype == source.dtype else y.float() + source.float()
        self._runner.store(self._run, o, y, top, 0)

    def _memory(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, C] in the run's work memory."""
        run, start, out = self._run, self._run.work, []
        for nbytes in self._runner.plan.backends.work_parts(run.index, run.stop - run.start).values():
            flat = self._runner.take_bytes(start, nbytes)
            size = tokens * self._op.channels
            out.append(flat[: size * self._dtype.itemsize].view(self._dtype).view(tokens, self._op.channels))
            start += nbytes
        return out[0], out[1]

    # -- the past of each pixel

    def _over_past(self) -> None:
        """Each pixel of a frame attends to itself and to its past; keys and values of the whole clip are kept."""
        runner, op, shape = self._runner, self._op, self._shape
        pixels, total = shape.height * shape.width, runner.driver.counts[op.inputs[0]]
        size = total * pixels * op.channels
        flat = runner.take_bytes(runner.driver.past[self._run.index], 2 * size * self._dtype.itemsize)
        keys, values = flat[: 2 * size * self._dtype.itemsize].view(self._dtype).view(2, total, pixels, op.channels)
        for o, page in enumerate(self._pages):
            n = page.frame + 1
            self._observer.tile_started(o, len(self._pages), (pixels, op.channels), dtype_name(self._dtype))
            self._observer.mark("compute")
            y = self._normalised(page, 0, shape.height)
            keys[page.frame], values[page.frame] = F.linear(y, *self._k), F.linear(y, *self._v)
            q = F.linear(y, *self._q)
            step = max(1, PAST_BYTES // (n * op.channels * self._dtype.itemsize))
            parts = [
                self._attend_past(q[a : a + step], keys[:n, a : a + step], values[:n, a : a + step])
                for a in range(0, pixels, step)
            ]
            self._finish(o, page, F.linear(torch.cat(parts), *self._proj), 0, shape.height)
            runner.context.progress.add(self._macs // len(self._pages))

    def _attend_past(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [p, C] against k, v [n, p, C]."""
        scores = torch.bmm(k.transpose(0, 1), (q * q.shape[1] ** -0.5)[:, :, None])
        weights = torch.softmax(scores, 1, dtype=torch.float32).to(v.dtype)
        return torch.bmm(weights.transpose(1, 2), v.transpose(0, 1))[:, 0]
