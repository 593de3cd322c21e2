"""The ComfyUI checkouts to test with, from $HALO_VAE_COMFYUI: DIR=PYTHON pairs, separated by spaces."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "HALO_VAE_COMFYUI"


@dataclass(frozen=True)
class Install:
    folder: Path
    python: Path

    @property
    def version(self) -> tuple[int, ...]:
        text = (self.folder / "comfyui_version.py").read_text("utf-8")
        found = re.search(r'__version__ = "([\d.]+)"', text)
        assert found is not None, text
        return tuple(map(int, found.group(1).split(".")))

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))


def installs() -> list[Install]:
    pairs = [pair.partition("=") for pair in os.environ.get(VARIABLE, "").split()]
    # the interpreter is not resolved: a virtual environment's is a link to the one it was made from
    return [Install(Path(folder).resolve(), Path(python).absolute()) for folder, _, python in pairs]
