"""Pages, finding and clearing: what they give, and how little they read for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import pytest

from halo_vae.optim import files
from halo_vae.profiling import store, tail
from halo_vae.profiling.record import DecodeRecord
from halo_vae.profiling.store import CursorError, HistoryPage, HistoryStore, StoreError
from halo_vae.profiling.store_format import TAG_BYTES, line_of
from halo_vae.tests.profiling.fakes import busy_events, make_collector, record_events

BASE: DecodeRecord = record_events(make_collector(), busy_events)


def make_record(n: int) -> DecodeRecord:
    return replace(BASE, wall_ns=n, record_id=f"{n:032x}")


def make_lines(first: int, last: int) -> list[bytes]:
    """Lines of records `first` to `last`, made of one: ten thousand take no time."""
    one = line_of(make_record(7))
    assert one.count(b'"wall_ns":7,') == one.count(b"%032x" % 7) == 1
    return [
        one.replace(b'"wall_ns":7,', b'"wall_ns":%d,' % n).replace(b"%032x" % 7, b"%032x" % n)
        for n in range(first, last + 1)
    ]


def filled(path: Path, n: int, *, per_file: int | None = None) -> HistoryStore:
    """A history of records 1 to n, `per_file` in each of at most 4 files."""
    size = len(line_of(make_record(n))) * (per_file or n)
    history = HistoryStore(path / "history.jsonl", max_bytes=size + (per_file or n) // 2)
    for i in range(1, n + 1):
        history.append(make_record(i))
    return history


def walls(page: HistoryPage) -> list[int]:
    return [r.wall_ns for r in page.records]


def all_pages(history: HistoryStore, limit: int) -> list[list[int]]:
    pages, before = [], None
    while True:
        page = history.page(limit, before)
        pages.append(walls(page))
        before = page.next
        if before is None:
            return pages


@dataclass
class Reads:
    """What is opened and read."""

    opened: list[str] = field(default_factory=list)
    nbytes: int = 0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    seen, opening, reading = Reads(), tail.open_plain, tail.read_at

    def open_plain(path: Path) -> BinaryIO:
        file = opening(path)
        seen.opened.append(path.name)
        return file

    def read_at(file: BinaryIO, offset: int, size: int) -> bytes:
        data = reading(file, offset, size)
        seen.nbytes += len(data)
        return data

    monkeypatch.setattr(tail, "open_plain", open_plain)
    monkeypatch.setattr(tail, "read_at", read_at)
    return seen


def test_pages_go_from_the_newest_to_the_oldest(tmp_path: Path) -> None:
    history = filled(tmp_path, 7)
    assert all_pages(history, 3) == [[7, 6, 5], [4, 3, 2], [1]]
    assert all_pages(history, 7) == [[7, 6, 5, 4, 3, 2, 1]]
    assert all_pages(history, 1000) == [[7, 6, 5, 4, 3, 2, 1]]
    assert history.page(3).records[0] == make_record(7)


def test_pages_go_on_in_older_files(tmp_path: Path) -> None:
    history = filled(tmp_path, 10, per_file=3)
    assert sorted(p.name for p in tmp_path.glob("*.jsonl")) == [
        "history.1.jsonl", "history.2.jsonl", "history.3.jsonl", "history.jsonl"
    ]  # fmt: skip
    assert all_pages(history, 4) == [[10, 9, 8, 7], [6, 5, 4, 3], [2, 1]]
    assert all_pages(history, 1) == [[n] for n in range(10, 0, -1)]
    assert all_pages(history, 3) == [[10, 9, 8], [7, 6, 5], [4, 3, 2], [1]]


def test_there_may_be_no_history(tmp_path: Path) -> None:
    history = HistoryStore(tmp_path / "new" / "history.jsonl")
    assert history.page() == HistoryPage(records=(), next=None, skipped=0, problems=())
    assert history.find("0" * 32) is None
    assert history.clear() == 0
    assert list(tmp_path.iterdir()) == []


def test_the_newest_page_of_ten_thousand_reads_only_the_tail(tmp_path: Path, reads: Reads) -> None:
    lines = make_lines(1, 10_000)
    path = tmp_path / "history.jsonl"
    path.write_bytes(b"".join(lines))
    path.with_name("history.1.jsonl").write_bytes(line_of(make_record(0)))
    history = HistoryStore(path)
    page = history.page(100)
    assert walls(page) == list(range(10_000, 9_900, -1))
    assert reads.opened == ["history.jsonl"]
    wanted = sum(map(len, lines[-100:]))
    assert wanted <= reads.nbytes <= wanted + tail.BLOCK_BYTES + TAG_BYTES
    assert reads.nbytes < path.stat().st_size / 50

    reads.opened.clear()
    reads.nbytes = 0
    assert walls(history.page(100, page.next)) == list(range(9_900, 9_800, -1))
    assert reads.opened == ["history.jsonl"]
    assert reads.nbytes <= wanted + tail.BLOCK_BYTES + 2 * TAG_BYTES + 1


def test_reading_the_newest_records_reads_only_the_tail(tmp_path: Path, reads: Reads) -> None:
    lines = make_lines(1, 2000)
    (tmp_path / "history.jsonl").write_bytes(b"".join(lines))
    found = HistoryStore(tmp_path / "history.jsonl").read(20)
    assert [r.wall_ns for r in found.records] == list(range(1981, 2001))
    assert reads.nbytes <= sum(map(len, lines[-20:])) + tail.BLOCK_BYTES
    assert HistoryStore(tmp_path / "history.jsonl").read(0).records == ()


def test_a_full_page_at_the_start_of_a_file_opens_no_older_one(tmp_path: Path, reads: Reads) -> None:
    history = filled(tmp_path, 6, per_file=3)
    page = history.page(3)
    assert (walls(page), reads.opened) == ([6, 5, 4], ["history.jsonl"])
    assert page.next is not None
    assert walls(history.page(3, page.next)) == [3, 2, 1]


def test_a_cursor_survives_rotation_and_new_records(tmp_path: Path) -> None:
    history = filled(tmp_path, 5, per_file=3)
    page = history.page(2)
    for n in range(6, 10):  # 4 and 5 are set aside meanwhile
        history.append(make_record(n))
    assert (tmp_path / "history.2.jsonl").exists()
    assert walls(page) == [5, 4]
    assert walls(history.page(3, page.next)) == [3, 2, 1]


def test_a_file_set_aside_while_a_page_is_read_is_not_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, opening = filled(tmp_path, 5, per_file=3), tail.open_plain
    done: list[Path] = []

    def rotate_after_the_first(path: Path) -> BinaryIO:
        file = opening(path)
        if not done:
            done.append(path)
            os.replace(tmp_path / "history.1.jsonl", tmp_path / "history.2.jsonl")
            os.replace(tmp_path / "history.jsonl", tmp_path / "history.1.jsonl")
        return file

    monkeypatch.setattr(tail, "open_plain", rotate_after_the_first)
    assert walls(history.page(100)) == [5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "0" * 16, "../../etc-1", "0" * 16 + "-", "0" * 16 + "-g", "0" * 16 + "-" + "f" * 13),
        *("A" * 16 + "-1", "0" * 16 + "-1\n", "０" * 16 + "-1", "-" * 100_000),
    ],
)
def test_what_is_no_cursor_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(CursorError, match="is no cursor of this history") as caught:
        filled(tmp_path, 2).page(1, text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("shift", [-1, 1, 10_000_000])
def test_a_cursor_into_the_middle_of_a_record_is_refused(tmp_path: Path, shift: int) -> None:
    history = filled(tmp_path, 3)
    good = history.page(1).next
    assert good is not None
    tag, _, offset = good.partition("-")
    with pytest.raises(CursorError, match="no record begins at"):
        history.page(1, f"{tag}-{int(offset, 16) + shift:x}")


def test_a_cursor_of_a_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    history = filled(tmp_path, 5, per_file=3)
    old = history.page(4).next
    history.clear()
    with pytest.raises(CursorError, match="gone, dropped for newer records or cleared; begin again"):
        history.page(4, old)
    history.append(make_record(9))
    with pytest.raises(CursorError, match="begin again"):
        history.page(4, old)
    assert walls(history.page(4)) == [9]


@pytest.mark.parametrize("limit", [0, -1, 1001, True])
def test_the_limit_is_bounded(tmp_path: Path, limit: int) -> None:
    with pytest.raises(ValueError, match=rf"limit is {limit}; a page has 1 to 1000 records"):
        filled(tmp_path, 1).page(limit)


def test_unreadable_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    history = HistoryStore(tmp_path / "history.jsonl")
    history.append(make_record(1))
    history.append(make_record(2))
    with history.path.open("ab") as file:
        file.write(b'{"torn\n\n[1]\n\xff\xfe\n' + b"[" * 100_000 + b"\n")
    history.append(make_record(3))
    page = history.page(2)
    assert walls(page) == [3, 2]
    assert page.skipped == 4  # the blank line is none
    assert page.problems == ("history.jsonl has a torn line, left out", "history.jsonl: a line is not an object")
    assert walls(history.page(2, page.next)) == [1]


def test_a_broken_file_cannot_make_a_page_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_SKIPPED", 10)
    history = filled(tmp_path, 1)
    with history.path.open("ab") as file:
        file.write(b"broken\n" * 25)
    pages, before = [], None
    for _ in range(3):
        page = history.page(5, before)
        pages.append((walls(page), page.skipped))
        before = page.next
    assert pages == [([], 10), ([], 10), ([1], 5)]
    assert before is None


def test_find_reads_to_the_record_and_no_further(tmp_path: Path, reads: Reads) -> None:
    history = filled(tmp_path, 9, per_file=3)
    assert history.find(f"{8:032x}") == make_record(8)
    assert reads.opened == ["history.jsonl"]
    assert history.find(f"{1:032x}") == make_record(1)
    assert history.find(f"{99:032x}") is None


@pytest.mark.parametrize("record_id", ["", "5", "x" * 32, f"{5:032x}\n", f"{5:032x}0", "../" * 11])
def test_find_takes_whole_ids_alone(tmp_path: Path, reads: Reads, record_id: str) -> None:
    assert filled(tmp_path, 5).find(record_id) is None
    assert reads.opened == []


def test_an_id_in_another_field_is_not_the_record(tmp_path: Path) -> None:
    history = HistoryStore(tmp_path / "history.jsonl")
    other = replace(make_record(1), environment_id=f"{7:032x}")
    history.append(other)
    assert history.find(f"{7:032x}") is None
    history.append(make_record(7))
    history.append(other)
    assert history.find(f"{7:032x}") == make_record(7)


def test_records_by_the_start_of_their_id(tmp_path: Path) -> None:
    history = HistoryStore(tmp_path / "history.jsonl")
    for n, start in ((1, "abcd1"), (2, "abcd2"), (3, "beef0")):
        history.append(replace(make_record(n), record_id=start.ljust(32, "0")))
    assert [r.wall_ns for r in history.matching("abcd")] == [2, 1]
    assert [r.wall_ns for r in history.matching("abcd", 1)] == [2]
    assert [r.wall_ns for r in history.matching("abcd1")] == [1]
    assert history.matching("0123") == ()
    for wrong in ("abc", "ABCD", "abcd" * 9, "", "ab%d"):
        with pytest.raises(ValueError, match="begins no id; give 4 to 32 of its digits"):
            history.matching(wrong)


def test_clear_removes_every_file_and_counts(tmp_path: Path) -> None:
    history = filled(tmp_path, 8, per_file=3)
    with history.path.open("ab") as file:
        file.write(b'{"torn')
    assert history.clear() == 9
    assert list(tmp_path.glob("*.jsonl")) == []
    assert history.read().records == ()
    history.append(make_record(1))
    assert [r.wall_ns for r in history.read().records] == [1]
    assert history.clear() == 1


def test_clear_waits_for_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = filled(tmp_path, 2)
    monkeypatch.setattr(files, "_try_lock", lambda fd: False)
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    with pytest.raises(StoreError, match=r"cannot be cleared \(another process holds the lock"):
        history.clear()
    assert len(history.read().records) == 2


def test_a_history_that_cannot_be_read_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").mkdir()
    history = HistoryStore(tmp_path / "history.jsonl")
    calls: list[Callable[[], object]] = [history.page, history.read, lambda: history.matching("abcd")]
    for call in calls:
        with pytest.raises(StoreError, match="cannot be read"):
            call()
