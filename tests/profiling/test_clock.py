from __future__ import annotations

from typing import Any

import pytest
import torch

from halo_vae.optim.events import PHASES
from halo_vae.profiling.clock import (
    FOLD_EVENTS,
    EventTimeline,
    HostTimeline,
    SystemClock,
    TorchTimer,
    WaitTimer,
    timer_for,
)
from halo_vae.tests.profiling.fakes import FakeClock, FakeDevice


def test_system_clock_never_falls() -> None:
    clock = SystemClock()
    times = [clock.now_ns() for _ in range(100)]
    assert times == sorted(times)
    assert isinstance(times[0], int)


def test_cpu_has_no_timer() -> None:
    assert timer_for("cpu") is None


def test_each_device_has_its_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(timer_for("cuda:0"), TorchTimer)
    waits: list[int] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waits.append(1))
    timer = timer_for("mps")
    assert isinstance(timer, WaitTimer)
    timer.sync()
    assert waits == [1]
    assert not timer.has_events
    assert timer_for("meta") is None  # nothing to wait for


class FakeTorchEvent:
    """Times itself by the order of recording."""

    count = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0

    def record(self, stream: Any) -> None:
        assert stream == "stream of cuda:1"
        FakeTorchEvent.count += 1
        self.at = FakeTorchEvent.count

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: FakeTorchEvent) -> float:
        return (end.at - self.at) * 1.5


def test_torch_timer_uses_its_own_device_and_reuses_events(monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", FakeTorchEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: synced.append(str(device)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    timer = TorchTimer("cuda:1")
    first, second = timer.event(), timer.event()
    timer.sync()
    assert synced == ["cuda:1"]
    assert timer.reached(second)
    assert timer.elapsed_ns(first, second) == 1_500_000
    timer.recycle(first)
    assert timer.event() is first


def test_host_timeline_adds_up() -> None:
    line = HostTimeline(100)
    line.mark("plan", 110)
    line.mark("compute", 130)
    line.mark("plan", 160)
    line.close(200)
    times = line.times(100)
    assert (times.plan_ns, times.compute_ns, times.other_ns) == (60, 30, 10)
    assert times.total_ns == 100


def test_event_timeline_stays_small_when_the_device_keeps_up() -> None:
    device = FakeDevice(FakeClock())
    line = EventTimeline(device)
    pending = []
    for i in range(4 * FOLD_EVENTS):
        line.mark(PHASES[i % 2], 0)
        device.launch(i % 2 + 1)
        device.sync()
        pending.append(len(device.made) - device.recycled)
    line.mark("sync", 0)
    line.close(0)
    times = line.times(6 * FOLD_EVENTS)
    assert (times.lower_ns, times.plan_ns, times.other_ns) == (2 * FOLD_EVENTS, 4 * FOLD_EVENTS, 0)
    assert max(pending) <= FOLD_EVENTS + 1


def test_event_timeline_waits_for_a_device_that_lags() -> None:
    device = FakeDevice(FakeClock())
    line = EventTimeline(device)
    for i in range(2 * FOLD_EVENTS):  # never done before the end
        line.mark(PHASES[i % 2], 0)
        device.launch(1)
    line.mark("sync", 0)
    assert device.recycled == 0
    device.sync()
    line.close(0)
    assert line.times(2 * FOLD_EVENTS).lower_ns == FOLD_EVENTS


def test_other_is_never_negative() -> None:
    device = FakeDevice(FakeClock())
    line = EventTimeline(device)
    line.mark("compute", 0)
    device.launch(10)
    line.mark("sync", 0)
    device.sync()
    line.close(0)
    times = line.times(9)  # the host's clock and the device's differ by a hair
    assert (times.compute_ns, times.other_ns) == (10, 0)
