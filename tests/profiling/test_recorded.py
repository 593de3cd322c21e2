from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.optim import device as optim_device
from halo_vae.optim.blended import decode_blended
from halo_vae.optim.decode import Decoder, Engine, open_decoder
from halo_vae.optim.errors import DecodeCancelled
from halo_vae.optim.events import SILENT, DecodeObserver
from halo_vae.optim.opaque import OpaqueDecoder
from halo_vae.optim.program import Program
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.store import to_unit_range
from halo_vae.optim.weights import MappingWeights
from halo_vae.profiling import memory
from halo_vae.profiling.collector import Collector
from halo_vae.profiling.record import DecodeRecord, DecodeStatus, Identity
from halo_vae.profiling.recorded import (
    decode_frames_recorded,
    decode_recorded,
    identity_of,
    open_and_decode_recorded,
    record_call,
)
from halo_vae.profiling.render.text import render_record
from halo_vae.profiling.store import HistoryStore
from halo_vae.profiling.tally import SeenShapes
from halo_vae.tests.fixtures import LimitDec, PointDec, latent, to_image
from halo_vae.tests.goldens import TOLERANCE, golden
from halo_vae.tests.profiling.fakes import IDENTITY, PLAN, FakeClock, make_collector

SETTINGS = DecodeSettings(tile_size=128, overlap=0)


@dataclass
class FakeDecoder:
    """What an engine decodes with."""

    content_hash: str = "feedface"
    program: Program | None = None
    loaded_dtype: torch.dtype = torch.bfloat16
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class FakeEngine:
    """Repeats each latent pixel eight times; reports a plan and keeps what it was asked."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.pool = SimpleNamespace(held_bytes=0, high_water_bytes=0)
        self.error = error
        self.asked: dict[str, Any] = {}

    def decode(
        self,
        decoder: FakeDecoder,
        latent: Tensor,
        settings: DecodeSettings = SETTINGS,
        *,
        observer: DecodeObserver = SILENT,
        finish: Callable[[Tensor], Tensor] = to_unit_range,
        out_dtype: torch.dtype = torch.float32,
        out_device: torch.device | str = "cpu",
    ) -> Tensor:
        self.asked = {"settings": settings, "finish": finish, "out_dtype": out_dtype, "out_device": out_device}
        observer.mark("plan")
        observer.planned(PLAN)
        self.pool.held_bytes, self.pool.high_water_bytes = 11, 22
        if self.error is not None:
            raise self.error
        raw = PointDec().decode(latent)
        return finish(raw).movedim(1, -1).to(out_device, out_dtype)


def test_picture_and_record() -> None:
    z, engine, collector = latent((2, 4, 8, 8)), FakeEngine(), make_collector()
    image, record = decode_recorded(engine, FakeDecoder(), z, SETTINGS, collector=collector)
    assert torch.equal(image, to_image(PointDec().decode(z)))
    assert (record.status, record.image_shape) == (DecodeStatus.OK, (2, 64, 64, 3))
    assert record.identity == Identity(vae_hash="feedface", family="unknown", loaded_dtype="bfloat16", device="cpu")
    assert (record.request.settings, record.request.latent_shape) == (SETTINGS, (2, 4, 8, 8))
    assert record.request.latent_dtype == "float32"
    assert record.plan == PLAN
    assert record.pool is not None
    assert (record.pool.held_bytes, record.pool.high_water_bytes) == (11, 22)
    assert collector.records() == (record,)
    assert engine.asked["finish"] is to_unit_range


def test_arguments_reach_the_engine() -> None:
    engine = FakeEngine()

    def finish(x: Tensor) -> Tensor:
        return x * 0

    image, record = decode_recorded(
        engine, FakeDecoder(), latent((1, 4, 8, 8)), collector=make_collector(), finish=finish,
        out_dtype=torch.bfloat16, out_device="meta",
    )  # fmt: skip
    assert engine.asked == {
        "settings": DecodeSettings(), "finish": finish, "out_dtype": torch.bfloat16, "out_device": "meta",
    }  # fmt: skip
    assert (image.device.type, image.dtype) == ("meta", torch.bfloat16)
    assert record.request.settings == DecodeSettings()


class FakeFrameEngine(FakeEngine):
    """Hands out the pictures of a clip, some at a time, always in the same memory."""

    def decode_frames(self, *args: Any, on_frames: Callable[[int, Tensor], None], step: int = 2, **given: Any) -> int:
        frames = self.decode(*args, **given)
        observer: DecodeObserver = given["observer"]
        observer.mark("stitch")
        memory = torch.empty_like(frames[:step])
        for first in range(0, len(frames), step):
            part = memory[: len(frames[first : first + step])]
            on_frames(first, part.copy_(frames[first : first + step]))
            memory.fill_(9)
        return len(frames)


def test_frames_and_record() -> None:
    z, engine, clock, taken = latent((5, 4, 8, 8)), FakeFrameEngine(), FakeClock(), []

    def take(first: int, frames: Tensor) -> None:
        clock.advance(7)
        taken.append((first, frames.clone()))

    collector = make_collector(clock=clock)
    n, record = decode_frames_recorded(engine, FakeDecoder(), z, SETTINGS, on_frames=take, collector=collector)
    assert n == 5
    assert [first for first, _ in taken] == [0, 2, 4]
    assert torch.equal(torch.cat([frames for _, frames in taken]), to_image(PointDec().decode(z)))
    assert (record.status, record.image_shape) == (DecodeStatus.OK, (5, 64, 64, 3))
    assert record.request.latent_shape == (5, 4, 8, 8)
    assert record.phases is not None
    assert (record.phases.other_ns, record.phases.stitch_ns) == (21, 0)  # what the caller does is not the decoder's
    assert engine.asked["finish"] is to_unit_range


@pytest.mark.parametrize("level", ["off", "summary", "per_op"])
def test_whoever_takes_frames_may_stop_the_decode(level: str) -> None:
    def take(first: int, frames: Tensor) -> None:
        raise OSError(28, "No space left on device")

    collector, engine = make_collector(level), FakeFrameEngine()
    with pytest.raises(OSError, match="No space left"):
        decode_frames_recorded(engine, FakeDecoder(), latent((5, 4, 8, 8)), on_frames=take, collector=collector)
    (record,) = collector.records()
    assert (record.status, record.image_shape) == (DecodeStatus.ERROR, None)


def test_frames_take_the_arguments_of_a_decode() -> None:
    engine, shapes = FakeFrameEngine(), []

    def finish(x: Tensor) -> Tensor:
        return x * 0

    decode_frames_recorded(
        engine, FakeDecoder(), latent((3, 4, 8, 8)), on_frames=lambda first, frames: shapes.append(frames.dtype),
        collector=make_collector("off"), finish=finish, out_dtype=torch.bfloat16, out_device="meta",
    )  # fmt: skip
    assert engine.asked == {
        "settings": DecodeSettings(), "finish": finish, "out_dtype": torch.bfloat16, "out_device": "meta",
    }  # fmt: skip
    assert shapes == [torch.bfloat16] * 2


def test_opening_is_recorded_too() -> None:
    clock, decoder = FakeClock(), FakeDecoder()

    def opening(observer: DecodeObserver) -> FakeDecoder:
        observer.mark("lower")
        observer.cache_lookup("program", False)
        clock.advance(5)
        return decoder

    image, record, opened = open_and_decode_recorded(
        FakeEngine(), opening, "cpu", latent((1, 4, 8, 8)), collector=make_collector(clock=clock)
    )
    assert opened is decoder
    assert image.shape == (1, 64, 64, 3)
    assert record.identity == identity_of(decoder)
    assert record.phases is not None
    assert (record.phases.lower_ns, record.wall_ns) == (5, 5)
    assert record.caches is not None
    assert (record.caches[0].name, record.caches[0].lookups) == ("program", 1)


def test_an_opening_that_fails_is_a_record_of_an_unknown_decoder() -> None:
    collector, error = make_collector(), ValueError("not a VAE")

    def opening(observer: DecodeObserver) -> FakeDecoder:
        raise error

    with pytest.raises(ValueError, match="not a VAE") as caught:
        open_and_decode_recorded(FakeEngine(), opening, "cpu", latent((1, 4, 8, 8)), collector=collector)
    assert caught.value is error
    assert (collector.records()[0].identity.family, collector.records()[0].plan) == ("unknown", None)


def test_a_decoder_on_another_device_is_refused() -> None:
    def opening(observer: DecodeObserver) -> FakeDecoder:
        return FakeDecoder(device=torch.device("meta"))

    with pytest.raises(ValueError, match="the recording began on cpu; a decoder on meta"):
        open_and_decode_recorded(FakeEngine(), opening, "cpu", latent((1, 4, 8, 8)), collector=make_collector())


def test_a_decoder_opened_once_serves_again() -> None:
    w = golden("kl_sd")
    collector, engine = Collector("per_op", seen=SeenShapes()), Engine()
    z = w.latents["a"]

    def opening(observer: DecodeObserver) -> Decoder:
        return open_decoder(MappingWeights(w.weights), observer=observer)

    first, record, decoder = open_and_decode_recorded(engine, opening, "cpu", z, collector=collector)
    again, later = decode_recorded(engine, decoder, z, collector=collector)
    assert torch.equal(first, again)
    assert torch.allclose(first, to_image(w.expected["a"]), atol=TOLERANCE)
    assert (record.first_of_shape, later.first_of_shape) == (True, False)
    assert record.phases is not None
    assert record.phases.total_ns == record.wall_ns
    assert record.phases.lower_ns > 0
    assert record.plan is not None
    assert record.precision is not None
    assert record.precision.kept_macs > 0
    assert len(later.stages) == len({s.op for s in later.stages}) > 5
    assert later.pool is not None
    assert later.pool.hits == later.pool.requests > 0
    assert later.caches is not None
    assert {c.name: (c.hits, c.lookups) for c in later.caches}["plan"] == (1, 1)
    assert later.convs is not None
    assert (later.convs.new, later.convs.seen) == (0, later.convs.distinct)
    assert later.tiles is not None
    assert later.tiles.count == record.plan.n_tiles
    assert DecodeRecord.from_json(later.to_json()) == later


def test_family_comes_from_the_program() -> None:
    decoder = FakeDecoder(program=SimpleNamespace(family="taesd"))  # type: ignore[arg-type]
    assert identity_of(decoder).family == "taesd"


@pytest.mark.parametrize("error", [DecodeCancelled("stop"), KeyboardInterrupt(), RuntimeError("HIP out of memory")])
def test_exceptions_pass_unchanged_and_are_recorded(error: BaseException, tmp_path: Path) -> None:
    collector, history = make_collector(), HistoryStore(tmp_path / "history.jsonl")
    with pytest.raises(type(error)) as caught:
        decode_recorded(FakeEngine(error), FakeDecoder(), latent((1, 4, 8, 8)), collector=collector, store=history)
    assert caught.value is error
    (record,) = collector.records()
    assert record.status in (DecodeStatus.INTERRUPTED, DecodeStatus.OUT_OF_MEMORY)
    assert record.pool is not None
    assert record.pool.held_bytes == 11  # also known after a failure
    assert history.read().records == (record,)


def test_history_gets_the_record(tmp_path: Path) -> None:
    history = HistoryStore(tmp_path / "history.jsonl")
    _, record = decode_recorded(
        FakeEngine(), FakeDecoder(), latent((1, 4, 8, 8)), collector=make_collector(), store=history
    )
    assert history.read().records == (record,)


def test_a_history_that_cannot_be_written_costs_a_warning_not_the_picture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    history = HistoryStore(tmp_path / "file" / "history.jsonl")
    with caplog.at_level(logging.WARNING, "halo_vae"):
        image, _ = decode_recorded(
            FakeEngine(), FakeDecoder(), latent((1, 4, 8, 8)), collector=make_collector(), store=history
        )
    assert image.shape == (1, 64, 64, 3)
    assert ["was not added to the history" in r.getMessage() for r in caplog.records] == [True]


def blended(model: Any, z: Tensor, settings: DecodeSettings, collector: Collector) -> DecodeRecord:
    opaque = OpaqueDecoder(name="Dec", decode=model.decode, latent_dim=2, latent_channels=4, scale=8)
    _, record = record_call(
        lambda observer: decode_blended(opaque, z, settings, finish=to_unit_range, observer=observer),
        IDENTITY, z, settings, collector=collector,
    )  # fmt: skip
    return record


def test_st_4_the_record_equals_the_decoders_log() -> None:
    model = LimitDec(PointDec(), limit=4 * 24 * 24)
    record = blended(model, latent((3, 4, 40, 40)), DecodeSettings(tile_size=512, overlap=0), make_collector())
    log = Counter((call["shape"], str(call["dtype"]).removeprefix("torch.")) for call in model.log)
    assert record.tiles is not None
    assert {(t.shape, t.dtype): t.count for t in record.tiles.shapes} == dict(log)
    assert record.tiles.count == len(model.log)
    too_large = sum(n for (shape, _), n in log.items() if math.prod(shape) > model.limit)
    assert too_large > 0
    assert [f.kind for f in record.fallbacks] == ["out_of_memory"] * too_large
    assert record.n_fallbacks == too_large
    assert record.plan is not None
    assert record.plan.approximate
    assert record.batch is not None
    assert record.batch.images == 3


@pytest.mark.usefixtures("machine_memory")
def test_every_linux_reader_hidden_still_decodes_and_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = open

    def no_proc(file: Any, *args: Any, **kwargs: Any) -> Any:
        if str(file).startswith(("/proc", "/sys")):
            raise FileNotFoundError(file)
        return real_open(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", no_proc)
    monkeypatch.setattr("io.open", no_proc)
    monkeypatch.setattr(memory, "PROC", tmp_path / "none")
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert optim_device.available_host_bytes() is None
    collector = Collector("per_op")  # real clock, real environment, real readers
    record = blended(PointDec(), latent((1, 4, 16, 16)), SETTINGS, collector)
    assert record.status is DecodeStatus.OK
    assert record.memory is not None
    assert record.memory.process.peak_bytes is None
    assert record.memory.available_bytes is None
    assert record.memory.measured_bytes is None
    assert "n/a" in render_record(record)
    history = HistoryStore(tmp_path / "history.jsonl")
    history.append(record)
    assert history.read().records == (record,)


def test_a_real_cpu_record_is_whole() -> None:
    record = blended(PointDec(), latent((1, 4, 16, 16)), SETTINGS, Collector("per_op"))
    assert record.phases is not None
    assert record.phases.total_ns == record.wall_ns
    assert [s.op for s in record.stages] == ["decode"]
    assert record.stages[0].host_ns <= record.wall_ns
    assert record.cpu_time_ns is not None
    assert DecodeRecord.from_json(record.to_json()) == record
