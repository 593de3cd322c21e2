"""Prompts in the API's form, pictures out of what they saved, and files for them to load."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from halo_vae.benchmarks.plain_kl import random_sd_weights
from halo_vae.benchmarks.plain_wan import random_wan_weights
from halo_vae.tests.comfyui.server import Finished, Prompt, Server
from halo_vae.tests.goldens import golden

LATENT = "small.latent"
WAN_VAE = "wan_2.1_vae.safetensors"
"""The name that ComfyUI's own examples give it, and ours."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "HaloVAEDecode": {
        "method": "auto", "precision_mode": "auto", "tile_size": 768, "overlap": 96, "batch_optimization": True,
        "memory_prefetching": True, "adaptive_precision": True, "tensor_layout_optimization": True,
        "advanced_caching": True,
    },
    "HaloVAEDecodeTiled": {
        "tile_size": 512, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8, "method": "auto",
        "precision_mode": "auto", "batch_optimization": True, "memory_prefetching": True, "adaptive_precision": True,
        "tensor_layout_optimization": True, "advanced_caching": True,
    },
    "HaloVAEDecodeVideo": {
        "method": "auto", "precision_mode": "auto", "tile_size": 0, "overlap": 96, "chunk_frames": 0,
        "chunk_overlap": 8, "noise_seed": -1, "batch_optimization": True, "memory_prefetching": True,
        "adaptive_precision": True, "tensor_layout_optimization": True, "advanced_caching": True,
    },
    "HaloVAEBenchmark": {
        "warm_ups": 1, "runs": 2, "method": "auto", "precision_mode": "auto", "tile_size": 768, "overlap": 96,
        "chunk_frames": 0, "stock": "plain",
    },
    "HaloVAETune": {"budget_seconds": 5, "try_precisions": False, "fp16_accumulation": False},
    "VAEDecode": {},
    "VAEDecodeTiled": {"tile_size": 512, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8},
}  # fmt: skip


def sources(vae: str, latent: str = LATENT) -> Prompt:
    """Nodes 1 and 2: a VAE and a latent."""
    return {
        "1": {"class_type": "VAELoader", "inputs": {"vae_name": vae}},
        "2": {"class_type": "LoadLatent", "inputs": {"latent": latent}},
    }


def decoding(kind: str, number: int, **widgets: Any) -> Prompt:
    """A decode node of this number, and the node that saves its pictures, numbered 100 more; a tuning one has none."""
    if kind == "HaloVAETune":
        return {str(number): {"class_type": kind, "inputs": {"vae": ["1", 0], **DEFAULTS[kind], **widgets}}}
    inputs = {"samples": ["2", 0], "vae": ["1", 0], **DEFAULTS[kind], **widgets}
    saving = {"images": [str(number), 0], "filename_prefix": f"n{number}"}
    return {
        str(number): {"class_type": kind, "inputs": inputs},
        str(100 + number): {"class_type": "SaveImage", "inputs": saving},
    }


def pictures(server: Server, done: Finished, number: int) -> np.ndarray[Any, Any]:
    """What the decode node of this number gave, as saved: [B, H, W, 3] of whole numbers."""
    images = done.shown[str(100 + number)]["images"]
    arrays = [np.asarray(Image.open(io.BytesIO(server.view(i))).convert("RGB"), dtype=np.int16) for i in images]
    return np.stack(arrays)


def assert_same(server: Server, done: Finished, one: int, other: int, steps: int = 1) -> None:
    """The pictures of two decode nodes differ by at most so many steps of 255."""
    assert done.status == "success", str(done.messages[-1])[:1000]
    a, b = pictures(server, done, one), pictures(server, done, other)
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= steps
    assert a.std() > 1  # no picture of one colour


def write_latent(folder: Path, name: str, shape: tuple[int, ...], seed: int = 2) -> str:
    """A seeded latent in the input folder."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.8
    save_file({"latent_tensor": values, "latent_format_version_0": torch.tensor([])}, str(folder / "input" / name))
    return name


def write_wan_vae(folder: Path, *, any_width: bool) -> str:
    """A Wan 2.1 decoder, and of the encoder what ComfyUI knows it by; a narrow one where ComfyUI takes `any_width`."""
    found = golden("wan21").weights if any_width else random_wan_weights()
    weights = {name: tensor.half() for name, tensor in found.items()}
    weights["encoder.conv1.weight"] = torch.zeros(weights["decoder.head.0.gamma"].shape[0], 3, 3, 3, 3)
    save_file(weights, str(folder / "models" / "vae" / WAN_VAE))
    return WAN_VAE


def write_full_vae(folder: Path) -> str:
    """A decoder of SD's full size with random weights, halved in size by float16."""
    weights = {name: tensor.half() for name, tensor in random_sd_weights().items()}
    save_file(weights, str(folder / "models" / "vae" / "full.safetensors"))
    return "full.safetensors"
