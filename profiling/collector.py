"""The collector: makes recordings, keeps the last records, the totals, and what runs now."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone

from ..optim.errors import DecodeCancelled
from ..optim.events import DecodeObserver, SilentObserver
from .bandwidth import PROCESS_RATES
from .clock import Clock, DeviceTimer, SystemClock, timer_for
from .counting import SummaryRun
from .energy import EnergyMeter, meter_for
from .environment import Environment, read_environment
from .live import LiveState, StallLog
from .memory import MemoryCounters, counters_for
from .metrics import Metrics, MetricsTotals
from .per_op import PerOpRun
from .record import DecodeRecord, Identity, Level, Request
from .run import Run, Tools, new_record_id
from .tally import PROCESS_SHAPES, SeenShapes

log = logging.getLogger("halo_vae")
CANCEL_TYPES: tuple[type[BaseException], ...] = (KeyboardInterrupt, DecodeCancelled)
"""Exceptions that mean the caller stopped the decode; a host adds its own."""
_RUNS: dict[Level, type[Run]] = {"off": Run, "summary": SummaryRun, "per_op": PerOpRun}


def utc_now() -> datetime:
    """The time of day, UTC."""
    return datetime.now(timezone.utc)


class Collector:
    """Turns decodes into records. Safe to share between threads; one recording belongs to one thread.

    Example:
        with collector.recording(identity, request) as run:
            image = engine.decode(decoder, latent, observer=run)
            run.delivered(tuple(image.shape))
        run.record  # also when the block raised
    """

    def __init__(
        self,
        level: Level = "summary",
        *,
        clock: Clock | None = None,
        timer: Callable[[str], DeviceTimer | None] = timer_for,
        memory: Callable[[str], MemoryCounters] = counters_for,
        environment: Callable[[str], Environment] = read_environment,
        utc_now: Callable[[], datetime] = utc_now,
        cpu_time_ns: Callable[[], int] = time.process_time_ns,
        copy_bytes_per_s: Callable[[str], int | None] = PROCESS_RATES.known,
        new_id: Callable[[], str] = new_record_id,
        energy: Callable[[str], EnergyMeter | None] = meter_for,
        seen: SeenShapes = PROCESS_SHAPES,
        cancel_types: tuple[type[BaseException], ...] = CANCEL_TYPES,
        ring: int = 64,
    ) -> None:
        """`ring` is the number of records kept; the callables take a device string. ValueError for an unknown level."""
        if level not in _RUNS:
            raise ValueError(f"profile level is {level!r}; choose one of {', '.join(_RUNS)}")
        if ring < 1:
            raise ValueError(f"ring is {ring}; keep at least 1 record")
        self.level: Level = level
        self._tools = Tools(
            clock=clock or SystemClock(), timer=timer, memory=memory, environment=environment, utc_now=utc_now,
            cpu_time_ns=cpu_time_ns, seen=seen, cancel_types=cancel_types, copy_bytes_per_s=copy_bytes_per_s,
            new_id=new_id, energy=energy,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._ring: deque[DecodeRecord] = deque(maxlen=ring)
        self._totals = MetricsTotals()
        self._running: tuple[Run, ...] = ()
        self._stalls = StallLog()

    @contextmanager
    def recording(
        self, identity: Identity, request: Request, *, forward: DecodeObserver | None = None
    ) -> Iterator[Run]:
        """A DecodeObserver whose `record` exists once the block is left, also by an exception, which passes unchanged.

        `forward` hears every event too, first, and may raise to stop the decode. ValueError when the block ends well
        without `run.delivered(...)`.
        """
        run = _RUNS[self.level](identity, request, self._tools, forward or SilentObserver())
        run.begin()
        with self._lock:
            self._running = (*self._running, run)
        try:
            yield run
        except BaseException as exc:
            self._finish(run, exc)
            raise
        late = self._finish(run, None)
        if late is not None:
            raise late

    def _finish(self, run: Run, exc: BaseException | None) -> BaseException | None:
        with self._lock:
            self._running = tuple(r for r in self._running if r is not run)
        try:
            late = run.end(exc)
        except Exception:
            if exc is None:
                raise
            log.exception("a decode failed, and its record could not be made either")
            return None
        if run.record is not None:
            with self._lock:
                self._ring.append(run.record)
                self._totals.add(run.record)
        return late

    def live(self) -> LiveState | None:
        """Where the latest decode under way stands, or None. For other threads: never holds the decode up.

        Also logs, at most once per ten seconds, that a decode has reported nothing for as long.
        """
        running = self._running
        if not running:
            return None
        state = running[-1].live()
        self._stalls.look(state)
        return state

    def records(self) -> tuple[DecodeRecord, ...]:
        """The last records, oldest first, failed and cancelled ones included."""
        with self._lock:
            return tuple(self._ring)

    def metrics(self) -> Metrics:
        """The aggregate over everything this collector has recorded."""
        with self._lock:
            return self._totals.metrics()
