from __future__ import annotations

from typing import Any

import pytest
import torch

from halo_vae.optim.errors import DecodeCancelled, NonFiniteError, PlanError
from halo_vae.optim.events import SilentObserver
from halo_vae.profiling.record import DecodeStatus
from halo_vae.profiling.run import Run
from halo_vae.tests.profiling.fakes import (
    IDENTITY,
    MS,
    ON_GPU,
    REQUEST,
    FakeClock,
    FakeDevice,
    busy_events,
    make_collector,
    record_events,
    record_failure,
    report,
)


class Interrupt(BaseException):
    """A host's own cancel."""


ERRORS = [
    (DecodeCancelled("stopped by the user"), DecodeStatus.INTERRUPTED, "stopped by the user"),
    (KeyboardInterrupt(), DecodeStatus.INTERRUPTED, "KeyboardInterrupt"),  # no text: the type's name
    (Interrupt("enough"), DecodeStatus.INTERRUPTED, "enough"),  # not an Exception
    (SystemExit(3), DecodeStatus.ERROR, "3"),
    (NonFiniteError("inf in conv_in\nmore", op="conv_in", dtype="float32"), DecodeStatus.NON_FINITE, "inf in conv_in"),
    (torch.OutOfMemoryError("HIP out of memory. Tried"), DecodeStatus.OUT_OF_MEMORY, "HIP out of memory. Tried"),
    (RuntimeError("can't allocate memory"), DecodeStatus.OUT_OF_MEMORY, "can't allocate memory"),
    (PlanError("takes 9 MiB", need_bytes=9 << 20, free_bytes=1), DecodeStatus.OUT_OF_MEMORY, "takes 9 MiB"),
    (PlanError("too many elements"), DecodeStatus.ERROR, "too many elements"),
    (RuntimeError("expected input to have 16 channels"), DecodeStatus.ERROR, "expected input to have 16 channels"),
]  # fmt: skip


@pytest.mark.parametrize("level", ["off", "summary", "per_op"])
@pytest.mark.parametrize(("error", "status", "sentence"), ERRORS)
def test_exceptions_pass_unchanged_and_leave_a_record(
    level: str, error: BaseException, status: DecodeStatus, sentence: str
) -> None:
    collector = make_collector(level, cancel_types=(KeyboardInterrupt, DecodeCancelled, Interrupt))
    assert record_failure(collector, error, busy_events) is error
    (record,) = collector.records()
    assert (record.status, record.error, record.image_shape) == (status, sentence, None)
    assert collector.live() is None
    if record.precision is not None:
        assert record.precision.kept == ()  # nothing of it is in a picture


def test_the_recording_itself_has_the_record_of_a_failure() -> None:
    collector = make_collector()
    runs: list[Run] = []
    record_failure(collector, DecodeCancelled("stop"), runs.append)
    assert runs[0].record is collector.records()[0]


class BrokenDevice(FakeDevice):
    """Fails when it is waited for at the end of the work it was given."""

    broken = RuntimeError("HIP error: out of memory")

    def sync(self) -> None:
        super().sync()
        if self.syncs == 2:
            self.done_ns = 0
            raise self.broken


def launch_one_op(device: FakeDevice) -> Any:
    def events(run: Any) -> None:
        run.mark("compute")
        run.op_started(0, 1, "a", 1)
        device.launch(MS)
        run.op_done(report("a"))
        run.delivered((1, 512, 512, 3))

    return events


def test_a_device_error_at_the_end_is_the_decodes_error() -> None:
    clock = FakeClock()
    device = BrokenDevice(clock)
    collector = make_collector("per_op", clock=clock, timer=lambda name: device)
    with pytest.raises(RuntimeError) as caught:
        record_events(collector, launch_one_op(device), ON_GPU)
    assert caught.value is device.broken
    (record,) = collector.records()
    assert record.status is DecodeStatus.OUT_OF_MEMORY
    assert record.phases is None  # events of a broken device cannot be read
    assert [s.device_ns for s in record.stages] == [None]


def test_a_device_error_at_the_end_does_not_hide_the_first_error() -> None:
    clock = FakeClock()
    device = BrokenDevice(clock)
    collector = make_collector("per_op", clock=clock, timer=lambda name: device)
    first = DecodeCancelled("stopped")
    assert record_failure(collector, first, launch_one_op(device), ON_GPU) is first
    assert collector.records()[0].status is DecodeStatus.INTERRUPTED


def test_a_record_that_cannot_be_made_does_not_hide_the_error(caplog: pytest.LogCaptureFixture) -> None:
    def broken(device: str) -> Any:
        raise OSError("no environment")

    first = DecodeCancelled("stopped")
    collector = make_collector(environment=broken)
    assert record_failure(collector, first) is first
    assert collector.records() == ()
    assert "its record could not be made" in caplog.text


def test_a_good_end_without_a_picture_is_refused() -> None:
    with pytest.raises(ValueError, match="contradicts"), make_collector().recording(IDENTITY, REQUEST):
        pass


class Listener(SilentObserver):
    """Keeps what it hears; stops the decode at its second tile."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.stop = DecodeCancelled("stopped by the listener")

    def mark(self, phase: Any) -> None:
        self.heard.append(phase)

    def tile_started(self, i: int, n: int, shape: tuple[int, ...], dtype: str) -> None:
        if i == 1:
            raise self.stop


@pytest.mark.parametrize("level", ["off", "summary", "per_op"])
def test_forward_hears_everything_first_and_may_stop_the_decode(level: str) -> None:
    listener = Listener()
    collector = make_collector(level)

    def decode() -> None:
        with collector.recording(IDENTITY, REQUEST, forward=listener) as run:
            for i in range(3):
                run.mark("stage")
                run.tile_started(i, 3, (1, 4, 8, 8), "float32")

    with pytest.raises(DecodeCancelled) as caught:
        decode()
    assert caught.value is listener.stop
    assert listener.heard == ["stage", "stage"]
    tiles = collector.records()[0].tiles
    assert level == "off" or (tiles is not None and tiles.count == 1)  # the second never ran
