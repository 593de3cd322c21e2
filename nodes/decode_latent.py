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
from ..optim.events import SILENT, DecodeObserver, Fallback
from ..optim.opaque import OpaqueDecoder, check_finite, fit_latent
from ..optim.settings import DecodeSettings
from .latents import latent_of
from .stock import TiledOptions, decode_stock
from .vae import describe_vae, finish_of

Load = Callable[[tuple[int, ...], torch.dtype], None]
"""Brings the model onto its device; told the largest latent of one call and its dtype, to ask for no more memory."""


def decode_latent(
    samples: Mapping[str, Any],
    vae: Any,
    settings: DecodeSettings = DecodeSettings(),  # noqa: B008 (frozen)
    *,
    decoder: Decoder | None = None,
    no_decoder: str | None = None,
    engine: Engine | None = None,
    observer: DecodeObserver = SILENT,
    load: Load | None = None,
    profile: DeviceProfile | None = None,
    out_dtype: torch.dtype = torch.float32,
    tiled: TiledOptions | None = None,
) -> Tensor:
    """Pictures [B * frames, H, W, C] in the VAE's picture range, in `out_dtype`, on the VAE's output device.

    `decoder` is the exact decoder of this VAE where its family is known: `auto` and `exact` use it, on `engine` (a new
    one with an empty pool unless given); where memory does not suffice for that in any way, `auto` blends tiles of the
    VAE's own decoder. Without it `auto` is blended, and `exact` an UnknownDecoderError; `no_decoder` says why there is
    none. `load` is called once, after every check of latent and settings and before the first call of the VAE's own
    decoder; exact decoding reads its weights through `decoder` and needs no load. The host's own decode chooses its
    dtype itself, and with `tiled` is its tiled one. LatentError, VaeError and the errors of the method are passed on.
    """
    opaque = describe_vae(vae)
    latent = fit_latent(opaque, latent_of(samples))
    check_finite(latent)
    out_device = torch.device(getattr(vae, "output_device", "cpu"))
    if settings.method == "stock":
        if load is not None:
            load(tuple(latent.shape), opaque.dtype)
        return decode_stock(vae, opaque, latent, observer, tiled)
    if settings.method == "blended" or (decoder is None and settings.method == "auto"):
        if settings.method == "auto" and no_decoder is not None:
            observer.fallback(Fallback(kind="method", where="decode", given="exact", used="blended", reason=no_decoder))
        profile = profile or describe_device(opaque.device)
        if load is not None:
            plan = plan_blend(opaque, tuple(latent.shape), settings, profile)
            load(plan.tile_shape, choose_dtype(opaque, settings).dtype)
        images = decode_blended(
            opaque, latent, settings, finish=finish_of(vae), observer=observer, out_device=out_device, profile=profile
        )
        return images.to(out_dtype)
    if decoder is None:
        raise _unknown(opaque, no_decoder)
    engine = engine if engine is not None else Engine()

    def as_opaque() -> OpaqueDecoder:
        if load is not None:
            load((1, *latent.shape[1:]), choose_dtype(opaque, settings).dtype)
        return opaque

    return engine.decode(
        decoder, latent, settings, observer=observer, finish=finish_of(vae), out_dtype=out_dtype, out_device=out_device,
        as_opaque=as_opaque,
    )  # fmt: skip


def _unknown(opaque: OpaqueDecoder, reason: str | None) -> UnknownDecoderError:
    """The error of the exact method where the VAE has no exact decoder."""
    why = f" ({reason})" if reason else ""
    return UnknownDecoderError(
        f"method is exact, but {opaque.name} is of no known family{why}; set method to blended, or to auto",
        keys_seen=(), families=(),
    )  # fmt: skip
