from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halo_vae.profiling import memory
from halo_vae.profiling.memory import (
    PeakWatch,
    ProcCounter,
    PsutilCounter,
    accelerator_facts,
    counters_for,
    process_counter,
    system_available_bytes,
)
from halo_vae.profiling.record import UNMEASURED
from halo_vae.tests.profiling.fakes import FakeCounter


def fake_proc(folder: Path, *, rss_pages: int, hwm_kib: int) -> Path:
    (folder / "statm").write_text(f"9999 {rss_pages} 5 1 0 7 0\n")
    (folder / "status").write_text(f"Name:\tx\nVmPeak:\t  1 kB\nVmHWM:\t  {hwm_kib} kB\nVmRSS:\t 2 kB\n")
    (folder / "clear_refs").write_text("")
    return folder


def test_proc_is_read(tmp_path: Path) -> None:
    counter = ProcCounter(fake_proc(tmp_path, rss_pages=10, hwm_kib=64), 4096)
    assert (counter.now_bytes(), counter.peak_bytes()) == (40_960, 65_536)
    assert counter.reset_peak()
    assert (tmp_path / "clear_refs").read_text() == "5"


def test_a_reset_that_does_nothing_is_not_believed(tmp_path: Path) -> None:
    counter = ProcCounter(fake_proc(tmp_path, rss_pages=10, hwm_kib=1 << 20), 4096)  # the mark stays at 1 GiB
    assert not counter.reset_peak()


@pytest.mark.parametrize("content", ["", "nonsense", "x y"])
def test_broken_proc_files_are_unknown(tmp_path: Path, content: str) -> None:
    (tmp_path / "statm").write_text(content)
    (tmp_path / "status").write_text(f"VmHWM:\t{content}\n")
    counter = ProcCounter(tmp_path, 4096)
    assert (counter.now_bytes(), counter.peak_bytes(), counter.reset_peak()) == (None, None, False)


def test_psutil_is_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=123))
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(Process=lambda: process))
    counter = process_counter(tmp_path / "none")
    assert counter is not None
    assert (counter.now_bytes(), counter.peak_bytes(), counter.reset_peak()) == (123, None, False)


def test_windows_peak_is_read() -> None:
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=123, peak_wset=456))
    assert PsutilCounter(process).peak_bytes() == 456


def test_nothing_is_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr(memory, "available_host_bytes", lambda: None)
    assert process_counter(tmp_path / "none") is None
    assert system_available_bytes() is None


def test_system_available_falls_back_to_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_host_bytes", lambda: None)
    fake = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=77))
    monkeypatch.setitem(sys.modules, "psutil", fake)
    assert system_available_bytes() == 77


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system has no /proc")
def test_real_process_counter_sees_a_new_buffer() -> None:
    counter = process_counter()
    assert isinstance(counter, ProcCounter)
    before = counter.now_bytes()
    held = torch.ones(64 << 20, dtype=torch.uint8)
    after, peak = counter.now_bytes(), counter.peak_bytes()
    assert before is not None
    assert after is not None
    assert peak is not None
    assert after - before > 48 << 20
    assert peak >= after - (1 << 20)  # the two files are read one after the other
    del held


def test_a_cpu_decode_touches_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("torch.cuda was asked on behalf of a CPU decode")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("synchronize", "empty_cache", "mem_get_info", "memory_stats", "reset_peak_memory_stats",
                 "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
                 "get_device_properties"):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, refuse)
    found = counters_for("cpu")
    assert (found.allocated, found.reserved) == (None, None)
    assert accelerator_facts("cpu") == ("cpu", None)


def test_gpu_counters_read_torchs_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def answer(name: str, value: int) -> Any:
        return lambda device: asked.append((name, str(device))) or value

    for i, name in enumerate(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")):
        monkeypatch.setattr(torch.cuda, name, answer(name, i + 1))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", answer("reset", 0))
    found = counters_for("cuda:1")
    assert found.allocated is not None
    assert found.reserved is not None
    assert (found.allocated.now_bytes(), found.allocated.peak_bytes()) == (1, 2)
    assert (found.reserved.now_bytes(), found.reserved.peak_bytes()) == (3, 4)
    assert found.allocated.reset_peak()
    assert {device for _, device in asked} == {"cuda:1"}


@pytest.mark.parametrize(("hip", "arch"), [("7.1.0", "gfx1151"), (None, "sm_90")])
def test_accelerator_facts(monkeypatch: pytest.MonkeyPatch, hip: str | None, arch: str) -> None:
    facts = SimpleNamespace(name="Some GPU", gcnArchName="gfx1151", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert accelerator_facts("cuda:0") == ("Some GPU", arch)


def test_watch_of_nothing_is_unmeasured() -> None:
    assert PeakWatch(None).finish() == UNMEASURED


def test_watch_measures_from_its_start() -> None:
    counter = FakeCounter(now=100)
    counter.touch(900)
    watch = PeakWatch(counter)
    counter.touch(50)
    reading = watch.finish()
    assert (reading.start_bytes, reading.peak_bytes, reading.above_start_bytes) == (100, 150, 50)


def test_watch_of_a_level_that_only_fell_is_zero_above() -> None:
    counter = FakeCounter(now=100)
    watch = PeakWatch(counter)
    counter.now = counter.peak = 60  # a peak that is read after pages were given back
    assert watch.finish().above_start_bytes == 0


def test_watch_with_unreadable_levels_is_unknown() -> None:
    unreadable = SimpleNamespace(now_bytes=lambda: None, peak_bytes=lambda: None, reset_peak=lambda: False)
    reading = PeakWatch(unreadable).finish()
    assert (reading.start_bytes, reading.peak_bytes, reading.above_start_bytes) == (None, None, None)


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="this system has no sysconf")
def test_page_size_is_the_systems() -> None:
    assert memory._page_bytes() == os.sysconf("SC_PAGE_SIZE")
