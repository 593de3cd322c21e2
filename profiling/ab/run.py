"""Runs two decodes in turn: warm-ups first, then one run of each for its memory, then the timed runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ..clock import Clock, DeviceTimer
from ..memory import MemoryCounter, PeakWatch
from ..parts import UNMEASURED, DecodeStatus, PeakReading
from ..run import sentence_of, status_of
from .samples import Samples

Kind = Literal["warm_up", "memory", "timed"]
Report = Callable[[int, int], None]
"""Takes decodes done and decodes in all; one that was left out, as its side had failed, counts as done."""


def _nothing(*given: object) -> None:
    """Does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two decodes."""

    name: str
    decode: Callable[[], Tensor]
    """The pictures [B * frames, H, W, C]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What both sides are measured with, and what is asked of the host."""

    clock: Clock
    timer: DeviceTimer | None = None
    """Waits for the device; None for one that never runs behind."""
    counter: MemoryCounter | None = None
    """Without one there is no run for the memory."""
    cancel_types: tuple[type[BaseException], ...] = ()
    """What passes unchanged: the user stopped."""
    before_each: Callable[[], None] = _nothing
    """Called before every decode, outside of its time; may raise one of `cancel_types`."""
    before_memory: Callable[[], None] = _nothing
    """Called before a decode whose memory counts: gives back what is kept from earlier ones."""
    report: Report = _nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How often each side decodes."""

    warm_ups: int
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a side failed. It is not run again."""

    status: DecodeStatus
    sentence: str
    after: int
    """Decodes of this side that had gone well before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRuns:
    """What was measured of one side; all times in order, nanoseconds."""

    name: str
    warm_ups_ns: tuple[int, ...]
    """The first of them is the cold one. Never part of a figure."""
    memory_run_ns: int | None
    """Time of the run for the memory, which is no sample either."""
    samples: Samples
    peak: PeakReading
    """Of the run for the memory."""
    failure: Failure | None

    @property
    def peak_bytes(self) -> int | None:
        """Bytes taken above the start of a run; None where that could not be told."""
        return self.peak.above_start_bytes


@dataclass(slots=True)
class _State:
    side: Side
    times: dict[Kind, list[int]] = field(default_factory=lambda: {"warm_up": [], "memory": [], "timed": []})
    peak: PeakReading = UNMEASURED
    failure: Failure | None = None
    picture: Tensor | None = None

    def runs(self) -> SideRuns:
        return SideRuns(
            name=self.side.name,
            warm_ups_ns=tuple(self.times["warm_up"]),
            memory_run_ns=next(iter(self.times["memory"]), None),
            samples=Samples(ns=tuple(self.times["timed"])),
            peak=self.peak,
            failure=self.failure,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Both sides: figures, and the picture of each one's last run (None where the side failed)."""

    first: SideRuns
    second: SideRuns
    first_picture: Tensor | None
    second_picture: Tensor | None


def run_in_turn(first: Side, second: Side, plan: Plan, means: Means) -> Taken:
    """Decode with both sides in turn; every other round the second goes first, so that neither always follows.

    An exception of a side ends that side and is told in its `failure`; what is of `means.cancel_types`, or no
    Exception, passes. ValueError for a plan without runs.
    """
    if plan.warm_ups < 0 or plan.runs < 1:
        raise ValueError(f"{plan.warm_ups} warm-up(s) and {plan.runs} run(s): at least 0 and 1 are needed")
    states = _State(first), _State(second)
    order = list(_order(plan, with_memory=means.counter is not None))
    means.report(0, len(order))
    for done, (kind, index) in enumerate(order, 1):
        state = states[index]
        if state.failure is None:
            _decode(state, kind, means)
        means.report(done, len(order))
    one, other = states
    return Taken(
        first=one.runs(), second=other.runs(), first_picture=one.picture, second_picture=other.picture
    )  # fmt: skip


def _order(plan: Plan, *, with_memory: bool) -> Iterator[tuple[Kind, int]]:
    for _ in range(plan.warm_ups):
        yield from (("warm_up", 0), ("warm_up", 1))
    if with_memory:
        yield from (("memory", 0), ("memory", 1))
    for i in range(plan.runs):
        yield from (("timed", i % 2), ("timed", 1 - i % 2))


def _decode(state: _State, kind: Kind, means: Means) -> None:
    """One decode. Its side's earlier picture is gone before: both sides begin beside the other's picture alone."""
    means.before_each()
    state.picture = None
    if kind == "memory":
        means.before_memory()
    try:
        _wait(means.timer)
        watch = PeakWatch(means.counter) if kind == "memory" else None
        start = means.clock.now_ns()
        picture = state.side.decode()
        _wait(means.timer)
        took = means.clock.now_ns() - start
        if watch is not None:
            state.peak = watch.finish()
    except Exception as error:
        if isinstance(error, means.cancel_types):
            raise
        state.failure = Failure(
            status=status_of(error, means.cancel_types), sentence=sentence_of(error),
            after=sum(map(len, state.times.values())),
        )  # fmt: skip
        return
    state.times[kind].append(took)
    state.picture = picture


def _wait(timer: DeviceTimer | None) -> None:
    if timer is not None:
        timer.sync()
