"""VAE objects and latents that are not what they usually are: empty, for sound, of a video, changed by others."""

from __future__ import annotations

import sys
from typing import Any

from common import answer, compared, filled, latent, session, start, tiny_kl

start(sys.argv[3:])

import comfy.model_management as management  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402

from halo_vae.nodes.actions import decode, decode_tiled, monitor  # noqa: E402


def said(vae: Any, samples: Any, **settings: Any) -> list[str]:
    """Type and text of the error that a decode ends with."""
    try:
        decode(session(), samples, vae, **settings)
    except Exception as error:
        return [*(kind.__name__ for kind in type(error).__mro__), str(error)]
    return []


def tiny_wan() -> Any:
    """A real VAE object around a narrow WanVAE: clips in."""
    from comfy.ldm.wan.vae import WanVAE

    model = filled(
        WanVAE(dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1, attn_scales=[],
               temperal_downsample=[False, True, True], dropout=0.0)
    )  # fmt: skip
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("gamma"):
                tensor.add_(1.0)
    return clip_vae(model)


def clip_vae(model: Any) -> Any:
    """A real VAE object around a model of clips."""
    vae = tiny_kl()
    vae.first_stage_model = model
    vae.patcher = type(vae.patcher)(model, load_device=vae.device, offload_device=vae.device)
    vae.latent_dim, vae.latent_channels = 3, 16
    vae.upscale_ratio = (lambda frames: max(0, frames * 4 - 3), 8, 8)
    vae.upscale_index_formula = (4, 8, 8)
    return vae


class Stranger(torch.nn.Module):
    """Decodes as the model in it, whose names nobody knows."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.nobody = inner

    def decode(self, z: Any) -> Any:
        return self.nobody.decode(z)


def strange() -> Any:
    return clip_vae(Stranger(tiny_wan().first_stage_model))


def circular() -> Any:
    """As packs for seamless textures leave a VAE."""
    vae = tiny_kl()
    for layer in vae.first_stage_model.modules():
        if isinstance(layer, torch.nn.Conv2d) and layer.padding != (0, 0):
            layer.padding_mode = "circular"
            layer._reversed_padding_repeated_twice = [side for side in layer.padding[::-1] for _ in range(2)]
    return vae


class Nested:
    """As ComfyUI's own class of that kind looks; older versions have none."""

    is_nested = True

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def unbind(self) -> list[Any]:
        return self.parts


def nested(parts: list[Any]) -> Any:
    try:
        from comfy.nested_tensor import NestedTensor
    except ImportError:
        return Nested(parts)
    return NestedTensor(parts)


Z = latent(1, 4, 8, 10)
facts: dict[str, Any] = {"empty": said(comfy.sd.VAE(sd={}), {"samples": Z}), "missing": said(None, {"samples": Z})}
facts["wrong channels"] = said(tiny_kl(), {"samples": latent(1, 16, 8, 8)})
facts["no samples"] = said(tiny_kl(), {"noise_mask": Z})
facts["exact unknown"] = said(strange(), {"samples": latent(1, 16, 2, 4, 4)}, method="exact")
facts["circular"] = compared(circular, Z)
facts["clip"] = compared(tiny_wan, latent(1, 16, 3, 4, 4))
facts["strange clip"] = compared(strange, latent(1, 16, 3, 4, 4))
facts["picture"] = compared(tiny_wan, latent(1, 16, 4, 4), stock=tiny_wan().decode(latent(1, 16, 4, 4).unsqueeze(2)))

video = latent(1, 16, 3, 4, 4)
with torch.inference_mode():
    done = decode(session(), {"samples": nested([video, latent(1, 8, 16, 16)])}, tiny_wan())
    facts["nested"] = float((done.images - tiny_wan().decode(video).flatten(0, 1)).abs().max())

vae, ours = tiny_kl(), session()
samples = {"samples": Z, "noise_mask": torch.ones(1, 1, 64, 80), "batch_index": [3]}
made = decode(ours, samples, vae)
facts["extras"] = list(samples)
decode_tiled(ours, {"samples": Z}, vae, tile_size=64)
facts["monitor"] = monitor(ours, strange())

management.interrupt_current_processing(True)
try:
    decode(ours, {"samples": Z}, vae)
except BaseException as error:
    facts["interrupted"] = [type(error).__name__, management.processing_interrupted()]
facts["after interrupt"] = float((decode(ours, {"samples": Z}, vae).images - made.images).abs().max())
made.images.add_(0)  # a tensor as any other
answer(facts)
