from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from halo_vae.profiling import append_log
from halo_vae.profiling.append_log import AppendLog, append_or_warn
from halo_vae.profiling.record import DecodeRecord, DecodeStatus
from halo_vae.profiling.recorded import decode_recorded
from halo_vae.profiling.store import HistoryStore
from halo_vae.tests.fixtures import latent
from halo_vae.tests.profiling.fakes import busy_events, make_collector, record_events
from halo_vae.tests.profiling.test_recorded import FakeDecoder, FakeEngine

RECORD: DecodeRecord = record_events(make_collector(), busy_events)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Let writes fail with an error number, or work again (None)."""
    write = os.write

    def set_error(number: int | None) -> None:
        def failing(fd: int, data: bytes) -> int:
            if number is None:
                return write(fd, data)
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "write", failing)

    return set_error


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Warnings since the last call."""
    caplog.set_level(logging.WARNING, "halo_vae")

    def take() -> list[str]:
        lines = [r.getMessage() for r in caplog.records]
        caplog.clear()
        return lines

    return take


def test_a_full_disk_is_told_once(
    tmp_path: Path, disk: Callable[[int | None], None], told: Callable[[], list[str]]
) -> None:
    history, appends = HistoryStore(tmp_path / "history.jsonl"), AppendLog()
    disk(errno.ENOSPC)
    assert [appends.append(history, RECORD) for _ in range(5)] == [False] * 5
    (line,) = told()
    assert line.startswith("the decode was not added to the history: ")
    assert "No space left on device" in line


def test_another_kind_is_told_too_and_all_again_after_it_worked(
    tmp_path: Path, disk: Callable[[int | None], None], told: Callable[[], list[str]]
) -> None:
    history, appends = HistoryStore(tmp_path / "history.jsonl"), AppendLog()
    for number in (errno.ENOSPC, errno.EIO, errno.ENOSPC, errno.EIO):
        disk(number)
        assert not appends.append(history, RECORD)
    assert len(told()) == 2
    disk(None)
    assert appends.append(history, RECORD)
    disk(errno.ENOSPC)
    assert not appends.append(history, RECORD)
    assert len(told()) == 1


def test_a_short_write_is_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[str]]
) -> None:
    history, appends, write = HistoryStore(tmp_path / "history.jsonl"), AppendLog(), os.write
    for kept in (50, 60):  # a little space each time, never enough
        monkeypatch.setattr(os, "write", lambda fd, data, n=kept: write(fd, data[:n]))
        assert not appends.append(history, RECORD)
    assert len(told()) == 1


def test_another_history_is_told_by_itself(
    tmp_path: Path, disk: Callable[[int | None], None], told: Callable[[], list[str]]
) -> None:
    appends = AppendLog()
    disk(errno.ENOSPC)
    for name in ("a", "b", "a"):
        appends.append(HistoryStore(tmp_path / name / "history.jsonl"), RECORD)
    assert len(told()) == 2


def test_a_full_disk_leaves_every_decode_as_it_is(
    tmp_path: Path,
    disk: Callable[[int | None], None],
    told: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(append_log, "PROCESS_LOG", AppendLog())
    collector, history = make_collector(), HistoryStore(tmp_path / "history.jsonl")
    disk(errno.ENOSPC)
    for _ in range(3):
        image, record = decode_recorded(
            FakeEngine(), FakeDecoder(), latent((1, 4, 8, 8)), collector=collector, store=history
        )
        assert image.shape == (1, 64, 64, 3)
        assert record.status is DecodeStatus.OK
    assert len(told()) == 1
    assert len(collector.records()) == 3
    assert history.read().records == ()
    disk(None)
    assert append_or_warn(history, RECORD)


def test_text_that_is_no_unicode_can_be_written(tmp_path: Path) -> None:
    history = HistoryStore(tmp_path / "history.jsonl")
    collector = make_collector()
    error = OSError("cannot read \udcff\x00 “file”")
    with pytest.raises(OSError, match="cannot read"):
        decode_recorded(FakeEngine(error), FakeDecoder(), latent((1, 4, 8, 8)), collector=collector, store=history)
    assert history.read().records == collector.records()
    assert history.read().records[0].error == "cannot read \udcff\x00 “file”"
