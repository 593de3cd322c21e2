from __future__ import annotations

from dataclasses import fields, replace

import pytest

from halo_vae.profiling.codec import decode, encode
from halo_vae.profiling.environment import environment_id
from halo_vae.profiling.memory import MemoryCounters
from halo_vae.profiling.record import DecodeRecord, DecodeStatus, DtypeMacs
from halo_vae.profiling.rows import HistoryRow, precision_of, row_of
from halo_vae.tests.profiling.fakes import (
    ENVIRONMENT,
    IDENTITY,
    PLAN,
    RECORD_ID,
    REQUEST,
    FakeCounter,
    busy_events,
    make_collector,
    record_events,
)


def busy_record(level: str = "summary") -> DecodeRecord:
    counter = FakeCounter(now=1000)

    def counters(device: str) -> MemoryCounters:
        return MemoryCounters(allocated=None, reserved=None, process=counter, available_bytes=None)

    def events(run: object) -> None:
        busy_events(run)  # type: ignore[arg-type]
        counter.touch(400)

    record: DecodeRecord = record_events(make_collector(level, memory=counters), events)
    return record


def test_every_column_of_a_counted_decode() -> None:
    record = replace(busy_record(), energy_uj=7)
    assert row_of(record) == HistoryRow(
        record_id=RECORD_ID,
        started_at="2026-01-02T03:04:05.678+00:00",
        status=DecodeStatus.OK,
        error=None,
        family="kl",
        vae_hash="0123456789abcdef",
        device="cpu",
        method="exact",
        approximate=False,
        precision="bfloat16",
        loaded_dtype="float32",
        latent_shape=(1, 4, 64, 64),
        image_shape=(1, 512, 512, 3),
        wall_ns=0,
        first_of_shape=True,
        predicted_bytes=400,
        measured_bytes=400,
        used_bytes=400,
        n_tiles=1,
        n_fallbacks=1,
        temporal_consistency=0.75,
        energy_uj=7,
        level="summary",
        environment_id=environment_id(ENVIRONMENT),
    )


def test_what_was_not_recorded_is_unknown() -> None:
    def nothing(run: object) -> None:
        pass

    row = row_of(record_events(make_collector("off"), nothing))
    unknown = {f.name for f in fields(row) if getattr(row, f.name) is None}
    assert unknown == {
        "error", "method", "approximate", "first_of_shape", "predicted_bytes", "measured_bytes", "used_bytes",
        "n_tiles", "n_fallbacks", "temporal_consistency", "energy_uj",
    }  # fmt: skip
    assert row.precision == row.loaded_dtype == "float32"


def test_a_failed_decode_has_its_error_and_no_picture() -> None:
    failed = replace(busy_record(), status=DecodeStatus.OUT_OF_MEMORY, error="no room", image_shape=None)
    row = row_of(failed)
    assert (row.status, row.error, row.image_shape) == (DecodeStatus.OUT_OF_MEMORY, "no room", None)


def test_a_row_goes_through_json() -> None:
    row = row_of(busy_record())
    line = encode(row)
    assert list(line) == [f.name for f in fields(HistoryRow)]
    assert (line["status"], line["latent_shape"]) == ("ok", [1, 4, 64, 64])
    assert decode(HistoryRow, line, "row") == row


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ((("float16", 10), ("float32", 90)), "float32"),
        ((("float32", 10), ("float16", 90)), "float16"),
        ((("float16", 0),), "float32"),  # an opaque decoder counts no arithmetic
        ((), "float32"),
    ],
)
def test_precision_is_that_of_most_work(kept: tuple[tuple[str, int], ...], expected: str) -> None:
    record = busy_record()
    assert record.precision is not None
    use = replace(record.precision, kept=tuple(DtypeMacs(dtype=d, macs=n) for d, n in kept))
    assert precision_of(replace(record, precision=use)) == expected
    assert (IDENTITY.loaded_dtype, REQUEST.latent_dtype, PLAN.method) == ("float32", "float32", "exact")
