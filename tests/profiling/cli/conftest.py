"""The command line as a function, and small files to feed it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from halo_vae.profiling.cli import main
from halo_vae.profiling.cli.demo import DATA, VAE_NAME
from halo_vae.tests.goldens import golden


@dataclass(frozen=True)
class Ended:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def halo(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run `halo-vae` with these arguments in this process."""

    def run(*argv: object) -> Ended:
        capsys.readouterr()
        code = main([str(a) for a in argv])
        captured = capsys.readouterr()
        return Ended(int(code), captured.out, captured.err)

    return run


@pytest.fixture
def vae() -> Path:
    """The demo's VAE: KL, 4 latent channels, x8."""
    return DATA / VAE_NAME


@pytest.fixture
def latent_file(tmp_path: Path) -> Callable[..., Path]:
    """Make a latent file of this shape; the same values each time."""

    def make(name: str = "small.latent", shape: tuple[int, ...] = (1, 4, 5, 7)) -> Path:
        latent = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        save_file({"latent_tensor": latent, "latent_format_version_0": torch.tensor([])}, tmp_path / name)
        return tmp_path / name

    return make


@pytest.fixture
def video_vae(tmp_path: Path) -> Path:
    """A tiny Wan 2.1 decoder: 16 latent channels, x8, and 4 frames per latent frame but the first."""
    path = tmp_path / "wan.safetensors"
    save_file(dict(golden("wan21").weights), path)
    return path
