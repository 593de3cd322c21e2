"""What recording costs, in counts: events per op and tile, looks at the clock, and nothing kept at level off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from halo_vae.optim.decode import Engine
from halo_vae.profiling.memory import MemoryCounters
from halo_vae.profiling.record import DecodeRecord
from halo_vae.profiling.recorded import decode_recorded
from halo_vae.tests.optim.helpers import latent, profile, settings, small_decoder
from halo_vae.tests.profiling.fakes import IDENTITY, REQUEST, FakeCounter, busy_events, make_collector

SHAPE = (1, 4, 12, 10)


class Counting:
    """An observer that counts what it is told, by name."""

    def __init__(self) -> None:
        self.heard: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def count(*args: Any) -> None:
            self.heard[name] += 1

        return count


class CountedClock:
    """A nanosecond passes whenever it is looked at."""

    def __init__(self) -> None:
        self.reads = 0

    def now_ns(self) -> int:
        self.reads += 1
        return self.reads


class CountedCounter(FakeCounter):
    """A level that counts how often it is read."""

    reads = 0

    def now_bytes(self) -> int | None:
        self.reads += 1
        return super().now_bytes()


def heard_of(tile_px: int, plan: str = "tiles") -> tuple[Counter[str], int]:
    """Events of a decode in tiles of so many pixels, and the number of its ops."""
    heard, engine, decoder = Counting(), Engine(profile=profile()), small_decoder()
    engine.decode(decoder, latent(*SHAPE), settings(tile_size=tile_px, plan=plan), observer=heard)  # type: ignore[arg-type]
    return heard.heard, len(decoder.program.ops)


@pytest.mark.parametrize("plan", ["tiles", "strips"])
@pytest.mark.parametrize("tile_px", [16, 768])
def test_events_come_by_op_and_by_tile(tile_px: int, plan: str) -> None:
    heard, n_ops = heard_of(tile_px, plan)
    tiles = heard["tile_started"]
    assert heard["op_started"] == heard["op_done"] <= n_ops
    assert tiles >= heard["op_started"]
    assert heard["progress"] == tiles + 1
    assert heard["mark"] <= 4 * tiles + 3 * n_ops + 8  # stage, compute, stitch, and stitch of a shortcut beside it
    assert sum(heard.values()) <= 8 * tiles + 8 * n_ops + 16


def test_smaller_tiles_add_eight_events_each_at_most() -> None:
    few, _ = heard_of(768)
    many, _ = heard_of(16)
    more = many["tile_started"] - few["tile_started"]
    assert more > 20
    assert sum(many.values()) - sum(few.values()) <= 8 * more


def recorded(level: str) -> tuple[DecodeRecord, CountedClock, CountedCounter, Counting]:
    clock, counter, heard = CountedClock(), CountedCounter(now=100), Counting()

    def memory(device: str) -> MemoryCounters:
        return MemoryCounters(allocated=None, reserved=None, process=counter, available_bytes=None)

    _, record = decode_recorded(
        Engine(profile=profile()), small_decoder(), latent(*SHAPE), settings(tile_size=16, plan="tiles"),
        collector=make_collector(level, clock=clock, memory=memory), forward=heard,  # type: ignore[arg-type]
    )  # fmt: skip
    return record, clock, counter, heard


def test_off_looks_at_the_clock_twice_and_at_nothing_else() -> None:
    record, clock, counter, heard = recorded("off")
    assert (clock.reads, counter.reads) == (2, 0)  # the wall time
    assert record.wall_ns == 1
    assert heard.heard["tile_started"] > 20


def test_off_keeps_no_event() -> None:
    with make_collector("off").recording(IDENTITY, REQUEST) as run:
        before = {name: value for name, value in vars(run).items()}  # noqa: C416 (a copy to compare with)
        busy_events(run)
        changed = {name for name, value in vars(run).items() if value is not before[name]}
        run.delivered((1, 8, 8, 3))
    assert changed <= {"_plan", "_boundaries"}  # the plan, and how smooth a video's chunks are: both in its record


def test_summary_looks_at_the_clock_once_per_mark_op_and_tile() -> None:
    record, clock, counter, heard = recorded("summary")
    timed = sum(heard.heard[name] for name in ("mark", "op_started", "tile_started", "pass_done", "chunk_started"))
    assert clock.reads == timed + 2
    assert counter.reads == 1  # the level at the start
    assert (record.trace, record.stages, record.n_stages) == (None, (), None)


def test_per_op_looks_once_more_per_op() -> None:
    _, less, _, _ = recorded("summary")
    record, clock, counter, heard = recorded("per_op")
    n_ops = heard.heard["op_done"]
    extra = n_ops + heard.heard["planned"] + heard.heard["fallback"] + 1  # and at the end
    assert clock.reads == less.reads + extra
    assert counter.reads == 1 + 2 + n_ops  # start and end of the trace, and each op's end: no tile was long enough
    assert record.trace is not None
    traced = ("mark", "op_started", "op_done", "tile_started", "chunk_started", "planned", "fallback")
    assert len(record.trace.kinds) == sum(heard.heard[name] for name in traced)


def test_per_op_reads_memory_inside_an_op_only_after_a_while() -> None:
    counter = CountedCounter(now=100)

    def memory(device: str) -> MemoryCounters:
        return MemoryCounters(allocated=None, reserved=None, process=counter, available_bytes=None)

    class Slow(CountedClock):
        def now_ns(self) -> int:
            return 500_000 * super().now_ns()

    with make_collector("per_op", clock=Slow(), memory=memory).recording(IDENTITY, REQUEST) as run:
        run.op_started(0, 1, "a", 100)
        for i in range(100):  # half a millisecond each
            run.tile_started(i, 100, (1, 4, 8, 8), "float32")
        reads = counter.reads
        run.delivered((1, 8, 8, 3))
    assert reads == 2 + 25  # one for two milliseconds
