"""The blended method on the command line: every tile is decoded by itself and feathered into its neighbours.

The engine knows the decoder, so `exact` is better in every respect but one: a tile's peak memory does not grow with
the picture. It is also what a host does with a decoder it does not know, so the two can be compared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...optim.decode import Decoder, Engine
from ...optim.opaque import Decode, OpaqueDecoder
from ...optim.packing import DTYPES
from ...optim.plan import Plan
from ...optim.settings import DecodeSettings, PrecisionMode
from ...optim.store import keep_raw
from ...optim.video.frames import output_frames
from ...optim.video.ops import is_video
from ...optim.video.plan import ClipPlan

_MODES: dict[torch.dtype, PrecisionMode] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def tile_settings(dtype: torch.dtype) -> DecodeSettings:
    """How one tile is decoded: whole, in that dtype."""
    return DecodeSettings(method="exact", precision_mode=_MODES[dtype], tile_size=0)


def plan_tile(engine: Engine, decoder: Decoder, shape: tuple[int, ...], dtype: torch.dtype) -> Plan | ClipPlan:
    """The plan of one tile's decode."""
    return engine.plan(decoder, shape, tile_settings(dtype))


def opaque_of(engine: Engine, decoder: Decoder) -> OpaqueDecoder:
    """The decoder as a call on one tile [B, C, H, W] or [B, C, T, H, W], whose norms see that tile alone."""
    program = decoder.program
    video = is_video(program)

    def decode_as(dtype: torch.dtype) -> Decode:
        def call(latent: Tensor) -> Tensor:
            images = engine.decode(decoder, latent, tile_settings(dtype), finish=keep_raw, out_device=decoder.device)
            if video:
                clips = images.view(latent.shape[0], -1, *images.shape[1:])
                return clips.permute(0, 4, 1, 2, 3)
            return images.permute(0, 3, 1, 2)

        return call

    def estimate(shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return plan_tile(engine, decoder, shape, dtype).predicted.total

    def frames(n: int) -> int:
        return output_frames(program, n) if video else n

    return OpaqueDecoder(
        name=f"this {program.family} decoder", decode=decode_as(decoder.loaded_dtype), decode_as=decode_as,
        latent_dim=3 if video else 2, latent_channels=program.latent_channels, output_channels=program.out_channels,
        scale=program.scale[1], time_ratio=frames(9) - frames(8), frames=frames, dtype=decoder.loaded_dtype,
        working_dtypes=tuple(DTYPES[name] for name in program.working_dtypes),
        device=decoder.device, content_hash=decoder.content_hash, estimate_bytes=estimate,
    )  # fmt: skip
