from __future__ import annotations

from typing import Any

from halo_vae.profiling.memory import MemoryCounters
from halo_vae.profiling.parts import PassRecord
from halo_vae.profiling.record import DecodeRecord
from halo_vae.profiling.render.text import render_record
from halo_vae.tests.profiling.fakes import (
    GIB,
    IDENTITY,
    MS,
    ON_GPU,
    REQUEST,
    SECOND,
    FakeClock,
    FakeCounter,
    FakeDevice,
    make_collector,
    record_events,
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
    assert "peak since process start" in render_record(collector.records()[-1])


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
