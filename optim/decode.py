"""The engine's front door: open a decoder, plan a decode, run it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from .arena import align
from .decoder import Decoder as Decoder
from .decoder import open_decoder as open_decoder
from .device import DeviceProfile, describe_device
from .errors import SettingsError
from .errors_oom import is_out_of_memory
from .events import SILENT, DecodeObserver, Fallback
from .executor import PassRunner, Progress, RestartDecode, RunContext
from .isolation import isolated, widest_head
from .latents import LatentShape, check_latent, check_latent_shape, check_values
from .packing import DTYPES, dtype_name
from .plan import Plan
from .planner import latent_buffer_bytes, make_plan
from .pool import MemoryPool, Slab
from .precision import DtypeDecision, WidenedOps, choose_dtypes
from .prefetch import LatentFeeder
from .scope import flags_for
from .settings import DecodeSettings
from .store import Finish, ImageSink, finish_of
from .summary import with_resident
from .tuning import TuningStore, filled_in, mark_choices, tuned_profile
from .video.engine import ClipEngine, check_clip_shape
from .video.frames import output_frames
from .video.latents import as_clips
from .video.ops import is_video
from .video.plan import ClipPlan
from .video.request import ClipRequest
from .video.sink import OnFrames

T = TypeVar("T")
R = TypeVar("R", "_Request", ClipRequest)

MAX_PLANS = 64
MAX_SMALLER = 4
"""How often a decode that ran out of memory is tried again, each time with tiles of a quarter of the bytes."""


class Engine:
    """Decodes with one memory pool. Decodes of two threads take turns; both get correct pictures."""

    def __init__(
        self,
        *,
        profile: DeviceProfile | None = None,
        pool: MemoryPool | None = None,
        tuning: TuningStore | None = None,
    ) -> None:
        """`profile` None describes each decoder's device when it is used; `tuning` holds what was measured on it."""
        self.pool = pool or MemoryPool()
        self.widened = WidenedOps()
        self._profile, self._tuning = profile, tuning
        self._clips = ClipEngine(self.pool, self.widened, self.profile_for)
        self._plans: OrderedDict[object, Plan] = OrderedDict()
        self._lock = threading.Lock()

    def device_profile(self, device: torch.device) -> DeviceProfile:
        """What is known of a device now."""
        return self._profile or describe_device(device)

    def profile_for(self, decoder: Decoder, settings: DecodeSettings | None = None) -> DeviceProfile:
        """What is known of the decoder's device now, and of the decoder on it unless the settings keep nothing."""
        profile = self.device_profile(decoder.device)
        if settings is not None and not settings.advanced_caching:
            return profile
        return tuned_profile(profile, self._tuning, decoder.program, dtype_name(decoder.loaded_dtype))

    # -- planning

    def plan(
        self,
        decoder: Decoder,
        latent_shape: tuple[int, ...],
        settings: DecodeSettings | None = None,
        *,
        observer: DecodeObserver = SILENT,
    ) -> Plan | ClipPlan:
        """The plan `decode` would run for latents of that shape. LatentError or PlanError if there is none."""
        profile = self.profile_for(decoder, settings)
        if is_video(decoder.program):
            clips = check_clip_shape(tuple(latent_shape), decoder.program)
            return self._clips.plan(decoder, clips, settings or DecodeSettings(), observer, profile)[0]
        plan, _ = self._plan(decoder, latent_shape, settings or DecodeSettings(), observer, profile)
        return plan

    def _plan(
        self,
        decoder: Decoder,
        latent_shape: tuple[int, ...],
        settings: DecodeSettings,
        observer: DecodeObserver,
        profile: DeviceProfile,
        out_itemsize: int = 4,
    ) -> tuple[Plan, DtypeDecision]:
        program, asked = decoder.program, settings
        settings = filled_in(settings, profile)
        shape = check_latent_shape(latent_shape, program)
        if settings.method in ("stock", "blended"):
            raise SettingsError(f"method {settings.method} is not the exact engine's; choose auto or exact")
        edge = max(shape[2] * program.scale[1], shape[3] * program.scale[2])
        native = dtype_name(decoder.loaded_dtype)
        decision = choose_dtypes(
            settings.precision_mode, program, native, profile, edge, self.widened, decoder.content_hash
        )
        # free memory changes from decode to decode: a plan is good for any budget it fits
        key = (program, shape, settings, profile.at_any_time(), decision.dtypes, decoder.stored_dtype)
        with self._lock:
            plan = self._plans.get(key) if settings.advanced_caching else None
        if plan is not None and not profile.fits(plan.predicted):
            plan = None
        observer.cache_lookup("plan", plan is not None)
        if plan is None:
            out_bytes = shape[0] * program.out_channels * shape[2] * program.scale[1] * shape[3] * program.scale[2] * 4
            plan = make_plan(
                program, shape, settings, profile, decision, out_bytes=out_bytes, stored=decoder.stored_dtype
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

    def decode(
        self,
        decoder: Decoder,
        latent: Tensor,
        settings: DecodeSettings | None = None,
        *,
        observer: DecodeObserver = SILENT,
        finish: Finish | None = None,
        out_dtype: torch.dtype = torch.float32,
        out_device: torch.device | str = "cpu",
    ) -> Tensor:
        """Decode latents to pictures [B, H, W, C], equal to the untiled decode within rounding.

        Latents are [B, C, H, W]; of a video decoder [B, C, T, H, W], or [B, C, H, W] for clips of one frame, and the
        pictures are then its frames, clip by clip. `finish` takes raw float32 tiles [B, C, h, w] to picture range; None
        is the decoder's usual ending.
        Raises LatentError, PlanError, NonFiniteError, or what the observer raises to cancel; the pool is then as it was
        and no picture exists.
        """
        settings = settings or DecodeSettings()
        observer.mark("plan")
        device = torch.device(out_device)
        if is_video(decoder.program):
            request = self._clip_request(decoder, latent, settings, observer, finish, out_dtype, device)
            image = self._exclusively(request, self._clips.decode)
            assert image is not None
        else:
            pictures = _Request(
                decoder=decoder, latent=latent, shape=check_latent(latent, decoder.program), settings=settings,
                observer=observer, finish=finish or finish_of(decoder.program), out_dtype=out_dtype,
                out_device=device,
            )  # fmt: skip
            image = self._exclusively(pictures, self._run_until_done)
        observer.mark("other")
        return image

    def decode_frames(
        self,
        decoder: Decoder,
        latent: Tensor,
        settings: DecodeSettings | None = None,
        *,
        observer: DecodeObserver = SILENT,
        finish: Finish | None = None,
        out_dtype: torch.dtype = torch.float32,
        out_device: torch.device | str = "cpu",
        on_frames: OnFrames,
    ) -> int:
        """As `decode`, with frames handed to `on_frames(first, frames [n, H, W, C])` as they finish; their number.

        In order over the whole batch, each frame once, in memory that is used again afterwards: it does not grow with
        the clip. SettingsError for a decoder of pictures.
        """
        if not is_video(decoder.program):
            raise SettingsError(f"a {decoder.program.family} decoder makes pictures, not frames; use decode")
        observer.mark("plan")
        device = torch.device(out_device)
        settings = settings or DecodeSettings()
        request = self._clip_request(decoder, latent, settings, observer, finish, out_dtype, device, on_frames)
        self._exclusively(request, self._clips.decode)
        observer.mark("other")
        return request.shape[0] * output_frames(decoder.program, request.shape[2])

    def _exclusively(self, request: R, work: Callable[[R], T]) -> T:
        """Run a decode with the pool, with its own flags, without gradients and without the caller's autocast."""
        decoder = request.decoder
        profile = self.profile_for(decoder, request.settings)
        if self._tuning is not None and request.settings.advanced_caching:
            request.observer.cache_lookup("tuning", profile.tuned is not None)
        flags = flags_for(profile, request.settings, head_dim=widest_head(decoder.program))
        with isolated(self.pool, decoder.device, flags, request.observer) as observer:
            return work(replace(request, observer=observer))

    @staticmethod
    def _clip_request(
        decoder: Decoder, latent: Tensor, settings: DecodeSettings, observer: DecodeObserver,
        finish: Finish | None, out_dtype: torch.dtype, out_device: torch.device, on_frames: OnFrames | None = None,
    ) -> ClipRequest:  # fmt: skip
        check_clip_shape(tuple(latent.shape), decoder.program)
        check_values(latent)
        return ClipRequest(
            decoder=decoder, latent=as_clips(decoder.program, latent), settings=settings, observer=observer,
            finish=finish or finish_of(decoder.program), out_dtype=out_dtype, out_device=out_device,
            on_frames=on_frames,
        )  # fmt: skip

    def _run_until_done(self, request: _Request) -> Tensor:
        """Run, start again with ops widened that overwrote their input, and with smaller tiles when memory ran out."""
        observer, progress = request.observer, None
        profile, failure = self.profile_for(request.decoder, request.settings), None
        restarts, smaller = 0, 0
        while True:
            observer.mark("plan")
            size = request.out_dtype.itemsize
            plan, decision = self._plan(request.decoder, request.shape, request.settings, observer, profile, size)
            if decision.fallback is not None and progress is None:
                observer.fallback(decision.fallback)
            observer.planned(plan.summary)
            progress = progress or Progress(observer, plan.summary.macs)
            progress.restart()
            try:
                return self._run(request, plan, progress, careful=restarts > 0)
            except RestartDecode:
                restarts += 1  # the widened op is remembered, so the next plan has it
            except Exception as error:
                smaller += 1
                if smaller > MAX_SMALLER or not is_out_of_memory(error):
                    raise
                failure = next(iter(str(error).splitlines()), type(error).__name__)
            if failure is not None:
                # past the except clause, where the traceback would keep the failed attempt's tensors alive
                profile = self._shrunk(profile, plan, observer, failure)
                failure = None

    def _shrunk(self, profile: DeviceProfile, plan: Plan, observer: DecodeObserver, reason: str) -> DeviceProfile:
        """The profile for the next attempt: one picture per pass and tiles of a quarter of the bytes."""
        self.pool.clear()
        smaller = replace(profile, tile_bytes=max(1, profile.tile_bytes // 4), batch_cap=1)
        given = f"{plan.passes[0].n_images} per pass in tiles of {profile.tile_bytes} bytes"
        used = f"1 per pass in tiles of {smaller.tile_bytes} bytes"
        observer.fallback(Fallback(kind="out_of_memory", where="decode", given=given, used=used, reason=reason))
        return smaller

    def _run(self, request: _Request, plan: Plan, progress: Progress, *, careful: bool) -> Tensor:
        """One attempt. `careful` looks at each op's finiteness at once, which on a GPU costs a synchronisation each."""
        decoder, observer, program = request.decoder, request.observer, plan.program
        b, _, h, w = plan.latent_shape
        with torch.inference_mode(False):
            image = torch.empty(
                (b, h * program.scale[1], w * program.scale[2], program.out_channels),
                dtype=request.out_dtype,
                device=request.out_device,
            )
        sink = ImageSink(image, request.finish)
        context = RunContext(
            plan=plan,
            device=decoder.device,
            packed=decoder.packed,
            observer=observer,
            progress=progress,
            check_each_op=careful or decoder.device.type == "cpu",
            on_widened=lambda name: self.widened.remember(decoder.content_hash, plan.dtypes.compute, name),
        )
        with self.pool.lease(plan.pool_bytes, decoder.device, request.settings.keep_bytes) as slab:
            feeder = LatentFeeder(request.latent, _parts(plan), _latent_buffers(plan, slab, observer), observer)
            try:
                first = 0
                for i, a_pass in enumerate(plan.passes):
                    observer.mark("transfer")
                    ready = feeder.get(i)
                    PassRunner(context, a_pass, slab, ready, sink, first).run()
                    first += a_pass.n_images
                    observer.pass_done(a_pass.n_images, plan.passes[0].n_images)
            finally:
                feeder.close()
        progress.finish()
        return image


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What `decode` was asked."""

    decoder: Decoder
    latent: Tensor
    shape: LatentShape
    settings: DecodeSettings
    observer: DecodeObserver
    finish: Finish
    out_dtype: torch.dtype
    out_device: torch.device


def _parts(plan: Plan) -> list[tuple[int, int]]:
    parts, start = [], 0
    for a_pass in plan.passes:
        parts.append((start, start + a_pass.n_images))
        start += a_pass.n_images
    return parts


def _latent_buffers(plan: Plan, slab: Slab, observer: DecodeObserver) -> list[Tensor]:
    """One or two pooled destinations [n, C, H, W] for latents, behind the arena."""
    _, c, h, w = plan.latent_shape
    n, dtype = plan.passes[0].n_images, DTYPES[plan.dtypes.stream]
    nbytes = latent_buffer_bytes(plan.program, n, (1, h, w), plan.dtypes.stream)
    start = max(p.arena.nbytes for p in plan.passes)
    buffers = []
    for i in range(2 if plan.prefetch else 1):
        flat, hit = slab.take(align(start) + i * nbytes, nbytes)
        observer.pool_request(nbytes, hit)
        typed = flat[: n * c * h * w * dtype.itemsize].view(dtype)
        buffers.append(
            typed.view(n, h, w, c).permute(0, 3, 1, 2) if plan.layout == "channels_last" else typed.view(n, c, h, w)
        )
    return buffers
