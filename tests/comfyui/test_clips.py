"""Clips in a real ComfyUI: every decode node against its own, an interrupt in the middle, and the memory after it."""

from __future__ import annotations

import io
import json
import threading
import time
from typing import Any

import pytest
from PIL import Image

from halo_vae.tests.comfyui.prompts import WAN_VAE, assert_same, decoding, pictures, sources, write_latent
from halo_vae.tests.comfyui.server import Prompt, Server
from halo_vae.tests.comfyui.test_interrupt import MOST_S
from halo_vae.tests.comfyui.test_server import kept_between_decodes, monitor

pytestmark = pytest.mark.usefixtures("calm")
FULL = {"precision_mode": "fp32"}


def clip(server: Server, *shape: int) -> Prompt:
    """The Wan VAE and a seeded latent of that shape."""
    return sources(WAN_VAE, write_latent(server.base, f"{'x'.join(map(str, shape))}.latent", shape))


@pytest.mark.parametrize(
    ("shape", "n_frames"),
    [((1, 16, 3, 4, 6), 9), ((2, 16, 2, 4, 5), 10), ((1, 16, 1, 5, 4), 1)],
    ids=["clip", "two clips", "one frame"],
)
def test_clip_equals_stock(server: Server, shape: tuple[int, ...], n_frames: int) -> None:
    done = server.run(
        {
            **clip(server, *shape),
            **decoding("VAEDecode", 3),
            **decoding("HaloVAEDecodeVideo", 4, **FULL),
            **decoding("HaloVAEDecode", 5, **FULL),
            **decoding("HaloVAEDecodeTiled", 6, **FULL, method="exact"),
            **decoding("HaloVAEDecodeVideo", 7, **FULL, chunk_frames=4, tile_size=32),
        }
    )
    for ours in (4, 5, 6, 7):
        assert_same(server, done, 3, ours)
        assert "equal to an untiled decode" in done.text(str(ours))
    assert len(pictures(server, done, 4)) == n_frames


def test_animation_of_a_clip(server: Server) -> None:
    prompt = {**clip(server, 1, 16, 2, 4, 6), **decoding("HaloVAEDecodeVideo", 4)}
    prompt["104"] = {
        "class_type": "SaveAnimatedWEBP",
        "inputs": {
            "images": ["4", 0], "filename_prefix": "clip", "fps": 16.0, "lossless": True, "quality": 80,
            "method": "default",
        },
    }  # fmt: skip
    done = server.run(prompt)
    assert done.status == "success"
    (saved,) = done.shown["104"]["images"]
    with Image.open(io.BytesIO(server.view(saved))) as animation:
        assert (animation.n_frames, animation.size) == (5, (48, 32))


@pytest.mark.parametrize("delay_s", [0.0, 2.0], ids=["at once", "midway"])
def test_interrupt_stops_a_clip(server: Server, delay_s: float) -> None:
    asked: list[float] = []
    ended: list[float] = []

    def interrupt() -> None:
        asked.append(time.monotonic())
        server.post("/interrupt")

    timer = threading.Timer(delay_s, interrupt)

    def watch(message: dict[str, Any]) -> None:
        if message["type"] == "progress" and message["data"]["node"] == "4" and not timer.is_alive() and not asked:
            timer.start()
        if message["type"] == "execution_interrupted":
            ended.append(time.monotonic())

    # with these settings no other test decodes, so that ComfyUI has no result of it
    done = server.run(
        {**clip(server, 1, 16, 41, 40, 60), **decoding("HaloVAEDecodeVideo", 4, overlap=64)}, on_message=watch
    )
    timer.join()
    assert done.status == "interrupted"
    assert ended[0] - asked[0] <= MOST_S
    record = json.loads((server.base / "halo" / "history.jsonl").read_text("utf-8").splitlines()[-1])
    assert (record["status"], record["image_shape"]) == ("interrupted", None)

    after = {**clip(server, 1, 16, 2, 4, 6), **decoding("VAEDecode", 3)}
    done = server.run({**after, **decoding("HaloVAEDecodeVideo", 4, **FULL, overlap=64 + 32 * int(delay_s))})
    assert_same(server, done, 3, 4)
    assert kept_between_decodes(server.run(monitor()).text("9")) != "0 B"
    server.post("/free", {"free_memory": True, "unload_models": True})
    server.run(monitor())  # a prompt that comes at once may run before the memory is freed
    assert kept_between_decodes(server.run(monitor()).text("9")) == "0 B"
