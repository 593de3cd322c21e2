"""Traces of records: the format, the nesting, what is left out, and that they say what happened when."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.errors import DecodeCancelled
from halo_vae.optim.events import PHASES, SilentObserver
from halo_vae.profiling.collector import Collector
from halo_vae.profiling.memory import MemoryCounters
from halo_vae.profiling.record import DecodeRecord, DecodeStatus
from halo_vae.profiling.recorded import decode_recorded
from halo_vae.profiling.run import Run
from halo_vae.profiling.trace import chrome_trace, write_chrome_trace
from halo_vae.tests.optim.helpers import hot_decoder, latent, settings, small_decoder
from halo_vae.tests.optim.video.helpers import golden_decoder as video_decoder
from halo_vae.tests.profiling.fakes import (
    FALLBACK,
    IDENTITY,
    ON_GPU,
    PLAN,
    REQUEST,
    FakeClock,
    FakeCounter,
    FakeDevice,
    busy_events,
    make_collector,
    record_events,
    record_failure,
    report,
)
from halo_vae.tests.profiling.trace_format import Node, read_trace

HOST = "decode"
LAUNCHES = "decode (host: when work was handed to the device)"
TOTALS = "phases: totals laid end to end, not when they ran"


def there_and_back(record: DecodeRecord) -> DecodeRecord:
    return DecodeRecord.from_json(json.loads(json.dumps(record.to_json(), allow_nan=False)))


def timed(clock: FakeClock) -> Any:
    """(do, ns): something happens, and then time passes."""

    def step(call: Any, ns: int) -> None:
        call()
        clock.advance(ns)

    return step


def outline(node: Node) -> Any:
    """(name, start, end, what is inside) of a slice."""
    return node.name, node.start, node.end, [outline(c) for c in node.children]


def test_slices_are_where_the_clock_says() -> None:
    clock = FakeClock()

    def events(run: Run) -> None:
        step = timed(clock)
        step(lambda: run.mark("plan"), 100)
        step(lambda: run.planned(PLAN), 10)
        step(lambda: run.op_started(0, 2, "a", 2), 1)
        step(lambda: run.mark("load"), 20)
        for i in range(2):
            step(lambda i=i: run.tile_started(i, 2, (1, 4, 8, 8), "float32"), 0)  # type: ignore[misc]
            step(lambda: run.mark("stage"), 30)
            step(lambda: run.mark("compute"), 40)
        step(lambda: run.op_done(report("a")), 5)
        step(lambda: run.op_started(1, 2, "b", 1), 0)
        step(lambda: run.mark("stage"), 50)
        step(lambda: run.op_done(report("b")), 0)
        step(lambda: run.mark("transfer"), 60)

    record = record_events(make_collector("per_op", clock=clock), events)
    read = read_trace(chrome_trace(record))
    assert list(read.threads) == [HOST]
    assert read.decode.name == "decode 1x4x64x64 to 1x512x512x3"
    tiles = [
        ("tile 1", 131, 201, [("stage", 131, 161, []), ("compute", 161, 201, [])]),
        ("tile 2", 201, 271, [("stage", 201, 231, []), ("compute", 231, 271, [])]),
    ]
    assert [outline(n) for n in read.decode.children] == [
        ("plan", 0, 110, []),
        ("a", 110, 271, [("plan", 110, 111, []), ("load", 111, 131, []), *tiles]),
        ("compute", 271, 276, []),
        ("b", 276, 326, [("stage", 276, 326, [])]),
        ("transfer", 326, 386, []),
    ]
    op = read.decode.of("op")[0]
    assert op.args == {
        "finished": True,
        "kind": "conv",
        "tiles": 9,
        "macs": 100,
        "dtype": "float32",
        "backend": "torch",
    }
    assert read.decode.of("tile")[0].args == {"shape": "1x4x8x8 float32"}
    assert [(i["name"], i["ts"]) for i in read.instants] == [("plan", 0.1)]
    assert chrome_trace(there_and_back(record)) == chrome_trace(record)
    assert "\\u" not in json.dumps(chrome_trace(record))  # viewers show an escaped character as it is escaped


class TickingClock:
    """A nanosecond passes whenever it is looked at."""

    def __init__(self) -> None:
        self.reads = 0

    def now_ns(self) -> int:
        self.reads += 1
        return self.reads


def decoded(decoder: Decoder, z: Any, level: Any = "per_op", **given: Any) -> DecodeRecord:
    collector = make_collector(level, clock=TickingClock(), memory=resident)
    _, record = decode_recorded(Engine(), decoder, z, settings(**given), collector=collector)
    return record


def resident(device: str) -> MemoryCounters:
    return MemoryCounters(allocated=None, reserved=None, process=FakeCounter(now=1000), available_bytes=None)


def assert_phases_add_up(record: DecodeRecord) -> None:
    """The slices of each phase come to the phase's time: nothing is missing, nothing counts twice."""
    spent: Counter[str] = Counter()
    for node in read_trace(chrome_trace(record)).decode.of("phase"):
        spent[node.name] += node.end - node.start
    assert record.phases is not None
    assert dict(spent) == {p: record.phases.of(p) for p in PHASES if record.phases.of(p)}


def test_trace_of_a_picture() -> None:
    record = decoded(small_decoder(), latent(2, 4, 9, 7), tile_size=16, plan="tiles")
    read = read_trace(chrome_trace(record))
    assert_phases_add_up(record)
    assert record.tiles is not None
    assert record.plan is not None
    assert record.n_stages == len(record.stages) > 10
    ops = read.decode.of("op")
    assert [n.name for n in ops] == [s.op for s in record.stages]
    assert all(n.args["finished"] for n in ops)
    assert len(read.decode.of("tile")) == record.tiles.count == record.plan.n_tiles
    for op, stage in zip(ops, record.stages, strict=True):
        assert (op.start, op.end) == (stage.start_ns, stage.start_ns + stage.host_ns)
        assert len(op.of("tile")) == stage.n_tiles == op.args["tiles"]
        assert "other" not in [n.name for n in op.of("phase")]  # what an op does has a name
    assert {c["name"] for c in read.counters} == {"resident set of the process"}
    assert read.counters[0]["ts"] == 0
    assert len(read.counters) >= len(ops)


def test_trace_of_a_video_in_chunks() -> None:
    z = latent(2, 16, 5, 2, 2)
    record = decoded(video_decoder("wan21"), z, chunk_lat=2)
    read = read_trace(chrome_trace(record))
    assert_phases_add_up(record)
    assert record.plan is not None
    assert record.plan.n_chunks > 1
    chunks = [i for i in read.instants if i["cat"] == "chunk"]
    n = z.shape[0] * record.plan.n_chunks
    assert [i["name"] for i in chunks] == [f"chunk {i + 1}" for i in range(n)]
    later = [i["args"] for i in chunks if i["args"]["frame"]]
    assert [(a["clip"], a["frame"], a["smoothness"]) for a in later] == [
        (b.clip, b.frame, b.smoothness) for b in record.boundaries
    ]
    assert record.tiles is not None
    assert len(read.decode.of("tile")) == record.tiles.count
    assert [n.name for n in read.decode.of("op")] == [s.op for s in record.stages]


def test_trace_of_a_decode_that_began_again() -> None:
    decoder = hot_decoder("decoder.conv_in")
    record = decoded(decoder, latent(1, 4, 6, 6), precision_mode="fp16")
    read = read_trace(chrome_trace(record))
    assert_phases_add_up(record)
    told = [i for i in read.instants if i["cat"] == "fallback"]
    assert {i["name"] for i in told} == {"fallback: non finite"}
    assert [i["args"]["where"] for i in told] == [f.where for f in record.fallbacks]
    assert (told[0]["args"]["where"], told[0]["args"]["used"]) == ("decoder.conv_in", "float32")
    (op, *_) = [n for n in read.decode.of("op") if n.name == "decoder.conv_in"]
    assert op.start < told[0]["ts"] * 1000 < op.end


class StopsAt(SilentObserver):
    """Raises in the nth tile."""

    def __init__(self, n: int, error: BaseException) -> None:
        self.left, self.error = n, error

    def tile_started(self, i: int, n: int, shape: tuple[int, ...], dtype: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DecodeCancelled("stopped"), DecodeStatus.INTERRUPTED),
        (RuntimeError("broken"), DecodeStatus.ERROR),
    ],
)
def test_trace_of_a_decode_that_did_not_end_well(error: BaseException, status: DecodeStatus) -> None:
    collector = make_collector("per_op", clock=TickingClock(), memory=resident)
    with pytest.raises(type(error)):
        decode_recorded(
            Engine(), small_decoder(), latent(1, 4, 9, 7), settings(tile_size=16, plan="tiles"),
            collector=collector, forward=StopsAt(12, error),
        )  # fmt: skip
    (record,) = collector.records()
    assert record.status is status
    read = read_trace(chrome_trace(record))
    assert_phases_add_up(record)
    assert read.decode.args["status"] == status.value
    assert read.decode.args["error"] == str(error)
    finished = [n.args["finished"] for n in read.decode.of("op")]
    assert finished == [True] * (len(finished) - 1) + [False]
    assert len(read.decode.of("tile")) == 11  # the twelfth did not begin
    assert chrome_trace(there_and_back(record)) == chrome_trace(record)


def test_trace_on_a_gpu_has_what_the_queue_did_on_threads_of_its_own() -> None:
    clock = FakeClock()
    device = FakeDevice(clock)

    def events(run: Run) -> None:
        for name in ("a", "b"):
            run.op_started(0, 2, name, 1)
            for phase, ns in (("stage", 100), ("compute", 1000)):
                run.mark(phase)  # type: ignore[arg-type]
                clock.advance(1)
                device.launch(ns)
            run.op_done(report(name))

    record = record_events(make_collector("per_op", clock=clock, timer=lambda name: device), events, ON_GPU)
    read = read_trace(chrome_trace(record))
    assert set(read.threads) == {LAUNCHES, "ops on the device's queue", "phases on the device's queue"}
    assert [outline(n) for n in read.threads["ops on the device's queue"]] == [
        ("a", 0, 1100, []),
        ("b", 1100, 2200, []),
    ]
    queue = [outline(n) for n in read.threads["phases on the device's queue"] if n.end > n.start]
    assert queue == [
        ("stage", 0, 100, []), ("compute", 100, 1100, []), ("stage", 1100, 1200, []), ("compute", 1200, 2200, []),
    ]  # fmt: skip
    ops = read.decode.of("op")
    assert [(n.start, n.end, n.args["device_us"]) for n in ops] == [(0, 2, 1.1), (2, 4, 1.1)]  # as they were launched


def test_nothing_of_the_queue_is_told_where_it_could_not_be_read() -> None:
    clock = FakeClock()

    class Lost(FakeDevice):
        def sync(self) -> None:
            super().sync()
            if self.syncs == 2:
                raise RuntimeError("illegal memory access")

    device = Lost(clock)
    collector = make_collector("per_op", clock=clock, timer=lambda name: device)
    record_failure(collector, RuntimeError("x"), busy_events, ON_GPU)
    (record,) = collector.records()
    assert record.trace is not None
    assert record.trace.device_phases == ()
    assert set(read_trace(chrome_trace(record)).threads) == {LAUNCHES}


def test_a_summary_is_shown_as_totals() -> None:
    clock = FakeClock()

    def events(run: Run) -> None:
        for phase, ns in (("stage", 10), ("compute", 20), ("stage", 30), ("other", 40)):
            run.mark(phase)  # type: ignore[arg-type]
            clock.advance(ns)

    record = record_events(make_collector(clock=clock), events)
    assert (record.trace, record.n_stages) == (None, None)
    read = read_trace(chrome_trace(record))
    assert outline(read.decode)[1:] == (0, 100, [])
    assert [outline(n) for n in read.threads[TOTALS]] == [
        ("stage (total)", 0, 40, []), ("compute (total)", 40, 60, []), ("other (total)", 60, 100, []),
    ]  # fmt: skip
    assert all(n.args == {"is_total": True} for n in read.threads[TOTALS])


def test_a_record_of_level_off_is_one_slice() -> None:
    read = read_trace(chrome_trace(record_events(make_collector("off"), busy_events)))
    assert list(read.threads) == [HOST]
    assert read.decode.children == []
    assert read.counters == read.instants == []


def test_records_older_than_the_trace_show_their_ops_and_totals() -> None:
    record = decoded(small_decoder(), latent(1, 4, 6, 6))
    line = json.loads(json.dumps(record.to_json()))
    del line["trace"], line["n_stages"]
    for stage in line["stages"]:
        del stage["device_start_ns"]
    older = DecodeRecord.from_json(line)
    assert older == replace(record, trace=None, n_stages=None)
    read = read_trace(chrome_trace(older))
    assert [n.name for n in read.decode.of("op")] == [s.op for s in record.stages]
    assert read.threads[TOTALS]


def test_an_op_that_a_new_plan_gave_up_ends_there() -> None:
    clock = FakeClock()

    def events(run: Run) -> None:
        step = timed(clock)
        step(lambda: run.op_started(0, 1, "a", 1), 0)
        step(lambda: run.mark("compute"), 10)
        step(lambda: run.fallback(FALLBACK), 0)
        step(lambda: run.mark("plan"), 5)
        step(lambda: run.planned(PLAN), 0)
        step(lambda: run.op_started(0, 1, "a", 1), 0)
        step(lambda: run.mark("compute"), 20)
        step(lambda: run.op_done(report("a")), 0)

    read = read_trace(chrome_trace(record_events(make_collector("per_op", clock=clock), events)))
    assert [outline(n) for n in read.decode.children] == [
        ("a", 0, 10, [("compute", 0, 10, [])]), ("plan", 10, 15, []), ("a", 15, 35, [("compute", 15, 35, [])]),
    ]  # fmt: skip
    assert [n.args["finished"] for n in read.decode.of("op")] == [False, True]


def test_a_trace_as_a_file(tmp_path: Any) -> None:
    record = record_events(make_collector("per_op"), busy_events)
    path = tmp_path / "a.trace.json"
    write_chrome_trace(record, path)
    assert json.loads(path.read_text(encoding="utf-8")) == chrome_trace(record)


def test_the_collectors_own_clock_and_counters() -> None:
    with Collector("per_op").recording(IDENTITY, REQUEST) as run:
        busy_events(run)
        run.delivered((1, 512, 512, 3))
    assert run.record is not None
    read_trace(chrome_trace(run.record))
