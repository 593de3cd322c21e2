from __future__ import annotations

from typing import Any

import pytest
import torch

from halo_vae.profiling import bandwidth
from halo_vae.profiling.bandwidth import PROCESS_RATES, CopyRates
from halo_vae.profiling.collector import Collector
from halo_vae.tests.profiling.fakes import IDENTITY, REQUEST, SECOND, FakeClock, FakeDevice


class Copies:
    """A clock that moves by one entry of a list per copy: it is read before and after each."""

    def __init__(self, *took: int) -> None:
        self.took, self.ns, self.reads = list(took), 0, 0

    def now_ns(self) -> int:
        self.reads += 1
        if self.reads % 2 == 0:
            self.ns += self.took[self.reads // 2 - 1]
        return self.ns


def test_the_fastest_copy_counts_and_the_first_does_not() -> None:
    clock = Copies(1, 500, 400, 700)
    rates = CopyRates(nbytes=1000, repeats=3, clock=clock)
    assert rates.measure("cpu") == 2 * 1000 * SECOND // 400  # read and written
    assert clock.reads == 8


def test_a_device_is_measured_once() -> None:
    clock = Copies(*[100] * 4)
    rates = CopyRates(nbytes=1000, repeats=1, clock=clock)
    assert rates.known("cpu") is None
    assert clock.reads == 0  # asking is not measuring
    first = rates.measure("cpu")
    assert first == 2 * 1000 * SECOND // 100
    assert rates.measure("cpu") == rates.known("cpu") == first
    assert clock.reads == 4
    assert rates.known("cuda:0") is None


def test_a_device_that_runs_behind_is_waited_for() -> None:
    clock = FakeClock()
    device = FakeDevice(clock)

    rates = CopyRates(nbytes=1000, repeats=2, clock=clock, timer=lambda name: device)
    sync = device.sync

    def synced() -> None:
        if device.syncs % 2:  # the second wait of each copy is for the copy itself
            device.launch(250)
        sync()

    device.sync = synced  # type: ignore[method-assign]
    assert rates.measure("cpu") == 2 * 1000 * SECOND // 250
    assert device.syncs == 2 * 3


def test_without_memory_for_the_buffers_the_rate_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def no_room(*args: Any, **more: Any) -> torch.Tensor:
        asked.append(more)
        raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 64 MiB")

    monkeypatch.setattr(bandwidth.torch, "ones", no_room)
    rates = CopyRates(nbytes=1000)
    assert rates.measure("cpu") is None
    assert rates.measure("cpu") is None
    assert len(asked) == 1  # and it is not tried again and again


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **more: Any) -> torch.Tensor:
        raise RuntimeError("invalid device ordinal")

    monkeypatch.setattr(bandwidth.torch, "ones", broken)
    with pytest.raises(RuntimeError, match="ordinal"):
        CopyRates(nbytes=1000).measure("cpu")


def test_names_of_one_device() -> None:
    rates = CopyRates(nbytes=1000, clock=Copies(*[100] * 6))
    rates.measure("meta")
    assert rates.known("meta:0") == rates.known("meta") is not None


@pytest.mark.parametrize("given", [{"nbytes": 0}, {"repeats": 0}])
def test_nothing_to_measure_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CopyRates(**given)


def test_a_decode_reads_what_is_known_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, int | None] = {}
    monkeypatch.setattr(PROCESS_RATES, "_known", known)

    def forbidden(device: str) -> int:
        raise AssertionError("measured inside a decode")

    monkeypatch.setattr(PROCESS_RATES, "measure", forbidden)
    collector = Collector()
    rates = []
    for rate in (None, 8_000):
        known["cpu"] = rate
        with collector.recording(IDENTITY, REQUEST) as run:
            run.delivered((1, 8, 8, 3))
        assert run.record is not None
        rates.append(run.record.copy_bytes_per_s)
    assert rates == [None, 8_000]


def test_a_real_copy() -> None:
    rate = CopyRates(nbytes=1 << 20, repeats=2).measure("cpu")
    assert rate is not None
    assert rate > 0
