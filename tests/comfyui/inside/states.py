"""Decodes one VAE in every state that ComfyUI may have its weights in. argv after the paths: flags."""

from __future__ import annotations

import sys
from typing import Any

from common import answer, compared, latent, start, tiny_kl

start(sys.argv[3:])

import comfy.model_management as management  # noqa: E402
import torch  # noqa: E402

Z = latent(1, 4, 8, 10)
KEY = "decoder.up.0.block.0.conv1"


def offload() -> None:
    """As --novram does it on a GPU: every layer keeps its weights away and casts them when it runs."""
    management.is_device_cpu = lambda device: False
    management.vram_state = management.VRAMState.NO_VRAM


PLAIN_LOAD = management.LoadedModel.model_load


def offload_in_part() -> None:
    """As --lowvram does it on a GPU: some layers are loaded, others cast."""
    management.LoadedModel.model_load = lambda self, *given, **more: PLAIN_LOAD(self, 1 << 20)


def patched() -> Any:
    vae = tiny_kl()
    model = vae.first_stage_model.state_dict()
    change = {
        f"{KEY}.{leaf}": ("diff", (torch.ones_like(model[f"{KEY}.{leaf}"]) * 0.05,)) for leaf in ("weight", "bias")
    }
    assert len(vae.patcher.add_patches(change, 0.7)) == 2
    return vae


def wrapped() -> Any:
    vae = tiny_kl()
    vae.patcher.add_weight_wrapper(f"{KEY}.weight", lambda weight: weight.flip(0))
    return vae


def eighths(casts: bool) -> Any:
    """Weights of the convolutions in float8, with layers that cast them or with layers that do not."""
    vae = tiny_kl()
    for layer in vae.first_stage_model.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.weight = torch.nn.Parameter(layer.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
            layer.comfy_cast_weights = casts
    return vae


def widened() -> Any:
    """The picture of those weights without float8 in the way."""
    vae = eighths(False)
    for layer in vae.first_stage_model.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.weight = torch.nn.Parameter(layer.weight.data.to(vae.vae_dtype), requires_grad=False)
    with torch.inference_mode():
        return vae.decode(Z)


def how_layers_compute(make: Any) -> dict[str, int]:
    """Layers that cast their weights themselves, and those that patch them as they do."""
    vae = make()
    management.load_models_gpu([vae.patcher])
    layers = list(vae.first_stage_model.modules())
    return {
        "casting": sum(bool(getattr(layer, "comfy_cast_weights", False)) for layer in layers),
        "patching": sum(bool(getattr(layer, "weight_function", None)) for layer in layers),
    }


facts: dict[str, Any] = {}
facts["plain"] = compared(tiny_kl, Z)
facts["blended"] = compared(tiny_kl, Z, method="blended")
facts["patched"] = compared(patched, Z)
facts["wrapped"] = compared(wrapped, Z)
facts["eighths that cast"] = compared(lambda: eighths(True), Z)
facts["eighths"] = compared(lambda: eighths(False), Z, stock=widened())
facts["eighths blended"] = compared(lambda: eighths(False), Z, stock=widened(), method="blended")
PLAIN = management.is_device_cpu, management.vram_state
offload()
facts["layers"] = how_layers_compute(patched)
facts["offloaded"] = compared(tiny_kl, Z)
facts["offloaded blended"] = compared(tiny_kl, Z, method="blended")
facts["offloaded patched"] = compared(patched, Z)
facts["offloaded wrapped"] = compared(wrapped, Z)
management.is_device_cpu, management.vram_state = PLAIN
offload_in_part()
facts["layers in part"] = how_layers_compute(patched)
facts["in part"] = compared(tiny_kl, Z)
facts["in part patched"] = compared(patched, Z)
management.LoadedModel.model_load = PLAIN_LOAD
with torch.inference_mode():
    facts["patches matter"] = float((patched().decode(Z) - tiny_kl().decode(Z)).abs().max())
    facts["wrapping matters"] = float((wrapped().decode(Z) - tiny_kl().decode(Z)).abs().max())
answer(facts)
