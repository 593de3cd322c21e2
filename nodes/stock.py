"""The host's own decode, so that the stock picture can be had bit for bit from the same node."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..optim.events import Choice, DecodeObserver, OpReport, PeakPrediction, PlanSummary
from ..optim.opaque import OpaqueDecoder
from ..optim.packing import dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledOptions:
    """What the host's tiled decode is told; pixels of the picture and frames of the clip."""

    tile_size: int
    overlap: int
    temporal_size: int
    temporal_overlap: int


def decode_stock(
    vae: Any, opaque: OpaqueDecoder, latent: Tensor, observer: DecodeObserver, tiled: TiledOptions | None = None
) -> Tensor:
    """What the host's VAE Decode returns, frames folded into the batch: [B * frames, H, W, C]. No setting applies.

    With `tiled` it is what the host's VAE Decode (Tiled) returns.
    """
    shape, dtype = tuple(latent.shape), dtype_name(opaque.dtype)
    observer.planned(_summary(opaque, shape, tiled))
    observer.op_started(0, 1, "decode", 1)
    observer.tile_started(0, 1, shape, dtype)
    observer.mark("compute")
    images: Tensor = vae.decode(latent) if tiled is None else _decode_tiled(vae, latent, tiled)
    observer.progress(1, 1)
    observer.pass_done(shape[0], shape[0])
    observer.op_done(
        OpReport(name="decode", kind="decode", n_tiles=1, macs=0, dtype=dtype, native_dtype=dtype, backend="stock")
    )
    return images.reshape(-1, *images.shape[-3:]) if images.ndim == 5 else images


def _decode_tiled(vae: Any, latent: Tensor, tiled: TiledOptions) -> Tensor:
    """The host's tiled decode with sizes in latent elements, limited as the host's own node limits them."""
    overlap = min(tiled.overlap, tiled.tile_size // 4)
    in_time = vae.temporal_compression_decode()
    frames, shared = (None, None) if in_time is None else _chunk(tiled, in_time)
    scale = vae.spacial_compression_decode()
    edge = tiled.tile_size // scale
    with torch.inference_mode():  # the host's tiled decode works in no other mode
        images: Tensor = vae.decode_tiled(
            latent, tile_x=edge, tile_y=edge, overlap=overlap // scale, tile_t=frames, overlap_t=shared
        )
    return images if torch.is_inference_mode_enabled() else images.clone()  # a normal tensor, as for any caller


def _chunk(tiled: TiledOptions, in_time: int) -> tuple[int, int]:
    """Latent frames that the host decodes at a time, and how many of them neighbours share."""
    wide = tiled.temporal_size >= 2 * tiled.temporal_overlap
    frames = max(2, tiled.temporal_size // in_time)
    shared = (tiled.temporal_overlap if wide else tiled.temporal_overlap // 2) // in_time
    return frames, max(1, min(frames // 2, shared))


def _summary(opaque: OpaqueDecoder, shape: tuple[int, ...], tiled: TiledOptions | None) -> PlanSummary:
    """One call over everything; its arithmetic is not known, so MACs and bytes moved are 0."""
    height, width = (side * opaque.scale for side in shape[-2:])
    frames = opaque.frames(shape[2]) if len(shape) == 5 else 1
    estimate = 0 if opaque.estimate_bytes is None else opaque.estimate_bytes(shape, opaque.dtype)
    output = 4 * math.prod((shape[0], frames, height, width, opaque.output_channels))
    edges = (height, width) if tiled is None else (min(height, tiled.tile_size), min(width, tiled.tile_size))
    starts, in_call = _chunk_starts(opaque, shape, tiled)
    return PlanSummary(
        method="stock", approximate=edges != (height, width) or len(starts) > 1, strategy="whole", layout="contiguous",
        tile_px=edges, overlap_px=0 if tiled is None else tiled.overlap, n_tiles=1, tile_grid=(1, 1),
        images_per_pass=shape[0], n_passes=1, macs=0, bytes_moved=0,
        predicted=PeakPrediction(pool=0, scratch=estimate, packed=0, output=output),
        choices=(Choice(name="method", value="stock", reason="as asked"),),
        chunk_frames=opaque.frames(in_call) if len(shape) == 5 else 0, n_chunks=len(starts),
        boundaries=tuple(opaque.frames(start + 1) - 1 for start in starts[1:]),
    )  # fmt: skip


def _chunk_starts(opaque: OpaqueDecoder, shape: tuple[int, ...], tiled: TiledOptions | None) -> tuple[range, int]:
    """First latent frame of each of the host's calls in time, and latent frames per call at most."""
    n_latents = shape[2] if len(shape) == 5 else 1
    if tiled is None or n_latents == 1:
        return range(1), n_latents
    frames, shared = _chunk(tiled, opaque.time_ratio)
    if n_latents <= frames:
        return range(1), n_latents
    return range(0, n_latents - shared, frames - shared), frames
