"""The tests on a device, checked without one: they run on the CPU as a stand-in, and their report says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from halo_vae.tests.conftest import GPU_TESTS_ON

ROOT = Path(__file__).resolve().parent.parent
CHOSEN = (
    "tests/gpu/test_engine.py::test_on_a_stream_of_the_callers_own",
    "tests/gpu/test_engine.py::test_events_are_passed_in_order",
    "tests/gpu/test_gfx1151.py::test_memory_by_the_driver_beside_torch",
    "tests/gpu/test_goldens.py::test_attention",
)


def run(report: Path, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != GPU_TESTS_ON} | variables
    env |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "HALO_VAE_DATA_DIR": str(report.parent)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--gpu-report", str(report), *argv]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300)


def test_the_report_says_what_was_found_and_on_what(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = run(path, "-m", "gpu", *CHOSEN, **{GPU_TESTS_ON: "cpu"})
    assert done.returncode == 0, done.stdout
    report = json.loads(path.read_text("utf-8"))
    assert (report["schema_version"], report["kind"], report["device_is_a_stand_in"]) == (1, "gpu-tests", True)
    assert report["outcomes"] == {"passed": 4, "skipped": 1}
    assert report["doctor"]["device"]["name"] == "cpu"
    assert report["doctor"]["versions"]["torch"]
    by_name = {line["test"]: line for line in report["tests"]}
    memory = by_name["test_gfx1151.py::test_memory_by_the_driver_beside_torch"]
    assert memory["measured"]["carve_out"]["total"] == 64 << 30
    assert by_name["test_engine.py::test_events_are_passed_in_order"]["why"].endswith("the CPU has no queue")
    assert by_name["test_goldens.py::test_attention[sdpa]"]["measured"]["max_error"] < 1e-3
    assert str(ROOT) not in path.read_text("utf-8")


def test_nothing_is_written_where_nothing_ran(tmp_path: Path) -> None:
    done = run(tmp_path / "report.json", CHOSEN[0])
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout
    assert not (tmp_path / "report.json").exists()
