"""Servers with other flags. Those about the memory of a GPU exclude --cpu; they are tested inside the process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halo_vae.tests.comfyui.installs import Install
from halo_vae.tests.comfyui.prompts import assert_same, decoding, sources, write_latent
from halo_vae.tests.comfyui.server import running

SETS = [
    pytest.param(("--fp16-vae", "--disable-smart-memory"), "off", 6, id="fp16 vae"),
    pytest.param(("--bf16-vae", "--cache-none"), "per_op", 16, id="bf16 vae"),
    pytest.param(("--fp16-intermediates",), "summary", 1, id="fp16 intermediates"),
]


@pytest.mark.parametrize(("flags", "level", "steps"), SETS)
def test_picture_under_flags(
    install: Install, base: Path, vae: str, flags: tuple[str, ...], level: str, steps: int
) -> None:
    if "--fp16-intermediates" in flags and install.version < (0, 20):
        pytest.skip("this ComfyUI has no --fp16-intermediates")
    write_latent(base, "tiny.latent", (1, 4, 4, 5))
    with running(install, base, *flags, HALO_VAE_PROFILE=level) as server:
        done = server.run(
            {
                **sources(vae, "tiny.latent"),
                **decoding("VAEDecode", 3),
                **decoding("HaloVAEDecode", 4),
                **decoding("HaloVAEDecode", 5, method="blended"),
            }
        )
        assert_same(server, done, 3, 4, steps)
        assert_same(server, done, 3, 5, steps)
        record = json.loads((base / "halo" / "history.jsonl").read_text("utf-8").splitlines()[-1])
        assert record["level"] == level
        assert (record["phases"] is None) == (level == "off")
        assert bool(record["stages"]) == (level == "per_op")
        assert "Traceback" not in server.log
