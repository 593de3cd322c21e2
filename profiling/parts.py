"""The parts of a DecodeRecord. Integers with units in their names; None is unknown, zero is measured."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from ..optim.events import PHASES, CacheName, ConvShape, PeakPrediction, Phase
from ..optim.settings import DecodeSettings

EnergyFrom = Literal["counter", "power", "amdsmi"]
"""`counter`: the difference of a counter in hwmon. `power`: samples of a power sensor there, integrated. `amdsmi`: the
difference of AMD SMI's counter."""
WIDE_DTYPES = ("float32", "float64")
"""Dtypes that do not count as reduced precision."""


class DecodeStatus(str, enum.Enum):
    """How a decode ended."""

    OK = "ok"
    INTERRUPTED = "interrupted"
    OUT_OF_MEMORY = "out_of_memory"
    NON_FINITE = "non_finite"
    ERROR = "error"


def share(part: int | None, whole: int | None) -> float | None:
    """part / whole, or None where either is unknown or there is no whole."""
    return None if part is None or not whole else part / whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which decoder ran, and where."""

    vae_hash: str | None
    """Content hash of the weights (names, shapes, sampled bytes); None where it cannot be taken."""
    family: str
    """Family that lowered the decoder, or the name of an opaque one."""
    loaded_dtype: str
    """The decoder's own dtype ("float32", "bfloat16", ...)."""
    device: str
    """Device string that torch understands ("cpu", "cuda:0")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller asked for."""

    settings: DecodeSettings
    latent_shape: tuple[int, ...]
    """[B, C, H, W] or [B, C, T, H, W] as given."""
    latent_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """Nanoseconds per phase; they sum to the wall time, `other_ns` being the remainder.

    On a GPU with events these are times on the device's queue, so that a phase is charged for what it launched.
    """

    lower_ns: int
    """Recognising and lowering the decoder."""
    plan_ns: int
    """Planning tiles, slots and dtypes."""
    load_ns: int
    """Fetching, casting and packing weights."""
    stage_ns: int
    """Norm, activation, upsampling and padding into a tile's scratch."""
    compute_ns: int
    """Convolutions and attention."""
    stitch_ns: int
    """Residuals and writing tiles where they belong."""
    transfer_ns: int
    """Moving the picture to the output device and dtype."""
    sync_ns: int
    """Waiting for the device; 0 where its queue is timed by events."""
    other_ns: int
    """Everything else."""

    def of(self, phase: Phase) -> int:
        """Nanoseconds of one phase."""
        ns: int = getattr(self, f"{phase}_ns")
        return ns

    @property
    def total_ns(self) -> int:
        """Sum of all phases."""
        return sum(self.of(p) for p in PHASES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """One run of one op; recorded at level `per_op` only."""

    op: str
    kind: str
    n_tiles: int
    start_ns: int
    """Host time since the decode began."""
    host_ns: int
    """Host time from start to end; on a GPU this is launch time only."""
    device_ns: int | None
    """Time on the device's queue, from events; None without them (CPU)."""
    macs: int
    dtype: str
    backend: str
    memory_bytes: int | None
    """Level at the op's end: torch's allocated bytes on a GPU, resident set of the process on a CPU."""
    device_start_ns: int | None = None
    """When the device's queue came to it, since the decode's first event; None without events (CPU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakReading:
    """One memory counter over one decode."""

    start_bytes: int | None
    """Level when the decode began."""
    peak_bytes: int | None
    """Highest level, absolute."""
    above_start_bytes: int | None
    """Peak minus start; None where the peak cannot be told to be this decode's."""
    since_process_start: bool
    """True where the counter cannot be reset: `peak_bytes` may then belong to an earlier run."""


UNMEASURED = PeakReading(start_bytes=None, peak_bytes=None, above_start_bytes=None, since_process_start=False)
"""A counter that does not exist here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBytes:
    """Memory of one decode, promised and measured."""

    planned: PeakPrediction | None
    """The last plan's promise, above the weights; None when none was made."""
    allocated: PeakReading
    """torch's caching allocator, bytes handed out; unmeasured on a CPU, where torch has none."""
    reserved: PeakReading
    """torch's caching allocator, bytes taken from the device."""
    process: PeakReading
    """Resident set of this process."""
    available_bytes: int | None
    """System memory available when the decode began."""

    @property
    def fragmentation_bytes(self) -> int | None:
        """Peak reserved minus peak allocated; None without a caching allocator."""
        if self.reserved.peak_bytes is None or self.allocated.peak_bytes is None:
            return None
        return self.reserved.peak_bytes - self.allocated.peak_bytes

    @property
    def measured_bytes(self) -> int | None:
        """What the decode itself took: allocated above the start on a GPU, else resident set above the start."""
        on_device = self.allocated.above_start_bytes
        return self.process.above_start_bytes if on_device is None else on_device


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """Buffers asked of the memory pool."""

    requests: int
    hits: int
    """Requests that needed no new memory, which is also the number of allocations avoided."""
    requested_bytes: int
    served_bytes: int
    """Bytes of the hits."""
    held_start_bytes: int | None
    """Bytes the pool held before the decode; None where the caller did not say."""
    held_bytes: int | None
    """Bytes the pool keeps after the decode; None where the caller did not say."""
    high_water_bytes: int | None
    """Most bytes the pool lent at once; None where the caller did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """Lookups in one cache."""

    name: CacheName
    lookups: int
    hits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeMacs:
    """Multiply-accumulates in one dtype."""

    dtype: str
    macs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionUse:
    """Arithmetic by dtype."""

    kept: tuple[DtypeMacs, ...]
    """Work whose result is in the picture, widest share first."""
    redone: tuple[DtypeMacs, ...]
    """Work thrown away: not finite, or from a plan that was given up."""
    ops_below_native: int
    """Op runs kept in a dtype narrower than the decoder's own."""
    converted_bytes: int
    """Bytes written by conversions that the arithmetic did not need."""

    @property
    def kept_macs(self) -> int:
        """All multiply-accumulates kept."""
        return sum(d.macs for d in self.kept)

    @property
    def kept_narrow_macs(self) -> int:
        """Multiply-accumulates below fp32 that were kept."""
        return sum(d.macs for d in self.kept if d.dtype not in WIDE_DTYPES)

    @property
    def redone_narrow_macs(self) -> int:
        """Multiply-accumulates below fp32 that were thrown away."""
        return sum(d.macs for d in self.redone if d.dtype not in WIDE_DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """One pass over a part of the batch."""

    images: int
    slots: int
    """Images it had room for."""
    ns: int | None
    """From its first op to its end; None where no op was reported or, on a GPU, without events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchUse:
    """Passes in order, at most the first 64."""

    images: int
    """Images decoded."""
    slots: int
    """Room in all passes that ran, those of a plan that was given up included."""
    n_passes: int
    largest_pass: int
    """Most images that one pass held."""
    passes: tuple[PassRecord, ...]

    @property
    def batch_speedup(self) -> float | None:
        """Time per image in one-image passes ÷ time per image in larger passes of the same decode.

        Above 1 the larger passes pay. None unless the decode ran both and could time both.
        """
        single = [p for p in self.passes if p.images == 1 and p.ns is not None]
        multi = [p for p in self.passes if p.images > 1 and p.ns is not None]
        if not single or not multi:
            return None
        alone = sum(p.ns or 0 for p in single) / len(single)
        together = sum(p.ns or 0 for p in multi) / sum(p.images for p in multi)
        return alone / together if together else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchUse:
    """Items prepared ahead."""

    asked: int
    ready: int
    """Items that had finished before they were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """One shape that tiles were run in."""

    shape: tuple[int, ...]
    """As handed to the kernel, [B, C, H, W] or [B, C, T, H, W]."""
    dtype: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileUse:
    """Tiles that really ran, retries included."""

    count: int
    distinct_shapes: int
    shapes: tuple[TileShape, ...]
    """At most the first 64, in order of appearance."""
    grid: tuple[int, int] | None
    """The last plan's tiles (down, across); None when none was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvUse:
    """Convolution shapes handed to a backend: each new one may cost a kernel search."""

    requests: int
    distinct: int
    new: int
    """Distinct shapes that this process had not requested before on this device."""
    shapes: tuple[ConvShape, ...]
    """At most 64, in order of appearance."""

    @property
    def seen(self) -> int:
        """Distinct shapes that this process had requested before."""
        return self.distinct - self.new


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBoundary:
    """Where one chunk of a video meets the next."""

    frame: int
    """First output frame of the later chunk, within its clip."""
    smoothness: float
    """0 to 1; 1 is as smooth as the frames around it."""
    clip: int = 0
    """Clip of the batch."""
