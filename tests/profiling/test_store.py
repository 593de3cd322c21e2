from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halo_vae.optim import files
from halo_vae.profiling import store
from halo_vae.profiling.record import DecodeRecord
from halo_vae.profiling.store import HistoryStore, StoreError, data_dir, upgrade
from halo_vae.tests.profiling.fakes import busy_events, make_collector, record_events


def make_record(wall_ns: int = 1) -> DecodeRecord:
    record: DecodeRecord = record_events(make_collector(), busy_events)
    return replace(record, wall_ns=wall_ns)


def walls(history: HistoryStore, limit: int | None = None) -> list[int]:
    return [r.wall_ns for r in history.read(limit).records]


def test_append_and_read(tmp_path: Path) -> None:
    history = HistoryStore(tmp_path / "new" / "history.jsonl")
    assert history.read().records == ()
    for ns in (1, 2, 3):
        history.append(make_record(ns))
    found = history.read()
    assert [r.wall_ns for r in found.records] == [1, 2, 3]
    assert found.records[0] == make_record(1)
    assert (found.skipped, found.problems) == (0, ())
    assert walls(history, 2) == [2, 3]
    assert walls(history, 0) == []


def test_every_line_carries_version_and_environment(tmp_path: Path) -> None:
    history = HistoryStore(tmp_path / "history.jsonl")
    history.append(make_record())
    history.append(make_record())
    lines = [json.loads(line) for line in history.path.read_text().splitlines()]
    assert [(line["schema_version"], line["environment_id"]) for line in lines] == [
        (1, make_record().environment_id)
    ] * 2


def test_a_torn_last_line_is_skipped_and_closed(tmp_path: Path) -> None:
    history = HistoryStore(tmp_path / "history.jsonl")
    history.append(make_record(1))
    history.append(make_record(2))
    whole = history.path.read_bytes()
    history.path.write_bytes(whole[:-100])  # killed while writing
    assert walls(history) == [1]
    assert history.read().problems == ("history.jsonl has a torn line, left out",)
    history.append(make_record(3))
    found = history.read()
    assert ([r.wall_ns for r in found.records], found.skipped) == ([1, 3], 1)


def test_a_torn_line_within_a_character_is_skipped(tmp_path: Path) -> None:
    history = HistoryStore(tmp_path / "history.jsonl")
    history.append(make_record(1))
    with history.path.open("ab") as f:
        f.write('{"error": "×'.encode()[:-1])
    assert walls(history) == [1]
    assert history.read().skipped == 1


def test_lines_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    history = HistoryStore(tmp_path / "history.jsonl")
    history.append(make_record(1))
    newer = make_record(2).to_json() | {"schema_version": 3}
    broken = make_record(2).to_json() | {"wall_ns": "long"}
    with history.path.open("a") as f:
        for line in (newer, newer, broken, [1], "\n"):
            f.write(json.dumps(line) + "\n" if line != "\n" else "\n")
    found = history.read()
    assert ([r.wall_ns for r in found.records], found.skipped) == ([1], 4)
    assert found.problems == (
        "history.jsonl: a record has format 3; this version reads up to 1, so update halo_vae",
        "history.jsonl: record.wall_ns is 'long'; int is needed",
        "history.jsonl: a line is not an object",
    )


def test_upgrade_goes_step_by_step() -> None:
    steps: dict[int, Any] = {
        1: lambda line: {**line, "renamed": line["old"]},
        2: lambda line: {k: v for k, v in line.items() if k != "old"},
    }
    assert upgrade({"schema_version": 1, "old": 5}, steps, 3) == {"schema_version": 3, "renamed": 5}
    assert upgrade({"schema_version": 3, "renamed": 5}, steps, 3) == {"schema_version": 3, "renamed": 5}
    with pytest.raises(ValueError, match="no upgrade from format 1"):
        upgrade({"schema_version": 1}, {2: steps[2]}, 3)
    with pytest.raises(ValueError, match="format 4; this version reads up to 3, so update"):
        upgrade({"schema_version": 4}, steps, 3)
    for wrong in (None, "1", True, 0):
        with pytest.raises(ValueError, match="whole number"):
            upgrade({"schema_version": wrong}, steps, 3)


def test_rotation_by_size(tmp_path: Path) -> None:
    one = len(json.dumps(make_record(1).to_json(), separators=(",", ":"), ensure_ascii=False).encode()) + 1
    history = HistoryStore(tmp_path / "history.jsonl", max_bytes=2 * one, keep_files=3)
    for ns in range(1, 8):
        history.append(make_record(ns))
    names = sorted(p.name for p in tmp_path.glob("*.jsonl"))
    assert names == ["history.1.jsonl", "history.2.jsonl", "history.jsonl"]
    assert walls(history) == [3, 4, 5, 6, 7]  # 1 and 2 went with the oldest file
    assert walls(history, 3) == [5, 6, 7]
    assert all(p.stat().st_size <= 2 * one for p in tmp_path.glob("*.jsonl"))


def test_rotation_with_one_file(tmp_path: Path) -> None:
    history = HistoryStore(tmp_path / "history.jsonl", max_bytes=1, keep_files=1)
    for ns in (1, 2):
        history.append(make_record(ns))
    assert walls(history) == [2]


WRITER = textwrap.dedent(
    """
    import sys
    from dataclasses import replace
    from pathlib import Path
    from halo_vae.profiling.record import DecodeRecord
    from halo_vae.profiling.store import HistoryStore
    import json

    path, first = Path(sys.argv[1]), int(sys.argv[2])
    record = DecodeRecord.from_json(json.loads(sys.argv[3]))
    print("ready", flush=True)
    sys.stdin.readline()  # both begin together
    for ns in range(first, first + 100):
        HistoryStore(path, max_bytes=200_000, keep_files=9).append(replace(record, wall_ns=ns))
    """
)


def test_two_processes_append_at_once(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    line = json.dumps(make_record().to_json())
    source = str(Path(store.__file__).resolve().parents[1])
    links = tmp_path / "path"
    links.mkdir()
    (links / "halo_vae").symlink_to(source, target_is_directory=True)
    env = os.environ | {"PYTHONPATH": str(links)}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), first, line],
            env=env, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for first in ("1000", "2000")
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=300)
        assert writer.returncode == 0
    found = HistoryStore(path, max_bytes=200_000, keep_files=9).read()
    assert found.skipped == 0
    assert sorted(r.wall_ns for r in found.records) == [*range(1000, 1100), *range(2000, 2100)]
    assert path.with_name("history.1.jsonl").exists()  # they also rotated


def test_a_full_disk_is_a_store_error_and_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = HistoryStore(tmp_path / "history.jsonl")
    history.append(make_record(1))
    whole = history.path.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:50]))
    with pytest.raises(StoreError, match=r"only 50 of \d+ bytes were written; the disk may be full"):
        history.append(make_record(2))
    assert history.path.read_bytes() == whole

    def no_space(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", no_space)
    with pytest.raises(StoreError, match="No space left on device"):
        history.append(make_record(2))
    assert walls(history) == [1]


def test_an_unwritable_place_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="cannot be written"):
        HistoryStore(tmp_path / "file" / "history.jsonl").append(make_record())


def test_a_lock_that_stays_taken_is_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(files, "_try_lock", lambda fd: False)
    monkeypatch.setattr(files.time, "sleep", pauses.append)
    with pytest.raises(StoreError, match=r"another process holds the lock history\.jsonl\.lock"):
        HistoryStore(tmp_path / "history.jsonl").append(make_record())
    assert sum(pauses) == pytest.approx(2.0)


def test_the_lock_is_held_while_writing_and_let_go_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = HistoryStore(tmp_path / "history.jsonl")
    lock = tmp_path / "history.jsonl.lock"
    seen: list[bool] = []
    write = os.write

    def looking(fd: int, data: bytes) -> int:
        other = os.open(lock, os.O_RDWR)
        seen.append(files._try_lock(other))
        os.close(other)
        return write(fd, data)

    monkeypatch.setattr(os, "write", looking)
    history.append(make_record(1))
    history.append(make_record(2))  # would time out if the first had kept the lock
    assert seen == [False, False]


@pytest.mark.parametrize(
    ("environ", "platform", "end"),
    [
        ({"HALO_VAE_DATA_DIR": "/somewhere"}, "linux", "/somewhere"),
        ({"XDG_DATA_HOME": "/data"}, "linux", "/data/halo-vae"),
        ({}, "linux", "/me/.local/share/halo-vae"),
        ({}, "darwin", "/me/Library/Application Support/halo-vae"),
        ({}, "win32", "/me/AppData/Local/halo-vae"),
        ({"LOCALAPPDATA": "/local"}, "win32", "/local/halo-vae"),
    ],
)
def test_data_dir(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], platform: str, end: str) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/me"))
    assert data_dir(environ, platform) == Path(end)


def test_data_dir_is_the_same_without_platformdirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HALO_VAE_DATA_DIR", raising=False)
    with_it = data_dir()
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert data_dir() == with_it


def test_no_home_is_a_store_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(StoreError, match="set HALO_VAE_DATA_DIR"):
        data_dir({}, "linux")


def test_default_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HALO_VAE_DATA_DIR", str(tmp_path / "data"))
    assert HistoryStore().path == tmp_path / "data" / "history.jsonl"
    assert not (tmp_path / "data").exists()  # nothing is made before the first append


@pytest.mark.parametrize("given", [{"max_bytes": 0}, {"keep_files": 0}])
def test_sizes_below_one_are_refused(tmp_path: Path, given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        HistoryStore(tmp_path / "history.jsonl", **given)
