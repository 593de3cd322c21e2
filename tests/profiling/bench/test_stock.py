"""The configuration `stock`: ComfyUI's own decode in ComfyUI's own Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from halo_vae.profiling.bench.cases import BenchCase
from halo_vae.profiling.bench.request import BenchRequest, ComfyUI
from halo_vae.profiling.bench.runner import run_bench
from halo_vae.tests.comfyui.installs import installs

CASES = (
    BenchCase(key="image", title="Image", family="kl", width_px=64, height_px=64),
    BenchCase(key="clip", title="Clip", family="wan21", width_px=64, height_px=64, asked_frames=5),
)


@pytest.mark.comfyui
def test_stock_decodes_pictures_and_clips_in_every_comfyui(tmp_path: Path) -> None:
    for i, install in enumerate(installs()):
        work = tmp_path / str(i)
        work.mkdir()
        wanted = BenchRequest(
            host="here", cases=CASES, configurations=("stock",), scenarios=("cold", "hot"), runs=1, threads=1,
            vaes=("tiny",), device="cpu", comfyui=ComfyUI(folder=install.folder, python=str(install.python)),
            time_limit_s=300.0,
        )  # fmt: skip
        lines = run_bench(wanted, work, lambda line: None).lines
        assert [line.error for line in lines] == [None] * 4
        for line in lines:
            assert line.max_error is not None
            assert line.max_error < 1e-4
            assert line.shapes is None  # nobody counts a host's
