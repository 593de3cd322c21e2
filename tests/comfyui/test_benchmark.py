"""The comparison inside ComfyUI, at a size that says nothing about speed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from halo_vae.tests.comfyui.installs import Install
from halo_vae.tests.comfyui.server import ROOT


def test_comparison_runs(install: Install, tmp_path: Path) -> None:
    command = [
        str(install.python), "-B", str(ROOT / "benchmarks" / "in_comfyui.py"), str(install.folder), "--size", "64",
        "--runs", "1", "--processes", "1", "--threads", "2", "--json", str(tmp_path / "result.json"),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text("utf-8"))
    sides = {side["side"]: side for side in result["sides"]}
    assert list(sides) == ["stock", "tiled", "halo"]
    assert sides["stock"]["max_error"] == 0
    assert sides["halo"]["max_error"] <= 1e-4
    assert all(side["peaks_bytes"][0] > 0 and side["threads_ns"]["2"][0] > 0 for side in sides.values())
    assert "Halo ÷ it" in done.stdout
    assert "only 1 run(s)" in done.stdout


def test_folder_that_is_no_comfyui_is_told(install: Install, tmp_path: Path) -> None:
    command = [str(install.python), "-B", str(ROOT / "benchmarks" / "in_comfyui.py"), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "it has no main.py" in done.stderr
    assert "Traceback" not in done.stderr


def video_command(install: Install, *more: str) -> list[str]:
    script = str(ROOT / "benchmarks" / "video_in_comfyui.py")
    return [str(install.python), "-B", script, str(install.folder), "--threads", "2", "--runs", "1", *more]


@pytest.mark.parametrize(
    ("family", "frames", "processes"),
    [
        ("wan21", 5, 1), ("hunyuan_video", 5, 0), ("ltx", 9, 0), pytest.param("wan22", 5, 0, marks=pytest.mark.slow),
        pytest.param("hunyuan15", 5, 0, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_comparison_of_clips_runs(install: Install, tmp_path: Path, family: str, frames: int, processes: int) -> None:
    command = video_command(
        install, "--family", family, "--size", "64", "--frames", str(frames), "--processes", str(processes),
        "--json", str(tmp_path / "result.json"),
    )  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text("utf-8"))
    decoded = result["decoded"]
    assert decoded["host_frames"] == decoded["our_frames"] == frames
    assert 0.1 < decoded["deviation"] < 5  # weights by fan-in keep the clip near a real one's range
    assert decoded["max_error"] <= 1e-4
    assert {case["engine"]: len(case["samples_ns"]) for case in result["times"]} == {"host": 1, "ours": 1}
    assert all(len(taken) == processes and min(taken, default=1) > 0 for taken in result["peaks_bytes"].values())
    assert "ours ÷ host" in done.stdout


def test_growth_with_the_clip_is_predicted_and_measured(install: Install, tmp_path: Path) -> None:
    command = video_command(install, "--flat", "--size", "64", "--flat-size", "16", "--processes", "1")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split("|")[1:3] for line in done.stdout.splitlines() if line.startswith(("| 64", "| 16"))]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["64x64", "predicted"], ["16x16", "predicted"], ["16x16", "measured, 1 process(es)"],
    ]  # fmt: skip
