"""Latent files: what is read, what is refused, and that a refusal names the file and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from halo_vae.optim.errors import LatentError
from halo_vae.profiling.cli.inputs import read_latent

VALUES = torch.linspace(-3, 3, 4 * 5 * 6).reshape(1, 4, 5, 6)


def save_latent(path: Path, latent: torch.Tensor, *, versioned: bool = True) -> Path:
    """A file as ComfyUI's SaveLatent writes it; before it had a version, latents were multiplied by 0.18215."""
    tensors = {"latent_tensor": latent.contiguous()}
    if versioned:
        tensors["latent_format_version_0"] = torch.tensor([])
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("name", ["a.latent", "a.safetensors", "A.LATENT"])
def test_read_latent_takes_comfyui_files(name: str, tmp_path: Path) -> None:
    assert torch.equal(read_latent(save_latent(tmp_path / name, VALUES)), VALUES)


def test_read_latent_undoes_the_old_scaling(tmp_path: Path) -> None:
    path = save_latent(tmp_path / "a.latent", VALUES * 0.18215, versioned=False)
    assert torch.allclose(read_latent(path), VALUES, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_read_latent_gives_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    read = read_latent(save_latent(tmp_path / "a.latent", VALUES.to(dtype)))
    assert read.dtype == torch.float32
    assert torch.allclose(read, VALUES, atol=0.02)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", ">f4", "int64"])
def test_read_latent_takes_npy(dtype: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", VALUES.round().numpy().astype(dtype))
    read = read_latent(tmp_path / "a.npy")
    assert read.dtype == torch.float32
    assert torch.equal(read, VALUES.round())


def test_read_latent_takes_columns_first_npy(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.asfortranarray(VALUES.numpy()))
    read = read_latent(tmp_path / "a.npy")
    assert torch.equal(read, VALUES)
    assert read.is_contiguous()


def test_read_latent_takes_video(tmp_path: Path) -> None:
    clip = VALUES[:, :, None]
    assert read_latent(save_latent(tmp_path / "a.latent", clip)).shape == (1, 4, 1, 5, 6)


def _no_file(path: Path) -> None:
    """Nothing there."""


def _folder(path: Path) -> None:
    path.mkdir()


def _truncated(path: Path) -> None:
    whole = save_latent(path.with_name("whole.latent"), VALUES).read_bytes()
    path.write_bytes(whole[: len(whole) - 40])


def _torch_pickle(path: Path) -> None:
    torch.save({"samples": VALUES}, path)


def _with(latent: torch.Tensor) -> Callable[[Path], object]:
    return lambda path: save_latent(path, latent)


def _npy(array: np.ndarray) -> Callable[[Path], object]:
    return lambda path: np.save(path, array)


REFUSED = [  # file name, what makes it, what the sentence must say
    ("a.latent", _no_file, "does not exist"),
    ("a.latent", _folder, "does not exist or is not a file"),
    ("a.latent", _truncated, "truncated"),
    ("a.latent", lambda p: p.write_bytes(b""), "not a readable safetensors file"),
    ("a.latent", lambda p: save_file({"samples": VALUES}, p), "latent_tensor"),
    ("a.pt", _torch_pickle, "not a kind of latent file"),
    ("a.latent", _torch_pickle, "not a readable safetensors file"),
    ("a.latent", _with(VALUES[0]), "[4, 5, 6]"),  # a batch axis is missing
    ("a.latent", _with(VALUES[None, None]), "[1, 1, 1, 4, 5, 6]"),
    ("a.latent", _with(VALUES[:0]), "empty"),
    ("a.latent", _with(VALUES[..., :0]), "empty"),
    ("a.latent", _with(VALUES.masked_fill(VALUES > 2.99, torch.nan)), "1 values that are NaN"),
    ("a.latent", _with(VALUES / 0), "120 values"),
    ("a.npy", lambda p: p.write_bytes(b"\x93NUMPY\x01\x00"), "not a readable .npy"),
    ("a.npy", lambda p: p.write_bytes(b""), "not a readable .npy"),
    ("a.npy", _npy(np.array(["x"])), "real numbers"),
    ("a.npy", _npy(np.zeros((1, 4, 5, 6), "complex64")), "real numbers"),
    ("a.npy", _npy(np.array([{"a": 1}], dtype=object)), "not a readable .npy"),  # would run a pickle
]


@pytest.mark.parametrize(("name", "make", "says"), REFUSED)
def test_read_latent_refuses(name: str, make: Callable[[Path], object], says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    make(path)
    with pytest.raises(LatentError) as caught:
        read_latent(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
