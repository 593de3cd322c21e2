"""How a latent is cut for an opaque decoder: equal overlapping tiles, pictures per call, a dtype to start in."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import torch

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
MOST_IMAGES = 16
"""Most pictures per call on any device."""

_MODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendPlan:
    """The calls of one blended decode."""

    shape: tuple[int, ...]
    """The latent: [B, C, H, W], or [B, C, T, H, W] for clips, which are never cut in time here."""
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
    def is_whole(self) -> bool:
        """True where one tile is the whole picture, which is then exactly what an untiled decode gives."""
        return max(self.shape[-2:]) <= self.tile

    @property
    def n_calls(self) -> int:
        """Calls of the decoder when none is repeated."""
        return len(self.rows) * len(self.cols) * len(self.passes)

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """The largest latent that one call gets."""
        return (self.images_per_pass, *self.shape[1:-2], self.rows[0].size, self.cols[0].size)

    @property
    def tile_px(self) -> tuple[int, int]:
        """Height and width of a tile in picture pixels."""
        return self.rows[0].size * self.scale, self.cols[0].size * self.scale

    @property
    def overlap_px(self) -> int:
        """Overlap in picture pixels; 0 where nothing is cut."""
        return 0 if self.is_whole else self.overlap * self.scale

    def smaller(self) -> BlendPlan | None:
        """The plan to try when memory runs out: one picture per call, then half the tile edge; None at the floor."""
        if self.images_per_pass > 1:
            return replace(self, images_per_pass=1)
        edge = max(self.rows[0].size, self.cols[0].size)
        if edge <= FLOOR_LAT:
            return None
        tile = max(FLOOR_LAT, edge // 2)
        return replace(self, tile=tile, overlap=min(self.overlap, tile // MOST_SHARED))


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

    Tile sizes are rounded down to whole latent elements and overlaps up.
    """
    tile = max(1, (settings.tile_size or DEFAULT_TILE_PX) // opaque.scale)
    asked = math.ceil(settings.overlap / opaque.scale)
    overlap = min(asked, tile // MOST_SHARED)
    cap = min(profile.batch_cap, MOST_IMAGES)
    plan = BlendPlan(shape=shape, scale=opaque.scale, tile=tile, overlap=overlap, images_per_pass=1, most_images=cap)
    return replace(plan, images_per_pass=_images_per_pass(plan, settings, profile))


def warn_of_cut_overlap(plan: BlendPlan, settings: DecodeSettings) -> None:
    """One warning where the plan overlaps its tiles by less than was asked for."""
    if not plan.is_whole and plan.overlap_px < settings.overlap:
        log.warning(
            "an overlap of %d px is too much for tiles of %d px; using %d px (a third of a tile at most)",
            settings.overlap, plan.tile * plan.scale, plan.overlap_px,
        )  # fmt: skip


def _images_per_pass(plan: BlendPlan, settings: DecodeSettings, profile: DeviceProfile) -> int:
    """Pictures per call: what fills the device, within its cap. Clips go one by one: a decoder may hold state."""
    if len(plan.shape) == 5 or not settings.batch_optimization:
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
    return PlanSummary(
        method="blended",
        approximate=not plan.is_whole,
        strategy="whole" if plan.is_whole else "tiles",
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
        choices=(
            Choice(name="precision", value=dtype_name(choice.dtype), reason=choice.reason),
            Choice(name="tile", value=f"{height}x{width} pixels", reason=f"an edge of {plan.tile} latents at most"),
            Choice(name="overlap", value=f"{plan.overlap_px} pixels", reason="at most a third of a tile"),
            Choice(name="images_per_pass", value=str(plan.images_per_pass), reason=f"at most {plan.most_images}"),
        ),
    )


def predict_peak(plan: BlendPlan, opaque: OpaqueDecoder, dtype: torch.dtype) -> PeakPrediction:
    """Bytes at the peak: the decoder's own estimate for a tile (where it has one), its float32 result, the picture."""
    pixels = math.prod(plan.tile_px)
    frames = opaque.frames(plan.shape[2]) if len(plan.shape) == 5 else 1
    tile_bytes = 4 * plan.images_per_pass * opaque.output_channels * frames * pixels
    picture = math.prod(plan.shape[-2:]) * plan.scale**2
    estimate = opaque.estimate_bytes(plan.tile_shape, dtype) if opaque.estimate_bytes is not None else 0
    output = 4 * plan.shape[0] * opaque.output_channels * frames * picture
    return PeakPrediction(pool=0, scratch=estimate + tile_bytes, packed=0, output=output)
