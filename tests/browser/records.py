"""Records for the page, made by the profiler itself from events, clocks and counters that are turned by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from itertools import count
from typing import Any

from halo_vae.optim.events import CacheName, ConvShape, Fallback, OpReport, Phase
from halo_vae.profiling.collector import Collector
from halo_vae.profiling.memory import MemoryCounters
from halo_vae.profiling.record import DecodeRecord, Identity, Request
from halo_vae.profiling.run import Run
from halo_vae.tests.profiling.fakes import (
    IDENTITY,
    MS,
    PLAN,
    PREDICTED,
    REQUEST,
    FakeClock,
    FakeCounter,
    make_collector,
)

MIB = 1 << 20
HOSTILE = "<img src=x onerror=\"window.hacked='yes'\">"
FORMULA = '=cmd|"/c calc"!A1'
_CACHES: tuple[tuple[CacheName, bool], ...] = (("program", True), ("plan", True), ("packed", True), ("tuning", False))
_BEFORE_MS: tuple[tuple[Phase, int], ...] = (("lower", 8), ("plan", 14), ("load", 90))
_OP_MS: tuple[tuple[Phase, int], ...] = (("stage", 60), ("compute", 320), ("stitch", 40))
_PREDICTED = replace(PREDICTED, pool=300 * MIB, scratch=64 * MIB, packed=36 * MIB, output=12 * MIB)
_PLAN = replace(PLAN, predicted=_PREDICTED, macs=1_240_000_000_000, bytes_moved=22_000_000_000)


def op(name: str, *, kind: str = "conv", macs: int = 1, dtype: str = "float32") -> OpReport:
    return OpReport(name=name, kind=kind, n_tiles=9, macs=macs, dtype=dtype, native_dtype="float32", backend="winograd")


_OPS = (
    op("decoder.mid.attn_1", kind="attention", macs=100_000_000_512, dtype="float32"),
    op("decoder.up.0.conv", macs=640_000_000_256, dtype="bfloat16"),
    op("decoder.conv_out", macs=500_000_000_128, dtype="bfloat16"),
)


@dataclass
class Bench:
    """Makes records one after another, as one process would."""

    level: str = "summary"

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.memory = FakeCounter(now=1000 * MIB)
        self._ids = (f"{n:032x}" for n in count(0xA0))
        self._started = (datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc) + timedelta(minutes=n) for n in count())
        self.collector: Collector = make_collector(
            self.level, clock=self.clock, memory=self._counters, new_id=lambda: next(self._ids),
            utc_now=lambda: next(self._started),
        )  # fmt: skip

    def _counters(self, device: str) -> MemoryCounters:
        return MemoryCounters(allocated=None, reserved=None, process=self.memory, available_bytes=12 * 1024 * MIB)

    def decode(
        self,
        *,
        identity: Identity = IDENTITY,
        request: Request = REQUEST,
        image_shape: tuple[int, ...] = (1, 512, 512, 3),
        factor: float = 1.0,
        error: BaseException | None = None,
        events: Callable[[Run], None] = lambda run: None,
    ) -> DecodeRecord:
        """One decode that takes `factor` times 1.402 s, reports `events` too, and raises `error` if there is one."""
        try:
            with self.collector.recording(identity, request) as run:
                self._usual(run, factor)
                events(run)
                if error is not None:
                    raise error
                run.delivered(image_shape)
        except BaseException as raised:
            if raised is not error:
                raise
        assert run.record is not None
        return run.record

    def _usual(self, run: Run, factor: float) -> None:
        def pass_ms(ms: int) -> None:
            self.clock.advance(round(ms * MS * factor))

        run.pool_at_start(0)
        for name, hit in _CACHES:
            run.cache_lookup(name, hit)
        for phase, ms in _BEFORE_MS:
            run.mark(phase)
            pass_ms(ms)
        run.planned(_PLAN)
        for i in range(200):
            run.pool_request(MIB, i % 40 != 0)
        for number, done in enumerate(_OPS):
            run.op_started(number, len(_OPS), done.name, done.n_tiles)
            for phase, ms in _OP_MS:
                run.mark(phase)
                pass_ms(ms)
            for i in range(done.n_tiles):
                run.tile_started(i, done.n_tiles, (1, 512, 66, 66), done.dtype)
            weight = (done.macs % 1000, 4, 3, 3)
            run.conv_requested(ConvShape(input=(1, 4, 66, 66), weight=weight, dtype=done.dtype, layout="channels_last"))
            run.op_done(done)
        self.memory.touch(401 * MIB)
        run.pass_done(1, 1)
        run.mark("transfer")
        pass_ms(30)
        run.mark("other")
        run.pool_levels(200 * MIB, 300 * MIB)


def boundaries(run: Run) -> None:
    for i, smoothness in enumerate((0.97, 0.91, 1.0)):
        run.chunk_started(i, 4)
        run.boundary(0, 4 * (i + 1), smoothness)


def video(bench: Bench) -> DecodeRecord:
    identity = Identity(vae_hash="77aa55cc00112233", family="wan21", loaded_dtype="bfloat16", device="cpu")
    request = replace(REQUEST, latent_shape=(1, 16, 4, 32, 32), latent_dtype="bfloat16")
    return bench.decode(
        identity=identity, request=request, image_shape=(13, 256, 256, 3), factor=4.5, events=boundaries
    )


def out_of_memory(bench: Bench) -> DecodeRecord:
    return bench.decode(factor=0.3, error=MemoryError("a tile of 512 needs 2.10 GiB but 1.40 GiB are free; use 384"))


def cancelled(bench: Bench) -> DecodeRecord:
    return bench.decode(factor=0.5, error=KeyboardInterrupt("stopped by the user"))


def hostile(bench: Bench) -> DecodeRecord:
    """Names that would do harm as markup or as a cell of a spreadsheet."""

    def events(run: Run) -> None:
        run.fallback(Fallback(kind="dtype", where=HOSTILE, given=FORMULA, used=HOSTILE, reason=HOSTILE))
        for number, name in enumerate((HOSTILE, FORMULA)):
            run.op_started(number, 2, name, 9)
            run.op_done(op(name))

    identity = Identity(vae_hash="=1+1", family=HOSTILE, loaded_dtype="float32", device="cpu")
    return bench.decode(identity=identity, events=events)


def many_ops(bench: Bench, n: int = 10_000) -> DecodeRecord:
    """A decode of more ops than a page can lay out at once."""
    record = bench.decode()
    first = record.stages[0]
    stages = tuple(replace(first, op=f"decoder.op_{i:05d}", host_ns=1000 + i) for i in range(n))
    changed: dict[str, Any] = {"stages": stages, "n_stages": n}
    return replace(record, **changed)
