"""The comparison inside ComfyUI, at a size that says nothing about speed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

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
