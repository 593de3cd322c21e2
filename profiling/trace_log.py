"""When what began in one decode, as columns of integers; recorded at level `per_op`, laid out by trace.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..optim.events import PHASES, Phase

EventKind = Literal["phase", "op", "op_end", "tile", "chunk", "plan", "fallback", "cut"]
EVENT_KINDS: tuple[EventKind, ...] = ("phase", "op", "op_end", "tile", "chunk", "plan", "fallback", "cut")
PHASE, OP, OP_END, TILE, CHUNK, PLAN, FALLBACK, CUT = range(len(EVENT_KINDS))
CUT_DETAIL, CUT_ALL = 0, 1
KEEP_DETAIL = 24_576
"""Events after which phases and tiles are left out: a picture of 2048² has fewer, a long clip many times as many."""
KEEP_EVENTS = 28_672
"""Events after which ops and all else are left out too."""
KEEP_SAMPLES = 1_024
"""Memory samples after which every second one is given up, the lower of two neighbours."""
KEEP_TILE_SHAPES = 256
KEEP_DEVICE_PHASES = 8_192
SAMPLE_EVERY_NS = 2_000_000
"""Least time between two memory samples taken inside an op: reading a counter costs as much as a few small kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLog:
    """Event i is `kinds[i]` with `values[i]`, `after_ns[i]` after event i - 1; the first, after the decode began.

    Times are the host's clock. On a CPU that is when the work was done; on a GPU it is when the work was handed to the
    device's queue, and `device_phases` tells when the queue did it. ValueError for columns that contradict each other.
    """

    kinds: tuple[int, ...]
    """Index into EVENT_KINDS. `op_end` ends an op whose result is final; an op that another event ends was not. `cut`
    is where recording stopped: of phases and tiles at value 0, of everything at 1."""
    values: tuple[int, ...]
    """phase: index into PHASES. op: index into `ops`. tile: index into `tiles`, -1 for a shape that is not listed.
    chunk: its number from 0. fallback: its number among the record's. cut: as told under `kinds`. Otherwise 0."""
    after_ns: tuple[int, ...]
    ops: tuple[str, ...]
    """Names of ops."""
    tiles: tuple[str, ...]
    """Shapes and dtypes of tiles, as shown."""
    n_left_out: int
    """Events beyond the bound."""
    memory_of: Literal["allocated", "process"] | None
    """What was sampled: torch's allocated bytes on a GPU, else the resident set; None where neither can be read."""
    memory_after_ns: tuple[int, ...]
    """Host time since the sample before; the first, since the decode began."""
    memory_bytes: tuple[int, ...]
    device_phases: tuple[int, ...] = ()
    """Phases one after the other on the device's queue, from the decode's first event on: indices into PHASES. Empty
    without events (CPU), and after an error that leaves the queue's events unread."""
    device_ns: tuple[int, ...] = ()
    """How long each of them took there."""

    def __post_init__(self) -> None:
        """Check that the columns fit each other, as they may come from a file."""
        if not len(self.kinds) == len(self.values) == len(self.after_ns):
            raise ValueError("the trace's columns kinds, values and after_ns differ in length; the record is damaged")
        if len(self.memory_after_ns) != len(self.memory_bytes) or len(self.device_phases) != len(self.device_ns):
            raise ValueError("the trace's columns of memory or of the device differ in length; the record is damaged")
        limits = {PHASE: len(PHASES), OP: len(self.ops), TILE: len(self.tiles)}
        for kind, value in zip(self.kinds, self.values, strict=True):
            least = -1 if kind == TILE else 0
            if not 0 <= kind < len(EVENT_KINDS) or not least <= value < limits.get(kind, value + 1):
                raise ValueError(f"the trace has an event {kind} with value {value}; the record is damaged")
        if any(not 0 <= p < len(PHASES) for p in self.device_phases):
            raise ValueError("the trace names a device phase that does not exist; the record is damaged")
        if any(ns < 0 for column in (self.after_ns, self.memory_after_ns, self.device_ns) for ns in column):
            raise ValueError("the trace has a negative time; the record is damaged")


class TraceRecorder:
    """Takes events as they come: one list, three integers each."""

    def __init__(self, start_ns: int, *, keep_detail: int = KEEP_DETAIL, keep_events: int = KEEP_EVENTS) -> None:
        """The decode began at `start_ns`."""
        self._start_ns = start_ns
        self._rows: list[int] = []
        self._detail_end, self._end = 3 * keep_detail, 3 * keep_events
        self._cut = -1
        self._n_left_out = 0
        self._n_fallbacks = 0
        self._phases = {name: i for i, name in enumerate(PHASES)}
        self._ops: dict[str, int] = {}
        self._tiles: dict[tuple[tuple[int, ...], str], int] = {}
        self._device_phases: list[int] = []
        self._device_ns: list[int] = []

    def phase(self, phase: Phase, now_ns: int) -> None:
        """The clock runs for this phase from now on."""
        if len(self._rows) < self._detail_end:
            self._rows += (PHASE, self._phases[phase], now_ns)
        else:
            self._leave_out(CUT_DETAIL, now_ns)

    def tile(self, shape: tuple[int, ...], dtype: str, now_ns: int) -> None:
        """A tile begins."""
        if len(self._rows) >= self._detail_end:
            self._leave_out(CUT_DETAIL, now_ns)
            return
        index = self._tiles.get((shape, dtype), -1)
        if index < 0 and len(self._tiles) < KEEP_TILE_SHAPES:
            index = self._tiles[shape, dtype] = len(self._tiles)
        self._rows += (TILE, index, now_ns)

    def op(self, name: str, now_ns: int) -> None:
        """An op begins."""
        if len(self._rows) < self._end:
            self._rows += (OP, self._ops.setdefault(name, len(self._ops)), now_ns)
        else:
            self._leave_out(CUT_ALL, now_ns)

    def op_end(self, now_ns: int) -> None:
        """The op's result is final."""
        self._event(OP_END, 0, now_ns)

    def chunk(self, number: int, now_ns: int) -> None:
        """A chunk of a video begins."""
        self._event(CHUNK, number, now_ns)

    def plan(self, now_ns: int) -> None:
        """A plan is about to run."""
        self._event(PLAN, 0, now_ns)

    def fallback(self, now_ns: int) -> None:
        """The next fallback of the record."""
        self._event(FALLBACK, self._n_fallbacks, now_ns)
        self._n_fallbacks += 1

    def device_phase(self, phase: Phase, ns: int) -> None:
        """The next phase on the device's queue."""
        if len(self._device_phases) < KEEP_DEVICE_PHASES:
            self._device_phases.append(self._phases[phase])
            self._device_ns.append(max(0, ns))

    def _event(self, kind: int, value: int, now_ns: int) -> None:
        if len(self._rows) < self._end:
            self._rows += (kind, value, now_ns)
        else:
            self._leave_out(CUT_ALL, now_ns)

    def _leave_out(self, cut: int, now_ns: int) -> None:
        """Count an event, and mark where the first one of its kind was left out: what was open there has no end."""
        self._n_left_out += 1
        if cut > self._cut:
            self._cut = cut
            self._rows += (CUT, cut, now_ns)

    def log(self, memory: MemorySamples, memory_of: Literal["allocated", "process"] | None, *, idle: bool) -> TraceLog:
        """The record's part. `idle`: the device was waited for, so its times are complete."""
        rows = self._rows
        return TraceLog(
            kinds=tuple(rows[0::3]),
            values=tuple(rows[1::3]),
            after_ns=_differences(rows[2::3], self._start_ns),
            ops=tuple(self._ops),
            tiles=tuple(f"{'x'.join(map(str, shape))} {dtype}" for shape, dtype in self._tiles),
            n_left_out=self._n_left_out,
            memory_of=memory_of,
            memory_after_ns=_differences(memory.at_ns, self._start_ns),
            memory_bytes=tuple(memory.nbytes),
            device_phases=tuple(self._device_phases) if idle else (),
            device_ns=tuple(self._device_ns) if idle else (),
        )


class MemorySamples:
    """A level over time in a bounded number of samples: when there are too many, pairs of neighbours become one."""

    def __init__(self, keep: int = KEEP_SAMPLES) -> None:
        """No sample yet; at most `keep` will be held."""
        self._keep = keep
        self._least_ns = 0
        self.at_ns: list[int] = []
        self.nbytes: list[int] = []

    def is_due(self, now_ns: int) -> bool:
        """True where the last sample is long enough ago for another inside an op."""
        return not self.at_ns or now_ns - self.at_ns[-1] >= max(self._least_ns, SAMPLE_EVERY_NS)

    def add(self, now_ns: int, nbytes: int | None) -> None:
        """Take a sample, unless it is unknown or, once samples were given up, too close to the last one."""
        if nbytes is None or (self.at_ns and now_ns - self.at_ns[-1] < self._least_ns):
            return
        self.at_ns.append(now_ns)
        self.nbytes.append(nbytes)
        if len(self.at_ns) >= self._keep:
            self._thin()

    def _thin(self) -> None:
        """Of two neighbours the higher stays, so that peaks do; the last sample stays where it is."""
        pairs = range(0, len(self.at_ns) - 1, 2)
        kept = [i if self.nbytes[i] >= self.nbytes[i + 1] else i + 1 for i in pairs]
        if len(self.at_ns) % 2:
            kept.append(len(self.at_ns) - 1)
        self.at_ns, self.nbytes = [self.at_ns[i] for i in kept], [self.nbytes[i] for i in kept]
        self._least_ns = max(2 * self._least_ns, SAMPLE_EVERY_NS)


def _differences(at_ns: list[int], start_ns: int) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip([start_ns, *at_ns], at_ns, strict=False))
