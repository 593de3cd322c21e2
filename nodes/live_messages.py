"""Tells the host's page where a decode stands, a few times a second, and how it ended."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ..optim.events import Phase, PlanSummary, SilentObserver
from ..profiling.clock import Clock, SystemClock
from ..profiling.live import stage_within
from .panel_data import Panel

log = logging.getLogger("halo_vae")
PROGRESS, ENDED = "halo_vae.progress", "halo_vae.ended"
"""Event names on the host's socket."""
MAX_PER_S = 10
"""Most progress messages in any second of a decode, the last one included."""
_SECOND_NS = 1_000_000_000
_APART_NS = _SECOND_NS // (MAX_PER_S - 1)
"""Least time between two messages but at a change of stage; one of a second's messages is kept for the last."""
Send = Callable[[str, Mapping[str, Any]], None]
"""Takes an event's name and its data; may raise."""


class LiveMessages(SilentObserver):
    """Hears a decode's events and sends `halo_vae.progress`: at the start, at a change of stage, at most ten a second.

    An event that sends nothing costs a few assignments and one reading of the clock. Memory is read and speed worked
    out for a message only. What goes wrong in sending is logged once and never reaches the decode.
    """

    def __init__(
        self,
        send: Send,
        *,
        node: str | None,
        prompt_id: str | None,
        memory: Callable[[], Callable[[], int | None]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Nothing is sent yet. `memory()` gives the reader of the memory in use; asked for with the first message."""
        self._send = send
        self._node, self._prompt_id = node, prompt_id
        self._open_memory = memory
        self._read_memory: Callable[[], int | None] | None = None
        self._now_ns = (clock or SystemClock()).now_ns
        self._broken = False
        self._start_ns = self._next_ns = self._now_ns()
        self._sent_at: deque[int] = deque(maxlen=MAX_PER_S - 1)
        self._steps: deque[tuple[int, int]] = deque(maxlen=MAX_PER_S)
        self._phase: Phase = "other"
        self._stage = "start"
        self._chunk: tuple[int, int] | None = None
        self._op: tuple[int, int, str] | None = None
        self._tile: tuple[int, int] | None = None
        self._done = 0
        self._total: int | None = None
        self._unsent = True

    def begin(self) -> None:
        """The decode begins: the first message."""
        self._start_ns = self._now_ns()
        self._tell(self._start_ns)

    def finish(self) -> None:
        """The decode has ended: its last position, unless that was told."""
        if self._unsent:
            self._tell(self._now_ns())

    def mark(self, phase: Phase) -> None:
        """See DecodeObserver."""
        self._phase = phase
        self._moved()

    def planned(self, plan: PlanSummary) -> None:
        """See DecodeObserver. A decode that is planned again begins again."""
        self._chunk = self._op = self._tile = None
        self._moved()

    def op_started(self, index: int, n_ops: int, name: str, n_tiles: int) -> None:
        """See DecodeObserver."""
        self._op, self._tile = (index + 1, n_ops, name), None
        self._moved()

    def tile_started(self, i: int, n: int, shape: tuple[int, ...], dtype: str) -> None:
        """See DecodeObserver."""
        self._tile = (i + 1, n)
        self._moved()

    def chunk_started(self, i: int, n: int) -> None:
        """See DecodeObserver."""
        self._chunk = (i + 1, n)
        self._moved()

    def progress(self, done: int, total: int) -> None:
        """See DecodeObserver."""
        self._done, self._total = done, total
        self._moved()

    def _moved(self) -> None:
        """Send if it is time to, or at once where the stage has changed and the second's messages allow it."""
        self._unsent = True
        now = self._now_ns()
        stage = stage_within(self._phase, self._tile is not None)
        if now < self._next_ns and (stage == self._stage or self._is_full(now)):
            return
        self._tell(now)

    def _is_full(self, now: int) -> bool:
        sent = self._sent_at
        return len(sent) == sent.maxlen and now - sent[0] < _SECOND_NS

    def _tell(self, now: int) -> None:
        if self._broken:
            return
        self._stage = stage_within(self._phase, self._tile is not None)
        self._sent_at.append(now)
        # a burst at changes of stage is paid back before the next regular message
        full_until = self._sent_at[0] + _SECOND_NS if len(self._sent_at) == self._sent_at.maxlen else 0
        self._next_ns = max(now + _APART_NS, full_until)
        self._unsent = False
        try:
            self._send(PROGRESS, self._message(now))
        except Exception:
            self._broken = True
            log.warning("the progress of a decode cannot be shown; the decode goes on", exc_info=True)

    def _message(self, now: int) -> dict[str, Any]:
        return {
            "node": self._node,
            "prompt_id": self._prompt_id,
            "stage": self._stage,
            "phase": self._phase,
            "chunk": None if self._chunk is None else list(self._chunk),
            "op": None if self._op is None else list(self._op),
            "tile": None if self._tile is None else list(self._tile),
            "done": self._done,
            "total": self._total,
            "elapsed_ns": now - self._start_ns,
            "memory_bytes": self._memory_bytes(),
            "work_per_s": self._speed(now),
        }

    def _memory_bytes(self) -> int | None:
        if self._read_memory is None:
            if self._open_memory is None:
                return None
            self._read_memory = self._open_memory()
        return self._read_memory()

    def _speed(self, now: int) -> float | None:
        """Units of `done` per second since the message before those of the last second; None before work is done."""
        steps = self._steps
        while len(steps) > 1 and now - steps[1][0] >= _SECOND_NS:
            steps.popleft()
        steps.append((now, self._done))
        then, before = steps[0]
        ns = now - then
        if ns <= 0 or self._done <= before:
            return None
        speed = (self._done - before) * _SECOND_NS / ns
        return speed if math.isfinite(speed) else None


def send_ended(send: Send, node: str | None, prompt_id: str | None, panel: Panel) -> None:
    """Send `halo_vae.ended`; what goes wrong is logged."""
    try:
        send(ENDED, {"node": node, "prompt_id": prompt_id, "panel": panel})
    except Exception:
        log.warning("the end of a decode cannot be shown; its record is kept", exc_info=True)
