from __future__ import annotations

from typing import Any

import pytest
import torch

from halo_vae.optim.errors import DecodeCancelled, NonFiniteError
from halo_vae.optim.events import SilentObserver
from halo_vae.profiling.memory import MemoryCounters
from halo_vae.profiling.parts import CacheUse, DtypeMacs, PassRecord, TileShape
from halo_vae.profiling.record import DecodeRecord, DecodeStatus
from halo_vae.tests.profiling.fakes import (
    CONV,
    FALLBACK,
    GIB,
    IDENTITY,
    MS,
    ON_GPU,
    PLAN,
    PREDICTED,
    REQUEST,
    SECOND,
    FakeClock,
    FakeCounter,
    FakeDevice,
    busy_events,
    make_collector,
    record_events,
    record_failure,
    report,
)


def phase_ns(record: DecodeRecord) -> dict[str, int]:
    assert record.phases is not None
    names = ("lower", "plan", "load", "stage", "compute", "stitch", "transfer", "sync", "other")
    return {n: record.phases.of(n) for n in names if record.phases.of(n)}  # type: ignore[arg-type]


def test_st_1_time_includes_what_the_device_owes() -> None:
    clock = FakeClock()
    device = FakeDevice(clock, has_events=False)
    with make_collector(clock=clock, timer=lambda name: device).recording(ON_GPU, REQUEST) as run:
        assert device.syncs == 1  # once before the start
        run.mark("compute")
        clock.advance(10 * MS)
        device.launch(5 * SECOND)
        run.delivered((1, 512, 512, 3))
    assert device.syncs == 2  # and once before the end
    assert run.record is not None
    assert run.record.wall_ns == 5_010 * MS
    assert phase_ns(run.record) == {"compute": 10 * MS, "sync": 5 * SECOND}


def test_st_1_events_charge_the_phase_that_launched() -> None:
    clock = FakeClock()
    device = FakeDevice(clock)
    device.launch(9 * SECOND)  # somebody else's work, done before the start
    with make_collector(clock=clock, timer=lambda name: device).recording(ON_GPU, REQUEST) as run:
        for phase, ns in (("load", 1), ("stage", 2), ("compute", 3), ("compute", 4), ("stitch", 5)):
            run.mark(phase)  # type: ignore[arg-type]
            device.launch(ns * MS)
        run.delivered((1, 512, 512, 3))
    assert run.record is not None
    assert run.record.wall_ns == 15 * MS
    assert phase_ns(run.record) == {"load": MS, "stage": 2 * MS, "compute": 7 * MS, "stitch": 5 * MS}


def test_st_1_other_is_what_the_phases_leave() -> None:
    clock = FakeClock()
    device = FakeDevice(clock)
    with make_collector(clock=clock, timer=lambda name: device).recording(ON_GPU, REQUEST) as run:
        run.mark("compute")
        device.launch(3 * MS)
        device.sync()
        clock.advance(2 * MS)  # the host alone, after the device has finished
        run.delivered((1, 512, 512, 3))
    assert run.record is not None
    assert phase_ns(run.record) == {"compute": 3 * MS, "other": 2 * MS}


def test_st_1_cpu_never_syncs_and_phases_are_exact() -> None:
    clock = FakeClock()
    asked: list[str] = []

    def timer(device: str) -> None:
        asked.append(device)

    with make_collector(clock=clock, timer=timer).recording(IDENTITY, REQUEST) as run:
        clock.advance(1)
        for phase, ns in (("plan", 10), ("stage", 100), ("compute", 1000), ("stage", 10_000), ("transfer", 100_000)):
            run.mark(phase)  # type: ignore[arg-type]
            clock.advance(ns)
        run.delivered((1, 512, 512, 3))
    assert asked == ["cpu"]
    assert run.record is not None
    assert run.record.wall_ns == 111_111
    assert phase_ns(run.record) == {"plan": 10, "stage": 10_100, "compute": 1000, "transfer": 100_000, "other": 1}
    assert run.record.phases is not None
    assert run.record.phases.total_ns == run.record.wall_ns


def test_st_2_peak_belongs_to_its_own_run() -> None:
    allocated, reserved = FakeCounter(now=3 * GIB), FakeCounter(now=5 * GIB)

    def memory(device: str) -> MemoryCounters:
        return MemoryCounters(allocated=allocated, reserved=reserved, process=None, available_bytes=8 * GIB)

    collector = make_collector(memory=memory)
    record_events(collector, lambda run: allocated.touch(10 * GIB))
    record = record_events(collector, lambda run: (allocated.touch(GIB), reserved.touch(2 * GIB)))
    found = record.memory
    assert (found.allocated.peak_bytes, found.allocated.above_start_bytes) == (4 * GIB, GIB)
    assert (found.reserved.peak_bytes, found.reserved.above_start_bytes) == (7 * GIB, 2 * GIB)
    assert found.fragmentation_bytes == 3 * GIB
    assert found.process.peak_bytes is None
    assert found.available_bytes == 8 * GIB
    assert not found.allocated.since_process_start


def test_st_2_without_reset_the_peak_is_since_process_start() -> None:
    allocated = FakeCounter(now=3 * GIB, resettable=False)

    def memory(device: str) -> MemoryCounters:
        return MemoryCounters(allocated=allocated, reserved=None, process=None, available_bytes=None)

    collector = make_collector(memory=memory)
    risen = record_events(collector, lambda run: allocated.touch(10 * GIB)).memory.allocated
    later = record_events(collector, lambda run: allocated.touch(GIB)).memory.allocated
    assert risen.since_process_start
    assert (risen.peak_bytes, risen.above_start_bytes) == (13 * GIB, 10 * GIB)  # it rose, so it is this run's
    assert later.since_process_start
    assert (later.peak_bytes, later.above_start_bytes) == (13 * GIB, None)  # an earlier run's


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
    assert (record.batch.n_passes, len(record.batch.passes)) == (300, 256)


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


def test_passes_are_timed_from_their_first_op_and_show_whether_batching_pays() -> None:
    clock = FakeClock()

    def events(run: Any) -> None:
        for images, ns in ((2, 30), (2, 50), (1, 60)):
            clock.advance(7)  # between passes: nobody's time
            run.op_started(0, 1, "decode", 1)
            clock.advance(ns)
            run.pass_done(images, 2)

    record = record_events(make_collector(clock=clock), events)
    assert record.batch.passes == (
        PassRecord(images=2, slots=2, ns=30),
        PassRecord(images=2, slots=2, ns=50),
        PassRecord(images=1, slots=2, ns=60),
    )
    assert record.batch.batch_speedup == 60 / 20


def test_batch_speedup_needs_both_kinds_of_pass() -> None:
    def events(run: Any) -> None:
        run.op_started(0, 1, "decode", 1)
        run.pass_done(2, 2)

    assert record_events(make_collector(), events).batch.batch_speedup is None


def test_passes_of_a_device_that_runs_behind_are_not_timed_by_the_host() -> None:
    clock = FakeClock()
    collector = make_collector(clock=clock, timer=lambda name: FakeDevice(clock))

    def events(run: Any) -> None:
        run.op_started(0, 1, "decode", 1)
        run.pass_done(1, 1)

    assert record_events(collector, events, ON_GPU).batch.passes[0].ns is None


def test_per_op_on_a_cpu_times_by_the_host() -> None:
    clock = FakeClock()
    resident = FakeCounter(now=100)

    def memory(device: str) -> MemoryCounters:
        return MemoryCounters(allocated=None, reserved=None, process=resident, available_bytes=None)

    def events(run: Any) -> None:
        clock.advance(5)
        for name, ns in (("a", 10), ("b", 20)):
            run.op_started(0, 2, name, 9)
            clock.advance(ns)
            resident.now += 1
            run.op_done(report(name))

    stages = record_events(make_collector("per_op", clock=clock, memory=memory), events).stages
    assert [(s.op, s.start_ns, s.host_ns, s.device_ns, s.memory_bytes) for s in stages] == [
        ("a", 5, 10, None, 101),
        ("b", 15, 20, None, 102),
    ]
    assert (stages[0].n_tiles, stages[0].macs, stages[0].dtype, stages[0].backend) == (9, 100, "float32", "torch")


def test_per_op_on_a_gpu_times_by_events() -> None:
    clock = FakeClock()
    device = FakeDevice(clock)

    def events(run: Any) -> None:
        for name, ns in (("a", 10), ("b", 20)):
            run.op_started(0, 2, name, 9)
            clock.advance(1)
            device.launch(ns)
            run.op_done(report(name))

    stages = record_events(make_collector("per_op", clock=clock, timer=lambda name: device), events, ON_GPU).stages
    assert [(s.op, s.host_ns, s.device_ns) for s in stages] == [("a", 1, 10), ("b", 1, 20)]


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


class Interrupt(BaseException):
    """A host's own cancel."""


ERRORS = [
    (DecodeCancelled("stopped by the user"), DecodeStatus.INTERRUPTED, "stopped by the user"),
    (KeyboardInterrupt(), DecodeStatus.INTERRUPTED, "KeyboardInterrupt"),  # no text: the type's name
    (Interrupt("enough"), DecodeStatus.INTERRUPTED, "enough"),  # not an Exception
    (SystemExit(3), DecodeStatus.ERROR, "3"),
    (NonFiniteError("inf in conv_in\nmore", op="conv_in", dtype="float32"), DecodeStatus.NON_FINITE, "inf in conv_in"),
    (torch.OutOfMemoryError("HIP out of memory. Tried"), DecodeStatus.OUT_OF_MEMORY, "HIP out of memory. Tried"),
    (RuntimeError("can't allocate memory"), DecodeStatus.OUT_OF_MEMORY, "can't allocate memory"),
    (RuntimeError("expected input to have 16 channels"), DecodeStatus.ERROR, "expected input to have 16 channels"),
]  # fmt: skip


@pytest.mark.parametrize("level", ["off", "summary", "per_op"])
@pytest.mark.parametrize(("error", "status", "sentence"), ERRORS)
def test_exceptions_pass_unchanged_and_leave_a_record(
    level: str, error: BaseException, status: DecodeStatus, sentence: str
) -> None:
    collector = make_collector(level, cancel_types=(KeyboardInterrupt, DecodeCancelled, Interrupt))
    assert record_failure(collector, error, busy_events) is error
    (record,) = collector.records()
    assert (record.status, record.error, record.image_shape) == (status, sentence, None)
    assert collector.live() is None
    if record.precision is not None:
        assert record.precision.kept == ()  # nothing of it is in a picture


def test_the_recording_itself_has_the_record_of_a_failure() -> None:
    collector, runs = make_collector(), []
    record_failure(collector, DecodeCancelled("stop"), runs.append)
    assert runs[0].record is collector.records()[0]


class BrokenDevice(FakeDevice):
    """Fails when it is waited for at the end of the work it was given."""

    broken = RuntimeError("HIP error: out of memory")

    def sync(self) -> None:
        super().sync()
        if self.syncs == 2:
            self.done_ns = 0
            raise self.broken


def launch_one_op(device: FakeDevice) -> Any:
    def events(run: Any) -> None:
        run.mark("compute")
        run.op_started(0, 1, "a", 1)
        device.launch(MS)
        run.op_done(report("a"))
        run.delivered((1, 512, 512, 3))

    return events


def test_a_device_error_at_the_end_is_the_decodes_error() -> None:
    clock = FakeClock()
    device = BrokenDevice(clock)
    collector = make_collector("per_op", clock=clock, timer=lambda name: device)
    with pytest.raises(RuntimeError) as caught:
        record_events(collector, launch_one_op(device), ON_GPU)
    assert caught.value is device.broken
    (record,) = collector.records()
    assert record.status is DecodeStatus.OUT_OF_MEMORY
    assert record.phases is None  # events of a broken device cannot be read
    assert [s.device_ns for s in record.stages] == [None]


def test_a_device_error_at_the_end_does_not_hide_the_first_error() -> None:
    clock = FakeClock()
    device = BrokenDevice(clock)
    collector = make_collector("per_op", clock=clock, timer=lambda name: device)
    first = DecodeCancelled("stopped")
    assert record_failure(collector, first, launch_one_op(device), ON_GPU) is first
    assert collector.records()[0].status is DecodeStatus.INTERRUPTED


def test_a_record_that_cannot_be_made_does_not_hide_the_error(caplog: pytest.LogCaptureFixture) -> None:
    def broken(device: str) -> Any:
        raise OSError("no environment")

    first = DecodeCancelled("stopped")
    collector = make_collector(environment=broken)
    assert record_failure(collector, first) is first
    assert collector.records() == ()
    assert "its record could not be made" in caplog.text


def test_a_good_end_without_a_picture_is_refused() -> None:
    with pytest.raises(ValueError, match="contradicts"), make_collector().recording(IDENTITY, REQUEST):
        pass


class Listener(SilentObserver):
    """Keeps what it hears; stops the decode at its second tile."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.stop = DecodeCancelled("stopped by the listener")

    def mark(self, phase: Any) -> None:
        self.heard.append(phase)

    def tile_started(self, i: int, n: int, shape: tuple[int, ...], dtype: str) -> None:
        if i == 1:
            raise self.stop


@pytest.mark.parametrize("level", ["off", "summary", "per_op"])
def test_forward_hears_everything_first_and_may_stop_the_decode(level: str) -> None:
    listener = Listener()
    collector = make_collector(level)

    def decode() -> None:
        with collector.recording(IDENTITY, REQUEST, forward=listener) as run:
            for i in range(3):
                run.mark("stage")
                run.tile_started(i, 3, (1, 4, 8, 8), "float32")

    with pytest.raises(DecodeCancelled) as caught:
        decode()
    assert caught.value is listener.stop
    assert listener.heard == ["stage", "stage"]
    tiles = collector.records()[0].tiles
    assert level == "off" or (tiles is not None and tiles.count == 1)  # the second never ran


EVENTS = ("mark", "planned", "op_started", "tile_started", "progress", "op_done", "op_redone", "conv_requested",
          "cache_lookup", "pool_request", "prefetch_asked", "pass_done", "fallback", "converted")  # fmt: skip


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
