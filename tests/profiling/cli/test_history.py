"""`halo-vae history`: what it prints and writes, and how it ends."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halo_vae.profiling import memory_chart
from halo_vae.profiling.cli import history_files
from halo_vae.profiling.codec import encode
from halo_vae.profiling.export import csv_of, json_of
from halo_vae.profiling.memory import MemoryCounters
from halo_vae.profiling.record import DecodeRecord, DecodeStatus
from halo_vae.profiling.render.text import render_record
from halo_vae.profiling.rows import row_of
from halo_vae.profiling.store import HistoryStore
from halo_vae.profiling.trace import chrome_trace
from halo_vae.tests.profiling.fakes import FakeCounter, busy_events, make_collector, record_events

Run = Callable[..., Any]
BASE: DecodeRecord = record_events(make_collector("per_op"), busy_events)


def make_record(n: int, **change: Any) -> DecodeRecord:
    started = f"2026-01-02T03:04:{n:02d}.678+00:00"
    return replace(BASE, wall_ns=n * 1_000_000, record_id=f"{n:04x}".ljust(32, "0"), started_at=started, **change)


FAILED = make_record(
    4, status=DecodeStatus.OUT_OF_MEMORY, error="=no room\x1b[31m for it", image_shape=None,
    identity=replace(BASE.identity, family="wan21", vae_hash="feedbeef"),
)  # fmt: skip
RECORDS = (make_record(1), make_record(2), make_record(3), FAILED)


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HistoryStore:
    """A history of four decodes, the last one failed."""
    monkeypatch.setenv("HALO_VAE_DATA_DIR", str(tmp_path / "data"))
    store = HistoryStore()
    for record in RECORDS:
        store.append(record)
    return store


def shown_ids(out: str) -> list[str]:
    return [line.split()[0] for line in out.splitlines()[1:] if line[:4].isalnum()]


def test_list_is_a_table_with_the_newest_first(halo: Run, history: HistoryStore) -> None:
    ended = halo("history", "list")
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0].split("  ")[0] == "id"
    assert shown_ids(ended.out) == ["00040000", "00030000", "00020000", "00010000"]
    assert "out of memory: =no room?[31m for it" in lines[1]  # nothing that a terminal would obey
    assert lines[2].split()[1:3] == ["2026-01-02", "03:04:03"]
    for word in ("kl", "01234567", "1×4×64×64", "1×512×512×3", "3.00 ms*", "bfloat16 of float32", "ok"):
        assert word in lines[2]
    assert lines[-1] == "* first run of its shapes"


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        (("--limit", "2"), ["00040000", "00030000"]),
        (("--status", "ok"), ["00030000", "00020000", "00010000"]),
        (("--status", "ok", "--limit", "1"), ["00030000"]),
        (("--vae", "wan21"), ["00040000"]),
        (("--vae", "0123"), ["00030000", "00020000", "00010000"]),
        (("--vae", "feedbeef", "--status", "out_of_memory"), ["00040000"]),
        (("--vae", ""), []),
        (("--vae", "kl2"), []),
    ],
)
def test_list_can_be_narrowed(halo: Run, history: HistoryStore, flags: tuple[str, ...], ids: list[str]) -> None:
    ended = halo("history", "list", *flags)
    assert (ended.code, shown_ids(ended.out)) == (0, ids)
    assert ids or ended.out == "no decode is recorded that fits\n"


def test_memory_is_what_a_decode_used_of_the_pool_too(halo: Run, history: HistoryStore) -> None:
    counter = FakeCounter(now=1000)

    def events(run: Any) -> None:
        busy_events(run)
        run.pool_at_start(250)
        counter.touch(400)

    def counters(device: str) -> MemoryCounters:
        return MemoryCounters(allocated=None, reserved=None, process=counter, available_bytes=None)

    history.append(record_events(make_collector(memory=counters), events))
    line = halo("history", "list", "--limit", "1").out.splitlines()[1]
    assert "  650 B  " in line
    assert row_of(history.read(1).records[0]).used_bytes == 650


def test_a_filter_looks_beyond_the_first_page(halo: Run, history: HistoryStore) -> None:
    for n in range(150):
        history.append(make_record(5, identity=FAILED.identity) if n % 2 else FAILED)
    ended = halo("history", "list", "--vae", "kl", "--limit", "2")
    assert shown_ids(ended.out) == ["00030000", "00020000"]


def test_list_as_json_is_one_row_per_line(halo: Run, history: HistoryStore) -> None:
    ended = halo("history", "list", "--limit", "2", "--json")
    lines = [json.loads(line) for line in ended.out.splitlines()]
    assert lines == [
        {"schema_version": 1, "kind": "history_row", **encode(row_of(record))} for record in (FAILED, RECORDS[2])
    ]


@pytest.mark.parametrize("limit", ["0", "1001", "-3"])
def test_list_has_a_limit(halo: Run, history: HistoryStore, limit: str) -> None:
    ended = halo("history", "list", "--limit", limit)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"halo-vae: --limit is {limit}; give 1 to 1000\n"


@pytest.mark.parametrize("command", [("list",), ("export", "--format", "csv"), ("clear", "--yes")])
def test_there_may_be_no_history_yet(
    halo: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("HALO_VAE_DATA_DIR", str(tmp_path / "data"))
    ended = halo("history", *command)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == {
        "list": "no decode is recorded that fits\n", "export": csv_of([]), "clear": "removed 0 records\n"
    }[command[0]]  # fmt: skip
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", ["0002", "00020", "0002" + "0" * 28, "0002" + "0" * 10])
def test_show_takes_the_start_of_an_id(halo: Run, history: HistoryStore, given: str) -> None:
    ended = halo("history", "show", given)
    assert ended.code == 0
    last = f"id {RECORDS[1].record_id}, started {RECORDS[1].started_at}"
    assert ended.out == f"{render_record(RECORDS[1])}\n{last}\n"
    assert json.loads(halo("history", "show", given, "--json").out) == RECORDS[1].to_json()


def test_show_takes_capitals(halo: Run, history: HistoryStore) -> None:
    history.append(replace(BASE, record_id="abcd".ljust(32, "0")))
    assert halo("history", "show", "ABCD").code == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ffff", "no decode has an id that begins with ffff; `halo-vae history list` shows them"),
        ("000", "'000' begins no id; give 4 to 32 of its digits, 0-9 and a-f"),
        ("../../x", "'../../x' begins no id; give 4 to 32 of its digits, 0-9 and a-f"),
    ],
)
def test_show_says_what_is_wrong_with_an_id(halo: Run, history: HistoryStore, given: str, message: str) -> None:
    ended = halo("history", "show", given)
    assert (ended.code, ended.out, ended.err) == (2, "", f"halo-vae: {message}\n")


def test_show_wants_one_decode(halo: Run, history: HistoryStore) -> None:
    history.append(replace(BASE, record_id="0002".ljust(32, "f")))
    ended = halo("history", "show", "0002")
    assert ended.code == 2
    assert "several decodes have an id that begins with 0002" in ended.err
    assert "give more digits" in ended.err
    assert halo("history", "show", "00020").code == 0


def test_export_of_all_is_oldest_first(halo: Run, history: HistoryStore, tmp_path: Path) -> None:
    assert halo("history", "export").out == json_of(RECORDS)
    assert halo("history", "export", "--format", "csv").out == csv_of(map(row_of, RECORDS))
    path = tmp_path / "all.csv"
    ended = halo("history", "export", "--format", "csv", "-o", path)
    assert (ended.code, ended.out) == (0, f"{path}\n")
    assert path.read_bytes() == csv_of(map(row_of, RECORDS)).encode()
    lines = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"), newline="")))
    assert [line["error"][:9] for line in lines] == ["", "", "", "'=no room"]


def test_export_of_some(halo: Run, history: HistoryStore) -> None:
    ended = halo("history", "export", "0003", "0001", "0003")
    assert ended.out == json_of([RECORDS[0], RECORDS[2]])
    ended = halo("history", "export", "0003", "ffff")
    assert (ended.code, ended.out) == (2, "")


def test_export_overwrites_only_with_force(halo: Run, history: HistoryStore, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text("mine")
    ended = halo("history", "export", "-o", path)
    assert (ended.code, path.read_text()) == (2, "mine")
    assert ended.err == f"halo-vae: {path} exists; use --force to overwrite it or choose another -o\n"
    assert halo("history", "export", "-o", path, "--force").code == 0
    assert path.read_text(encoding="utf-8") == json_of(RECORDS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "kept.json"]


def test_export_needs_a_place(halo: Run, history: HistoryStore, tmp_path: Path) -> None:
    for path, message in ((tmp_path, "is a folder"), (tmp_path / "no" / "x.json", "there is no folder")):
        ended = halo("history", "export", "-o", path, "--force")
        assert ended.code == 2
        assert message in ended.err


def test_a_full_disk_is_a_failure(
    halo: Run, history: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(history_files, "write_atomically", full)
    ended = halo("history", "export", "-o", tmp_path / "x.json")
    assert ended.code == 1
    assert "(No space left on device); free space or choose another -o" in ended.err


def test_a_trace_is_of_one_decode(halo: Run, history: HistoryStore) -> None:
    assert json.loads(halo("history", "export", "--format", "trace", "0002").out) == chrome_trace(RECORDS[1])
    assert json.loads(halo("history", "export", "--format", "trace").out) == chrome_trace(FAILED)  # the newest
    ended = halo("history", "export", "--format", "trace", "0002", "0003")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "halo-vae: --format trace takes one decode and 2 ids are given; give one\n"


def test_a_trace_of_nothing(halo: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALO_VAE_DATA_DIR", str(tmp_path / "data"))
    ended = halo("history", "export", "--format", "trace")
    assert ended.code == 2
    assert "there is no decode in" in ended.err


def test_a_chart_goes_to_a_file(
    halo: Run, history: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[DecodeRecord] = []

    def draw(record: DecodeRecord, path: Path) -> None:
        drawn.append(record)
        path.write_bytes(b"picture")

    monkeypatch.setattr(memory_chart, "write_memory_chart", draw)
    monkeypatch.setattr(history_files, "find_spec", lambda name: SimpleNamespace())
    path = tmp_path / "memory.png"
    ended = halo("history", "export", "--format", "png", "0003", "-o", path)
    assert (ended.code, ended.out, path.read_bytes()) == (0, f"{path}\n", b"picture")
    assert drawn == [RECORDS[2]]
    ended = halo("history", "export", "--format", "png")
    assert (ended.code, ended.err) == (2, "halo-vae: --format png is a picture; say where it goes with -o FILE\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "memory.png"]


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib, the extra `charts`")
def test_a_chart_needs_samples(halo: Run, history: HistoryStore, tmp_path: Path) -> None:
    history.append(make_record(6, trace=None))
    ended = halo("history", "export", "--format", "png", "-o", tmp_path / "x.png")
    assert ended.code == 2
    assert "holds no memory samples" in ended.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data"]


def test_a_chart_needs_matplotlib(
    halo: Run, history: HistoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_files, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ended = halo("history", "export", "--format", "png", "-o", tmp_path / "x.png")
    assert ended.code == 1
    assert "pip install 'halo-vae[charts]'" in ended.err


def test_clear_asks_first(halo: Run, history: HistoryStore) -> None:
    ended = halo("history", "clear")
    assert (ended.code, ended.out) == (2, "")
    assert "removes every record" in ended.err
    assert history.read().records == RECORDS
    ended = halo("history", "clear", "--yes")
    assert (ended.code, ended.out) == (0, "removed 4 records\n")
    assert history.read().records == ()


def test_unreadable_lines_are_told(halo: Run, history: HistoryStore) -> None:
    with history.path.open("a") as file:
        file.write("{broken\n[]\n")
    for command in (("list",), ("export",)):
        ended = halo("history", *command)
        assert ended.code == 0
        assert ended.err == "halo-vae: left out 2 lines of the history that cannot be read\n"


def test_a_kind_of_work_is_needed(halo: Run) -> None:
    assert halo("history").code == 2
    assert halo("history", "forget").code == 2
    assert halo("history", "list", "--help").code == 0
