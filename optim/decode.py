"""The engine's front door: open a decoder, plan a decode, run it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from .decoder import Decoder as Decoder
from .decoder import open_decoder as open_decoder
from .device import DeviceProfile, describe_device
from .errors import SettingsError
from .events import SILENT, DecodeObserver
from .executor import Progress
from .isolation import isolated, widest_head
from .ladder import PICTURE_RUNGS, Job, Last, Squeeze, fit_or_refuse, run_ladder
from .latents import LatentShape, check_latent, check_latent_shape, check_values
from .packing import dtype_name
from .pictures import AsOpaque, PictureRequest, blend_pictures, run_pictures
from .places import MakeRoom, Places
from .plan import Plan
from .planner import ADVICE, describe_pictures, is_for_now, plan_with
from .pool import MemoryPool
from .precision import DtypeDecision, WidenedOps, choose_dtypes
from .scope import flags_for
from .settings import DecodeSettings
from .store import Finish, finish_of
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
R = TypeVar("R", PictureRequest, ClipRequest)

MAX_PLANS = 64


class Engine:
    """Decodes with one memory pool. Decodes of two threads take turns; both get correct pictures."""

    def __init__(
        self,
        *,
        profile: DeviceProfile | None = None,
        pool: MemoryPool | None = None,
        tuning: TuningStore | None = None,
        make_room: MakeRoom | None = None,
        host_device: torch.device | str = "cpu",
    ) -> None:
        """`profile` None describes each decoder's device when it is used; `tuning` holds what was measured on it.

        Where memory is short, `make_room` is asked to free some, and the widest values move to `host_device`.
        """
        self.pool = pool or MemoryPool()
        self.widened = WidenedOps()
        self._profile, self._tuning = profile, tuning
        self._places = Places(pool=self.pool, host=torch.device(host_device), make_room=make_room)
        self._clips = ClipEngine(self._places, self.widened, self.profile_for)
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
            return self._clips.plan(decoder, clips, settings or DecodeSettings(), observer, profile)
        shape, chosen = check_latent_shape(latent_shape, decoder.program), settings or DecodeSettings()

        def plan_for(squeeze: Squeeze) -> Plan:
            return self._plan(decoder, shape, chosen, observer, profile, squeeze)[0]

        return fit_or_refuse(plan_for, PICTURE_RUNGS, profile, describe_pictures(shape), ADVICE)

    def _plan(
        self,
        decoder: Decoder,
        shape: LatentShape,
        settings: DecodeSettings,
        observer: DecodeObserver,
        profile: DeviceProfile,
        squeeze: Squeeze,
        out_itemsize: int = 4,
    ) -> tuple[Plan, DtypeDecision]:
        """The plan that gives up what the squeeze says, whether it fits or not."""
        program, asked = decoder.program, settings
        settings = filled_in(settings, profile)
        if settings.method in ("stock", "blended"):
            raise SettingsError(f"method {settings.method} is not the exact engine's; choose auto or exact")
        edge = max(shape[2] * program.scale[1], shape[3] * program.scale[2])
        native = dtype_name(decoder.loaded_dtype)
        decision = choose_dtypes(
            settings.precision_mode, program, native, profile, edge, self.widened, decoder.content_hash
        )
        # free memory changes from decode to decode: a plan is good for any budget it fits
        key = (program, shape, settings, profile.at_any_time(), decision.dtypes, decoder.stored_dtype, squeeze)
        with self._lock:
            plan = self._plans.get(key) if settings.advanced_caching else None
        if plan is not None and not profile.fits(plan.predicted):
            plan = None
        observer.cache_lookup("plan", plan is not None)
        if plan is None:
            out_bytes = shape[0] * program.out_channels * shape[2] * program.scale[1] * shape[3] * program.scale[2] * 4
            plan = plan_with(
                program, shape, settings, profile, decision, out_bytes=out_bytes, stored=decoder.stored_dtype,
                squeeze=squeeze,
            )  # fmt: skip
            if settings.advanced_caching and not (is_for_now(plan) and not squeeze.batch):
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
        as_opaque: AsOpaque | None = None,
    ) -> Tensor:
        """Decode latents to pictures [B, H, W, C], equal to the untiled decode within rounding.

        Latents are [B, C, H, W]; of a video decoder [B, C, T, H, W], or [B, C, H, W] for clips of one frame, and the
        pictures are then its frames, clip by clip. `finish` takes raw float32 tiles [B, C, h, w] to picture range; None
        is the decoder's usual ending. `as_opaque` gives the decoder as blended tiles know it, for the method `auto`
        where memory does not suffice in any other way.
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
            pictures = PictureRequest(
                decoder=decoder, latent=latent, shape=check_latent(latent, decoder.program), settings=settings,
                observer=observer, finish=finish or finish_of(decoder.program), out_dtype=out_dtype,
                out_device=device, as_opaque=as_opaque,
            )  # fmt: skip
            image = self._exclusively(pictures, self._decode_pictures)
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

    def _decode_pictures(self, request: PictureRequest) -> Tensor:
        decoder, settings, observer = request.decoder, request.settings, request.observer

        def plan_for(squeeze: Squeeze, profile: DeviceProfile) -> tuple[Plan, DtypeDecision]:
            size = request.out_dtype.itemsize
            return self._plan(decoder, request.shape, settings, observer, profile, squeeze, size)

        def run(plan: Plan, progress: Progress, careful: bool) -> Tensor:
            def remember(name: str) -> None:
                self.widened.remember(decoder.content_hash, plan.dtypes.compute, name)

            return run_pictures(request, plan, self._places, progress, careful=careful, on_widened=remember)

        def blend(last: Last) -> Tensor:
            return blend_pictures(request, self.profile_for(decoder, settings), last)

        may_blend = request.as_opaque is not None and settings.method == "auto"
        return run_ladder(
            Job(
                observer=observer, what=describe_pictures(request.shape), advice=ADVICE, rungs=PICTURE_RUNGS,
                profile=lambda: self.profile_for(decoder, settings), plan=plan_for, run=run,
                release=lambda: self._places.release(decoder), held=lambda: self._places.held_bytes(decoder),
                make_room=self._places.room_maker(decoder.device), blend=blend if may_blend else None,
            )
        )  # fmt: skip
