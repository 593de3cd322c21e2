"""What one decode did and cost: one frozen record, one JSON line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..optim.events import Fallback, PlanSummary
from .codec import decode, encode
from .environment import Environment, environment_id
from .parts import (
    UNMEASURED,
    BatchUse,
    CacheUse,
    ChunkBoundary,
    ConvUse,
    DecodeStatus,
    DtypeMacs,
    EnergyFrom,
    Identity,
    PassRecord,
    PeakBytes,
    PeakReading,
    PhaseTimes,
    PoolUse,
    PrecisionUse,
    PrefetchUse,
    Request,
    StageRecord,
    TileShape,
    TileUse,
    share,
)
from .trace_log import TraceLog

__all__ = [
    "SCHEMA_VERSION",
    "UNMEASURED",
    "BatchUse",
    "CacheUse",
    "ChunkBoundary",
    "ConvUse",
    "DecodeRecord",
    "DecodeStatus",
    "DtypeMacs",
    "EnergyFrom",
    "Environment",
    "Identity",
    "Level",
    "PassRecord",
    "PeakBytes",
    "PeakReading",
    "PhaseTimes",
    "PoolUse",
    "PrecisionUse",
    "PrefetchUse",
    "Request",
    "StageRecord",
    "TileShape",
    "TileUse",
    "TraceLog",
    "environment_id",
]

SCHEMA_VERSION = 1
"""Format of a record. History: 1 first version."""

Level = Literal["off", "summary", "per_op"]
"""How much is recorded: `off` keeps identity, plan, outcome and wall time, `per_op` adds ops one by one and a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRecord:
    """One decode. ValueError if status, error and image_shape disagree.

    Parts are None at level `off`, where nothing was counted; inside a part None is unknown and zero is measured.
    """

    status: DecodeStatus
    error: str | None
    """The one-sentence error, exactly when status is not ok."""
    image_shape: tuple[int, ...] | None
    """[B, H, W, C] as delivered (frames folded into B), exactly when status is ok."""
    started_at: str
    """UTC, ISO 8601."""
    wall_ns: int
    """Latent in hand to pictures on the output device, synchronised at both ends."""
    first_of_shape: bool | None
    """True when the decode requested a convolution shape new to the process, so it may hold a kernel search;
    for an opaque decoder, a new tile shape. None when nothing was counted."""
    level: Level
    identity: Identity
    environment: Environment
    environment_id: str
    """Equal for records that may be compared directly."""
    request: Request
    plan: PlanSummary | None
    """The last plan, its lists and texts within the bounds of bounds.py; None when the decode ended before one."""
    phases: PhaseTimes | None
    stages: tuple[StageRecord, ...]
    """Empty unless level is `per_op`; at most the first 2048 then."""
    memory: PeakBytes | None
    pool: PoolUse | None
    caches: tuple[CacheUse, ...] | None
    """One entry per cache, in the order program, plan, packed, tuning."""
    precision: PrecisionUse | None
    batch: BatchUse | None
    prefetch: PrefetchUse | None
    tiles: TileUse | None
    convs: ConvUse | None
    n_fallbacks: int | None
    fallbacks: tuple[Fallback, ...]
    """At most the first 64."""
    boundaries: tuple[ChunkBoundary, ...]
    """Chunk boundaries of a video, at most the 256 least smooth, in the order of the frames; empty for pictures."""
    cpu_time_ns: int | None
    """CPU time of the whole process during the decode, all threads. Source: time.process_time_ns."""
    copy_bytes_per_s: int | None
    """Bandwidth of a plain copy on this device (bytes read plus written); None unless it was measured."""
    energy_uj: int | None
    """Microjoules of the whole device meanwhile; None where the platform does not report energy."""
    n_boundaries: int | None = None
    """Chunk boundaries measured; None in records older than the count."""
    record_id: str = ""
    """32 hex digits, new for each decode; empty in records older than the field."""
    energy_from: EnergyFrom | None = None
    """What `energy_uj` was read from; None where it is unknown."""
    n_stages: int | None = None
    """Ops that ran to their end, those beyond the bound of `stages` included; None unless level is `per_op`."""
    trace: TraceLog | None = None
    """When ops, tiles and phases began, and memory over time; None unless level is `per_op`."""

    def __post_init__(self) -> None:
        """Check that the outcome is told consistently."""
        ok = self.status is DecodeStatus.OK
        if ok != (self.error is None) or ok != (self.image_shape is not None):
            raise ValueError(
                f"status {self.status.value} contradicts error={self.error!r}, image_shape={self.image_shape}; "
                "an ok decode has a shape and no error, any other an error and no shape"
            )
        if self.wall_ns < 0:
            raise ValueError(f"wall_ns is {self.wall_ns}; a duration cannot be negative")

    @property
    def conversion_share(self) -> float | None:
        """Bytes of avoidable conversions ÷ bytes the plan moves; None for an opaque decoder."""
        moved = self.plan.bytes_moved if self.plan else None
        return share(self.precision.converted_bytes, moved) if self.precision else None

    @property
    def bytes_per_s(self) -> float | None:
        """Memory bandwidth: bytes the plan moves ÷ wall time; None for an opaque decoder or a decode that failed."""
        if self.status is not DecodeStatus.OK or self.plan is None or not self.plan.bytes_moved:
            return None
        return share(self.plan.bytes_moved * 1_000_000_000, self.wall_ns)

    @property
    def bandwidth_share(self) -> float | None:
        """Memory bandwidth ÷ that of a plain copy on this device."""
        rate = self.bytes_per_s
        return None if rate is None or not self.copy_bytes_per_s else rate / self.copy_bytes_per_s

    @property
    def parallel_efficiency(self) -> float | None:
        """CPU time ÷ (wall time x threads): the share of the threads' time in which they ran. CPU decodes only.

        Threads that wait by spinning count as running, and so does all else the process does meanwhile, so the
        value can pass 1. On a GPU the host's threads say nothing about the device, so it is None.
        """
        if self.cpu_time_ns is None or self.identity.device.partition(":")[0] != "cpu":
            return None
        return share(self.cpu_time_ns, self.wall_ns * self.environment.threads)

    @property
    def used_bytes(self) -> int | None:
        """What the decode took: the measured peak above the start, and what it used of the memory the pool held before.

        This is what the plan predicts. None where the peak could not be measured.
        """
        if self.memory is None or self.memory.measured_bytes is None:
            return None
        held = (self.pool.held_start_bytes if self.pool else None) or 0
        return self.memory.measured_bytes + min(held, self.memory.planned.pool if self.memory.planned else 0)

    @property
    def prediction_ratio(self) -> float | None:
        """Predicted peak ÷ bytes used."""
        planned = self.memory.planned if self.memory else None
        return share(planned.total, self.used_bytes) if planned else None

    @property
    def temporal_consistency(self) -> float | None:
        """The least smooth chunk boundary; None without boundaries."""
        return min((b.smoothness for b in self.boundaries), default=None)

    def to_json(self) -> dict[str, Any]:
        """A JSON-safe object that carries `schema_version`."""
        return {"schema_version": SCHEMA_VERSION, **encode(self)}

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> DecodeRecord:
        """The record that `to_json` wrote. ValueError for another format or a broken record."""
        version = line.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(f"a record has format {version}; this version reads format {SCHEMA_VERSION}")
        return decode(cls, {k: v for k, v in line.items() if k != "schema_version"})
