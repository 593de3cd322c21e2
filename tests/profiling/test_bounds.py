"""A record at level `summary` fits 64 KiB, whatever a decode reports."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from halo_vae.optim.events import Choice, ConvShape, Fallback, OpReport, PeakPrediction, PlanSummary
from halo_vae.profiling.bounds import MAX_RECORD_BYTES, bounded_fallback, bounded_plan, cut
from halo_vae.profiling.environment import VARIABLES, Environment, EnvVariable
from halo_vae.profiling.memory import MemoryCounters
from halo_vae.profiling.record import DecodeRecord, Identity, Request
from halo_vae.profiling.run import Run
from halo_vae.profiling.store_format import line_of
from halo_vae.tests.profiling.fakes import (
    ENVIRONMENT,
    FALLBACK,
    PLAN,
    REQUEST,
    FakeClock,
    FakeCounter,
    make_collector,
)

LONG = "\x01×\\" * 5_000
"""Text that JSON makes longer, and far too much of it."""
HUGE = 10**15 - 1
"""More bytes, nanoseconds or multiply-accumulates than any decode has."""
DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")

LARGE_PLAN = PlanSummary(
    method="blended", approximate=False, strategy=LONG, layout=LONG, tile_px=(16384, 16384), overlap_px=16384,
    n_tiles=HUGE, tile_grid=(16384, 16384), images_per_pass=10**6, n_passes=10**6, macs=HUGE, bytes_moved=HUGE,
    predicted=PeakPrediction(pool=HUGE, scratch=HUGE, packed=HUGE, output=HUGE, host=HUGE),
    choices=(Choice(name=LONG, value=LONG, reason=LONG),) * 1000,
    chunk_frames=10**6, n_chunks=10**6, boundaries=tuple(range(10**6, 10**6 + 5000)), carried_bytes=HUGE,
)  # fmt: skip
LARGE_ENVIRONMENT = Environment(
    python="3.14.10rc1+".ljust(40, "x"), torch="2.19.0a0+".ljust(60, "x"), cuda="x" * 60, hip="x" * 60, miopen="x" * 60,
    cudnn="x" * 60, os="x" * 100, machine="x" * 40, cpu="x" * 100, cpu_count=10**4, threads=10**4, device="x" * 100,
    device_arch="x" * 40, variables=tuple(EnvVariable(name=name, value="x" * 64) for name in VARIABLES),
    device_family="x" * 20, compute_units=10**4, rocm="x" * 60, driver="x" * 60,
)  # fmt: skip
IDENTITY = Identity(vae_hash=LONG, family=LONG, loaded_dtype=LONG, device="cpu")
REQUESTED = Request(
    settings=replace(
        REQUEST.settings, tile_size=16384, overlap=512, chunk_frames=10**3, seed=2**63 - 1, keep_bytes=HUGE
    ),
    latent_shape=(10**6, 10**6, 10**6, 16384, 16384),
    latent_dtype="float8_e4m3fn",
)


def everything(run: Run, clock: FakeClock) -> None:
    """More of every event than a record keeps, each as long as it can be."""
    run.planned(LARGE_PLAN)
    run.pool_at_start(HUGE)
    run.pool_levels(HUGE, HUGE)
    for i in range(300):
        shape = (10**4, 10**4, 10**4, 16384, 16000 + i)
        run.op_started(i, 300, f"op {i} {LONG}", 10**6)
        run.tile_started(i, 300, shape, DTYPES[4])
        run.conv_requested(ConvShape(input=shape, weight=(10**4,) * 5, dtype=DTYPES[4], layout="channels_last_3d"))
        run.fallback(Fallback(kind="out_of_memory", where=LONG, given=LONG, used=LONG, reason=LONG))
        run.boundary(i + 10**4, 10**6 + i, 1 / 3 + i * 1e-5)
        run.pool_request(HUGE, i % 2 == 0)
        run.prefetch_asked(True)
        run.converted(HUGE)
        clock.advance(HUGE)
        run.pass_done(10**6, 10**6)
    for dtype in DTYPES:
        run.op_done(
            OpReport(name=LONG, kind=LONG, n_tiles=1, macs=HUGE, dtype=dtype, native_dtype="float32", backend=LONG)
        )
        run.op_redone(LONG, dtype, HUGE)
    for name in ("program", "plan", "packed", "tuning") * 3:
        run.cache_lookup(name, True)  # type: ignore[arg-type]


def largest(level: str = "summary", *, failed: bool = True) -> DecodeRecord:
    clock, counter = FakeClock(), FakeCounter(now=HUGE)
    collector = make_collector(
        level, clock=clock, environment=lambda device: LARGE_ENVIRONMENT, copy_bytes_per_s=lambda device: HUGE,
        memory=lambda device: MemoryCounters(
            allocated=counter, reserved=counter, process=counter, available_bytes=HUGE
        ),
    )  # fmt: skip

    def decode() -> None:
        with collector.recording(IDENTITY, REQUESTED) as run:
            everything(run, clock)
            run.delivered((10**6, 16384, 16384, 10**4))
            if failed:
                raise ValueError(LONG)

    if failed:
        with pytest.raises(ValueError, match="\x01"):
            decode()
    else:
        decode()
    record: DecodeRecord = collector.records()[0]
    return replace(record, energy_uj=HUGE, energy_from="counter", n_boundaries=10**6)


@pytest.mark.parametrize("failed", [True, False])
def test_the_largest_summary_record_fits(failed: bool) -> None:
    record = largest(failed=failed)
    assert record.batch is not None
    assert record.tiles is not None
    assert record.convs is not None
    assert record.plan is not None
    lists = {
        "passes": record.batch.passes, "tiles": record.tiles.shapes, "convs": record.convs.shapes,
        "fallbacks": record.fallbacks, "boundaries": record.boundaries, "choices": record.plan.choices,
        "plan": record.plan.boundaries,
    }  # fmt: skip
    assert {name: len(items) for name, items in lists.items()} == {
        "passes": 64, "tiles": 64, "convs": 64, "fallbacks": 64, "boundaries": 256, "choices": 20, "plan": 128,
    }  # fmt: skip
    size = len(line_of(record))
    assert 48 << 10 < size <= MAX_RECORD_BYTES == 65_536
    assert DecodeRecord.from_json(json.loads(line_of(record))) == record


def test_counts_beside_the_lists_are_whole() -> None:
    record = largest()
    assert record.batch is not None
    assert record.tiles is not None
    assert record.convs is not None
    assert record.plan is not None
    assert (record.batch.n_passes, record.n_fallbacks, record.tiles.count) == (300, 300, 300)
    assert (record.convs.distinct, record.plan.n_chunks) == (300, 10**6)


@pytest.mark.parametrize("level", ["off", "per_op"])
def test_other_levels_bound_their_texts_too(level: str) -> None:
    record = largest(level)
    assert record.plan is not None
    assert len(record.plan.choices) == 20
    assert len(record.identity.family) < 200
    assert record.error is not None
    assert len(record.error) <= 400
    assert len(record.plan.boundaries) == {"off": 128, "per_op": 4096}[level]


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("short", 5, "short"),
        ("longer", 5, "lo…"),
        ("", 3, ""),
        ("××××", 8, "××××"),
        ("×××××", 8, "××…"),
        ('""""', 8, '""""'),  # each is two bytes of JSON
        ('"""""', 8, '""…'),
        ("\x01\x01", 12, "\x01\x01"),  # six each
        ("\x01\x01\x01", 12, "\x01…"),
        ("\udc80\udc80\udc80", 12, "\udc80…"),
        ("😀😀😀", 11, "😀😀…"),
    ],
)
def test_text_is_cut_by_its_bytes_in_json(text: str, n: int, expected: str) -> None:
    assert cut(text, n) == expected
    written = json.dumps(cut(text, n), ensure_ascii=False).encode("utf-8", "backslashreplace")
    assert len(written) - 2 <= n


def test_what_is_short_stays_as_it_is() -> None:
    assert bounded_plan(PLAN) == PLAN
    assert bounded_fallback(FALLBACK, 0) == bounded_fallback(FALLBACK, 63) == FALLBACK
    assert ENVIRONMENT != LARGE_ENVIRONMENT


def test_later_fallbacks_are_told_in_fewer_words() -> None:
    event = replace(FALLBACK, reason="a reason of so many words that it takes more than forty bytes")
    assert bounded_fallback(event, 5) == event
    assert bounded_fallback(event, 6).reason == "a reason of so many words that it tak…"


def names_of(value: Any) -> set[str]:
    return {k for v in value.values() if isinstance(v, dict) for k in v}


def test_lists_of_a_record_are_all_looked_at() -> None:
    """A list that is added to records must be filled above, or the largest record is not the largest."""
    line = largest(failed=False).to_json()
    lists: dict[str, int] = {}

    def walk(value: Any, where: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{where}.{key}" if where else key)
        elif isinstance(value, list):
            lists[where] = len(value)
            if value and isinstance(value[0], dict):
                walk(value[0], f"{where}[]")

    walk(line, "")
    assert {name for name, n in lists.items() if n == 0} == {"stages"}
    assert names_of(line) >= {"macs", "settings", "kept"}
