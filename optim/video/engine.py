"""Decodes clips with the engine's pool: plan, run clip by clip, begin again wider or smaller where that is due."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arena import align
from ..device import DeviceProfile
from ..errors import LatentError, SettingsError
from ..events import SILENT, DecodeObserver
from ..executor import Progress
from ..ladder import CLIP_RUNGS, MAX_ATTEMPTS, Job, Last, Squeeze, fit_or_refuse, run_ladder
from ..packing import DTYPES, dtype_name
from ..places import Places
from ..pool import Slab
from ..precision import DtypeDecision, WidenedOps, choose_dtypes
from ..prefetch import LatentFeeder
from ..program import Program
from ..rng import RandomScope
from ..settings import DecodeSettings
from ..summary import with_resident
from ..tuning import filled_in, mark_choices
from .latents import BATCH_IS_TIME
from .overlap import decode_overlapped, may_overlap
from .plan import ClipPlan, ClipShape
from .planner import ADVICE, clip_plan_with, describe_clips, latent_bytes
from .request import ClipRequest
from .runner import ClipContext, ClipRunner
from .sink import FrameSink, StreamSink, WholeSink

if TYPE_CHECKING:
    from ..decode import Decoder

MAX_PLANS = 64


ProfileFor = Callable[["Decoder", DecodeSettings], DeviceProfile]


class ClipEngine:
    """The part of the engine that knows clips."""

    def __init__(self, places: Places, widened: WidenedOps, profile_for: ProfileFor) -> None:
        """Shares the engine's memory and what it learnt."""
        self._places, self._widened, self._profile_for = places, widened, profile_for
        self._plans: OrderedDict[object, ClipPlan] = OrderedDict()
        self._lock = threading.Lock()

    # -- planning

    def plan(
        self, decoder: Decoder, shape: ClipShape, settings: DecodeSettings, observer: DecodeObserver,
        profile: DeviceProfile,
    ) -> ClipPlan:  # fmt: skip
        """The plan of a decode. PlanError if none fits."""

        def plan_for(squeeze: Squeeze) -> ClipPlan:
            return self._plan(decoder, shape, settings, observer, profile, squeeze)[0]

        return fit_or_refuse(plan_for, CLIP_RUNGS, profile, describe_clips(shape), ADVICE)

    def _plan(
        self, decoder: Decoder, shape: ClipShape, settings: DecodeSettings, observer: DecodeObserver,
        profile: DeviceProfile, squeeze: Squeeze, out_itemsize: int = 4,
    ) -> tuple[ClipPlan, DtypeDecision]:  # fmt: skip
        """The plan that gives up what the squeeze says, whether it fits or not."""
        program, asked = decoder.program, settings
        settings = filled_in(settings, profile)
        if settings.method in ("stock", "blended"):
            raise SettingsError(f"method {settings.method} is not the exact engine's; choose auto or exact")
        edge = max(shape[3] * program.scale[1], shape[4] * program.scale[2])
        native = dtype_name(decoder.loaded_dtype)
        decision = choose_dtypes(
            settings.precision_mode, program, native, profile, edge, self._widened, decoder.content_hash
        )
        key = (program, shape, settings, profile.at_any_time(), decision.dtypes, decoder.stored_dtype, squeeze)
        with self._lock:
            plan = self._plans.get(key) if settings.advanced_caching else None
        if plan is not None and not profile.fits(plan.predicted):
            plan = None
        observer.cache_lookup("plan", plan is not None)
        if plan is None:
            plan = clip_plan_with(
                program, shape, settings, profile, decision, stored=decoder.stored_dtype, squeeze=squeeze
            )
            if settings.advanced_caching:
                with self._lock:
                    self._plans[key] = plan
                    while len(self._plans) > MAX_PLANS:
                        self._plans.popitem(last=False)
        summary = with_resident(plan.summary, decoder.packed.nbytes, out_itemsize, profile)
        summary = replace(summary, choices=mark_choices(summary.choices, profile.tuned, asked))
        return replace(plan, summary=summary), decision

    # -- running

    def decode(self, request: ClipRequest) -> Tensor | None:
        """The image [B * frames, H, W, C], or None where frames were handed on. The pool is the caller's already.

        Where the exact decode does not fit it is cut in time, if it may be. PlanError or DecodeOutOfMemoryError if that
        does not help either.
        """
        results = _Results(request)

        def blend(last: Last) -> Tensor | None:
            profile = self._profile_for(request.decoder, request.settings)

            def plan_for(shape: ClipShape) -> ClipPlan:
                return self.plan(request.decoder, shape, request.settings, SILENT, profile)

            def decode(part: ClipRequest) -> Tensor | None:
                return self._decode_exactly(part, _Results(part), attempts=1)

            images = decode_overlapped(request, plan_for, decode, profile, last, results.n_delivered)
            return None if request.on_frames is not None else images

        return self._decode_exactly(request, results, blend if may_overlap(request) else None)

    def _decode_exactly(
        self, request: ClipRequest, results: _Results, blend: Callable[[Last], Tensor | None] | None = None,
        attempts: int = MAX_ATTEMPTS,
    ) -> Tensor | None:  # fmt: skip
        decoder, observer, settings = request.decoder, request.observer, request.settings

        def plan_for(squeeze: Squeeze, profile: DeviceProfile) -> tuple[ClipPlan, DtypeDecision]:
            size = request.out_dtype.itemsize
            return self._plan(decoder, request.shape, settings, observer, profile, squeeze, size)

        with RandomScope(decoder.device, settings.seed) as rng:

            def run(plan: ClipPlan, progress: Progress, careful: bool) -> Tensor | None:
                rng.rewind()
                self._run(request, plan, progress, results.sink(plan), careful=careful)
                return results.image

            return run_ladder(
                Job(
                    observer=observer, what=describe_clips(request.shape), advice=ADVICE, rungs=CLIP_RUNGS,
                    profile=lambda: self._profile_for(decoder, settings), plan=plan_for, run=run,
                    release=lambda: self._places.release(decoder), held=lambda: self._places.held_bytes(decoder),
                    make_room=self._places.room_maker(decoder.device), blend=blend, attempts=attempts,
                )
            )  # fmt: skip

    def _run(self, request: ClipRequest, plan: ClipPlan, progress: Progress, sink: FrameSink, *, careful: bool) -> None:
        """One attempt. `careful` looks at each op's finiteness at once, which on a GPU costs a synchronisation each."""
        decoder, observer = request.decoder, request.observer
        context = ClipContext(
            plan=plan, device=decoder.device, packed=decoder.packed, observer=observer, progress=progress,
            check_each_op=careful or decoder.device.type == "cpu",
            on_widened=lambda name: self._widened.remember(decoder.content_hash, plan.dtypes.compute, name),
            noise_dtype=decoder.loaded_dtype, measure=len(plan.summary.boundaries) > 0,
        )  # fmt: skip
        n_clips, t = plan.latent_shape[0], plan.latent_shape[2]
        starts = range(0, t, plan.chunk_lat)
        with self._places.pool.lease(plan.pool_bytes, decoder.device, request.settings.keep_bytes) as slab:
            parts = [(b * t + s, b * t + min(t, s + plan.chunk_lat)) for b in range(n_clips) for s in starts]
            frames = request.latent.transpose(1, 2).flatten(0, 1)
            feeder = LatentFeeder(frames, parts, _latent_buffers(plan, slab, observer), observer)
            try:
                for clip in range(n_clips):
                    first = clip * len(starts)
                    runner = ClipRunner(context, slab, sink, clip, lambda chunk, first=first: feeder.get(first + chunk))  # type: ignore[misc]
                    runner.run()
                    observer.pass_done(1, 1)
            finally:
                feeder.close()
        progress.finish()


def check_clip_shape(shape: tuple[int, ...], program: Program) -> ClipShape:
    """The shape as [B, C, T, H, W]; pictures [B, C, H, W] are taken as
    `as_clips` takes them. LatentError if it does not fit."""
    if len(shape) not in (4, 5):
        raise LatentError(
            f"the latent has shape {list(shape)}; give [batch, channels, frames, height, width], or four dimensions"
            " for clips of one frame"
        )
    if len(shape) == 5:
        b, c, t, h, w = shape
    else:
        n, c, h, w = shape
        b, t = (1, n) if program.family in BATCH_IS_TIME else (n, 1)
    if min(b, t, h, w) < 1:
        raise LatentError(f"the latent has shape {list(shape)}, which holds no frame; give at least one of one pixel")
    if c != program.latent_channels:
        clip = len(shape) == 4 and shape[0] == program.latent_channels
        raise LatentError(
            f"the latent has {c} channels but this {program.family} decoder takes {program.latent_channels};"
            + (f" a clip has five dimensions: is this one {[1, *shape]}?" if clip else
               " use the VAE that belongs to the model that made the latent")
        )  # fmt: skip
    return b, c, t, h, w


class _Results:
    """What a decode has made so far; it outlives attempts, as frames that were handed on are not handed on again."""

    def __init__(self, request: ClipRequest) -> None:
        self._request = request
        self._sink: FrameSink | None = None
        self.image: Tensor | None = None
        """[B * frames, H, W, C]; None before the first attempt, and where frames are handed on."""

    @property
    def n_delivered(self) -> int:
        """Frames that were handed on."""
        return self._sink.delivered if isinstance(self._sink, StreamSink) else 0

    def sink(self, plan: ClipPlan) -> FrameSink:
        """Where an attempt puts its frames; the first one makes it."""
        if self._sink is None:
            self._sink = self._made(plan)
        return self._sink

    def _made(self, plan: ClipPlan) -> FrameSink:
        program, request = plan.program, self._request
        b, _, _, h, w = plan.latent_shape
        size = h * program.scale[1], w * program.scale[2], program.out_channels
        if request.on_frames is not None:
            return StreamSink(size, request.finish, request.on_frames, request.out_dtype, request.out_device)
        with torch.inference_mode(False):
            frames = b * plan.clip_frames
            self.image = torch.empty((frames, *size), dtype=request.out_dtype, device=request.out_device)
        return WholeSink(self.image, request.finish)


def _latent_buffers(plan: ClipPlan, slab: Slab, observer: DecodeObserver) -> list[Tensor]:
    """One or two destinations [n, C, H, W] for a chunk's latent, at the slab's end."""
    _, c, _, h, w = plan.latent_shape
    n, dtype = plan.chunk_lat, DTYPES[plan.dtypes.stream]
    nbytes = latent_bytes(plan.program, n, (h, w), plan.dtypes.stream)
    count = 2 if plan.prefetch else 1
    start = plan.pool_bytes - count * align(nbytes)
    buffers = []
    for i in range(count):
        flat, hit = slab.take(start + i * nbytes, nbytes)
        observer.pool_request(nbytes, hit)
        typed = flat[: n * c * h * w * dtype.itemsize].view(dtype)
        channels_last = plan.layout == "channels_last"
        buffers.append(typed.view(n, h, w, c).permute(0, 3, 1, 2) if channels_last else typed.view(n, c, h, w))
    return buffers
