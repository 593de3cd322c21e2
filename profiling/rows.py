"""One line of the history per decode: what a table of decodes shows, sorts and filters by."""

from __future__ import annotations

from dataclasses import dataclass

from .record import DecodeRecord, DecodeStatus, Level


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """One decode as a row. None is unknown or not recorded, zero is measured."""

    record_id: str
    """32 hex digits; empty for records older than ids."""
    started_at: str
    """UTC, ISO 8601."""
    status: DecodeStatus
    error: str | None
    family: str
    vae_hash: str | None
    device: str
    method: str | None
    """As planned: `exact`, `blended` or `stock`; None where the decode ended before its plan."""
    approximate: bool | None
    """True where the picture may differ from an untiled decode by more than rounding."""
    precision: str
    """Dtype of most multiply-accumulates kept, else the decoder's own."""
    loaded_dtype: str
    """The decoder's own dtype."""
    latent_shape: tuple[int, ...]
    """[B, C, H, W] or [B, C, T, H, W]."""
    image_shape: tuple[int, ...] | None
    """[B, H, W, C]; None unless the decode ended well."""
    wall_ns: int
    first_of_shape: bool | None
    """True where the time may hold a kernel search."""
    predicted_bytes: int | None
    """Peak above the weights, as planned."""
    measured_bytes: int | None
    """Peak above the start, as measured."""
    used_bytes: int | None
    """What the prediction compares with: measured, and what was used of the memory the pool held before."""
    n_tiles: int | None
    """Tiles that really ran."""
    n_fallbacks: int | None
    temporal_consistency: float | None
    """The least smooth chunk boundary of a video, 0 to 1; None without boundaries."""
    energy_uj: int | None
    """Microjoules of the whole device meanwhile."""
    level: Level
    environment_id: str
    """Equal for decodes whose figures may be compared directly."""


def row_of(record: DecodeRecord) -> HistoryRow:
    """The row of a record."""
    plan, memory = record.plan, record.memory
    return HistoryRow(
        record_id=record.record_id,
        started_at=record.started_at,
        status=record.status,
        error=record.error,
        family=record.identity.family,
        vae_hash=record.identity.vae_hash,
        device=record.identity.device,
        method=None if plan is None else plan.method,
        approximate=None if plan is None else plan.approximate,
        precision=precision_of(record),
        loaded_dtype=record.identity.loaded_dtype,
        latent_shape=record.request.latent_shape,
        image_shape=record.image_shape,
        wall_ns=record.wall_ns,
        first_of_shape=record.first_of_shape,
        predicted_bytes=None if plan is None else plan.predicted.total,
        measured_bytes=None if memory is None else memory.measured_bytes,
        used_bytes=record.used_bytes,
        n_tiles=None if record.tiles is None else record.tiles.count,
        n_fallbacks=record.n_fallbacks,
        temporal_consistency=record.temporal_consistency,
        energy_uj=record.energy_uj,
        level=record.level,
        environment_id=record.environment_id,
    )


def precision_of(record: DecodeRecord) -> str:
    """Dtype of most multiply-accumulates kept; the decoder's own where none were counted."""
    kept = record.precision.kept if record.precision else ()
    counted = [d for d in kept if d.macs]
    return max(counted, key=lambda d: d.macs).dtype if counted else record.identity.loaded_dtype
