"""Where a decode stands right now, for readers in other threads, and a log line when it stands still."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from ..optim.events import Phase

LOG_EVERY_NS = 10_000_000_000
"""At most one line per this much waiting."""

Stage = Literal["start", "lower", "plan", "load", "decode", "transfer", "sync"]
_STAGES: dict[Phase, Stage] = {
    "lower": "lower", "plan": "plan", "load": "load", "stage": "decode", "compute": "decode", "stitch": "decode",
    "transfer": "transfer", "sync": "sync", "other": "start",
}  # fmt: skip

log = logging.getLogger("halo_vae")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPosition:
    """An op under way."""

    number: int
    """From 1."""
    count: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePosition:
    """A tile under way."""

    number: int
    """From 1."""
    count: int
    shape: tuple[int, ...]
    """As handed to the kernel."""
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPosition:
    """A chunk of a video under way."""

    number: int
    """From 1, counted over all clips."""
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """A snapshot of a running decode."""

    started_at: str
    """UTC, ISO 8601."""
    elapsed_ns: int
    waiting_ns: int
    """Time since the decode last reported anything."""
    stage: Stage
    phase: Phase
    chunk: ChunkPosition | None
    """None for pictures, and before the first chunk."""
    op: OpPosition | None
    tile: TilePosition | None
    done: int
    """Work done, in the observer's units; `done` of `total`."""
    total: int | None
    """None until the decode has said."""

    def sentence(self) -> str:
        """What it is doing, for a log or a panel."""
        parts = [f"stage {self.stage}"]
        if self.chunk is not None:
            parts.append(f"chunk {self.chunk.number} of {self.chunk.count}")
        if self.op is not None:
            parts.append(f"op {self.op.number} of {self.op.count} ({self.op.name})")
        if self.tile is not None:
            shape = "x".join(map(str, self.tile.shape))
            parts.append(f"tile {self.tile.number} of {self.tile.count} ({shape}, {self.tile.dtype})")
        return ", ".join(parts)


def stage_of(phase: Phase, tile: TilePosition | None) -> Stage:
    """The stage that a phase belongs to; between tiles a decode is still decoding."""
    return stage_within(phase, tile is not None)


def stage_within(phase: Phase, in_tile: bool) -> Stage:
    """As `stage_of`, told whether a tile is under way."""
    return "decode" if phase == "other" and in_tile else _STAGES[phase]


class StallLog:
    """Logs that a decode waits: first after ten seconds without an event, then at most once per ten seconds."""

    def __init__(self, every_ns: int = LOG_EVERY_NS) -> None:
        """`every_ns` is the least waiting time per line."""
        self._every_ns = every_ns
        self._lock = threading.Lock()
        self._logged_at: tuple[str, int] | None = None

    def look(self, state: LiveState) -> None:
        """Log one line if it is due. Safe from any thread; takes no lock that a decode takes."""
        with self._lock:
            if state.waiting_ns < self._every_ns:
                return
            last = self._logged_at
            if last is not None and last[0] == state.started_at and state.elapsed_ns - last[1] < self._every_ns:
                return
            self._logged_at = (state.started_at, state.elapsed_ns)
        seconds = state.waiting_ns // 1_000_000_000
        log.warning("VAE decode has reported nothing for %d s: %s", seconds, state.sentence())


@contextmanager
def watching(
    look: Callable[[], object],
    *,
    every_s: float = 10.0,
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
) -> Iterator[None]:
    """Call `look` every `every_s` seconds from a thread until the block ends; the block never waits for it.

    `wait(event, seconds)` returns True when the event was set, as threading.Event.wait does.
    """
    stop = threading.Event()

    def loop() -> None:
        while not wait(stop, every_s):
            look()

    thread = threading.Thread(target=loop, name="halo_vae-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
