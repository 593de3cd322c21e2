"""Runs one clip: feeds latent frames, runs ops as the driver orders them, writes frames as they finish."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import NonFiniteError
from ..events import DecodeObserver, Fallback, OpReport
from ..executor import Progress, RestartDecode
from ..heap import trim_heap
from ..kernels import torch_kernels as kernels
from ..moments import Moments, tile_moments
from ..packing import DTYPES, PackedWeights
from ..pool import Slab
from ..store import reduce_finite
from . import noise
from .attention import ClipAttentionStep
from .consistency import ConsistencyMeter
from .conv import ClipConvStep
from .driver import Driver
from .frames import scope_of
from .layout import FrameShape, norm_of
from .ops import ClipAttention, ClipConv, ClipNorm, ClipScale
from .plan import ClipPlan, reads_latent
from .sink import FrameSink
from .stage import Normaliser, activate_, copy_frame
from .steps import Feed, Keep, Page, Run
from .weights import ClipWeights

ScopeKey = tuple[int, int, int, int]
"""(value, frames per scope, offset, number of the scope)."""


@dataclass(slots=True, kw_only=True)
class ClipContext:
    """What a clip needs besides its plan."""

    plan: ClipPlan
    device: torch.device
    packed: PackedWeights
    observer: DecodeObserver
    progress: Progress
    check_each_op: bool
    """Look at every op's finiteness at once (CPU); otherwise before frames are handed on, to synchronise less."""
    on_widened: Callable[[str], None]
    """Remembers an op that needed a wider dtype."""
    noise_dtype: torch.dtype
    """Dtype that the decoder's own noise is drawn in."""
    measure: bool
    """Compare the frames around chunk boundaries."""


class ClipRunner:
    """State of one clip: views of its frames, statistics, flags."""

    def __init__(
        self,
        context: ClipContext,
        slab: Slab,
        sink: FrameSink,
        clip: int,
        next_latent: Callable[[int], Tensor],
    ) -> None:
        """`next_latent(chunk)` gives the latent frames [n, C, H, W] of a chunk in the stored dtype."""
        self.context, self.plan, self._slab, self._sink = context, context.plan, slab, sink
        self.program = context.plan.program
        self._clip, self._next_latent = clip, next_latent
        self.weights = ClipWeights(
            context.packed, context.device, context.observer, keep=context.plan.cache_weights
        )
        self.moments: dict[ScopeKey, Moments] = {}
        self._norms = self._norms_of_values()
        self._flags: list[tuple[Run, Tensor]] = []
        self._constants: dict[int, tuple[Tensor | None, Tensor | None]] = {}
        self.noise = noise.NoiseMaps(context.noise_dtype, context.device)
        self._keeps_latent = reads_latent(self.program)
        self.latent: list[Tensor] = []
        """Latent frames [C, H, W], where norms read them."""
        self.driver: Driver = context.plan.driver()
        self._meter = ConsistencyMeter() if context.measure and context.plan.summary.boundaries else None
        self._run_flags: list[Tensor] = []

    # -- the clip

    def run(self) -> None:
        """Run every step. RestartDecode, NonFiniteError, or whatever the observer raises."""
        n_ops, level = len(self.program.ops), None
        observer = self.context.observer
        for step in self.driver.steps():
            if isinstance(step, Feed):
                self._feed(step)
                continue
            if isinstance(step, Keep):
                self._keep(step)
                continue
            op = self.program.ops[step.index]
            before, level = level, self.program.values[op.output].scale
            if level != before and self.context.device.type == "cpu":
                trim_heap()  # results had other sizes until now, and their freed memory fits nothing that follows
            n_tiles = self.plan.backends.n_tiles(step.index, step.stop - step.start)
            observer.op_started(step.index, n_ops, op.name, n_tiles)
            ran_on = self._run_op(step)
            observer.op_done(self._report(step, n_tiles, ran_on))
        self._check_flags()
        if self._meter is not None:
            for frame, smoothness in self._meter.scores(self.plan.summary.boundaries):
                observer.boundary(self._clip, frame, smoothness)

    def _feed(self, step: Feed) -> None:
        observer, shape, size = self.context.observer, self.plan.layouts.frames[0], self.plan.chunk_lat
        pages, n_chunks = iter(step.pages), self.plan.summary.n_chunks
        # a feed holds several chunks where norms read the latent and need all of it from the start
        for chunk in range(step.start // size, -(-step.stop // size)):
            observer.chunk_started(self._clip * n_chunks + chunk, self.plan.latent_shape[0] * n_chunks)
            observer.mark("transfer")
            frames = self._next_latent(chunk)
            observer.mark("stage")
            for frame in frames:  # before the next chunk, which may use the same memory
                page = next(pages)
                self.take(page, shape)
                view = self.inner(page, shape)
                view.copy_(frame)
                self.count(0, page.frame, view)
                if self._keeps_latent:
                    self.latent.append(frame.float().clone())

    def _keep(self, step: Keep) -> None:
        """Move the frames that the op's next run reaches back to into its history."""
        self.context.observer.mark("stage")
        layouts = self.plan.layouts
        shape = layouts.staged.get(step.index) or layouts.frames[self.program.ops[step.index].inputs[0]]
        for page, kept in step.moves:
            self.take(kept, shape)
            copy_frame(self.page(page, shape), self.page(kept, shape))

    def _run_op(self, run: Run) -> str:
        """Run an op for some frames; the names of what its tiles ran on."""
        ran_on = "torch"
        op = self.program.ops[run.index]
        self._run_flags = []
        is_last = op.output == self.program.output
        n_out = len(run.over_skip)
        first = self._clip * self.plan.clip_frames + run.first_out
        for page in run.outs:
            self.take(page, self.plan.layouts.frames[op.output])
        if is_last:
            self._sink.begin(first, n_out)
        if isinstance(op, ClipConv):
            ran_on = ClipConvStep(self, run, op).run()
        elif isinstance(op, ClipAttention):
            ClipAttentionStep(self, run, op).run()
        else:
            assert isinstance(op, ClipScale)
            self._scale(run, op)
        self._flag(run, op)
        if is_last and n_out:
            self.context.observer.mark("transfer")
            self._deliver()
        return ran_on

    def _flag(self, run: Run, op: object) -> None:
        """Note or check whether the op's results are finite."""
        if not self._run_flags:
            return
        flag = reduce_finite(self._run_flags)
        if self.context.check_each_op:
            if not bool(flag):
                raise self._restart(run)
        else:
            self._flags.append((run, flag))

    def _deliver(self) -> None:
        frames = self._sink.end()
        self._check_flags()
        if self._meter is not None:
            self._meter.feed(frames)
        self._sink.deliver()

    def _check_flags(self) -> None:
        """Deferred check: one read of all flags."""
        if not self._flags:
            return
        finite = torch.stack([flag for _, flag in self._flags]).cpu().tolist()
        runs, self._flags = self._flags, []
        for (run, _), ok in zip(runs, finite, strict=True):
            if not ok:
                raise self._restart(run)

    def _restart(self, run: Run) -> Exception:
        """What follows from a result that is not finite: another attempt with the op in float32, or an error."""
        op, plan = self.program.ops[run.index], self.plan
        dtype = plan.dtypes.of(op.name)
        macs = plan.backends.macs(run)
        if dtype == "float32":
            return NonFiniteError(
                f"{op.name} is not finite even in float32: the weights hold inf or NaN, or the latent is far out of"
                " range; check the VAE file",
                op=op.name, dtype=dtype,
            )  # fmt: skip
        if not plan.guard:
            message = f"{op.name} is not finite in {dtype}; turn adaptive precision on or choose a wider dtype"
            return NonFiniteError(message, op=op.name, dtype=dtype)
        observer = self.context.observer
        self.context.on_widened(op.name)
        observer.op_redone(op.name, dtype, macs)
        observer.fallback(
            Fallback(kind="non_finite", where=op.name, given=dtype, used="float32", reason="the result was not finite")
        )
        return RestartDecode(op.name, dtype, macs)

    def _report(self, run: Run, n_tiles: int, ran_on: str) -> OpReport:
        op, plan = self.program.ops[run.index], self.plan
        kind = "conv" if isinstance(op, ClipConv) else "attention" if isinstance(op, ClipAttention) else "pointwise"
        return OpReport(
            name=op.name, kind=kind, n_tiles=n_tiles, macs=plan.backends.macs(run),
            dtype=plan.dtypes.of(op.name), native_dtype=plan.dtypes.native, backend=ran_on,
        )  # fmt: skip

    # -- memory

    def take(self, page: Page, shape: FrameShape) -> None:
        """Note that a frame's memory comes into use."""
        self.take_bytes(page.offset, shape.nbytes)

    def take_bytes(self, offset: int, nbytes: int) -> Tensor:
        """Flat bytes of the slab, counted as one request."""
        memory, hit = self._slab.take(offset, nbytes)
        self.context.observer.pool_request(nbytes, hit)
        return memory

    def page(self, page: Page, shape: FrameShape) -> Tensor:
        """[C, H + 2 halo, W + 2 halo] view of a frame, border included."""
        dtype = DTYPES[shape.dtype]
        flat = self._slab.memory[page.offset : page.offset + shape.nbytes].view(dtype)
        h, w = shape.height + 2 * shape.halo, shape.width + 2 * shape.halo
        if self.plan.layout == "channels_last":
            return flat.view(h, w, shape.channels).permute(2, 0, 1)
        return flat.view(shape.channels, h, w)

    def inner(self, page: Page, shape: FrameShape) -> Tensor:
        """[C, H, W] view of a frame without its border."""
        whole, halo = self.page(page, shape), shape.halo
        return whole[:, halo : halo + shape.height, halo : halo + shape.width] if halo else whole

    def batch_view(self, flat: Tensor, n: int, c: int, h: int, w: int, dtype: torch.dtype) -> Tensor:
        """The front of flat bytes as [n, c, h, w] in the plan's layout."""
        typed = flat[: n * c * h * w * dtype.itemsize].view(dtype)
        if self.plan.layout == "channels_last":
            return typed.view(n, h, w, c).permute(0, 3, 1, 2)
        return typed.view(n, c, h, w)

    # -- norms

    def _norms_of_values(self) -> dict[int, list[ClipNorm]]:
        found: dict[int, list[ClipNorm]] = {}
        for op in self.program.ops:
            norm = norm_of(op)
            if norm is not None and norm.kind == "group":
                found.setdefault(op.inputs[0], []).append(norm)
        return found

    def count(self, v: int, frame: int, y: Tensor) -> None:
        """Take a stored tile [C, h, w] of a frame into its readers' statistics, or look for inf and NaN."""
        norms = self._norms.get(v, [])
        if not norms:
            self._run_flags.append(kernels.is_finite_sum(y))
            return
        for norm in norms:
            mean, variance = tile_moments(y[None], norm.groups)
            key = v, norm.scope, norm.scope_offset, scope_of(frame, norm.scope, norm.scope_offset)
            if key not in self.moments:
                self.moments[key] = Moments(1, norm.groups, self.context.device)
            self.moments[key].merge(0, 1, mean, variance, y.numel() // norm.groups)
        self._run_flags.append(torch.isfinite(variance).all() & torch.isfinite(mean).all())

    def normaliser(self, index: int, frame: int) -> Normaliser:
        """The normalisation in front of an op for one of its source's frames."""
        op = self.program.ops[index]
        norm, v = norm_of(op), op.inputs[0]
        if norm is None:
            return Normaliser(kind="none")
        channels = self.program.values[v].channels
        if index not in self._constants:
            self._constants[index] = self.weights.constants(norm, channels)
        gain, shift = self._constants[index]
        latent = noise.latent_rows(self, norm, v) if norm.latent is not None else None
        if norm.kind != "group":
            return Normaliser(
                kind=norm.kind, eps=norm.eps, gain=None if gain is None else gain.view(-1, 1, 1),
                shift=None if shift is None else shift.view(-1, 1, 1), latent=latent,
            )  # fmt: skip
        key = v, norm.scope, norm.scope_offset, scope_of(frame, norm.scope, norm.scope_offset)
        assert gain is not None
        assert shift is not None
        scale, moved = self.moments[key].affine_of(norm.eps, gain, shift)
        return Normaliser(kind="affine", gain=scale[0], shift=moved[0], latent=latent)

    # -- output

    def store(self, run: Run, o: int, y: Tensor, row: int, col: int) -> None:
        """Write a finished tile [C, h, w] of the run's o-th output frame at its place."""
        op = self.program.ops[run.index]
        if op.output == self.program.output:
            self._run_flags.append(kernels.is_finite_sum(y))
            frame = self._clip * self.plan.clip_frames + run.first_out + o
            self._sink.write(y, frame, row, col)
            return
        page, shape = run.outs[o], self.plan.layouts.frames[op.output]
        window = self.inner(page, shape)[:, row : row + y.shape[1], col : col + y.shape[2]]
        window.copy_(y)
        # statistics and finiteness are those of the rounded values
        self.count(op.output, run.first_out + o, window)

    # -- scaling

    def _scale(self, run: Run, op: ClipScale) -> None:
        observer, shape = self.context.observer, self.plan.layouts.frames[op.inputs[0]]
        observer.tile_started(0, 1, (run.stop - run.start, shape.channels, shape.height, shape.width), "float32")
        observer.mark("compute")
        for o, (page,) in enumerate(run.taps):
            assert page is not None
            x = self.inner(page, shape).float()
            if op.noise_share:
                size = shape.channels, self.plan.latent_shape[2], shape.height, shape.width
                drawn = self.noise.clip(run.index, size)
                x = drawn[:, page.frame].float().mul_(op.noise_share).add_(x, alpha=1.0 - op.noise_share)
            if op.before != 1.0:
                x = x * op.before
            if op.scale is not None:
                x = x * self._per_frame(op.scale, op.period, page.frame)
            if op.shift is not None:
                x = x + self._per_frame(op.shift, op.period, page.frame)
            self.store(run, o, activate_(x.clone(), op.act), 0, 0)
        self.context.progress.add(0)

    def _per_frame(self, name: str, period: int, frame: int) -> Tensor:
        return self.weights.vector(name).reshape(-1, period)[:, frame % period, None, None]
