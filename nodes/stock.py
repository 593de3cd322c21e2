"""The host's own decode, so that the stock picture can be had bit for bit from the same node."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..optim.events import Choice, DecodeObserver, OpReport, PeakPrediction, PlanSummary
from ..optim.opaque import OpaqueDecoder, dtype_name


def decode_stock(vae: Any, opaque: OpaqueDecoder, latent: Tensor, observer: DecodeObserver) -> Tensor:
    """What the host's VAE Decode returns, frames folded into the batch: [B * frames, H, W, C]. No setting applies."""
    shape, dtype = tuple(latent.shape), dtype_name(opaque.dtype)
    observer.planned(_summary(opaque, shape))
    observer.op_started(0, 1, "decode", 1)
    observer.tile_started(0, 1, shape, dtype)
    observer.mark("compute")
    images: Tensor = vae.decode(latent)
    observer.progress(1, 1)
    observer.pass_done(shape[0], shape[0])
    observer.op_done(
        OpReport(name="decode", kind="decode", n_tiles=1, macs=0, dtype=dtype, native_dtype=dtype, backend="stock")
    )
    return images.reshape(-1, *images.shape[-3:]) if images.ndim == 5 else images


def _summary(opaque: OpaqueDecoder, shape: tuple[int, ...]) -> PlanSummary:
    """One call over everything; its arithmetic is not known, so MACs and bytes moved are 0."""
    height, width = (side * opaque.scale for side in shape[-2:])
    frames = opaque.frames(shape[2]) if len(shape) == 5 else 1
    estimate = 0 if opaque.estimate_bytes is None else opaque.estimate_bytes(shape, opaque.dtype)
    output = 4 * math.prod((shape[0], frames, height, width, opaque.output_channels))
    return PlanSummary(
        method="stock", approximate=False, strategy="whole", layout="contiguous", tile_px=(height, width), overlap_px=0,
        n_tiles=1, tile_grid=(1, 1), images_per_pass=shape[0], n_passes=1, macs=0, bytes_moved=0,
        predicted=PeakPrediction(pool=0, scratch=estimate, packed=0, output=output),
        choices=(Choice(name="method", value="stock", reason="as asked"),),
    )  # fmt: skip
