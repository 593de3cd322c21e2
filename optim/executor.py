"""Runs one pass of a plan: op by op, tile by tile, out of leased memory, straight into the image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .conv_step import ConvStep
from .errors import NonFiniteError
from .events import DecodeObserver, Fallback, OpReport
from .heap import trim_heap
from .kernels import kitchen
from .kernels import torch_kernels as kernels
from .kernels.attention import run_attention
from .moments import MapMoments, Moments, tile_moments
from .offload import fetch
from .packing import DTYPES, PackedWeights
from .plan import OpPlan, PassPlan, Plan
from .pool import Slab
from .program import Conv, Norm, Pointwise, Rearrange, norm_groups
from .store import ImageSink, expand, pixels_of, reduce_finite
from .tiling import largest_divisor


class RestartDecode(Exception):  # noqa: N818 (a signal, not an error)
    """An op that overwrote its input was not finite: start again from the latent with this op widened."""

    def __init__(self, op_name: str, dtype: str, macs: int) -> None:
        """Name the op, the dtype that failed, and the work it had done."""
        super().__init__(op_name)
        self.op_name = op_name
        self.dtype = dtype
        self.macs = macs


class Progress:
    """Thousandths of planned MACs; never falls, ends exactly at the total."""

    TOTAL = 1000

    def __init__(self, observer: DecodeObserver, macs: int) -> None:
        """`macs` of the whole decode."""
        self._observer, self._macs, self._done, self._shown = observer, max(1, macs), 0, 0

    def add(self, macs: int) -> None:
        """Count work and report it; the last thousandth waits for `finish`."""
        self._done += macs
        self._shown = max(self._shown, min(self.TOTAL - 1, self._done * self.TOTAL // self._macs))
        self._observer.progress(self._shown, self.TOTAL)

    def rewind(self, macs: int) -> None:
        """Work that has to be done again; what was shown stays."""
        self._done -= macs

    def restart(self) -> None:
        """The decode begins again; what was shown stays."""
        self._done = 0

    def finish(self) -> None:
        """All is done."""
        self._observer.progress(self.TOTAL, self.TOTAL)


@dataclass(slots=True, kw_only=True)
class RunContext:
    """What a pass needs besides its plan."""

    plan: Plan
    device: torch.device
    packed: PackedWeights
    observer: DecodeObserver
    progress: Progress
    check_each_op: bool
    """Look at every op's finiteness at once (CPU); otherwise once per pass, to synchronise less."""
    on_widened: Callable[[str], None]
    """Remembers an op that needed a wider dtype."""
    widened: set[str] = field(default_factory=set)
    """Ops that an earlier pass of this attempt ran wider than planned."""


class PassRunner:
    """State of one pass: views of values, statistics, staged rows."""

    def __init__(
        self,
        context: RunContext,
        a_pass: PassPlan,
        slab: Slab,
        latent: Tensor,
        sink: ImageSink,
        first_image: int,
        host: Slab | None = None,
    ) -> None:
        """`latent` [n, C, H, W] lies in pooled memory already; the pictures go to `sink` from `first_image` on.

        `host` is where the plan's offloaded values live, if it has any.
        """
        self.context, self.a_pass, self._slab, self._sink, self._first_image = context, a_pass, slab, sink, first_image
        self._host = host
        self.program = context.plan.program
        self._groups = norm_groups(self.program)
        self._views: dict[int, Tensor] = {0: latent}
        self._homes: dict[str, Tensor] = {}
        self.moments: dict[int, Moments | MapMoments] = {}
        self._at_once = values_counted_at_once(a_pass)
        self._finite: dict[int, Tensor] = {}
        self._flags: list[tuple[OpPlan, Tensor]] = []
        self._stored_as: dict[int, torch.dtype] = {}

    # -- the pass

    def run(self) -> None:
        """Run every step. RestartDecode, NonFiniteError, or whatever the observer raises."""
        n_steps = len(self.a_pass.steps)
        self._prepare_latent_moments()
        level = None
        for step in self.a_pass.steps:
            before, level = level, (self.program.values[step.op.output].scale, step.fold)
            if level != before and self.context.device.type == "cpu":
                trim_heap()  # results had other sizes until now, and their freed memory fits nothing that follows
            self.context.observer.op_started(step.index, n_steps, step.name, step.n_tiles)
            done, ran_on = self._run_guarded(step)
            self.context.observer.op_done(self._report(done, ran_on))
        self._check_flags()

    def _prepare_latent_moments(self) -> None:
        if 0 in self._groups:
            self._start_moments(0)
            self._count(0, self._views[0], 0, self.a_pass.n_images)

    def _run_guarded(self, step: OpPlan) -> tuple[OpPlan, str]:
        """Run a step; where its result is not finite, run it again wider. Returns what was kept and what it ran on."""
        if step.name in self.context.widened:
            step = step.in_float32()
        ran_on = self._run_step(step)
        if not self.context.check_each_op:
            self._flags.append((step, self._is_finite(step)))
            return step, ran_on
        if bool(self._is_finite(step)):
            return step, ran_on
        wider = self._widen(step)
        self.context.progress.rewind(step.macs)
        ran_on = self._run_step(wider)
        if not bool(self._is_finite(wider)):
            raise NonFiniteError(_damaged(wider), op=wider.name, dtype=wider.dtype)
        return wider, ran_on

    def _widen(self, step: OpPlan) -> OpPlan:
        """The step in float32, or the error or restart that is due instead."""
        context = self.context
        if step.dtype == "float32":
            raise NonFiniteError(_damaged(step), op=step.name, dtype=step.dtype)
        if not context.plan.guard:
            message = f"{step.name} is not finite in {step.dtype}; turn adaptive precision on or choose a wider dtype"
            raise NonFiniteError(message, op=step.name, dtype=step.dtype)
        context.on_widened(step.name)
        context.observer.op_redone(step.name, step.dtype, step.macs)
        context.observer.fallback(
            Fallback(
                kind="non_finite", where=step.name, given=step.dtype, used="float32", reason="the result was not finite"
            )
        )
        if step.in_place != "no":
            raise RestartDecode(step.name, step.dtype, step.macs)
        context.widened.add(step.name)
        return step.in_float32()

    def _check_flags(self) -> None:
        """Deferred check: one read of all flags."""
        if not self._flags:
            return
        finite = torch.stack([flag for _, flag in self._flags]).cpu().tolist()
        for (step, _), ok in zip(self._flags, finite, strict=True):
            if not ok:
                self._widen(step)
                raise RestartDecode(step.name, step.dtype, step.macs)

    def _report(self, step: OpPlan, ran_on: str) -> OpReport:
        return OpReport(
            name=step.name,
            kind=step.kind,
            n_tiles=step.n_tiles,
            macs=step.macs,
            dtype=step.dtype,
            native_dtype=self.context.plan.dtypes.native,
            backend=ran_on,
        )

    # -- values

    def buffer(self, key: str, nbytes: int) -> Tensor:
        """Flat bytes of a planned buffer; a buffer that no plan foresaw (a redone op's) is allocated."""
        if key in self.a_pass.offload.homes:
            assert self._host is not None
            memory, hit = self._host.take(self.a_pass.offload.host.offsets[key], nbytes)
            self.context.observer.pool_request(nbytes, hit)
            return memory
        if key not in self.a_pass.arena.offsets or nbytes > self.a_pass.buffer_bytes[key]:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.context.device)
        memory, hit = self._slab.take(self.a_pass.arena.offsets[key], self.a_pass.buffer_bytes[key])
        self.context.observer.pool_request(self.a_pass.buffer_bytes[key], hit)
        return memory

    def value(self, v: int) -> Tensor:
        """[n, C, H, W] view of a value in its home."""
        if v not in self._views:
            place = self.a_pass.slices[v]
            dtype = self._stored_as.get(v, DTYPES[self.context.plan.dtypes.stream])
            if place.home not in self._homes:
                self._homes[place.home] = self.buffer(place.home, self.a_pass.buffer_bytes[place.home])
            scale = self.program.values[v].scale
            size = self.a_pass.latent[1] * scale[1], self.a_pass.latent[2] * scale[2]
            whole = self.map_view(self._homes[place.home], self.a_pass.n_images, place.home_channels, *size, dtype)
            self._views[v] = whole[:, place.offset : place.offset + place.channels]
        return self._views[v]

    def near(self, v: int, part: Tensor) -> Tensor:
        """A part of a value where kernels can read it: as it is, or a copy of what lives in the host's memory."""
        if not self.is_far(v):
            return part
        self.context.observer.mark("transfer")
        return fetch(part, self.context.device)

    def is_far(self, v: int) -> bool:
        """True for a value that lives in the host's memory."""
        return v in self.a_pass.slices and self.a_pass.slices[v].home in self.a_pass.offload.homes

    def map_view(self, flat: Tensor, n: int, c: int, h: int, w: int, dtype: torch.dtype) -> Tensor:
        """The front of flat bytes as [n, c, h, w] in the plan's layout."""
        typed = flat[: n * c * h * w * dtype.itemsize].view(dtype)
        if self.context.plan.layout == "channels_last":
            return typed.view(n, h, w, c).permute(0, 3, 1, 2)
        return typed.view(n, c, h, w)

    # -- steps

    def _run_step(self, step: OpPlan) -> str:
        """Run a step; the names of what really ran its tiles, which may be fewer or others than planned."""
        for op in (step.op, step.partner):
            if op is not None:
                self._start_value(op.output, step.dtype)
        if step.kind == "attention":
            run_attention(self, step)
        elif isinstance(step.op, Conv):
            return ConvStep(self, step, step.op).run()
        else:
            self._run_latent_op(step)
        return step.backend

    def _start_value(self, v: int, compute: str) -> None:
        """Forget statistics of an earlier attempt; a widened float16 value is stored as bfloat16 in the same bytes."""
        if self.context.plan.dtypes.stream == "float16" and compute == "float32":
            self._stored_as[v] = torch.bfloat16
            self._views.pop(v, None)
        self._finite.pop(v, None)
        if v in self._groups and v not in self._at_once:
            self._start_moments(v)

    def _start_moments(self, v: int) -> None:
        self.moments[v] = Moments(self.a_pass.n_images, self._groups[v], self.context.device)

    def _run_latent_op(self, step: OpPlan) -> None:
        """Pointwise and Rearrange: small, at latent resolution, whole."""
        op, context = step.op, self.context
        context.observer.tile_started(0, 1, tuple(self.value(op.inputs[0]).shape), step.dtype)
        context.observer.mark("load")
        x = self.near(op.inputs[0], self.value(op.inputs[0])).float()
        if isinstance(op, Pointwise):
            first, second = (context.packed.vector(name, torch.float32, context.device) for name in op.weights)
            assert first is not None
            assert second is not None
            context.observer.mark("compute")
            if op.kind == "denormalize":
                y = x * (second + op.eps).sqrt()[None, :, None, None] + first[None, :, None, None]
            else:
                y = (x - first) * second
        else:
            assert isinstance(op, Rearrange)
            y = expand(x, op.factor, op.order)
        context.observer.mark("stitch")
        whole = step.grid.tiles()[0]
        self.store(op.output, y, whole.images.start, 0, 0)
        context.progress.add(step.macs)

    def store(self, v: int, y: Tensor, image: int, row: int, col: int) -> None:
        """Write a finished tile [m, C, h, w] at its place, and count it in the statistics that its reader needs."""
        if v == self.program.output:
            flag = kernels.is_finite_sum(y)
            self._sink.write(y, self._first_image + image, row, col)
        else:
            m, _, h, w = y.shape
            dst = self.value(v)
            if y.dtype != dst.dtype and dst.dtype != torch.float32:
                y = self._narrowed(y, dst.dtype)
            dst[image : image + m, :, row : row + h, col : col + w].copy_(y)
            self.written(v, y, image)
            return
        self._finite[v] = self._finite[v] & flag if v in self._finite else flag

    def written(self, v: int, y: Tensor, image: int) -> None:
        """Take the statistics of new elements [m, C, h, w] of a value, or see that they are finite."""
        if v in self._at_once:
            return
        if v in self._groups:
            self._count(v, y, image, image + y.shape[0])
            return
        flag = kernels.is_finite_sum(y)
        self._finite[v] = self._finite[v] & flag if v in self._finite else flag

    def _narrowed(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """A result as it will be stored: its statistics and its finiteness are those of the rounded values."""
        self.context.observer.converted(y.numel() * dtype.itemsize)
        return y.to(dtype)

    def store_pixels(self, v: int, y: Tensor, image: int, start: int) -> None:
        """Write pixels [n, C] of one picture from pixel `start` on; they may begin and end inside a row."""
        dst = pixels_of(self.value(v)[image])
        if y.dtype != dst.dtype and dst.dtype != torch.float32:
            y = self._narrowed(y, dst.dtype)
        dst[start : start + y.shape[0]].copy_(y)
        n, c = y.shape
        # as a small picture, so that the same kernel can take its statistics
        height = largest_divisor(n, 64)
        self.written(v, y.view(1, height, n // height, c).permute(0, 3, 1, 2), image)

    def _count(self, v: int, y: Tensor, start: int, stop: int) -> None:
        moments = self.moments[v]
        assert isinstance(moments, Moments)
        mean, variance = tile_moments(y, moments.groups)
        moments.merge(start, stop, mean, variance, y[0].numel() // moments.groups)

    def _is_finite(self, step: OpPlan) -> Tensor:
        flags = []
        for op in (step.op, step.partner):
            if op is not None:
                v = op.output
                if v in self._at_once:
                    self.moments[v] = MapMoments(kitchen.map_statistics(self.value(v), self._at_once[v]))
                flags.append(self.moments[v].is_finite() if v in self._groups else self._finite[v])
        return reduce_finite(flags)


def values_counted_at_once(a_pass: PassPlan) -> dict[int, Norm]:
    """Values whose statistics a package takes in one call once they are complete, and the norm that reads them.

    Those that a package stages, where they lie dense and all their readers' norms are alike.
    """
    found: dict[int, Norm] = {}
    for step in a_pass.steps:
        norm, v = getattr(step.op, "norm", None), step.op.inputs[0]
        if norm is not None and step.staging == "kitchen" and v != 0 and a_pass.slices[v].is_whole:
            found[v] = norm
    norms = [(step.op.inputs[0], norm.eps) for step in a_pass.steps if (norm := getattr(step.op, "norm", None))]
    return {v: norm for v, norm in found.items() if all(eps == norm.eps for of, eps in norms if of == v)}


def _damaged(step: OpPlan) -> str:
    return (
        f"{step.name} is not finite even in float32: the weights hold inf or NaN,"
        " or the latent is far out of range; check the VAE file"
    )
