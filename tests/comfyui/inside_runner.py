"""Runs a script of `inside/` with a ComfyUI's own Python and gives its answer."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from halo_vae.tests.comfyui.installs import Install
from halo_vae.tests.comfyui.server import ROOT

LIMIT_S = 600


def run_inside(install: Install, folder: Path, script: str, *flags: str) -> Any:
    """What `inside/<script>` answered; its log is part of the error where it fails."""
    path = folder / "path"
    path.mkdir(exist_ok=True)
    link = path / "halo_vae"
    if not link.is_symlink():
        link.symlink_to(ROOT, target_is_directory=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HALO_VAE_"))}
    env |= {"HALO_VAE_DATA_DIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_WAIT_POLICY": "passive"}
    command = [
        str(install.python),
        str(Path(__file__).parent / "inside" / script),
        str(install.folder),
        str(path),
        *flags,
    ]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
