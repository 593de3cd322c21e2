"""The nodes in a real ComfyUI, over its HTTP API."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from halo_vae.tests.comfyui.prompts import assert_same, decoding, sources
from halo_vae.tests.comfyui.server import Prompt, Server

pytestmark = pytest.mark.usefixtures("calm")


def monitor(**links: list[Any]) -> Prompt:
    return {"9": {"class_type": "HaloVAEMonitor", "inputs": links}}


def kept_between_decodes(text: str) -> str:
    found = re.search(r"kept between decodes\s+(\S+ \S+)", text)
    assert found is not None, text
    return found.group(1)


def test_import_says_one_line(server: Server) -> None:
    at_start = server.log.partition("Starting server")[0]
    lines = [line for line in at_start.splitlines() if "halo" in line.lower()]
    ours = [line for line in lines if not re.search(r"\d seconds: ", line)]  # ComfyUI's own list of import times
    assert len(ours) == 1, ours
    assert re.fullmatch(r"Halo VAE \d+\.\d+\.\d+: 7 nodes in ComfyUI \S+", ours[0])
    assert "Traceback" not in at_start


@pytest.mark.parametrize("latent", ["small.latent", "pair.latent", "medium.latent"])
def test_picture_equals_stock(server: Server, vae: str, latent: str) -> None:
    done = server.run(
        {
            **sources(vae, latent),
            **decoding("VAEDecode", 3),
            **decoding("HaloVAEDecode", 4, precision_mode="fp32"),
            **decoding("HaloVAEDecodeTiled", 5, precision_mode="fp32", tile_size=64),
        }
    )
    assert_same(server, done, 3, 4)
    assert_same(server, done, 3, 5)


@pytest.mark.parametrize(("stock", "ours"), [("VAEDecode", "HaloVAEDecode"), ("VAEDecodeTiled", "HaloVAEDecodeTiled")])
def test_stock_method_is_the_host_decode(server: Server, vae: str, stock: str, ours: str) -> None:
    off = dict.fromkeys(
        (
            "batch_optimization", "memory_prefetching", "adaptive_precision", "tensor_layout_optimization",
            "advanced_caching",
        ),
        False,
    )  # fmt: skip
    sizes = {"tile_size": 128, "overlap": 64} if stock == "VAEDecodeTiled" else {}
    done = server.run(
        {
            **sources(vae, "medium.latent"),
            **decoding(stock, 3, **sizes),
            **decoding(ours, 4, method="stock", **sizes, **off),
        }
    )
    assert_same(server, done, 3, 4, steps=0)
    assert "stock" in done.text("4")


def test_blended_is_another_picture_of_the_same(server: Server, vae: str) -> None:
    done = server.run(
        {
            **sources(vae, "medium.latent"),
            **decoding("VAEDecode", 3),
            **decoding("HaloVAEDecode", 4, method="blended", tile_size=96, overlap=32),
        }
    )
    assert done.status == "success"
    assert "approximate" in done.text("4")
    with pytest.raises(AssertionError):
        assert_same(server, done, 3, 4)


def test_panel_progress_and_stats_arrive(server: Server, vae: str) -> None:
    prompt = {**sources(vae, "pair.latent"), **decoding("HaloVAEDecode", 4)}
    prompt["5"] = {"class_type": "HaloVAEStats", "inputs": {"stats": ["4", 1]}}
    done = server.run(prompt)
    assert done.status == "success"
    assert done.text("4").startswith("Halo VAE · kl on cpu: 2×4×8×8 float32 → 2×64×64×3")
    assert "equal to an untiled decode" in done.text("4")
    assert done.text("5") == done.text("4")
    steps = [m for m in done.of("progress") if m["node"] == "4"]
    assert steps
    assert steps[-1]["value"] == steps[-1]["max"]


def test_decodes_are_in_the_history(server: Server, vae: str) -> None:
    path = server.base / "halo" / "history.jsonl"
    before = len(path.read_text("utf-8").splitlines()) if path.exists() else 0
    server.run({**sources(vae), **decoding("HaloVAEDecode", 4, tile_size=256)})
    lines = path.read_text("utf-8").splitlines()
    assert len(lines) == before + 1
    assert json.loads(lines[-1])["status"] == "ok"


def test_unchanged_decode_is_not_run_again(server: Server, vae: str) -> None:
    prompt = {**sources(vae), **decoding("HaloVAEDecode", 4, tile_size=288)}
    server.run(prompt)
    lines = len((server.base / "halo" / "history.jsonl").read_text("utf-8").splitlines())
    done = server.run(prompt)
    assert done.status == "success"
    assert len((server.base / "halo" / "history.jsonl").read_text("utf-8").splitlines()) == lines


def test_free_empties_the_pool(server: Server, vae: str) -> None:
    server.run({**sources(vae), **decoding("HaloVAEDecode", 4, tile_size=320)})
    assert kept_between_decodes(server.run({**sources(vae), **monitor(vae=["1", 0])}).text("9")) != "0 B"
    server.post("/free", {"free_memory": True, "unload_models": True})
    server.run(monitor())  # a prompt that comes at once may run before the memory is freed
    assert kept_between_decodes(server.run(monitor()).text("9")) == "0 B"
    done = server.run({**sources(vae), **decoding("VAEDecode", 3), **decoding("HaloVAEDecode", 4, tile_size=352)})
    assert_same(server, done, 3, 4)


def test_monitor_tells_what_auto_would_choose(server: Server, vae: str) -> None:
    text = server.run({**sources(vae, "medium.latent"), **monitor(vae=["1", 0])}).text("9")
    assert re.search(r"family\s+kl", text)
    assert re.search(r"auto chooses\s+exact", text)
    assert "2048×2048 px" in text
    assert text.count("Plan for") == 3
    both = monitor(vae=["1", 0], samples=["2", 0])
    assert server.run({**sources(vae, "medium.latent"), **both}).text("9").count("Plan for") == 1
