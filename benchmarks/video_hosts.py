"""ComfyUI's own video decoder modules at their full width with seeded random weights, and our engine over the same.

Importable anywhere; building a module needs ComfyUI on the path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from halo_vae.optim.decode import Engine, open_decoder
from halo_vae.optim.events import PeakPrediction, PlanSummary
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.store import keep_raw
from halo_vae.optim.weights import MappingWeights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RESIDUAL_GAIN, SPREAD = 0.5, 0.05
"""What a res block adds has half the deviation of its input; norms lie around 1 and biases around 0 by SPREAD."""
ENCODER_PARTS = ("encoder", "quant_conv")


@dataclass(frozen=True, kw_only=True)
class HostFamily:
    """A family whose module the host has."""

    build: Callable[[], Any]
    """The host's module, weights not yet set."""
    latent_channels: int
    rate: int
    """Output frames per latent frame after the first."""
    scale: int
    """Picture pixels per latent pixel."""
    drop: tuple[str, ...] = ENCODER_PARTS
    """Parts that no decode uses."""
    weights: Callable[[], Mapping[str, Tensor]] | None = None
    """Seeded weights by name; None draws them by the module's own shapes."""
    hints: Callable[[Any], dict[str, str]] = field(default=lambda module: {})
    """What weights cannot tell of this module."""
    same_state: bool = False
    """Does the host carry the same frames from call to call as our plan?"""

    def latent_frames(self, frames: int) -> int:
        """Latent frames of a clip. ValueError where no latent makes so many."""
        if frames < 1 or (frames - 1) % self.rate:
            raise ValueError(f"no latent decodes to {frames} frames here; give 1 more than a multiple of {self.rate}")
        return 1 + (frames - 1) // self.rate

    def latent_shape(self, size_px: int, frames: int) -> tuple[int, int, int, int, int]:
        """[1, C, T, h, w] of a square clip's latent. ValueError where there is none."""
        if size_px < 2 * self.scale or size_px % self.scale:
            raise ValueError(
                f"no latent decodes to {size_px} pixels here; give a multiple of {self.scale} from {2 * self.scale} on"
            )
        edge = size_px // self.scale
        return 1, self.latent_channels, self.latent_frames(frames), edge, edge

    def latent(self, size_px: int, frames: int, seed: int = 1) -> Tensor:
        """Seeded float32 latents [1, C, T, h, w] of a square clip. ValueError where there is none."""
        return torch.randn(self.latent_shape(size_px, frames), generator=torch.Generator().manual_seed(seed))


def _wan21() -> Any:
    from comfy.ldm.wan.vae import WanVAE

    return WanVAE(dim=96, z_dim=16, **_WAN)


def _wan21_weights() -> Mapping[str, Tensor]:
    from halo_vae.benchmarks.plain_wan import random_wan_weights

    return random_wan_weights()


def _wan22() -> Any:
    from comfy.ldm.wan.vae2_2 import WanVAE

    return WanVAE(dim=160, z_dim=48, **_WAN)


def _hunyuan_video() -> Any:
    from comfy.ldm.models.autoencoder import AutoencoderKL

    layout = {
        "double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
        "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0, "conv3d": True,
        "time_compress": 4,
    }  # fmt: skip
    return AutoencoderKL(ddconfig=layout, embed_dim=16)


def _hunyuan15() -> Any:
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    layout = {
        "block_out_channels": [128, 256, 512, 1024, 1024], "in_channels": 3, "out_channels": 3, "num_res_blocks": 2,
        "ffactor_spatial": 16, "ffactor_temporal": 4, "z_channels": 32, "downsample_match_channel": True,
        "upsample_match_channel": True,
    }  # fmt: skip
    vae = "comfy.ldm.hunyuan_video.vae_refiner"
    return AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.EmptyRegularizer"},
        encoder_config={"target": f"{vae}.Encoder", "params": layout},
        decoder_config={"target": f"{vae}.Decoder", "params": layout},
    )


def _ltx() -> Any:
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return VideoVAE(version=0)


def _ltx_hints(module: Any) -> dict[str, str]:
    config = getattr(module, "config", None)  # older hosts do not keep it, and their weights tell enough
    return {} if config is None else {"config": json.dumps({"vae": config})}


_WAN: dict[str, Any] = {
    "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [], "temperal_downsample": [False, True, True],
}  # fmt: skip
_WAN_ENCODER = ("encoder", "conv1")
FAMILIES = {
    "wan21": HostFamily(
        build=_wan21, latent_channels=16, rate=4, scale=8, drop=_WAN_ENCODER, weights=_wan21_weights, same_state=True
    ),
    "wan22": HostFamily(build=_wan22, latent_channels=48, rate=4, scale=16, drop=_WAN_ENCODER, same_state=True),
    "hunyuan_video": HostFamily(build=_hunyuan_video, latent_channels=16, rate=4, scale=8),
    "hunyuan15": HostFamily(build=_hunyuan15, latent_channels=32, rate=4, scale=16),
    "ltx": HostFamily(build=_ltx, latent_channels=128, rate=8, scale=32, hints=_ltx_hints),
}
"""By the names that our engine gives them."""


def fill_by_fan_in(module: torch.nn.Module, seed: int = 0) -> None:
    """Draw every weight and kept buffer so that activations stay near unit deviation; equal seeds give equal weights.

    A random stack of res blocks would grow without a gain below 1 on what each of them adds.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            values = torch.randn(tensor.shape, generator=generator)
            norm = name.endswith("gamma") or (tensor.ndim == 1 and name.endswith(".weight"))
            if norm or name.endswith("std-of-means"):
                values = 1.0 + SPREAD * values
            elif tensor.ndim > 1:
                gain = RESIDUAL_GAIN if ".residual.6." in name or ".conv2." in name else 1.0
                values *= gain * (tensor[0].numel() ** -0.5)
            else:
                values *= SPREAD
            tensor.copy_(values)


def make_module(family: HostFamily) -> Any:
    """The host's decoder in float32, its weights set, without the parts that only encode."""
    module = family.build()
    for part in family.drop:
        if hasattr(module, part):
            delattr(module, part)
    if family.weights is None:
        fill_by_fan_in(module)
    else:
        module.load_state_dict(family.weights())
    return module.float().eval().requires_grad_(False)


class HostSide:
    """The host's module, called directly."""

    def __init__(self, module: Any, precision: str) -> None:
        """The module is cast in place."""
        self._dtype = DTYPES[precision]
        self._module = module.to(self._dtype)

    def decode(self, latent: Tensor) -> Tensor:
        """[1, C, T, h, w] -> [1, 3, frames, H, W], raw."""
        with torch.inference_mode():
            return self._module.decode(latent.to(self._dtype))  # type: ignore[no-any-return]


class HaloSide:
    """The exact engine over a module's own weights, with its default settings."""

    def __init__(self, module: Any, precision: str, hints: dict[str, str]) -> None:
        """The weights are the module's, not copies."""
        self._dtype = DTYPES[precision]
        self.engine = Engine()
        self._decoder = open_decoder(MappingWeights(module.state_dict()), loaded_dtype=self._dtype, hints=hints)
        self._settings = DecodeSettings(precision_mode=precision)  # type: ignore[arg-type]

    def decode(self, latent: Tensor) -> Tensor:
        """[1, C, T, h, w] -> [frames, H, W, 3], raw, in the dtype that the host's module gives."""
        return self.engine.decode(self._decoder, latent, self._settings, finish=keep_raw, out_dtype=self._dtype)

    def predict(self, latent_shape: tuple[int, ...]) -> tuple[PeakPrediction, PlanSummary]:
        """What `decode` would take for a latent of that shape, less what is packed already, and its plan."""
        summary = self.engine.plan(self._decoder, latent_shape, self._settings).summary
        output = summary.predicted.output // 4 * self._dtype.itemsize  # `plan` takes it to be float32
        return replace(summary.predicted, output=output), summary


def as_frames(clip: Tensor) -> Tensor:
    """The host's [1, 3, frames, H, W] as a float32 [frames, H, W, 3]."""
    return clip[0].movedim(0, -1).float()
