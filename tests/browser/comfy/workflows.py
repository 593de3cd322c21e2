"""The image example, with files that the test server has, so that each run decodes anew."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from halo_vae.tests.comfyui.workflows import FOLDER, read_workflow

DECODE, SAVE, STATS, MONITOR = 3, 4, 5, 6
"""Node ids of the example."""
_TILE_SIZE = 2
"""Its place among the decode node's widgets."""


class Workflows:
    """Workflows for one server: `folder` is its base folder, `vae` a VAE that decodes at once."""

    def __init__(self, folder: Path, vae: str) -> None:
        self.folder, self._vae = folder, vae
        self._tile_sizes = itertools.count(1024, 32)

    def image(self, latent: str = "small.latent", vae: str | None = None, *, monitor: bool = True) -> dict[str, Any]:
        """The example with this latent. Each one differs in a widget, so that ComfyUI's cache does not know it."""
        workflow = read_workflow(FOLDER / "image.json")
        if not monitor:
            workflow["nodes"] = [node for node in workflow["nodes"] if node["id"] != MONITOR]
            workflow["links"] = [link for link in workflow["links"] if link[3] != MONITOR]
            for node in workflow["nodes"]:
                for slot in node.get("outputs", []):
                    kept = {link[0] for link in workflow["links"]}
                    slot["links"] = [link for link in slot["links"] or [] if link in kept]
        for node in workflow["nodes"]:
            if node["type"] == "VAELoader":
                node["widgets_values"] = [vae or self._vae]
            elif node["type"] == "LoadLatent":
                node["widgets_values"] = [latent]
            elif node["id"] == DECODE:
                node["widgets_values"][_TILE_SIZE] = next(self._tile_sizes)
        return workflow

    def long(self) -> dict[str, Any]:
        """A decode that takes long enough to be watched and stopped."""
        return self.image("large.latent", "full.safetensors", monitor=False)

    def failing(self) -> dict[str, Any]:
        """A latent of another model."""
        return self.image("wrong.latent", monitor=False)
