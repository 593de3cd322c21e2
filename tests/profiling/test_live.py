from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from halo_vae.optim.blended import decode_blended
from halo_vae.optim.events import DecodeObserver
from halo_vae.optim.opaque import OpaqueDecoder
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.store import to_unit_range
from halo_vae.profiling.live import ChunkPosition, LiveState, OpPosition, TilePosition, watching
from halo_vae.profiling.recorded import record_call
from halo_vae.tests.fixtures import PointDec, latent
from halo_vae.tests.profiling.fakes import IDENTITY, PLAN, REQUEST, SECOND, FakeClock, make_collector


class WaitsInThirdCall(PointDec):
    """Stands still in its third call until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.release = threading.Event(), threading.Event()

    def run(self, z: torch.Tensor) -> torch.Tensor:
        if len(self.log) == 3:
            self.reached.set()
            assert self.release.wait(60)
        return super().run(z)


def test_st_6_a_reader_sees_where_a_decode_waits(caplog: pytest.LogCaptureFixture) -> None:
    model, clock = WaitsInThirdCall(), FakeClock()
    opaque = OpaqueDecoder(name="PointDec", decode=model.decode, latent_dim=2, latent_channels=4, scale=8)
    settings = DecodeSettings(tile_size=64, overlap=0)
    z = latent((1, 4, 24, 24))
    collector = make_collector(clock=clock)
    done: list[Any] = []

    def call(observer: DecodeObserver) -> torch.Tensor:
        return decode_blended(opaque, z, settings, finish=to_unit_range, observer=observer)

    def decode() -> None:
        done.append(record_call(call, IDENTITY, z, settings, collector=collector))

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        assert model.reached.wait(60)
        with caplog.at_level(logging.WARNING, "halo_vae"):
            first = collector.live()
            clock.advance(9 * SECOND)
            collector.live()
            lines_before_ten_seconds = len(caplog.records)
            clock.advance(2 * SECOND)
            for _ in range(3):
                later = collector.live()
    finally:
        model.release.set()
        thread.join(60)
    assert first is not None
    assert later is not None
    assert (first.stage, first.tile) == ("decode", TilePosition(number=3, count=9, shape=(1, 4, 8, 8), dtype="float32"))
    assert first.op == OpPosition(number=1, count=1, name="decode")
    assert first.started_at == "2026-01-02T03:04:05.678+00:00"
    assert (later.elapsed_ns, later.waiting_ns) == (11 * SECOND, 11 * SECOND)
    assert lines_before_ten_seconds == 0
    assert [r.getMessage() for r in caplog.records] == [
        "VAE decode has reported nothing for 11 s: stage decode, op 1 of 1 (decode), tile 3 of 9 (1x4x8x8, float32)"
    ]
    image, record = done[0]
    assert len(model.log) == record.tiles.count == 9  # reading changed nothing
    assert torch.equal(image, to_unit_range(PointDec().decode(z)).movedim(1, -1))
    assert collector.live() is None


def test_st_6_one_line_per_ten_seconds_of_waiting(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    collector = make_collector(clock=clock)
    with caplog.at_level(logging.WARNING, "halo_vae"), collector.recording(IDENTITY, REQUEST) as run:
        run.mark("compute")
        for _ in range(35):
            clock.advance(SECOND)
            collector.live()
        assert len(caplog.records) == 3  # at 10, 20 and 30 s
        run.mark("stitch")  # it lives
        clock.advance(9 * SECOND)
        collector.live()
        assert len(caplog.records) == 3
        run.delivered((1, 8, 8, 3))


def test_stages_follow_the_phases() -> None:
    collector = make_collector()
    seen: list[str] = []

    def look() -> LiveState:
        state = collector.live()
        assert state is not None
        seen.append(state.stage)
        return state

    with collector.recording(IDENTITY, REQUEST) as run:
        look()
        for phase in ("lower", "plan", "load", "stage"):
            run.mark(phase)  # type: ignore[arg-type]
            look()
        run.op_started(4, 30, "decoder.conv_in", 2)
        run.tile_started(0, 2, (1, 4, 8, 8), "float16")
        run.progress(40, 1000)
        run.mark("other")
        state = look()
        run.mark("transfer")
        look()
        run.delivered((1, 8, 8, 3))
    assert seen == ["start", "lower", "plan", "load", "decode", "decode", "transfer"]
    assert state.op == OpPosition(number=5, count=30, name="decoder.conv_in")
    assert (state.done, state.total) == (40, 1000)


def test_chunks_of_a_video_are_live() -> None:
    collector = make_collector()
    with collector.recording(IDENTITY, REQUEST) as run:
        run.chunk_started(2, 6)
        run.op_started(0, 30, "decoder.conv_in", 1)
        state = collector.live()
        run.planned(PLAN)
        again = collector.live()
        run.delivered((1, 8, 8, 3))
    assert state is not None
    assert again is not None
    assert state.chunk == ChunkPosition(number=3, count=6)
    assert state.sentence() == "stage start, chunk 3 of 6, op 1 of 30 (decoder.conv_in)"
    assert again.chunk is None


def test_a_new_op_has_no_tile_yet() -> None:
    collector = make_collector()
    with collector.recording(IDENTITY, REQUEST) as run:
        run.op_started(0, 2, "a", 1)
        run.tile_started(0, 1, (1, 4, 8, 8), "float32")
        run.op_started(1, 2, "b", 1)
        state = collector.live()
        run.delivered((1, 8, 8, 3))
    assert state is not None
    assert (state.op, state.tile) == (OpPosition(number=2, count=2, name="b"), None)


def test_off_is_live_without_details() -> None:
    clock = FakeClock()
    collector = make_collector("off", clock=clock)
    with collector.recording(IDENTITY, REQUEST) as run:
        clock.advance(SECOND)
        state = collector.live()
        run.delivered((1, 8, 8, 3))
    assert state is not None
    assert (state.elapsed_ns, state.op, state.tile) == (SECOND, None, None)


def test_watching_looks_until_the_block_ends() -> None:
    turns, looks, ended = threading.Semaphore(0), threading.Semaphore(0), threading.Event()
    asked: list[float] = []

    def wait(stop: threading.Event, seconds: float) -> bool:
        asked.append(seconds)
        turns.acquire()
        if stop.is_set():
            ended.set()
        return stop.is_set()

    with watching(looks.release, every_s=10.0, wait=wait):
        for _ in range(2):
            turns.release()
            assert looks.acquire(timeout=60)
    turns.release()
    assert ended.wait(60)
    assert asked == [10.0, 10.0, 10.0]
