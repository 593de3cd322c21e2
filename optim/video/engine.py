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
from ..errors import LatentError, PlanError, SettingsError
from ..errors_oom import is_out_of_memory
from ..events import SILENT, DecodeObserver, Fallback
from ..executor import Progress, RestartDecode
from ..packing import DTYPES, dtype_name
from ..pool import MemoryPool, Slab
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
from .planner import latent_bytes, make_clip_plan
from .request import ClipRequest
from .runner import ClipContext, ClipRunner
from .sink import FrameSink, StreamSink, WholeSink

if TYPE_CHECKING:
    from ..decode import Decoder

MAX_PLANS = 64
MAX_SMALLER = 4
"""How often a decode that ran out of memory is tried again, each time with tiles of a quarter of the bytes."""


ProfileFor = Callable[["Decoder", DecodeSettings], DeviceProfile]


class ClipEngine:
    """The part of the engine that knows clips."""

    def __init__(self, pool: MemoryPool, widened: WidenedOps, profile_for: ProfileFor) -> None:
        """Shares the engine's pool and what it learnt."""
        self._pool, self._widened, self._profile_for = pool, widened, profile_for
        self._plans: OrderedDict[object, ClipPlan] = OrderedDict()
        self._lock = threading.Lock()

    # -- planning

    def plan(
        self, decoder: Decoder, shape: ClipShape, settings: DecodeSettings, observer: DecodeObserver,
        profile: DeviceProfile, out_itemsize: int = 4,
    ) -> tuple[ClipPlan, DtypeDecision]:  # fmt: skip
        """The plan of a decode. PlanError if none fits."""
        program, asked = decoder.program, settings
        settings = filled_in(settings, profile)
        if settings.method in ("stock", "blended"):
            raise SettingsError(f"method {settings.method} is not the exact engine's; choose auto or exact")
        edge = max(shape[3] * program.scale[1], shape[4] * program.scale[2])
        native = dtype_name(decoder.loaded_dtype)
        decision = choose_dtypes(
            settings.precision_mode, program, native, profile, edge, self._widened, decoder.content_hash
        )
        key = (program, shape, settings, profile.at_any_time(), decision.dtypes, decoder.stored_dtype)
        with self._lock:
            plan = self._plans.get(key) if settings.advanced_caching else None
        if plan is not None and not profile.fits(plan.predicted):
            plan = None
        observer.cache_lookup("plan", plan is not None)
        if plan is None:
            plan = make_clip_plan(program, shape, settings, profile, decision, stored=decoder.stored_dtype)
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

        PlanError where the exact decode does not fit, unless it may be cut in time.
        """
        try:
            return self._decode_exactly(request)
        except PlanError as error:
            if not may_overlap(request):
                raise
            shortage = error
        profile = self._profile_for(request.decoder, request.settings)

        def plan_for(shape: ClipShape) -> ClipPlan:
            return self.plan(request.decoder, shape, request.settings, SILENT, profile)[0]

        images = decode_overlapped(request, plan_for, self._decode_exactly, profile, shortage)
        return None if request.on_frames is not None else images

    def _decode_exactly(self, request: ClipRequest) -> Tensor | None:
        sink: FrameSink | None = None
        image: Tensor | None = None
        profile, failure, progress = self._profile_for(request.decoder, request.settings), None, None
        restarts, smaller = 0, 0
        with RandomScope(request.decoder.device, request.settings.seed) as rng:
            while True:
                observer = request.observer
                observer.mark("plan")
                plan, decision = self.plan(
                    request.decoder, request.shape, request.settings, observer, profile, request.out_dtype.itemsize
                )
                if decision.fallback is not None and progress is None:
                    observer.fallback(decision.fallback)
                observer.planned(plan.summary)
                progress = progress or Progress(observer, plan.summary.macs)
                progress.restart()
                rng.rewind()
                if sink is None:
                    sink, image = _make_sink(request, plan)
                try:
                    self._run(request, plan, progress, sink, careful=restarts > 0)
                    return image
                except RestartDecode:
                    restarts += 1  # the widened op is remembered, so the next plan has it
                except Exception as error:
                    smaller += 1
                    if smaller > MAX_SMALLER or not is_out_of_memory(error):
                        raise
                    failure = next(iter(str(error).splitlines()), type(error).__name__)
                if failure is not None:
                    # past the except clause, where the traceback would keep the failed attempt's tensors alive
                    profile = self._shrunk(profile, observer, failure)
                    failure = None

    def _shrunk(self, profile: DeviceProfile, observer: DecodeObserver, reason: str) -> DeviceProfile:
        """The profile for the next attempt: tiles and portions of a quarter of the bytes."""
        self._pool.clear()
        smaller = replace(profile, tile_bytes=max(1, profile.tile_bytes // 4))
        observer.fallback(
            Fallback(
                kind="out_of_memory", where="decode", given=f"tiles of {profile.tile_bytes} bytes",
                used=f"tiles of {smaller.tile_bytes} bytes", reason=reason,
            )
        )  # fmt: skip
        return smaller

    def _run(
        self, request: ClipRequest, plan: ClipPlan, progress: Progress, sink: FrameSink, *, careful: bool
    ) -> None:
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
        with self._pool.lease(plan.pool_bytes, decoder.device, request.settings.keep_bytes) as slab:
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
        raise LatentError(
            f"the latent has {c} channels but this {program.family} decoder takes {program.latent_channels};"
            " use the VAE that belongs to the model that made the latent"
        )
    return b, c, t, h, w


def _make_sink(request: ClipRequest, plan: ClipPlan) -> tuple[FrameSink, Tensor | None]:
    program = plan.program
    b, _, _, h, w = plan.latent_shape
    size = h * program.scale[1], w * program.scale[2], program.out_channels
    if request.on_frames is not None:
        return StreamSink(size, request.finish, request.on_frames, request.out_dtype, request.out_device), None
    with torch.inference_mode(False):
        image = torch.empty((b * plan.clip_frames, *size), dtype=request.out_dtype, device=request.out_device)
    return WholeSink(image, request.finish), image


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

