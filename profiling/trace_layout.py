"""From a trace's columns to nested slices: op > tile > phase, and moments between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..optim.events import PHASES
from .record import DecodeRecord, StageRecord
from .trace_log import CHUNK, CUT, CUT_ALL, FALLBACK, OP, OP_END, PHASE, TILE, TraceLog

SliceKind = Literal["decode", "op", "tile", "phase", "total"]
InstantKind = Literal["chunk", "plan", "fallback", "cut"]
_BETWEEN_OPS = (PHASES.index("lower"), PHASES.index("plan"))
"""Phases that no op has: where one begins, the op before it was given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Something that took time."""

    name: str
    kind: SliceKind
    start_ns: int
    """Since the decode began."""
    end_ns: int
    args: dict[str, Any] = field(default_factory=dict)
    """JSON-safe details."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """Something that happened."""

    name: str
    kind: InstantKind
    at_ns: int
    args: dict[str, Any] = field(default_factory=dict)


def lay_out(record: DecodeRecord, log: TraceLog) -> tuple[list[Slice], list[Instant]]:
    """What the log tells, parents before their children. Slices are properly nested and end with the decode at latest.

    A phase runs until the next one is marked; where an op or a tile begins or ends meanwhile, it is cut there, so that
    the slices of a phase add up to its time. A phase, tile or op that recording broke off ends there. What took no time
    is left out: viewers could not tell what lies inside what.
    """
    layout = _Layout(record, log)
    now = 0
    for kind, value, after_ns in zip(log.kinds, log.values, log.after_ns, strict=True):
        now = min(now + after_ns, record.wall_ns)
        layout.event(kind, value, now)
    layout.close_op(record.wall_ns)
    shown = [s for s in layout.slices if s.end_ns > s.start_ns]
    shown.sort(key=lambda s: (s.start_ns, -s.end_ns, _DEPTH[s.kind]))
    return shown, layout.instants


_DEPTH: dict[SliceKind, int] = {"decode": 0, "op": 1, "tile": 2, "phase": 3, "total": 3}


def op_args(stage: StageRecord) -> dict[str, Any]:
    """What a record knows of an op that ran to its end."""
    args: dict[str, Any] = {
        "kind": stage.kind, "tiles": stage.n_tiles, "macs": stage.macs, "dtype": stage.dtype, "backend": stage.backend,
    }  # fmt: skip
    return args if stage.device_ns is None else args | {"device_us": stage.device_ns / 1000}


class _Layout:
    """What is open while the events are gone through."""

    def __init__(self, record: DecodeRecord, log: TraceLog) -> None:
        self.slices: list[Slice] = []
        self.instants: list[Instant] = []
        self._record, self._log = record, log
        self._phase: int | None = PHASES.index("other")
        self._phase_ns = 0
        self._tile: tuple[int, int, int] | None = None  # shape, number from 1, start
        self._op: tuple[int, int] | None = None  # name, start
        self._n_tiles = self._n_ended = 0
        self._n_plans = 0
        self._smoothness = {(b.clip, b.frame): b.smoothness for b in record.boundaries}

    def event(self, kind: int, value: int, now: int) -> None:
        """One event of the log."""
        if kind == PHASE:
            if value in _BETWEEN_OPS:
                self.close_op(now)
            self._close_phase(now)
            self._phase = value
        elif kind == TILE:
            self._close_tile(now)
            self._n_tiles += 1
            self._tile = (value, self._n_tiles, now)
        elif kind == OP:
            self.close_op(now)
            self._op, self._n_tiles = (value, now), 0
        elif kind == OP_END:
            stages = self._record.stages
            self.close_op(now, stages[self._n_ended] if self._n_ended < len(stages) else None, ended=True)
            self._n_ended += 1
        elif kind == CUT:
            self._cut(value, now)
        else:
            self.instants.append(self._instant(kind, value, now))

    def close_op(self, now: int, stage: StageRecord | None = None, *, ended: bool = False) -> None:
        """The op that is open, if one is, and all inside it."""
        self._close_tile(now)
        if self._op is None:
            return
        index, start = self._op
        args = {"finished": ended} | ({} if stage is None else op_args(stage))
        self.slices.append(Slice(name=self._log.ops[index], kind="op", start_ns=start, end_ns=now, args=args))
        self._op = None

    def _close_tile(self, now: int) -> None:
        self._close_phase(now)
        if self._tile is None:
            return
        shape, number, start = self._tile
        args = {} if shape < 0 else {"shape": self._log.tiles[shape]}
        self.slices.append(Slice(name=f"tile {number}", kind="tile", start_ns=start, end_ns=now, args=args))
        self._tile = None

    def _close_phase(self, now: int) -> None:
        """Up to here; the phase goes on where nothing else is marked."""
        if self._phase is not None:
            name = PHASES[self._phase]
            self.slices.append(Slice(name=name, kind="phase", start_ns=self._phase_ns, end_ns=now))
        self._phase_ns = now

    def _cut(self, value: int, now: int) -> None:
        """Recording stopped: of phases and tiles, or of everything."""
        self._close_tile(now)
        self._phase = None
        if value == CUT_ALL:
            self.close_op(now)
        what = "everything" if value == CUT_ALL else "phases and tiles"
        args = {"left_out": self._log.n_left_out}
        self.instants.append(Instant(name=f"from here {what} left out", kind="cut", at_ns=now, args=args))

    def _instant(self, kind: int, value: int, now: int) -> Instant:
        if kind == CHUNK:
            return Instant(name=f"chunk {value + 1}", kind="chunk", at_ns=now, args=self._chunk_args(value))
        if kind == FALLBACK:
            return self._fallback(value, now)
        self._n_plans += 1
        return Instant(name="plan" if self._n_plans == 1 else "planned again", kind="plan", at_ns=now)

    def _fallback(self, value: int, now: int) -> Instant:
        told = self._record.fallbacks
        if value >= len(told):
            return Instant(name="fallback", kind="fallback", at_ns=now)
        found = told[value]
        args = {"where": found.where, "given": found.given, "used": found.used, "reason": found.reason}
        return Instant(name=f"fallback: {found.kind.replace('_', ' ')}", kind="fallback", at_ns=now, args=args)

    def _chunk_args(self, number: int) -> dict[str, Any]:
        """Where a chunk of an exactly decoded clip begins, and how smoothly it goes on from the one before."""
        plan = self._record.plan
        if plan is None or plan.method != "exact" or len(plan.boundaries) != plan.n_chunks - 1:
            return {}
        clip, chunk = divmod(number, plan.n_chunks)
        frame = plan.boundaries[chunk - 1] if chunk else 0
        smoothness = self._smoothness.get((clip, frame))
        return {"clip": clip, "frame": frame} | ({} if smoothness is None else {"smoothness": smoothness})
