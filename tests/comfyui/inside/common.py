"""Run by a ComfyUI's own Python, not by pytest: starts its modules for the CPU and prints one answer."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def start(flags: list[str]) -> None:
    """Make `comfy` importable as main.py does, with these flags and a package named halo_vae beside it."""
    checkout, path = sys.argv[1], sys.argv[2]
    sys.path[:0] = [checkout, path]
    sys.argv = ["main.py", "--cpu", *flags]
    import comfy.options

    comfy.options.enable_args_parsing()
    import logging

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    import torch

    torch.set_num_threads(2)


def answer(facts: Any) -> None:
    print(json.dumps(facts))


def tiny_kl(width: int = 32, seed: int = 0) -> Any:
    """A real VAE object around a narrow AutoencoderKL, x8."""
    import comfy.sd
    from comfy.ldm.models.autoencoder import AutoencoderKL

    config = {
        "double_z": True, "z_channels": 4, "resolution": 64, "in_channels": 3, "out_ch": 3, "ch": width,
        "ch_mult": [1, 1, 2, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
    }  # fmt: skip
    model = filled(AutoencoderKL(ddconfig=dict(config), embed_dim=4), seed)
    return comfy.sd.VAE(sd=model.state_dict(), config={"params": {"ddconfig": config, "embed_dim": 4}})


def filled(module: Any, seed: int = 0) -> Any:
    """Seeded weights by fan-in."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            values = torch.randn(p.shape, generator=generator)
            if p.ndim > 1:
                p.copy_(values * p[0].numel() ** -0.5)
            else:
                p.copy_(values * 0.05 + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    return module.eval().requires_grad_(False)


def latent(*shape: int, seed: int = 2) -> Any:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fingerprint(vae: Any) -> str:
    """Every tensor of the VAE, bit by bit."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(vae.first_stage_model.state_dict().items()):
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}{tensor.device}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def manners(vae: Any) -> list[Any]:
    """How the VAE's layers are set to compute, and what they hold besides tensors."""
    return [
        (
            name, getattr(layer, "comfy_cast_weights", None), len(getattr(layer, "weight_function", ())),
            len(getattr(layer, "bias_function", ())), sorted(vars(layer)),
        )
        for name, layer in vae.first_stage_model.named_modules()
    ]  # fmt: skip


def session() -> Any:
    """The nodes' session, without a history."""
    from halo_vae.nodes.comfy_host import ComfyHost
    from halo_vae.nodes.session import Session

    return Session(ComfyHost(), keep_history=False)


def compared(make: Callable[[], Any], z: Any, stock: Any = None, **settings: Any) -> dict[str, Any]:
    """Our picture against the host's own (or a given one), and what became of the VAE."""
    import torch

    from halo_vae.nodes.actions import decode

    vae, ours = make(), session()
    with torch.inference_mode():
        expected = make().decode(z) if stock is None else stock
        expected = expected.reshape(-1, *expected.shape[-3:])
        ours.host.load(vae, 0)
        before, manners_before = fingerprint(vae), manners(vae)
        done = decode(ours, {"samples": z}, vae, **settings)
    record = done.record
    return {
        "error": float((done.images.float() - expected.float()).abs().max()),
        "spread": float(expected.float().std()),
        "shape": list(done.images.shape),
        "dtype": str(done.images.dtype),
        "stock_dtype": str(expected.dtype),
        "method": record.plan.method,
        "computed_in": sorted({kept.dtype for kept in record.precision.kept}),
        "loaded_dtype": record.identity.loaded_dtype,
        "family": record.identity.family,
        "same_weights": fingerprint(vae) == before,
        "same_manners": manners(vae) == manners_before,
        "fallbacks": [f.reason for f in record.fallbacks],
        "inference": done.images.is_inference(),
    }


def here(name: str) -> Path:
    return Path(__file__).resolve().parents[2] / name
