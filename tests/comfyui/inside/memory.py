"""What else stays loaded, and what the pool gives back, on a device of made-up size. argv after the paths: flags."""

from __future__ import annotations

import sys
from typing import Any

from common import answer, latent, session, start, tiny_kl

start(sys.argv[3:])

import comfy.model_management as management  # noqa: E402
import comfy.model_patcher  # noqa: E402
import torch  # noqa: E402

from halo_vae.nodes.actions import decode  # noqa: E402

GIB = 1 << 30
TOTAL = int(2.6 * GIB)
DEVICE = torch.device("cpu:0")  # equal to no plain "cpu", so ComfyUI manages it as it does a GPU
SETTINGS = {"precision_mode": "fp32"}


def loaded_bytes() -> int:
    return sum(int(m.loaded_size()) for m in management.loaded_models() if m.load_device == DEVICE)


def free_memory(device: Any = None, torch_free_too: bool = False) -> Any:
    free = TOTAL - loaded_bytes()
    return (free, 0) if torch_free_too else free


def other_model(nbytes: int) -> Any:
    """A model that says it is so large, as one of another node would be."""

    class Other(torch.nn.Module):
        pass

    class Patcher(comfy.model_patcher.ModelPatcher):
        def loaded_size(self) -> int:
            return nbytes if self in management.loaded_models() else 0

    return Patcher(Other(), load_device=DEVICE, offload_device=torch.device("cpu"), size=nbytes)


def vae_on_device() -> Any:
    vae = tiny_kl(width=64)
    vae.device = vae.patcher.load_device = DEVICE
    return vae


management.get_free_memory = free_memory
management.get_torch_device = lambda: DEVICE
asked: list[int] = []
LOAD = management.load_models_gpu


def load_models_gpu(models: Any, memory_required: int = 0, **more: Any) -> Any:
    asked.append(int(memory_required))
    return LOAD(models, memory_required=memory_required, **more)


management.load_models_gpu = load_models_gpu


def after_decoding(by: str) -> dict[str, Any]:
    """Decodes 512 x 512 beside another model and tells whether it is still loaded."""
    management.unload_all_models()
    asked.clear()
    other, vae = other_model(GIB), vae_on_device()
    LOAD([other])
    with torch.inference_mode():
        if by == "stock":
            vae.decode(latent(1, 4, 64, 64))
        else:
            decode(ours, {"samples": latent(1, 4, 64, 64)}, vae, **SETTINGS)
    return {"stays": other in management.loaded_models(), "asked": max(asked)}


def after_running_out() -> dict[str, Any]:
    """The pool gets no memory at first, though ComfyUI counts enough of it as free."""
    management.unload_all_models()
    other, vae, pool = other_model(GIB), vae_on_device(), ours.engine.pool
    LOAD([other])
    give, refused = pool._source, []

    def refuse_once(nbytes: int, device: Any) -> Any:
        if not refused:
            refused.append(nbytes)
            raise RuntimeError("HIP error: out of memory")
        return give(nbytes, device)

    pool._source = refuse_once
    done = decode(ours, {"samples": latent(1, 4, 64, 64)}, vae, **SETTINGS)
    pool._source = give
    return {
        "stays": other in management.loaded_models(),
        "vae": any(m is vae.patcher for m in management.loaded_models()),
        "rungs": [f.used.split(":")[0] for f in done.record.fallbacks],
        "status": done.record.status.value,
    }


ours = session()
facts: dict[str, Any] = {"stock": after_decoding("stock"), "halo": after_decoding("halo")}
facts["held"] = ours.held_bytes()
names = [type(m.model).__name__ for m in management.loaded_models()]
facts["counted"] = [names.count("HaloVaePool"), free_memory() == TOTAL - loaded_bytes()]
LOAD([other_model(int(0.1 * GIB))])
facts["held after a small model"] = ours.held_bytes()
LOAD([other_model(int(1.4 * GIB))])
facts["held after a large model"] = ours.held_bytes()
decode(ours, {"samples": latent(1, 4, 8, 8)}, vae_on_device(), **SETTINGS)
facts["held again"] = ours.held_bytes()
management.unload_all_models()
facts["held after unloading all"] = ours.held_bytes()
facts["out of memory"] = after_running_out()
answer(facts)
