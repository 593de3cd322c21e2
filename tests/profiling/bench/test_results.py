from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from halo_vae.profiling import store_write
from halo_vae.profiling.bench.cases import BenchError
from halo_vae.profiling.bench.results import ResultsFile, RunLine, ShapeCounts, line_of, parse_line, read_all
from halo_vae.tests.profiling.bench.lines import make_run, make_series


def ids(path: Path) -> list[int]:
    return [int(run.run_id, 16) for run in ResultsFile(path).read().runs]


def test_append_and_read(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "new" / "results.jsonl")
    run = make_run(1, shapes=ShapeCounts(requested=9, new=2, not_in_hot=("1x4x8x8",)), note="ü\ud800")
    file.append(run)
    file.append(make_series())
    found = file.read()
    assert found.runs == (make_run(1, shapes=run.shapes, note="ü\ud800"),)
    assert found.series == (make_series(),)
    assert (found.skipped, found.problems) == (0, ())


def test_a_line_holds_version_samples_and_fingerprint_but_no_statistic() -> None:
    line = json.loads(line_of(make_run()))
    assert (line["schema_version"], line["kind"]) == (1, "run")
    assert line["samples_ns"][0] == 100_000_000
    assert line["warm_ups_ns"] == [400_000_000]
    assert line["environment"]["torch"] == "2.13.0"
    assert len(line["environment_id"]) == 12
    assert not [key for key in line if key.startswith(("mean_n", "median", "stdev", "min_", "ops"))]


def test_a_torn_last_line_is_counted_and_closed(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "results.jsonl")
    file.append(make_run(1))
    file.append(make_run(2))
    file.path.write_bytes(file.path.read_bytes()[:-50])
    torn = file.read()
    assert (len(torn.runs), torn.skipped) == (1, 1)
    assert torn.problems == ("results.jsonl: a torn line, left out",)
    file.append(make_run(3))
    assert ids(file.path) == [1, 3]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")
def test_killed_in_the_middle_of_a_write(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    ResultsFile(path).append(make_run(1))
    child = textwrap.dedent(
        f"""
        import os, signal
        from pathlib import Path
        from halo_vae.profiling.bench.results import ResultsFile
        from halo_vae.tests.profiling.bench.lines import make_run
        whole = os.write
        def torn(fd, data):
            whole(fd, data[:200])
            os.kill(os.getpid(), signal.SIGKILL)
        os.write = torn
        ResultsFile(Path({str(path)!r})).append(make_run(2))
        """
    )
    done = subprocess.run([sys.executable, "-c", child], cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    found = ResultsFile(path).read()
    assert (len(found.runs), found.skipped) == (1, 1)
    ResultsFile(path).append(make_run(3))  # the dead process holds no lock
    assert ids(path) == [1, 3]


def test_a_full_disk_leaves_the_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ResultsFile(tmp_path / "results.jsonl")
    file.append(make_run(1))
    before = file.path.read_bytes()
    whole = os.write
    monkeypatch.setattr(store_write.os, "write", lambda fd, data: whole(fd, data[:30]))
    with pytest.raises(BenchError, match=r"not added to .*results\.jsonl .*disk may be full.*name another file"):
        file.append(make_run(2))
    assert file.path.read_bytes() == before

    def none(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_write.os, "write", none)
    with pytest.raises(BenchError, match="No space left on device"):
        file.append(make_run(2))
    assert file.path.read_bytes() == before


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **rest: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("halo_vae.optim.files.os.open", refuse)  # root may write anywhere
    with pytest.raises(BenchError, match="Permission denied"):
        ResultsFile(tmp_path / "results.jsonl").append(make_run())


def test_every_line_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(store_write.os, "fsync", synced.append)
    file = ResultsFile(tmp_path / "results.jsonl")
    file.append(make_run(1))
    file.append(make_run(2))
    assert len(synced) == 2


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="halo-vae bench"):
        ResultsFile(tmp_path / "none.jsonl").read()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_line_holds_nan_or_inf(value: float) -> None:
    for name in ("max_error", "mean_error", "psnr_db"):
        with pytest.raises(ValueError, match=f"run.{name} is {value}"):
            make_run(**{name: value})
    with pytest.raises(ValueError, match=r"cpu_share\.values is"):
        make_series(values=(0.0, value, 0.0))


def test_a_file_with_inf_in_it_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    raw = line_of(make_run()).decode()
    path.write_text(raw.replace('"max_error":1e-06', '"max_error":NaN') + raw.replace("1e-06", '"inf"'), "utf-8")
    found = ResultsFile(path).read()
    assert (found.runs, found.skipped) == ((), 2)


def test_equal_pictures_are_valid_json() -> None:
    raw = line_of(make_run(psnr_db=None, psnr_infinite=True, max_error=0.0))
    assert b"Infinity" not in raw
    assert b'"inf"' not in raw
    read = parse_line(raw)
    assert isinstance(read, RunLine)
    assert read.psnr_infinite


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"status": "failed"}, "status failed contradicts error=None"),
    ({"error": "e"}, "status ok contradicts"),
    ({"samples_ns": ()}, "without a sample"),
    ({"status": "not_finite", "error": "e"}, "contradicts samples"),  # a wrong picture has no time
    ({"status": "refused", "error": "e"}, "contradicts samples"),
    ({"samples_ns": (5, -1)}, "below 1 ns"),  # a clock that went back
    ({"warm_ups_ns": (0,)}, "below 1 ns"),
    ({"psnr_infinite": True}, "contradicts psnr_infinite"),
    ({"lane": "nightly", "scenario": "frozen"}, "contradicts the nightly lane"),
    ({"threads": 0}, "threads is 0"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_run_that_contradicts_itself(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_run(**change)


def test_series_read_by_a_clock_that_falls() -> None:
    with pytest.raises(ValueError, match="monotonic"):
        make_series(at_ns=(0, 2, 1))
    with pytest.raises(ValueError, match="3 times and 1 values"):
        make_series(values=(0.5,))


def test_a_newer_or_foreign_line_is_told(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    raw = line_of(make_run()).decode()
    path.write_text(raw.replace('"schema_version":1', '"schema_version":2') + '{"kind":"decode"}\n[1]\n' + raw, "utf-8")
    found = ResultsFile(path).read()
    assert (len(found.runs), found.skipped) == (1, 3)
    assert "format 2; this version reads up to 1" in found.problems[0]
    assert "kinds run, series" in found.problems[1]


def test_frozen_that_is_not_verified_has_a_star() -> None:
    assert make_run(scenario="frozen", page_cache="dropped").scenario_label == "frozen"
    for page_cache in ("unverified", "kept"):
        run = make_run(scenario="frozen", page_cache=page_cache)
        assert (run.scenario_label, run.is_verified) == ("frozen*", False)
    assert make_run(page_cache="unverified").scenario_label == "hot"


def test_several_files_as_one(tmp_path: Path) -> None:
    one, two = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path, numbers in ((one, (1, 2)), (two, (2, 3))):
        for n in numbers:
            ResultsFile(path).append(make_run(n))
        ResultsFile(path).append(make_series())
    found = read_all([one, two])
    assert [int(run.run_id, 16) for run in found.runs] == [1, 2, 3]
    assert len(found.series) == 1
