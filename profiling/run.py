"""One recording under way: a DecodeObserver per level, ending in a DecodeRecord."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from ..optim.errors import NonFiniteError, PlanError
from ..optim.errors_oom import is_out_of_memory
from ..optim.events import CacheName, ConvShape, DecodeObserver, Fallback, OpReport, Phase, PlanSummary, SilentObserver
from .bounds import ERROR_BYTES, KEEP_PLAN_BOUNDARIES, bounded_identity, bounded_plan, cut
from .clock import Clock, DeviceTimer
from .energy import EnergyMeter, meter_for
from .live import LiveState
from .memory import MemoryCounters
from .parts import ChunkBoundary, DecodeStatus, Identity, Request
from .record import DecodeRecord, Environment, Level, environment_id
from .tally import BoundaryTally, SeenShapes

_ERROR_LENGTH = 400


def new_record_id() -> str:
    """32 hex digits that no other record has."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a recording measures with; tests pass fakes."""

    clock: Clock
    timer: Callable[[str], DeviceTimer | None]
    memory: Callable[[str], MemoryCounters]
    environment: Callable[[str], Environment]
    utc_now: Callable[[], datetime]
    cpu_time_ns: Callable[[], int]
    seen: SeenShapes
    cancel_types: tuple[type[BaseException], ...]
    copy_bytes_per_s: Callable[[str], int | None]
    new_id: Callable[[], str] = new_record_id
    energy: Callable[[str], EnergyMeter | None] = meter_for


def status_of(exc: BaseException, cancel_types: tuple[type[BaseException], ...]) -> DecodeStatus:
    """How a decode that raised `exc` ended."""
    if isinstance(exc, cancel_types):
        return DecodeStatus.INTERRUPTED
    if isinstance(exc, NonFiniteError):
        return DecodeStatus.NON_FINITE
    short = isinstance(exc, PlanError) and exc.need_bytes is not None  # told beforehand by the plan
    return DecodeStatus.OUT_OF_MEMORY if short or is_out_of_memory(exc) else DecodeStatus.ERROR


def sentence_of(exc: BaseException) -> str:
    """The first line of an exception's text, or its type's name where it has none."""
    lines = str(exc).strip().splitlines()
    return cut(lines[0][:_ERROR_LENGTH], ERROR_BYTES) if lines else type(exc).__name__


class Run(SilentObserver):
    """A recording at level `off`: identity, plan, outcome and wall time. Used as a context manager around a decode.

    Every event also goes to `forward`, first, so that what it raises leaves the decode before anything is counted.
    """

    level: Level = "off"
    _keep_boundaries = KEEP_PLAN_BOUNDARIES

    def __init__(self, identity: Identity, request: Request, tools: Tools, forward: DecodeObserver) -> None:
        """Nothing is measured before the block is entered."""
        self.identity = identity
        self.request = request
        self.record: DecodeRecord | None = None
        """The record, once the block has been left in any way."""
        self.record_id = ""
        """The record's id, from when the recording begins."""
        self._tools = tools
        self._next = forward
        self._plan: PlanSummary | None = None
        self._image_shape: tuple[int, ...] | None = None
        self._boundaries = BoundaryTally()
        self._held_start_bytes: int | None = None
        self._held_bytes: int | None = None
        self._high_water_bytes: int | None = None
        self._timer: DeviceTimer | None = None
        self._started_at = ""
        self._start_ns = 0
        self._idle = True

    def delivered(self, image_shape: tuple[int, ...]) -> None:
        """The decode gave a picture of this shape, [B, H, W, C]. Needed once before the block ends well."""
        self._image_shape = tuple(image_shape)

    def identify(self, identity: Identity) -> None:
        """Name the decoder once it is known, where opening it is part of what is recorded.

        ValueError for another kind of device: clock and counters were chosen for the one the recording began on.
        """
        began, found = self.identity.device, identity.device
        if began.partition(":")[0] != found.partition(":")[0]:
            raise ValueError(f"the recording began on {began}; a decoder on {found} needs its own")
        self.identity = identity

    @property
    def phase(self) -> Phase:
        """The phase that the clock runs for; always `other` at this level, which has no clock for phases."""
        return "other"

    def pool_at_start(self, held_bytes: int) -> None:
        """What the pool holds before the decode: memory that it need not take again."""
        self._held_start_bytes = held_bytes

    def pool_levels(self, held_bytes: int, high_water_bytes: int) -> None:
        """What the pool holds after the decode, and the most it lent during it."""
        self._held_bytes, self._high_water_bytes = held_bytes, high_water_bytes

    def begin(self) -> None:
        """Wait for the device, then start the clock."""
        tools = self._tools
        self.record_id = tools.new_id()
        self._timer = tools.timer(self.identity.device)
        self._started_at = tools.utc_now().isoformat(timespec="milliseconds")
        self._before()
        if self._timer is not None:
            self._timer.sync()
        self._start_ns = tools.clock.now_ns()
        self._started()

    def end(self, exc: BaseException | None) -> BaseException | None:
        """Wait for the device, stop the clock, build the record. Returns an error that showed only while waiting."""
        self._closing()
        failed = None if self._timer is None else _sync(self._timer)
        self._idle = failed is None
        wall_ns = self._tools.clock.now_ns() - self._start_ns
        self._ended()
        self.record = self._build(exc or failed, wall_ns)
        return failed if exc is None else None

    def live(self) -> LiveState:
        """A snapshot for other threads; at this level it knows the start only."""
        return LiveState(
            started_at=self._started_at,
            elapsed_ns=self._tools.clock.now_ns() - self._start_ns,
            waiting_ns=0,
            stage="start",
            phase="other",
            chunk=None,
            op=None,
            tile=None,
            done=0,
            total=None,
        )

    def _before(self) -> None:
        """Hook: before the first synchronisation."""

    def _started(self) -> None:
        """Hook: the clock has started."""

    def _closing(self) -> None:
        """Hook: before the last synchronisation."""

    def _ended(self) -> None:
        """Hook: the device is idle and the wall time is known."""

    def _build(self, exc: BaseException | None, wall_ns: int) -> DecodeRecord:
        environment = self._tools.environment(self.identity.device)
        return DecodeRecord(
            status=DecodeStatus.OK if exc is None else status_of(exc, self._tools.cancel_types),
            error=None if exc is None else sentence_of(exc),
            image_shape=self._image_shape if exc is None else None,
            started_at=self._started_at,
            wall_ns=wall_ns,
            level=self.level,
            identity=bounded_identity(self.identity),
            environment=environment,
            environment_id=environment_id(environment),
            request=self.request,
            plan=self._plan,
            first_of_shape=None,
            phases=None,
            stages=(),
            memory=None,
            pool=None,
            caches=None,
            precision=None,
            batch=None,
            prefetch=None,
            tiles=None,
            convs=None,
            n_fallbacks=None,
            fallbacks=(),
            boundaries=self._boundaries.part(),
            n_boundaries=self._boundaries.count,
            cpu_time_ns=None,
            copy_bytes_per_s=self._tools.copy_bytes_per_s(self.identity.device),
            energy_uj=None,
            record_id=self.record_id,
        )

    def mark(self, phase: Phase) -> None:
        """See DecodeObserver."""
        self._next.mark(phase)

    def planned(self, plan: PlanSummary) -> None:
        """See DecodeObserver. A decode that is planned again begins again, and so do its boundaries."""
        self._next.planned(plan)
        self._plan = bounded_plan(plan, self._keep_boundaries)
        self._boundaries = BoundaryTally()

    def op_started(self, index: int, n_ops: int, name: str, n_tiles: int) -> None:
        """See DecodeObserver."""
        self._next.op_started(index, n_ops, name, n_tiles)

    def tile_started(self, i: int, n: int, shape: tuple[int, ...], dtype: str) -> None:
        """See DecodeObserver."""
        self._next.tile_started(i, n, shape, dtype)

    def progress(self, done: int, total: int) -> None:
        """See DecodeObserver."""
        self._next.progress(done, total)

    def op_done(self, report: OpReport) -> None:
        """See DecodeObserver."""
        self._next.op_done(report)

    def op_redone(self, name: str, dtype: str, macs: int) -> None:
        """See DecodeObserver."""
        self._next.op_redone(name, dtype, macs)

    def conv_requested(self, shape: ConvShape) -> None:
        """See DecodeObserver."""
        self._next.conv_requested(shape)

    def cache_lookup(self, cache: CacheName, hit: bool) -> None:
        """See DecodeObserver."""
        self._next.cache_lookup(cache, hit)

    def pool_request(self, nbytes: int, hit: bool) -> None:
        """See DecodeObserver."""
        self._next.pool_request(nbytes, hit)

    def prefetch_asked(self, ready: bool) -> None:
        """See DecodeObserver."""
        self._next.prefetch_asked(ready)

    def pass_done(self, images: int, slots: int) -> None:
        """See DecodeObserver."""
        self._next.pass_done(images, slots)

    def fallback(self, event: Fallback) -> None:
        """See DecodeObserver."""
        self._next.fallback(event)

    def converted(self, nbytes: int) -> None:
        """See DecodeObserver."""
        self._next.converted(nbytes)

    def chunk_started(self, i: int, n: int) -> None:
        """See DecodeObserver."""
        self._next.chunk_started(i, n)

    def boundary(self, clip: int, frame: int, smoothness: float) -> None:
        """See DecodeObserver."""
        self._next.boundary(clip, frame, smoothness)
        self._boundaries.add(ChunkBoundary(clip=clip, frame=frame, smoothness=smoothness))


def _sync(timer: DeviceTimer) -> Exception | None:
    """Wait for the device; an error of the work it was given shows here and is returned."""
    try:
        timer.sync()
    except Exception as exc:
        return exc
    return None
