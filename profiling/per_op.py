"""Recordings at level `per_op`: a record per op, and when each op, tile and phase began."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..optim.events import Fallback, OpReport, Phase, PlanSummary
from .clock import DeviceTimer, EventTimeline
from .counting import SummaryRun
from .parts import StageRecord
from .record import DecodeRecord, Level
from .trace_log import MemorySamples, TraceRecorder

KEEP_STAGES = 2_048
"""Most ops that a record lists with all they did; the trace names more, and the count beside them is complete."""


class PerOpRun(SummaryRun):
    """Level `per_op`: `summary`, and per event the host's clock, which `summary` reads as well, in a bounded list.

    On a GPU host times tell when work was handed to the device's queue. When the queue did it comes from the events
    that `summary` takes for phases and from two more per op; no tile has events of its own.
    """

    level: Level = "per_op"
    _keep_boundaries = 4096  # a trace names the frames of each chunk

    def _before(self) -> None:
        super()._before()
        self._open_ops: dict[str, tuple[int, Any]] = {}
        self._finished: list[tuple[OpReport, int, int, Any, Any, int | None]] = []
        self._n_finished = 0
        self._counter = self._counters.allocated or self._counters.process
        self._memory_at_start = self._level_bytes()
        self._samples = MemorySamples()

    def _started(self) -> None:
        self._trace = TraceRecorder(self._start_ns)
        self._samples.add(self._start_ns, self._memory_at_start)
        super()._started()
        self._first_event = self._event()

    def _event_timeline(self, timer: DeviceTimer) -> EventTimeline:
        return EventTimeline(timer, self._trace.device_phase)

    def _closing(self) -> None:
        super()._closing()
        self._samples.add(self._now(), self._level_bytes())

    def _enter(self, phase: Phase) -> None:
        super()._enter(phase)
        self._trace.phase(phase, self._event_ns)

    def planned(self, plan: PlanSummary) -> None:
        """See DecodeObserver."""
        super().planned(plan)
        self._trace.plan(self._now())

    def chunk_started(self, i: int, n: int) -> None:
        """See DecodeObserver."""
        super().chunk_started(i, n)
        self._trace.chunk(i, self._event_ns)

    def fallback(self, event: Fallback) -> None:
        """See DecodeObserver."""
        super().fallback(event)
        self._trace.fallback(self._now())

    def op_started(self, index: int, n_ops: int, name: str, n_tiles: int) -> None:
        """See DecodeObserver."""
        super().op_started(index, n_ops, name, n_tiles)
        self._trace.op(name, self._event_ns)
        self._open_ops[name] = (self._event_ns, self._event())

    def tile_started(self, i: int, n: int, shape: tuple[int, ...], dtype: str) -> None:
        """See DecodeObserver."""
        super().tile_started(i, n, shape, dtype)
        self._trace.tile(shape, dtype, self._event_ns)
        if self._samples.is_due(self._event_ns):
            self._samples.add(self._event_ns, self._level_bytes())

    def op_done(self, report: OpReport) -> None:
        """See DecodeObserver."""
        super().op_done(report)
        opened = self._open_ops.pop(report.name, None)
        if opened is None:
            return
        start_ns, start = opened
        end_ns, end = self._now(), self._event()
        self._trace.op_end(end_ns)
        self._open_ops[report.name] = (end_ns, end)  # one op may report once per dtype
        self._n_finished += 1
        if self._n_finished <= KEEP_STAGES:
            level = self._level_bytes()
            self._samples.add(end_ns, level)
            self._finished.append((report, start_ns, end_ns, start, end, level))
        elif self._samples.is_due(end_ns):
            self._samples.add(end_ns, self._level_bytes())

    def _event(self) -> Any:
        if self._timer is None or not self._timer.has_events or self._n_finished >= KEEP_STAGES:
            return None
        return self._timer.event()

    def _level_bytes(self) -> int | None:
        return None if self._counter is None else self._counter.now_bytes()

    def _build(self, exc: BaseException | None, wall_ns: int) -> DecodeRecord:
        built = super()._build(exc, wall_ns)  # reads the last of the device's phases
        memory_of = None if self._counter is None else "allocated" if self._counters.allocated else "process"
        trace = self._trace.log(self._samples, memory_of, idle=self._idle)  # type: ignore[arg-type]
        return replace(built, n_stages=self._n_finished, trace=trace)

    def _stages(self) -> tuple[StageRecord, ...]:
        return tuple(
            StageRecord(
                op=report.name,
                kind=report.kind,
                n_tiles=report.n_tiles,
                start_ns=start_ns - self._start_ns,
                host_ns=end_ns - start_ns,
                device_ns=self._device_ns(start, end),
                macs=report.macs,
                dtype=report.dtype,
                backend=report.backend,
                memory_bytes=level,
                device_start_ns=self._device_ns(self._first_event, start),
            )
            for report, start_ns, end_ns, start, end, level in self._finished
        )

    def _device_ns(self, start: Any, end: Any) -> int | None:
        if self._timer is None or start is None or end is None or not self._idle:
            return None
        return self._timer.elapsed_ns(start, end)
