"""The example workflows: as ComfyUI lists them, and run."""

from __future__ import annotations

from pathlib import Path

import pytest

from halo_vae.tests.comfyui.installs import Install
from halo_vae.tests.comfyui.prompts import WAN_VAE
from halo_vae.tests.comfyui.server import Server
from halo_vae.tests.comfyui.workflows import example_workflows, read_workflow, to_prompt

pytestmark = pytest.mark.usefixtures("calm")


@pytest.mark.parametrize("path", example_workflows(), ids=lambda p: p.stem)
def test_example_runs(server: Server, install: Install, vae: str, path: Path) -> None:
    prompt = to_prompt(read_workflow(path), server.get("/object_info"))
    for node in prompt.values():
        if node["class_type"] == "VAELoader" and node["inputs"]["vae_name"] not in (vae, WAN_VAE):
            node["inputs"]["vae_name"] = vae  # the demo's VAE, where this ComfyUI can load it
        if node["class_type"] == "LoadLatent" and vae != "tiny_kl_vae.safetensors":
            node["inputs"]["latent"] = "medium.latent"
        if node["class_type"] == "HaloVAETune":
            node["inputs"]["budget_seconds"] = 5
        if node["class_type"] == "HaloVAEBenchmark":
            node["inputs"] |= {"warm_ups": 0, "runs": 1}
        if node["class_type"] == "EmptyHunyuanLatentVideo" and install.version < (0, 4):
            node["inputs"] |= {"width": 64, "height": 48, "length": 5}  # its Wan decoder is of the published width
    done = server.run(prompt)
    assert done.status == "success", str(done.messages[-1])[:1000]
    ours = {number for number, node in prompt.items() if node["class_type"].startswith("HaloVAE")}
    assert len(ours) >= 2
    assert ours <= done.shown.keys()
    assert all("Halo VAE" in done.text(number) for number in ours)


def test_comfyui_lists_the_examples(server: Server) -> None:
    listed = server.get("/workflow_templates")
    assert sorted(listed["ComfyUI-HaloVAE"]) == [path.stem for path in example_workflows()]
    status, body = server.request("GET", f"/api/workflow_templates/ComfyUI-HaloVAE/{example_workflows()[0].name}")
    assert status == 200
    assert body == example_workflows()[0].read_bytes()


def test_help_pages_are_served(server: Server) -> None:
    info = server.get("/object_info")
    for node in (name for name in info if name.startswith("HaloVAE")):
        status, body = server.request("GET", f"/extensions/ComfyUI-HaloVAE/docs/{node}.md")
        assert status == 200, node
        assert body.startswith(b"# ")
