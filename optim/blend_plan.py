"""How a latent is cut for an opaque decoder: equal overlapping tiles and chunks, pictures per call, a first dtype."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import torch

from .blend_time import TimePlan, asked_chunks, usual_chunks, warn_of_cut_chunk_overlap, whole_clip
from .blend_weights import overlapped_spans
from .device import DeviceProfile
from .events import Choice, Fallback, PeakPrediction, PlanSummary
from .opaque import OpaqueDecoder
from .packing import dtype_name
from .settings import DecodeSettings
from .tiling import Span

log = logging.getLogger(__name__)

DEFAULT_TILE_PX = 768
"""Tile edge where the caller leaves it to the plan."""
MOST_SHARED = 3
"""An overlap takes at most one part in this many of a tile, so that no area is decoded more than about twice."""
FLOOR_LAT = 8
"""Least tile edge, in latent elements, that a shortage of memory may lead to."""
FIRST_FLOOR_PX = 256
"""Tile edge below which chunks of a clip get shorter before its tiles get smaller."""
MOST_IMAGES = 16
"""Most pictures per call on any device."""

_MODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendPlan:
    """The calls of one blended decode."""

    shape: tuple[int, ...]
    """The latent: [B, C, H, W], or [B, C, T, H, W] for clips."""
    scale: int
    """Picture pixels per latent element."""
    tile: int
    """Largest tile edge in latent elements."""
    overlap: int
    """Least overlap of neighbouring tiles in latent elements."""
    images_per_pass: int
    """Pictures, or clips, per call."""
    most_images: int
    """The cap that images_per_pass was chosen under."""
    time: TimePlan | None = None
    """How clips are cut in time; None for pictures."""
    memory: Choice | None = None
    """The memory there is, and which reading says so."""

    @property
    def rows(self) -> tuple[Span, ...]:
        """Spans of latent rows, all of one length."""
        return overlapped_spans(self.shape[-2], self.tile, self.overlap)

    @property
    def cols(self) -> tuple[Span, ...]:
        """Spans of latent columns, all of one length."""
        return overlapped_spans(self.shape[-1], self.tile, self.overlap)

    @property
    def passes(self) -> tuple[Span, ...]:
        """Pictures of each pass; the last may hold fewer."""
        n, step = self.shape[0], self.images_per_pass
        return tuple(Span(i, min(i + step, n)) for i in range(0, n, step))

    @property
    def is_untiled(self) -> bool:
        """True where one tile holds a whole picture, or whole frames."""
        return max(self.shape[-2:]) <= self.tile

    @property
    def is_whole(self) -> bool:
        """True where one call holds whole pictures or clips, which are then exactly what an undivided decode gives."""
        return self.is_untiled and self.n_chunks == 1

    @property
    def n_chunks(self) -> int:
        """Parts that a clip is cut into; 1 for pictures."""
        return 1 if self.time is None else self.time.n_chunks

    @property
    def calls_per_pass(self) -> int:
        """Calls of the decoder in one pass when none is repeated."""
        return len(self.rows) * len(self.cols) * self.n_chunks

    @property
    def n_calls(self) -> int:
        """Calls of the decoder when none is repeated."""
        return self.calls_per_pass * len(self.passes)

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """The largest latent that one call gets."""
        in_time = () if self.time is None else (self.time.call_latents,)
        return (self.images_per_pass, self.shape[1], *in_time, self.rows[0].size, self.cols[0].size)

    @property
    def tile_px(self) -> tuple[int, int]:
        """Height and width of a tile in picture pixels."""
        return self.rows[0].size * self.scale, self.cols[0].size * self.scale

    @property
    def overlap_px(self) -> int:
        """Overlap in picture pixels; 0 where nothing is cut."""
        return 0 if self.is_untiled else self.overlap * self.scale

    def smaller(self) -> BlendPlan | None:
        """The plan to try when memory runs out: one picture per call, then half the tile edge; None at the floor.

        A clip is tiled before it is cut in time, as a tile's fault ends near its border, while that of a chunk may go
        on to the end of the clip; but chunks get shorter before tiles get smaller than FIRST_FLOOR_PX.
        """
        if self.images_per_pass > 1:
            return replace(self, images_per_pass=1)
        shorter = None if self.time is None else self.time.smaller()
        floor = FLOOR_LAT if shorter is None else max(FLOOR_LAT, FIRST_FLOOR_PX // self.scale)
        edge = max(self.rows[0].size, self.cols[0].size)
        if edge > floor:
            tile = max(floor, edge // 2)
            return replace(self, tile=tile, overlap=min(self.overlap, tile // MOST_SHARED))
        return None if shorter is None else replace(self, time=shorter)


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeChoice:
    """The dtype that tiles start in, and why."""

    dtype: torch.dtype
    reason: str
    fallback: Fallback | None = None
    """Set where it is not what was asked for."""


def plan_blend(
    opaque: OpaqueDecoder, shape: tuple[int, ...], settings: DecodeSettings, profile: DeviceProfile
) -> BlendPlan:
    """The plan for a latent of the rank that the decoder takes; an overlap too large for the tile is cut.

    Tile sizes are rounded down to whole latent elements and overlaps up. A clip is one call in time unless chunks were
    asked for, or the decoder's own estimate for the whole clip exceeds the device's budget.
    """
    tile = max(1, (settings.tile_size or DEFAULT_TILE_PX) // opaque.scale)
    asked = math.ceil(settings.overlap / opaque.scale)
    overlap = min(asked, tile // MOST_SHARED)
    cap = min(profile.batch_cap, MOST_IMAGES)
    plan = BlendPlan(
        shape=shape, scale=opaque.scale, tile=tile, overlap=overlap, images_per_pass=1, most_images=cap,
        memory=profile.memory_choice,
    )  # fmt: skip
    if len(shape) == 5:
        return replace(plan, time=_plan_time(opaque, plan, settings, profile))
    return replace(plan, images_per_pass=_images_per_pass(plan, settings, profile))


def _plan_time(opaque: OpaqueDecoder, plan: BlendPlan, settings: DecodeSettings, profile: DeviceProfile) -> TimePlan:
    """How clips are cut in time: as asked, or not at all, or in short chunks where memory is known to be too small."""
    n_latents = plan.shape[2]
    if settings.chunk_frames:
        return asked_chunks(opaque, n_latents, settings)
    whole = whole_clip(opaque, n_latents, settings)
    if profile.budget_bytes is None or opaque.estimate_bytes is None:
        return whole
    peak = predict_peak(replace(plan, time=whole), opaque, choose_dtype(opaque, settings).dtype)
    needed = peak.total if profile.unified_memory else peak.scratch  # elsewhere the picture lies in the host's memory
    if needed <= profile.budget_bytes:
        return whole
    reason = (
        f"the whole clip would take {needed / 2**30:.2f} GiB of the {profile.budget_bytes / 2**30:.2f} GiB there are"
    )
    return usual_chunks(opaque, n_latents, settings, reason)


def warn_of_cut_overlap(plan: BlendPlan, settings: DecodeSettings) -> None:
    """One warning where the plan overlaps its tiles, or its chunks, by less than was asked for."""
    if plan.time is not None:
        warn_of_cut_chunk_overlap(plan.time, settings)
    if not plan.is_untiled and plan.overlap_px < settings.overlap:
        log.warning(
            "an overlap of %d px is too much for tiles of %d px; using %d px (a third of a tile at most)",
            settings.overlap, plan.tile * plan.scale, plan.overlap_px,
        )  # fmt: skip


def _images_per_pass(plan: BlendPlan, settings: DecodeSettings, profile: DeviceProfile) -> int:
    """Pictures per call: what fills the device, within its cap. (Clips go one by one: a decoder may hold state.)"""
    if not settings.batch_optimization:
        return 1
    fitting = profile.pass_pixels // math.prod(plan.tile_px)
    return max(1, min(plan.shape[0], plan.most_images, fitting))


def choose_dtype(opaque: OpaqueDecoder, settings: DecodeSettings) -> DtypeChoice:
    """The dtype to start in: what was asked for where the decoder allows it, else the nearest it does allow."""
    mode = settings.precision_mode
    own = DtypeChoice(dtype=opaque.dtype, reason="the VAE's own dtype")
    if mode == "mixed":
        return _instead(mode, opaque.dtype, "an opaque decoder runs in one dtype at a time")
    wanted = _MODES.get(mode, opaque.dtype)
    if wanted != opaque.dtype and opaque.decode_as is None:
        return _instead(dtype_name(wanted), opaque.dtype, "this decoder runs in its own dtype only")
    if mode != "auto" and wanted != torch.float32 and wanted not in opaque.working_dtypes:
        allowed = opaque.working_dtypes[0] if opaque.working_dtypes else opaque.dtype
        return _instead(dtype_name(wanted), allowed, "this VAE is not known to survive the dtype asked for")
    remembered = settings.adaptive_precision and settings.advanced_caching and opaque.memory.fails_in(wanted)
    wider = wider_dtype(opaque, wanted)
    if remembered and wider is not None:
        return _instead(dtype_name(wanted), wider, "most tiles of an earlier decode came out non-finite")
    return own if mode == "auto" else DtypeChoice(dtype=wanted, reason="as asked")


def _instead(given: str, used: torch.dtype, reason: str) -> DtypeChoice:
    event = Fallback(kind="dtype", where="decode", given=given, used=dtype_name(used), reason=reason)
    return DtypeChoice(dtype=used, reason=reason, fallback=event)


def wider_dtype(opaque: OpaqueDecoder, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype that repairs a non-finite tile, or None.

    It is float32: the one that holds every value of the others (bfloat16 has the range but drops digits of float16).
    """
    return torch.float32 if dtype != torch.float32 and opaque.decode_as is not None else None


def summarise(plan: BlendPlan, opaque: OpaqueDecoder, choice: DtypeChoice) -> PlanSummary:
    """The plan for records. Its MACs are 0: nobody knows the arithmetic of an opaque decoder."""
    height, width = plan.tile_px
    time = plan.time
    choices = [
        Choice(name="precision", value=dtype_name(choice.dtype), reason=choice.reason),
        Choice(name="tile", value=f"{height}x{width} pixels", reason=f"an edge of {plan.tile} latents at most"),
        Choice(name="overlap", value=f"{plan.overlap_px} pixels", reason="at most a third of a tile"),
        Choice(name="images_per_pass", value=str(plan.images_per_pass), reason=f"at most {plan.most_images}"),
    ]
    if plan.memory is not None:
        choices.append(plan.memory)
    if time is not None:
        choices.append(Choice(name="chunks", value=time.value, reason=time.reason))
    return PlanSummary(
        method="blended",
        approximate=not plan.is_whole,
        strategy="whole" if plan.is_whole else "chunks" if plan.is_untiled else "tiles",
        layout="contiguous",
        tile_px=plan.tile_px,
        overlap_px=plan.overlap_px,
        n_tiles=plan.n_calls,
        tile_grid=(len(plan.rows), len(plan.cols)),
        images_per_pass=plan.images_per_pass,
        n_passes=len(plan.passes),
        macs=0,
        bytes_moved=0,
        predicted=predict_peak(plan, opaque, choice.dtype),
        choices=tuple(choices),
        chunk_frames=0 if time is None else opaque.frames(time.call_latents),
        n_chunks=plan.n_chunks,
        boundaries=() if time is None else time.boundaries,
    )


def predict_peak(plan: BlendPlan, opaque: OpaqueDecoder, dtype: torch.dtype) -> PeakPrediction:
    """Bytes at the peak: the decoder's own estimate for a tile (where it has one), its float32 result, the picture.

    Frames that chunks share are held once more, beside the picture, while a chunk's tiles arrive.
    """
    frames, all_frames, held = 1, 1, 0
    if plan.time is not None:
        frames, all_frames = opaque.frames(plan.time.call_latents), opaque.frames(plan.time.n_latents)
        held = 0 if plan.is_untiled else plan.time.most_shared
    frame_bytes = 4 * opaque.output_channels * math.prod(plan.shape[-2:]) * plan.scale**2
    tile_bytes = 4 * plan.images_per_pass * opaque.output_channels * frames * math.prod(plan.tile_px)
    estimate = opaque.estimate_bytes(plan.tile_shape, dtype) if opaque.estimate_bytes is not None else 0
    return PeakPrediction(
        pool=0, scratch=estimate + tile_bytes, packed=0,
        output=(plan.shape[0] * all_frames + held) * frame_bytes,
    )  # fmt: skip
