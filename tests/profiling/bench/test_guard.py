"""One benchmark at a time, and none while something else uses the device."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halo_vae.profiling.bench.guard import (
    BusyError,
    Holder,
    bench_lock,
    check_comfyui,
    check_device,
    me,
)


def write_lock(path: Path, pid: int, born: str | None = None) -> None:
    path.write_text(json.dumps({"pid": pid, "born": born}))


def test_lock_is_held_for_the_block_and_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "bench.lock"
    with bench_lock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert not path.exists()


def test_living_process_keeps_others_out(tmp_path: Path) -> None:
    path = tmp_path / "bench.lock"
    write_lock(path, os.getppid())
    with pytest.raises(BusyError, match=f"process {os.getppid()}"), bench_lock(path):
        pass
    assert json.loads(path.read_text())["pid"] == os.getppid()


def test_lock_of_a_process_that_is_gone_is_taken_over(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    path = tmp_path / "bench.lock"
    write_lock(path, gone.pid)
    with bench_lock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_lock_of_another_process_with_a_used_number_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "bench.lock"
    write_lock(path, os.getppid(), born="another boot:1")
    with bench_lock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": true, "born": null}', '{"pid": -1, "born": null}', "{}"])
def test_lock_that_nobody_wrote_is_taken_over(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bench.lock"
    path.write_text(content)
    with bench_lock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_lock_that_was_taken_over_meanwhile_is_left(tmp_path: Path) -> None:
    path = tmp_path / "bench.lock"
    with bench_lock(path):
        write_lock(path, os.getppid())
    assert json.loads(path.read_text())["pid"] == os.getppid()


def test_lock_that_cannot_be_written_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "halo_vae"), bench_lock(tmp_path / "file" / "bench.lock"):
        pass
    assert "cannot be written" in caplog.text


def test_this_process_is_told_by_its_birth() -> None:
    assert me() == me()
    assert me() != Holder(pid=os.getpid(), born="another boot:1")


@pytest.mark.parametrize(
    ("queue", "busy"),
    [
        ({"queue_running": [], "queue_pending": []}, False),
        ({"queue_running": [1], "queue_pending": []}, True),
        ({"queue_running": [], "queue_pending": [1, 2]}, True),
        ({"other": 1}, False),  # another server on that port
        ([], False),
    ],
)
def test_comfyui_is_asked_for_its_queue(queue: object, busy: bool) -> None:
    urls: list[str] = []

    def fetch(url: str) -> bytes:
        urls.append(url)
        return json.dumps(queue).encode()

    if busy:
        with pytest.raises(BusyError, match="ComfyUI"):
            check_comfyui("http://there:1/", fetch)
    else:
        check_comfyui("http://there:1/", fetch)
    assert urls == ["http://there:1/queue"]


def test_comfyui_that_is_not_there_keeps_nobody_out() -> None:
    def fetch(url: str) -> bytes:
        raise ConnectionRefusedError(url)

    check_comfyui("http://there:1", fetch)
    check_comfyui("http://there:1", lambda url: b"<html>")
    check_comfyui(None, lambda url: pytest.fail("nobody is asked"))


@pytest.mark.parametrize(
    ("looks", "busy"),
    [
        ([0, 0, 0, 0, 0], False),
        ([90, 0, 0, 0, 0], False),  # one frame of a desktop
        ([90, 40, 95, 0, 99], True),
        ([10, 10, 10, 10, 10], True),
        ([9, 9, 9, 9, 9], False),
    ],
)
def test_gpu_is_busy_by_the_median_of_some_looks(looks: list[int], busy: bool) -> None:
    left = list(looks)
    slept: list[float] = []

    def look() -> None:
        check_device(lambda: left.pop(0), sleep=slept.append)

    if busy:
        with pytest.raises(BusyError, match="busy"):
            look()
    else:
        look()
    assert len(slept) == len(looks) - 1


def test_gpu_that_tells_nothing_keeps_nobody_out() -> None:
    check_device(lambda: None, sleep=lambda seconds: pytest.fail("there is nothing to wait for"))
