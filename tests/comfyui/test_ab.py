"""The benchmark node in real ComfyUIs: as a prompt, and with a side that fails."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from halo_vae.tests.comfyui.inside_runner import run_inside
from halo_vae.tests.comfyui.installs import Install
from halo_vae.tests.comfyui.prompts import assert_same, decoding, pictures, sources
from halo_vae.tests.comfyui.server import Server

DIFFERENCE, STATS = 1, 6


@pytest.mark.usefixtures("calm")
def test_benchmark_as_a_prompt(server: Server, vae: str) -> None:
    history = server.base / "halo" / "history.jsonl"
    lines = len(history.read_text("utf-8").splitlines()) if history.exists() else 0
    prompt = {
        **sources(vae),
        **decoding("HaloVAEBenchmark", 4, precision_mode="fp32"),
        **decoding("VAEDecode", 5),
        "106": {"class_type": "SaveImage", "inputs": {"images": ["4", DIFFERENCE], "filename_prefix": "n6"}},
        "7": {"class_type": "HaloVAEStats", "inputs": {"stats": ["4", STATS]}},
    }
    done = server.run(prompt)
    assert_same(server, done, 4, 5)
    assert done.text("4").startswith("Halo VAE · benchmark on cpu: 1×4×12×20")
    assert "n=2" in done.text("4")
    assert "Halo VAE · kl on cpu" in done.text("7")
    difference = pictures(server, done, 6)
    assert difference.shape == pictures(server, done, 4).shape
    assert difference.max() < 150  # darker than the colour of 1e-4
    assert np.isfinite(difference).all()
    bar = [data for data in done.of("progress") if data["node"] == "4"]
    assert bar[-1]["value"] == bar[-1]["max"] == 800
    after = len(history.read_text("utf-8").splitlines()) if history.exists() else 0
    assert after == lines


@pytest.fixture(scope="session")
def ab(install: Install, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_inside(install, tmp_path_factory.mktemp("ab"), "ab.py")


def test_both_sides_are_measured(ab: Any) -> None:
    plain = ab["plain"]
    assert plain["images"] == plain["difference"] == [1, 64, 64, 3]
    assert not any(plain["blocked"])
    assert plain["shown"]
    assert plain["max_error"] <= 1e-4
    assert plain["speedup"] > 0
    assert plain["status"] == "ok"
    figures = plain["figures"]
    assert figures["reference"] == {"dtype": "float32", "untiled": True}
    assert [len(figures[side]["samples"]["ns"]) for side in ("stock", "halo")] == [2, 2]
    assert figures["figures"]["passed"]
    assert ab["same weights"]
    json.dumps(figures, allow_nan=False)


def test_stock_that_was_told_to_tile(ab: Any) -> None:
    assert "a tiled float32 decode; tiling of stock's own is part of it" in ab["tiled"]["report"]


def test_stock_that_had_to_tile_is_told(ab: Any) -> None:
    told = ab["had to tile"]
    assert "that the host had to tile" in told["report"]
    assert any("tiled" in line for line in told["figures"]["seen"]["said"])
    assert told["images"] == [1, 64, 64, 3]


def test_our_failure_leaves_stocks_figures(ab: Any) -> None:
    failed = ab["ours failed"]
    assert failed["blocked"] == [True, True, False, False, True, True, False]
    assert "FAIL: Halo failed: method is exact" in failed["report"]
    assert failed["figures"]["figures"]["stock_median_ns"] > 0
    assert failed["status"] == "error"


def test_stocks_failure_leaves_our_picture(ab: Any) -> None:
    failed = ab["stock failed"]
    assert failed["images"] == [1, 64, 64, 3]
    assert failed["blocked"] == [False, True, False, False, True, True, False]
    assert "no comparison: stock failed: a decoder that is broken" in failed["report"]


def test_a_stop_is_consumed_once(ab: Any) -> None:
    assert ab["interrupted"] == ["InterruptProcessingException", False]
    assert ab["after interrupt"] <= 1e-4
