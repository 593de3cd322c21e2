"""A process that dies while it appends: at most its last line is lost, and nobody else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from halo_vae.profiling import store
from halo_vae.profiling.record import DecodeRecord
from halo_vae.profiling.store import HistoryStore
from halo_vae.profiling.store_format import line_of
from halo_vae.tests.profiling.fakes import busy_events, make_collector, record_events

RECORD: DecodeRecord = record_events(make_collector(), busy_events)
LINE = line_of(RECORD)
CUTS = sorted({0, 1, 2, len(LINE) // 2, len(LINE) - 2, len(LINE) - 1, len(LINE), *range(7, len(LINE), 97)})


@pytest.mark.parametrize("n_kept", CUTS)
def test_a_line_cut_anywhere_is_all_that_is_lost(tmp_path: Path, n_kept: int) -> None:
    history = HistoryStore(tmp_path / "history.jsonl")
    history.append(replace(RECORD, wall_ns=1))
    history.append(replace(RECORD, wall_ns=2))
    with history.path.open("ab") as file:
        file.write(LINE[:n_kept])
    whole = n_kept >= len(LINE) - 1  # the record is there, but for its line feed
    walls = [1, 2, RECORD.wall_ns] if whole else [1, 2]
    torn = n_kept > 0 and not whole
    assert [r.wall_ns for r in history.page(10).records] == walls[::-1]
    assert history.page(10).skipped == torn
    history.append(replace(RECORD, wall_ns=3))
    assert [r.wall_ns for r in history.read().records] == [*walls, 3]
    assert history.read().skipped == torn


WRITER = textwrap.dedent(
    """
    import json, sys
    from dataclasses import replace
    from pathlib import Path
    from halo_vae.profiling.record import DecodeRecord
    from halo_vae.profiling.store import HistoryStore

    history = HistoryStore(Path(sys.argv[1]))
    record = DecodeRecord.from_json(json.loads(sys.argv[2]))
    record = replace(record, status=type(record.status).ERROR, error="long " * 20_000, image_shape=None)
    n = 0
    while True:
        history.append(replace(record, wall_ns=n))
        print(n, flush=True)
        n += 1
    """
)


def test_a_killed_process_loses_at_most_its_last_line(tmp_path: Path) -> None:
    links = tmp_path / "path"
    links.mkdir()
    (links / "halo_vae").symlink_to(Path(store.__file__).resolve().parents[1], target_is_directory=True)
    history = HistoryStore(tmp_path / "history.jsonl")
    env = os.environ | {"PYTHONPATH": str(links)}
    for _ in range(2):  # the second one begins after what the first one left
        before = len(history.read().records)

        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(history.path), json.dumps(RECORD.to_json())],
            env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert writer.stdout is not None
        told = [int(writer.stdout.readline()) for _ in range(10)]
        writer.kill()
        rest, _ = writer.communicate()
        told += [int(line) for line in rest.splitlines() if line.strip()]
        found = history.read()
        walls = [r.wall_ns for r in found.records[before:]]
        assert told == list(range(len(told)))
        assert walls == list(range(len(walls)))
        assert len(told) <= len(walls) <= len(told) + 1  # a line may be whole and not told yet
        assert found.skipped <= 2
