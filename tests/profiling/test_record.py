from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from halo_vae.profiling.record import (
    SCHEMA_VERSION,
    UNMEASURED,
    ChunkBoundary,
    DecodeRecord,
    DecodeStatus,
    PeakBytes,
    PeakReading,
    environment_id,
)
from halo_vae.profiling.run import new_record_id
from halo_vae.tests.profiling.fakes import (
    ENVIRONMENT,
    IDENTITY,
    ON_GPU,
    PLAN,
    PREDICTED,
    RECORD_ID,
    REQUEST,
    SECOND,
    CpuTime,
    FakeClock,
    busy_events,
    make_collector,
    record_events,
)


def busy_record() -> DecodeRecord:
    record: DecodeRecord = record_events(make_collector("per_op"), busy_events)
    return record


def there_and_back(record: DecodeRecord) -> DecodeRecord:
    return DecodeRecord.from_json(json.loads(json.dumps(record.to_json(), allow_nan=False)))


@pytest.mark.parametrize("level", ["off", "summary", "per_op"])
def test_round_trip(level: str) -> None:
    record = record_events(make_collector(level), busy_events)
    assert there_and_back(record) == record
    assert (level == "off") == (record.pool is None)


def test_round_trip_of_a_failure_with_boundaries() -> None:
    boundaries = (ChunkBoundary(frame=4, smoothness=0.25),)
    record = replace(
        busy_record(), status=DecodeStatus.INTERRUPTED, error="stopped", image_shape=None, boundaries=boundaries
    )
    assert there_and_back(record) == record
    assert record.temporal_consistency == 0.25


def test_json_carries_version_and_environment() -> None:
    line = busy_record().to_json()
    assert line["schema_version"] == SCHEMA_VERSION == 1
    assert line["environment_id"] == environment_id(ENVIRONMENT)
    assert line["status"] == "ok"
    assert line["request"]["settings"]["tile_size"] == 768


@pytest.mark.parametrize(
    ("status", "error", "shape"),
    [
        (DecodeStatus.OK, "x", (1, 8, 8, 3)),  # an error in an ok decode
        (DecodeStatus.OK, None, None),  # ok without a picture
        (DecodeStatus.ERROR, None, None),  # failed without a reason
        (DecodeStatus.INTERRUPTED, "x", (1, 8, 8, 3)),  # cancelled with a picture
    ],
)
def test_contradicting_outcomes_are_refused(status: DecodeStatus, error: str | None, shape: Any) -> None:
    with pytest.raises(ValueError, match=f"status {status.value} contradicts"):
        replace(busy_record(), status=status, error=error, image_shape=shape)


def test_every_level_has_an_id_and_older_lines_none() -> None:
    for level in ("off", "summary", "per_op"):
        assert record_events(make_collector(level), busy_events).record_id == RECORD_ID
    line = busy_record().to_json()
    assert line.pop("record_id") == RECORD_ID
    assert DecodeRecord.from_json(line) == replace(busy_record(), record_id="")


def test_ids_are_new_for_each_decode_and_known_when_it_begins() -> None:
    collector, seen = make_collector(new_id=new_record_id), []
    for _ in range(3):
        record = record_events(collector, lambda run: seen.append(run.record_id))
        assert record.record_id == seen[-1]
    assert len(set(seen)) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", record_id) for record_id in seen)


def test_lines_older_than_video_are_read() -> None:
    record = replace(busy_record(), boundaries=(ChunkBoundary(frame=4, smoothness=0.25),))
    line = json.loads(json.dumps(record.to_json()))
    del line["n_boundaries"], line["boundaries"][0]["clip"]
    for name in ("chunk_frames", "n_chunks", "boundaries", "carried_bytes"):
        del line["plan"][name]
    assert DecodeRecord.from_json(line) == replace(record, n_boundaries=None)  # its plan has the values of a picture's


def test_negative_wall_time_is_refused() -> None:
    with pytest.raises(ValueError, match="wall_ns is -1"):
        replace(busy_record(), wall_ns=-1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "format 2; this version reads format 1"),
        ({"schema_version": None}, "format None"),
        ({"wall_ns": "5"}, "record.wall_ns is '5'; int is needed"),
        ({"wall_ns": True}, "record.wall_ns is True"),  # JSON true is not the number 1
        ({"status": "fine"}, "record.status is 'fine'; allowed are 'ok'"),
        ({"level": "all"}, "record.level is 'all'"),
        ({"invented": 1}, r"unknown fields \['invented'\]"),
        ({"plan": 3}, "record.plan is 3; an object is needed"),
        ({"image_shape": "1x2"}, "record.image_shape is '1x2'; a list is needed"),
        ({"image_shape": [1, "2"]}, "record.image_shape\\[1\\] is '2'"),
    ],
)
def test_broken_lines_name_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeRecord.from_json(busy_record().to_json() | change)


def test_missing_field_is_named() -> None:
    line = busy_record().to_json()
    del line["wall_ns"]
    with pytest.raises(ValueError, match="lacks \\['wall_ns'\\]"):
        DecodeRecord.from_json(line)


def test_wrong_pair_length_is_named() -> None:
    line = busy_record().to_json()
    line["plan"]["tile_px"] = [1, 2, 3]
    with pytest.raises(ValueError, match=r"record\.plan\.tile_px has 3 items; 2 are needed"):
        DecodeRecord.from_json(line)


def test_environment_id_follows_the_environment() -> None:
    assert environment_id(ENVIRONMENT) == environment_id(replace(ENVIRONMENT))
    assert environment_id(ENVIRONMENT) != environment_id(replace(ENVIRONMENT, threads=3))


def timed(identity: Any, wall_ns: int, cpu_ns: int) -> DecodeRecord:
    clock, cpu = FakeClock(), CpuTime()
    collector = make_collector(clock=clock, cpu_time_ns=cpu, copy_bytes_per_s=lambda device: 8_000)
    with collector.recording(identity, REQUEST) as run:
        run.planned(PLAN)
        clock.advance(wall_ns)
        cpu.ns += cpu_ns
        run.converted(1_000)
        run.delivered((1, 512, 512, 3))
    assert run.record is not None
    return run.record


def test_derived_figures() -> None:
    record = timed(IDENTITY, 2 * SECOND, 3 * SECOND)
    assert record.parallel_efficiency == 0.75  # 3 s of CPU time on 2 threads in 2 s
    assert record.bytes_per_s == 2_000.0  # 4000 bytes in 2 s
    assert record.bandwidth_share == 0.25
    assert record.conversion_share == 0.25


def test_host_threads_say_nothing_about_a_gpu() -> None:
    assert timed(ON_GPU, 2 * SECOND, 3 * SECOND).parallel_efficiency is None


def test_unknown_work_gives_no_rate() -> None:
    opaque = replace(timed(IDENTITY, 2 * SECOND, SECOND), plan=replace(PLAN, bytes_moved=0))
    assert opaque.bytes_per_s is None
    assert opaque.conversion_share is None
    assert replace(opaque, plan=None).bytes_per_s is None
    assert replace(timed(IDENTITY, 2 * SECOND, SECOND), copy_bytes_per_s=None).bandwidth_share is None


def test_prediction_is_compared_with_what_the_decode_took() -> None:
    taken = PeakReading(start_bytes=1000, peak_bytes=1500, above_start_bytes=500, since_process_start=False)
    memory = PeakBytes(
        planned=PREDICTED, allocated=UNMEASURED, reserved=UNMEASURED, process=taken, available_bytes=None
    )
    record = replace(busy_record(), memory=memory)
    assert record.prediction_ratio == 400 / 500
    assert record.pool is not None
    for held, used in ((None, 500), (0, 500), (100, 600), (9_999, 800)):  # of a larger pool it uses what it planned
        warm = replace(record, pool=replace(record.pool, held_start_bytes=held))
        assert (warm.used_bytes, warm.prediction_ratio) == (used, 400 / used)
    assert memory.fragmentation_bytes is None
    on_gpu = replace(memory, allocated=replace(taken, peak_bytes=1400, above_start_bytes=400), reserved=taken)
    assert on_gpu.measured_bytes == 400
    assert on_gpu.fragmentation_bytes == 100
    assert replace(record, memory=replace(memory, planned=None)).prediction_ratio is None
