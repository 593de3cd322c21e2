"""The columns of a trace: what is kept of a long decode, samples of memory, damaged files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from halo_vae.benchmarks.plain_kl import sd_shapes
from halo_vae.benchmarks.shapes import SpecWeights
from halo_vae.optim.decode import Engine, open_decoder
from halo_vae.profiling import trace_log
from halo_vae.profiling.per_op import KEEP_STAGES
from halo_vae.profiling.record import DecodeRecord
from halo_vae.profiling.render.text import render_record
from halo_vae.profiling.run import Run
from halo_vae.profiling.trace import chrome_trace
from halo_vae.profiling.trace_log import KEEP_DETAIL, KEEP_EVENTS, KEEP_SAMPLES, MemorySamples, TraceLog
from halo_vae.tests.optim.helpers import profile, settings
from halo_vae.tests.profiling.fakes import PLAN, FakeClock, busy_events, make_collector, record_events, report
from halo_vae.tests.profiling.test_trace import resident, there_and_back
from halo_vae.tests.profiling.trace_format import read_trace


def long_clip(n_ops: int) -> DecodeRecord:
    clock = FakeClock()

    def events(run: Run) -> None:
        run.planned(PLAN)
        for i in range(n_ops):
            run.op_started(i, n_ops, f"decoder.up.{i % 40}.conv", 2)
            for t in range(2):
                run.tile_started(t, 2, (4, 96, 66, 66 + t), "float32")
                for phase in ("stage", "compute", "stitch"):
                    run.mark(phase)  # type: ignore[arg-type]
                    clock.advance(400_000 + i)
            run.op_done(report(f"decoder.up.{i % 40}.conv"))

    record: DecodeRecord = record_events(make_collector("per_op", clock=clock, memory=resident), events)
    return record


def test_ten_thousand_ops_stay_within_bounds() -> None:
    n = 10_000
    record = long_clip(n)
    trace = record.trace
    assert trace is not None
    assert (len(record.stages), record.n_stages) == (KEEP_STAGES, n)
    assert KEEP_EVENTS <= len(trace.kinds) <= KEEP_EVENTS + 2
    assert trace.n_left_out + len(trace.kinds) - 2 == 1 + n * 10
    assert len(trace.memory_bytes) <= KEEP_SAMPLES
    assert sum(trace.memory_after_ns) > 0.99 * record.wall_ns  # samples of the whole decode, not of its beginning
    assert len(json.dumps(record.to_json(), separators=(",", ":"))) < 1 << 20
    read = read_trace(chrome_trace(there_and_back(record)))
    cuts = [i for i in read.instants if i["cat"] == "cut"]
    assert [c["name"] for c in cuts] == ["from here phases and tiles left out", "from here everything left out"]
    detailed = [op for op in read.decode.of("op") if op.children]
    assert len(detailed) == len([op for op in read.decode.of("op") if op.start < cuts[0]["ts"] * 1000])
    assert len(read.decode.of("op")) > len(detailed) + 1000  # ops go on after their tiles were left out
    assert max(n.end for n in read.decode.of("tile")) <= cuts[0]["ts"] * 1000
    assert max(n.end for n in read.decode.of("op")) <= cuts[1]["ts"] * 1000
    assert "of the first 2 048 of 10 000 op runs" in render_record(record)
    shown = chrome_trace(record)["otherData"]
    assert (shown["events_left_out"], shown["ops_left_out"]) == (trace.n_left_out, n - KEEP_STAGES)


@pytest.mark.parametrize("plan", ["strips", "tiles"])
@pytest.mark.parametrize("edge", [64, 256])
def test_a_full_size_picture_is_not_cut(plan: str, edge: int) -> None:
    decoder = open_decoder(SpecWeights(sd_shapes()))
    summary = Engine(profile=profile()).plan(decoder, (1, 4, edge, edge), settings(plan=plan)).summary
    per_tile, per_op = 5, 4  # a tile and its phases; an op, its end and the phases before its first tile
    assert per_tile * summary.n_tiles + per_op * len(decoder.program.ops) < KEEP_DETAIL


def test_samples_are_thinned_and_keep_the_peak() -> None:
    samples = MemorySamples(keep=8)
    for i in range(1000):
        now = i * trace_log.SAMPLE_EVERY_NS
        if samples.is_due(now):
            samples.add(now, 500 if i == 3 else i % 7)
    assert len(samples.at_ns) < 8
    assert max(samples.nbytes) == 500
    assert samples.at_ns == sorted(samples.at_ns)
    assert samples.at_ns[-1] > 700 * trace_log.SAMPLE_EVERY_NS


def test_an_unknown_level_is_no_sample() -> None:
    samples = MemorySamples()
    samples.add(5, None)
    assert samples.at_ns == []
    record = record_events(make_collector("per_op"), busy_events)
    assert record.trace.memory_of is None
    assert read_trace(chrome_trace(record)).counters == []


DAMAGES: list[dict[str, Any]] = [
    {"kinds": [0]}, {"kinds": [99, 0]}, {"values": [99, 0]}, {"values": [-1, 0]}, {"after_ns": [-1, 0]},
    {"memory_bytes": [1, 2, 3]}, {"device_phases": [99], "device_ns": [1]}, {"device_phases": [1]},
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_columns_are_refused(damage: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "kinds": (0, 2), "values": (0, 0), "after_ns": (0, 0), "ops": (), "tiles": (), "n_left_out": 0,
        "memory_of": None, "memory_after_ns": (), "memory_bytes": (),
    }  # fmt: skip
    TraceLog(**given)
    with pytest.raises(ValueError, match="the record is damaged"):
        TraceLog(**(given | {k: tuple(v) for k, v in damage.items()}))
