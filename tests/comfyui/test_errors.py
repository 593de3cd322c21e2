"""What a user reads when something is wrong."""

from __future__ import annotations

from halo_vae.tests.comfyui.prompts import decoding, sources, write_latent
from halo_vae.tests.comfyui.server import Server


def test_errors_are_plain_sentences(server: Server, vae: str) -> None:
    write_latent(server.base, "wide.latent", (1, 16, 8, 8))
    done = server.run({**sources(vae, "wide.latent"), **decoding("HaloVAEDecode", 4)})
    assert done.status == "error"
    assert done.error["node_id"] == "4"
    assert "the latent has 16 channels" in done.error["exception_message"]
    assert server.run({**sources(vae), **decoding("HaloVAEDecode", 4)}).status == "success"
