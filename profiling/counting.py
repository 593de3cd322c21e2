"""Recordings that count: level `summary`; per_op.py adds to it."""

from __future__ import annotations

from dataclasses import replace

from ..optim.events import CacheName, ConvShape, Fallback, OpReport, Phase, PlanSummary
from .bounds import bounded_fallback
from .clock import DeviceTimer, EventTimeline, HostTimeline, Timeline
from .live import ChunkPosition, LiveState, OpPosition, TilePosition, stage_of
from .memory import PeakWatch
from .parts import BatchUse, PassRecord, PeakBytes, PoolUse, PrefetchUse, StageRecord
from .record import DecodeRecord, Level
from .run import Run
from .tally import CacheTally, ConvTally, PrecisionTally, TileTally

KEEP_FALLBACKS = 64
KEEP_PASSES = 64


class SummaryRun(Run):
    """Level `summary`: counts everything, keeps no list that grows with the picture."""

    level: Level = "summary"
    _timeline: Timeline

    def _before(self) -> None:
        tools = self._tools
        self._counters = tools.memory(self.identity.device)
        found = self._counters
        self._watches = [PeakWatch(c) for c in (found.allocated, found.reserved, found.process)]
        self._convs = ConvTally(self.identity.device, tools.seen)
        self._tiles, self._precision, self._caches = TileTally(), PrecisionTally(), CacheTally()
        self._pool_requests = self._pool_hits = self._requested_bytes = self._served_bytes = 0
        self._asked = self._ready = self._images = self._slots = self._n_passes = self._largest = 0
        self._passes: list[PassRecord] = []
        self._pass_start_ns: int | None = None
        self._n_fallbacks = 0
        self._fallbacks: list[Fallback] = []
        # One tuple, replaced as a whole, so that another thread never reads half of a change.
        self._where: tuple[OpPosition | None, tuple[int, int, tuple[int, ...], str] | None] = (None, None)
        self._chunk: ChunkPosition | None = None
        self._done: tuple[int, int | None] = (0, None)
        self._phase: Phase = "other"
        self._energy = tools.energy(self.identity.device)
        self._energy_uj: int | None = None
        self._cpu_start_ns = tools.cpu_time_ns()

    def _started(self) -> None:
        self._event_ns = self._start_ns
        self._timeline = HostTimeline(self._start_ns)
        if self._timer is not None and self._timer.has_events:
            self._timeline = self._event_timeline(self._timer)
        if self._energy is not None:
            self._energy.begin(self._start_ns)

    def _event_timeline(self, timer: DeviceTimer) -> EventTimeline:
        return EventTimeline(timer)

    def _closing(self) -> None:
        if self._timer is not None:
            self._enter("sync")

    def _ended(self) -> None:
        self._cpu_ns = self._tools.cpu_time_ns() - self._cpu_start_ns
        if self._energy is not None:
            self._energy_uj = self._energy.end(self._tools.clock.now_ns())

    @property
    def phase(self) -> Phase:
        """See Run."""
        return self._phase

    def _now(self) -> int:
        self._event_ns = self._tools.clock.now_ns()
        if self._energy is not None:
            self._energy.tick(self._event_ns)
        return self._event_ns

    def _begin_pass(self) -> None:
        if self._pass_start_ns is None:
            self._pass_start_ns = self._event_ns

    def _enter(self, phase: Phase) -> None:
        self._timeline.mark(phase, self._now())
        self._phase = phase

    def live(self) -> LiveState:
        """See Run."""
        op, tile = self._where
        done, total = self._done
        phase, last = self._phase, self._event_ns
        at = None if tile is None else TilePosition(number=tile[0] + 1, count=tile[1], shape=tile[2], dtype=tile[3])
        now = self._tools.clock.now_ns()
        return LiveState(
            started_at=self._started_at,
            elapsed_ns=now - self._start_ns,
            waiting_ns=now - last,
            stage=stage_of(phase, at),
            phase=phase,
            chunk=self._chunk,
            op=op,
            tile=at,
            done=done,
            total=total,
        )

    def mark(self, phase: Phase) -> None:
        """See DecodeObserver."""
        self._next.mark(phase)
        self._enter(phase)

    def planned(self, plan: PlanSummary) -> None:
        """See DecodeObserver. A decode that is planned again begins again: what it did so far was in vain."""
        super().planned(plan)
        self._precision.give_up()
        self._images = 0
        self._pass_start_ns = None
        self._chunk = None

    def op_started(self, index: int, n_ops: int, name: str, n_tiles: int) -> None:
        """See DecodeObserver."""
        self._next.op_started(index, n_ops, name, n_tiles)
        self._now()
        self._begin_pass()
        self._where = (OpPosition(number=index + 1, count=n_ops, name=name), None)

    def tile_started(self, i: int, n: int, shape: tuple[int, ...], dtype: str) -> None:
        """See DecodeObserver."""
        self._next.tile_started(i, n, shape, dtype)
        self._now()
        self._begin_pass()
        self._tiles.add(shape, dtype)
        self._where = (self._where[0], (i, n, shape, dtype))

    def progress(self, done: int, total: int) -> None:
        """See DecodeObserver."""
        self._next.progress(done, total)
        self._done = (done, total)

    def op_done(self, report: OpReport) -> None:
        """See DecodeObserver."""
        self._next.op_done(report)
        self._precision.add(report)

    def op_redone(self, name: str, dtype: str, macs: int) -> None:
        """See DecodeObserver."""
        self._next.op_redone(name, dtype, macs)
        self._precision.redo(dtype, macs)

    def conv_requested(self, shape: ConvShape) -> None:
        """See DecodeObserver."""
        self._next.conv_requested(shape)
        self._convs.add(shape)

    def cache_lookup(self, cache: CacheName, hit: bool) -> None:
        """See DecodeObserver."""
        self._next.cache_lookup(cache, hit)
        self._caches.add(cache, hit)

    def pool_request(self, nbytes: int, hit: bool) -> None:
        """See DecodeObserver."""
        self._next.pool_request(nbytes, hit)
        self._pool_requests += 1
        self._requested_bytes += nbytes
        if hit:
            self._pool_hits += 1
            self._served_bytes += nbytes

    def prefetch_asked(self, ready: bool) -> None:
        """See DecodeObserver."""
        self._next.prefetch_asked(ready)
        self._asked += 1
        self._ready += ready

    def pass_done(self, images: int, slots: int) -> None:
        """See DecodeObserver."""
        self._next.pass_done(images, slots)
        now = self._now()
        self._images += images
        self._slots += slots
        self._n_passes += 1
        self._largest = max(self._largest, images)
        if len(self._passes) < KEEP_PASSES:
            start = self._pass_start_ns
            # On a device that runs behind, host time between passes is launch time: worse than none.
            ns = None if start is None or self._timer is not None else now - start
            self._passes.append(PassRecord(images=images, slots=slots, ns=ns))
        self._pass_start_ns = None

    def fallback(self, event: Fallback) -> None:
        """See DecodeObserver."""
        self._next.fallback(event)
        self._n_fallbacks += 1
        if len(self._fallbacks) < KEEP_FALLBACKS:
            self._fallbacks.append(bounded_fallback(event, len(self._fallbacks)))

    def converted(self, nbytes: int) -> None:
        """See DecodeObserver."""
        self._next.converted(nbytes)
        self._precision.converted_bytes += nbytes

    def chunk_started(self, i: int, n: int) -> None:
        """See DecodeObserver."""
        self._next.chunk_started(i, n)
        self._now()
        self._chunk = ChunkPosition(number=i + 1, count=n)

    def _build(self, exc: BaseException | None, wall_ns: int) -> DecodeRecord:
        if exc is not None:
            self._precision.give_up()
        if self._idle:
            self._timeline.close(self._start_ns + wall_ns)
        return replace(
            super()._build(exc, wall_ns),
            first_of_shape=self._first_of_shape(),
            phases=self._timeline.times(wall_ns) if self._idle else None,
            stages=self._stages(),
            memory=self._memory(),
            pool=self._pool(),
            caches=self._caches.part(),
            precision=self._precision.part(),
            batch=self._batch(),
            prefetch=PrefetchUse(asked=self._asked, ready=self._ready),
            tiles=self._tiles.part(self._plan.tile_grid if self._plan else None),
            convs=self._convs.part(),
            n_fallbacks=self._n_fallbacks,
            fallbacks=tuple(self._fallbacks),
            cpu_time_ns=self._cpu_ns,
            energy_uj=self._energy_uj,
            energy_from=None if self._energy is None or self._energy_uj is None else self._energy.source,
        )

    def _stages(self) -> tuple[StageRecord, ...]:
        return ()

    def _memory(self) -> PeakBytes:
        allocated, reserved, process = (w.finish() for w in self._watches)
        return PeakBytes(
            planned=self._plan.predicted if self._plan else None,
            allocated=allocated,
            reserved=reserved,
            process=process,
            available_bytes=self._counters.available_bytes,
        )

    def _pool(self) -> PoolUse:
        return PoolUse(
            requests=self._pool_requests,
            hits=self._pool_hits,
            requested_bytes=self._requested_bytes,
            served_bytes=self._served_bytes,
            held_start_bytes=self._held_start_bytes,
            held_bytes=self._held_bytes,
            high_water_bytes=self._high_water_bytes,
        )

    def _batch(self) -> BatchUse:
        return BatchUse(
            images=self._images,
            slots=self._slots,
            n_passes=self._n_passes,
            largest_pass=self._largest,
            passes=tuple(self._passes),
        )

    def _first_of_shape(self) -> bool:
        if self._convs.requests:
            return self._convs.part().new > 0
        # An opaque decoder reports no convolution; the shapes it is called with decide which it requests.
        seen, key = self._tools.seen, (self.identity.device, self.identity.vae_hash)
        return any([seen.add((key, tile)) for tile in self._tiles.keys()])  # noqa: SIM118, C419 (add all)
