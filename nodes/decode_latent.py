"""From a LATENT dictionary and a VAE object to an IMAGE: the function under the decode nodes; imports no host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..optim.blend_plan import choose_dtype, plan_blend
from ..optim.blended import decode_blended
from ..optim.decode import Decoder, Engine
from ..optim.device import DeviceProfile, describe_device
from ..optim.errors import UnknownDecoderError
from ..optim.events import SILENT, DecodeObserver
from ..optim.opaque import OpaqueDecoder, check_finite, fit_latent
from ..optim.settings import DecodeSettings
from .latents import latent_of
from .stock import decode_stock
from .vae import describe_vae, finish_of

Load = Callable[[tuple[int, ...], torch.dtype], None]
"""Brings the model onto its device; told the largest latent of one call and its dtype, to ask for no more memory."""


def decode_latent(
    samples: Mapping[str, Any],
    vae: Any,
    settings: DecodeSettings = DecodeSettings(),  # noqa: B008 (frozen)
    *,
    decoder: Decoder | None = None,
    engine: Engine | None = None,
    observer: DecodeObserver = SILENT,
    load: Load | None = None,
    profile: DeviceProfile | None = None,
) -> Tensor:
    """Pictures [B * frames, H, W, C], float32 in the VAE's picture range, on the VAE's output device.

    `decoder` is the exact decoder of this VAE where its family is known: `auto` and `exact` use it, on `engine` (a new
    one with an empty pool unless given). Without it `auto` is blended, and `exact` an UnknownDecoderError. `load` is
    called once, after every check of latent and settings and before the first decoder call; exact decoding reads its
    weights through `decoder` and needs no load. LatentError, VaeError and the errors of the method are passed on.
    """
    opaque = describe_vae(vae)
    latent = fit_latent(opaque, latent_of(samples))
    check_finite(latent)
    out_device = torch.device(getattr(vae, "output_device", "cpu"))
    if settings.method == "stock":
        if load is not None:
            load(tuple(latent.shape), opaque.dtype)
        return decode_stock(vae, opaque, latent, observer)
    if settings.method == "blended" or (decoder is None and settings.method == "auto"):
        profile = profile or describe_device(opaque.device)
        if load is not None:
            plan = plan_blend(opaque, tuple(latent.shape), settings, profile)
            load(plan.tile_shape, choose_dtype(opaque, settings).dtype)
        return decode_blended(
            opaque, latent, settings, finish=finish_of(vae), observer=observer, out_device=out_device, profile=profile
        )
    return _decode_exact(decoder, engine, opaque, vae, latent, settings, observer, out_device)


def _decode_exact(
    decoder: Decoder | None,
    engine: Engine | None,
    opaque: OpaqueDecoder,
    vae: Any,
    latent: Tensor,
    settings: DecodeSettings,
    observer: DecodeObserver,
    out_device: torch.device,
) -> Tensor:
    """The exact method. UnknownDecoderError where the VAE has no exact decoder."""
    if decoder is None:
        raise UnknownDecoderError(
            f"method is exact, but {opaque.name} is of no known family; set method to blended, or to auto",
            keys_seen=(), families=(),
        )  # fmt: skip
    engine = engine if engine is not None else Engine()
    return engine.decode(decoder, latent, settings, observer=observer, finish=finish_of(vae), out_device=out_device)
