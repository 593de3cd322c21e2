"""Stopping a large decode, and going on after it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from halo_vae.tests.comfyui.prompts import decoding, sources, write_latent
from halo_vae.tests.comfyui.server import Server

pytestmark = pytest.mark.usefixtures("calm")
MOST_S = 2.0


@pytest.mark.parametrize(("share", "precision"), [(0.0, "auto"), (0.4, "fp32")], ids=["at once", "midway"])
def test_interrupt_stops_a_full_size_decode(server: Server, share: float, precision: str) -> None:
    write_latent(server.base, "large.latent", (1, 4, 128, 128))
    asked: list[float] = []
    ended: list[float] = []

    def watch(message: dict[str, Any]) -> None:
        data = message["data"]
        if message["type"] == "progress" and data["node"] == "4" and not asked and data["value"] >= share * data["max"]:
            server.post("/interrupt")
            asked.append(time.monotonic())
        if message["type"] == "execution_interrupted":
            ended.append(time.monotonic())

    wide = {**sources("full.safetensors", "large.latent"), **decoding("HaloVAEDecode", 4, precision_mode=precision)}
    done = server.run(wide, on_message=watch)
    assert done.status == "interrupted"
    assert done.of("execution_interrupted")[-1]["node_id"] == "4"
    assert ended[0] - asked[0] <= MOST_S
    record = json.loads((server.base / "halo" / "history.jsonl").read_text("utf-8").splitlines()[-1])
    assert (record["status"], record["image_shape"]) == ("interrupted", None)
    after = server.run({**sources("full.safetensors", "small.latent"), **decoding("HaloVAEDecode", 4)})
    assert after.status == "success"
