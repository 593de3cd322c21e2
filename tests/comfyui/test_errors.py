"""What a user reads when something is wrong."""

from __future__ import annotations

import torch
from safetensors.torch import save_file

from halo_vae.tests.comfyui.prompts import decoding, sources, write_latent
from halo_vae.tests.comfyui.server import Server


def test_errors_are_plain_sentences(server: Server, vae: str) -> None:
    write_latent(server.base, "wide.latent", (1, 16, 8, 8))
    done = server.run({**sources(vae, "wide.latent"), **decoding("HaloVAEDecode", 4)})
    assert done.status == "error"
    assert done.error["node_id"] == "4"
    assert "the latent has 16 channels" in done.error["exception_message"]
    assert done.error["exception_type"] == "halo_vae.optim.errors.LatentError"  # no path: pages show it first
    assert server.run({**sources(vae), **decoding("HaloVAEDecode", 4)}).status == "success"


def test_the_end_of_a_failed_decode_is_told(server: Server, vae: str) -> None:
    path = server.base / "input" / "nan.latent"
    save_file({"latent_tensor": torch.full((1, 4, 8, 8), torch.nan), "latent_format_version_0": torch.tensor([])}, path)
    done = server.run({**sources(vae, path.name), **decoding("HaloVAEDecode", 4)})
    assert done.status == "error"
    (ended,) = done.of("halo_vae.ended")
    assert (ended["node"], ended["panel"]["record"]["status"]) == ("4", "error")
    assert ended["panel"]["record"]["error"] in done.error["exception_message"]
    assert server.get("/halo_vae/panels/4") == ended["panel"]
    assert server.get("/halo_vae/history?limit=1")["rows"][0]["record_id"] == ended["panel"]["record_id"]
