"""Latents as files: ComfyUI's `.latent`, safetensors and npy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...optim.errors import LatentError

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".latent", ".safetensors", ".npy")
_KEY = "latent_tensor"
_UNSCALED = "latent_format_version_0"
_SD_SCALE = 0.18215
"""Files without the version key hold latents multiplied by Stable Diffusion's scaling factor."""


def read_latent(path: Path) -> Tensor:
    """A latent, [B, C, H, W] or [B, C, T, H, W], float32 and finite. LatentError says what is wrong with the file."""
    if not path.is_file():
        raise LatentError(f"{path} does not exist or is not a file; give a file with a latent ({', '.join(SUFFIXES)})")
    if path.suffix.lower() not in SUFFIXES:
        raise LatentError(f"{path} is not a kind of latent file that is read here; give {', '.join(SUFFIXES)}")
    latent = _read_npy(path) if path.suffix.lower() == ".npy" else _read_safetensors(path)
    return _checked(latent, path)


def _read_safetensors(path: Path) -> Tensor:
    import torch

    from ...optim.errors import WeightsError
    from ...optim.weights import FileWeights

    try:
        file = FileWeights(path)
        if _KEY not in file.specs:
            raise LatentError(f"{path} holds no {_KEY!r}; give a latent as ComfyUI's Save Latent node writes it")
        latent = file.get(_KEY, torch.float32, torch.device("cpu"))
    except WeightsError as e:
        raise LatentError(str(e)) from e
    return latent if _UNSCALED in file.specs else latent / _SD_SCALE


def _read_npy(path: Path) -> Tensor:
    import numpy as np
    import torch

    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise LatentError(f"{path} is not a readable .npy file ({e}); write it with numpy.save") from e
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        raise LatentError(f"{path} does not hold an array of real numbers; write a float array with numpy.save")
    return torch.from_numpy(array.astype(np.float32))


def _checked(latent: Tensor, path: Path) -> Tensor:
    """The latent itself, if any decoder could take it: rank, size and values."""
    import torch

    shape = list(latent.shape)
    if latent.ndim not in (4, 5):
        raise LatentError(f"{path} holds a latent of shape {shape}; give [B, C, H, W] or [B, C, T, H, W]")
    if latent.numel() == 0:
        raise LatentError(f"{path} holds an empty latent, shape {shape}; every axis needs at least 1 element")
    if n_bad := int(torch.count_nonzero(~torch.isfinite(latent))):
        raise LatentError(f"{path} holds {n_bad} values that are NaN or infinite; sample the latent again")
    return latent.contiguous()
