from __future__ import annotations

from typing import Any

import pytest

from halo_vae.profiling.memory import MemoryCounters
from halo_vae.profiling.parts import CacheUse, ChunkBoundary, DtypeMacs, TileShape
from halo_vae.profiling.record import DecodeRecord, DecodeStatus
from halo_vae.profiling.run import Run
from halo_vae.profiling.tally import KEEP_BOUNDARIES
from halo_vae.tests.profiling.fakes import (
    CONV,
    FALLBACK,
    IDENTITY,
    MS,
    ON_GPU,
    PLAN,
    PREDICTED,
    REQUEST,
    FakeClock,
    busy_events,
    make_collector,
    record_events,
    report,
)


def test_counts_are_what_was_reported() -> None:
    record = record_events(make_collector(), busy_events)
    assert record.level == "summary"
    assert record.plan == PLAN
    assert record.stages == ()
    assert (record.pool.requests, record.pool.hits) == (2, 1)
    assert (record.pool.requested_bytes, record.pool.served_bytes) == (1500, 1000)
    assert record.pool.held_bytes is None
    assert record.caches[0] == CacheUse(name="program", lookups=1, hits=1)
    assert record.caches[1] == CacheUse(name="plan", lookups=1, hits=0)
    assert [(c.name, c.lookups) for c in record.caches[2:]] == [("packed", 0), ("tuning", 0)]
    assert record.precision.kept == (DtypeMacs(dtype="bfloat16", macs=300), DtypeMacs(dtype="float32", macs=100))
    assert record.precision.redone == (DtypeMacs(dtype="float16", macs=50),)
    assert (record.precision.ops_below_native, record.precision.converted_bytes) == (1, 40)
    assert (record.batch.images, record.batch.slots, record.batch.n_passes, record.batch.largest_pass) == (3, 4, 2, 2)
    assert (record.prefetch.asked, record.prefetch.ready) == (2, 1)
    assert record.tiles.shapes == (TileShape(shape=(1, 4, 66, 66), dtype="float16", count=1),)
    assert record.tiles.grid == (3, 3)
    assert (record.convs.requests, record.convs.distinct, record.convs.new, record.convs.seen) == (1, 1, 1, 0)
    assert record.convs.shapes == (CONV,)
    assert (record.n_fallbacks, record.fallbacks) == (1, (FALLBACK,))
    assert record.memory.planned == PREDICTED
    assert record.started_at == "2026-01-02T03:04:05.678+00:00"
    assert record.energy_uj is None


def test_the_least_smooth_boundaries_are_kept_and_all_are_counted() -> None:
    def events(run: Run) -> None:
        run.planned(PLAN)
        for i in range(2 * KEEP_BOUNDARIES):
            run.boundary(i % 2, 2 * i, 1 - i / 1000)

    record = record_events(make_collector(), events)
    n = KEEP_BOUNDARIES
    kept = [ChunkBoundary(clip=i % 2, frame=2 * i, smoothness=1 - i / 1000) for i in range(n, 2 * n)]
    assert record.boundaries == tuple(kept[::2] + kept[1::2])
    assert record.n_boundaries == 2 * n
    assert record.temporal_consistency == 1 - (2 * n - 1) / 1000


def test_a_decode_that_begins_again_measures_its_boundaries_again() -> None:
    def events(run: Run) -> None:
        run.boundary(0, 4, 0.1)
        run.planned(PLAN)
        run.boundary(0, 4, 0.9)

    for level in ("off", "summary"):
        record = record_events(make_collector(level), events)
        assert record.boundaries == (ChunkBoundary(frame=4, smoothness=0.9),)
        assert record.n_boundaries == 1


def test_shapes_are_new_once_per_process_and_device() -> None:
    collector = make_collector()
    first, second = (record_events(collector, busy_events) for _ in range(2))
    elsewhere = record_events(collector, busy_events, ON_GPU)
    assert [r.convs.new for r in (first, second, elsewhere)] == [1, 0, 1]
    assert [r.first_of_shape for r in (first, second, elsewhere)] == [True, False, True]


def test_opaque_decoders_are_first_of_a_tile_shape() -> None:
    collector = make_collector()

    def one_tile(edge: int) -> DecodeRecord:
        record: DecodeRecord = record_events(
            collector, lambda run: run.tile_started(0, 1, (1, 4, edge, edge), "float32")
        )
        return record

    assert [one_tile(edge).first_of_shape for edge in (8, 8, 16)] == [True, False, True]


def test_lists_are_bounded_and_counts_are_not() -> None:
    def events(run: Any) -> None:
        for i in range(300):
            run.tile_started(i, 300, (1, 4, i, i), "float32")
            run.conv_requested(type(CONV)(input=(1, 4, i, i), weight=(8, 4, 3, 3), dtype="float32", layout="x"))
            run.fallback(FALLBACK)
            run.pass_done(1, 1)

    record = record_events(make_collector(), events)
    assert (record.tiles.count, record.tiles.distinct_shapes, len(record.tiles.shapes)) == (300, 300, 64)
    assert (record.convs.distinct, len(record.convs.shapes)) == (300, 64)
    assert (record.n_fallbacks, len(record.fallbacks)) == (300, 64)
    assert (record.batch.n_passes, len(record.batch.passes)) == (300, 64)


def test_a_second_plan_means_that_the_work_so_far_was_in_vain() -> None:
    def events(run: Any) -> None:
        run.planned(PLAN)
        run.op_done(report(macs=70, dtype="float16"))
        run.pass_done(1, 2)
        run.planned(PLAN)
        run.op_done(report(macs=30, dtype="float32"))
        run.pass_done(1, 2)

    record = record_events(make_collector(), events)
    assert record.precision.kept == (DtypeMacs(dtype="float32", macs=30),)
    assert record.precision.redone == (DtypeMacs(dtype="float16", macs=70),)
    assert record.precision.ops_below_native == 0
    assert (record.batch.images, record.batch.slots, record.batch.n_passes) == (1, 4, 2)


def test_off_keeps_identity_plan_outcome_and_wall_time() -> None:
    clock = FakeClock()

    def events(run: Any) -> None:
        busy_events(run)
        clock.advance(3 * MS)

    def nothing(device: str) -> MemoryCounters:
        raise AssertionError("memory was read at level off")

    record = record_events(make_collector("off", clock=clock, memory=nothing), events)
    assert (record.identity, record.request, record.plan) == (IDENTITY, REQUEST, PLAN)
    assert (record.status, record.wall_ns, record.image_shape) == (DecodeStatus.OK, 3 * MS, (1, 512, 512, 3))
    parts = (record.phases, record.memory, record.pool, record.caches, record.precision, record.batch, record.convs)
    assert parts == (None,) * 7
    assert record.first_of_shape is None


EVENTS = ("mark", "planned", "op_started", "tile_started", "progress", "op_done", "op_redone", "conv_requested",
          "cache_lookup", "pool_request", "prefetch_asked", "pass_done", "fallback", "converted", "chunk_started",
          "boundary")  # fmt: skip


@pytest.mark.parametrize("level", ["off", "summary", "per_op"])
def test_every_event_is_forwarded(level: str) -> None:
    heard: set[str] = set()

    class Everything:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: heard.add(name)

    with make_collector(level).recording(IDENTITY, REQUEST, forward=Everything()) as run:  # type: ignore[arg-type]
        busy_events(run)
        run.delivered((1, 8, 8, 3))
    assert heard == set(EVENTS)


def test_ring_keeps_the_last_records() -> None:
    clock = FakeClock()
    collector = make_collector(clock=clock, ring=2)
    for ns in (1, 2, 3):
        record_events(collector, lambda run, ns=ns: clock.advance(ns))  # type: ignore[misc]
    assert [r.wall_ns for r in collector.records()] == [2, 3]
    assert collector.metrics().total_executions == 3


@pytest.mark.parametrize(
    ("given", "message"), [({"level": "all"}, "choose one of off, summary"), ({"ring": 0}, "at least 1")]
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_collector(**given)
