from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from halo_vae.optim.errors import DecodeCancelled
from halo_vae.profiling.collector import Collector
from halo_vae.profiling.metrics import Metrics, metrics_of
from halo_vae.profiling.run import Run
from halo_vae.tests.profiling.fakes import (
    CONV,
    SECOND,
    FakeClock,
    busy_events,
    make_collector,
    record_events,
    record_failure,
    report,
)

ELEVEN = {
    "average_execution_time", "total_executions", "cache_hit_rate", "memory_efficiency", "precision_efficiency",
    "batch_efficiency", "prefetch_efficiency", "total_memory_saves", "total_precision_optimizations",
    "total_batch_optimizations", "total_prefetch_hits",
}  # fmt: skip
RATES = {
    "average_execution_time", "cache_hit_rate", "memory_efficiency", "precision_efficiency", "batch_efficiency",
    "prefetch_efficiency",
}  # fmt: skip


def test_the_eleven_names() -> None:
    assert set(asdict(make_collector().metrics())) >= ELEVEN


def test_nothing_recorded_gives_none_and_zero() -> None:
    found = asdict(make_collector().metrics())
    assert {name: found[name] for name in ELEVEN} == {name: None if name in RATES else 0 for name in ELEVEN}


def test_a_decode_that_used_nothing_leaves_rates_unknown() -> None:
    collector = make_collector()
    record_events(collector, lambda run: None)
    found = asdict(collector.metrics())
    assert {name for name in RATES if found[name] is None} == RATES - {"average_execution_time"}
    assert found["total_executions"] == 1


def pool(nbytes: int, hit: bool) -> Callable[[Run], None]:
    return lambda run: run.pool_request(nbytes, hit)


def op(macs: int, dtype: str, native: str = "float32") -> Callable[[Run], None]:
    return lambda run: run.op_done(report(macs=macs, dtype=dtype, native=native))


# Each row: a metric, what a first and a second decode report, and the metric after each.
CASES: list[tuple[str, Callable[[Run], Any], Callable[[Run], Any], float | None, float]] = [
    ("cache_hit_rate", lambda r: r.cache_lookup("plan", True), lambda r: r.cache_lookup("packed", False), 1.0, 0.5),
    ("cache_hit_rate", lambda r: r.cache_lookup("tuning", False), lambda r: r.cache_lookup("program", True), 0.0, 0.5),
    ("memory_efficiency", pool(300, True), pool(100, False), 1.0, 0.75),  # by bytes, not by requests
    ("memory_efficiency", pool(300, False), pool(100, True), 0.0, 0.25),
    ("precision_efficiency", op(300, "float16"), lambda r: r.op_redone("a", "float16", 100), 1.0, 0.75),
    ("precision_efficiency", lambda r: r.op_redone("a", "bfloat16", 100), op(100, "bfloat16"), 0.0, 0.5),
    ("precision_efficiency", op(300, "float32"), op(1, "float16"), None, 1.0),  # fp32 work is no denominator
    ("precision_efficiency", op(3, "float16"), lambda r: r.op_redone("a", "float32", 9), 1.0, 1.0),
    ("batch_efficiency", lambda r: r.pass_done(2, 2), lambda r: r.pass_done(1, 2), 1.0, 0.75),
    ("batch_efficiency", lambda r: r.pass_done(1, 2), lambda r: r.pass_done(2, 2), 0.5, 0.75),
    ("prefetch_efficiency", lambda r: r.prefetch_asked(True), lambda r: r.prefetch_asked(False), 1.0, 0.5),
    ("prefetch_efficiency", lambda r: r.prefetch_asked(False), lambda r: r.prefetch_asked(True), 0.0, 0.5),
    ("total_memory_saves", pool(1, True), pool(1, True), 1, 2),
    ("total_memory_saves", pool(1, False), pool(1, True), 0, 1),
    ("total_precision_optimizations", op(1, "float16"), op(1, "bfloat16"), 1, 2),
    ("total_precision_optimizations", op(1, "float32"), op(1, "bfloat16", "bfloat16"), 0, 0),  # its own dtype
    ("total_precision_optimizations", op(1, "float32", "float16"), op(1, "float16"), 0, 1),  # wider is not narrower
    ("total_batch_optimizations", lambda r: r.pass_done(2, 4), lambda r: r.pass_done(4, 4), 1, 2),
    ("total_batch_optimizations", lambda r: r.pass_done(1, 4), lambda r: r.pass_done(1, 1), 0, 0),
    ("total_prefetch_hits", lambda r: r.prefetch_asked(True), lambda r: r.prefetch_asked(True), 1, 2),
    ("total_prefetch_hits", lambda r: r.prefetch_asked(False), lambda r: r.prefetch_asked(True), 0, 1),
]


@pytest.mark.parametrize(("name", "first", "second", "after_first", "after_second"), CASES)
def test_each_metric_moves(
    name: str, first: Callable[[Run], Any], second: Callable[[Run], Any], after_first: float | None, after_second: float
) -> None:
    collector = make_collector()
    record_events(collector, first)
    assert getattr(collector.metrics(), name) == after_first
    record_events(collector, second)
    assert getattr(collector.metrics(), name) == after_second


def test_a_decode_with_two_multi_image_passes_is_one_optimisation() -> None:
    collector = make_collector()
    record_events(collector, lambda run: (run.pass_done(2, 2), run.pass_done(2, 2)))
    assert collector.metrics().total_batch_optimizations == 1


def lasting(collector: Collector, clock: FakeClock, ns: int, width: int) -> None:
    """A decode that takes `ns` and requests a convolution of that width."""
    shape = type(CONV)(input=(1, 4, 66, width), weight=(8, 4, 3, 3), dtype="float32", layout="channels_last")
    record_events(collector, lambda run: (run.conv_requested(shape), clock.advance(ns)))


def test_average_time_and_first_of_shape_apart() -> None:
    clock = FakeClock()
    collector = make_collector(clock=clock)
    lasting(collector, clock, 5 * SECOND, 66)
    assert collector.metrics().average_execution_time == 5.0
    assert collector.metrics().average_execution_time_repeated is None
    lasting(collector, clock, SECOND, 66)
    lasting(collector, clock, 3 * SECOND, 66)
    lasting(collector, clock, 11 * SECOND, 130)
    found = collector.metrics()
    assert (found.average_execution_time, found.total_executions) == (5.0, 4)
    assert (found.average_execution_time_first_of_shape, found.first_of_shape_executions) == (8.0, 2)
    assert found.average_execution_time_repeated == 2.0


def test_failed_and_cancelled_decodes_are_only_counted() -> None:
    clock = FakeClock()
    collector = make_collector(clock=clock)
    lasting(collector, clock, SECOND, 66)
    before = asdict(collector.metrics())
    for error in (DecodeCancelled("stop"), RuntimeError("out of memory"), ValueError("no")):
        record_failure(collector, error, lambda run: (busy_events(run), clock.advance(SECOND)))
    after = asdict(collector.metrics())
    assert (after["interrupted_executions"], after["failed_executions"]) == (1, 2)
    assert {k: v for k, v in after.items() if v != before[k]} == {"interrupted_executions": 1, "failed_executions": 2}


def test_off_counts_decodes_and_time_only() -> None:
    clock = FakeClock()
    collector = make_collector("off", clock=clock)
    record_events(collector, lambda run: (run.pool_request(1, True), clock.advance(SECOND)))
    found = collector.metrics()
    assert (found.total_executions, found.average_execution_time, found.total_memory_saves) == (1, 1.0, 0)
    assert found.first_of_shape_executions == 0


def test_metrics_of_records_equal_the_collectors() -> None:
    clock = FakeClock()
    collector = make_collector(clock=clock)
    lasting(collector, clock, SECOND, 66)
    lasting(collector, clock, 2 * SECOND, 66)
    found: Metrics = metrics_of(collector.records())
    assert found == collector.metrics()
    assert metrics_of(()).average_execution_time is None
