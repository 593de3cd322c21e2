"""What a caller may ask of a decode; every field changes what runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

from .errors import SettingsError

Method = Literal["auto", "exact", "blended", "stock"]
PrecisionMode = Literal["auto", "fp32", "bf16", "fp16", "mixed"]
Strategy = Literal["auto", "strips", "tiles"]
KernelBackend = Literal["auto", "torch", "winograd", "shifted_gemm", "conv2d_sum", "kitchen"]
Use = Literal["leave", "on", "off"]

KEEP_BYTES = 256 << 20
"""Default bytes that stay in the pool after a decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """Settings of one decode; the defaults are the recommended ones. SettingsError if a value is out of range."""

    method: Method = "auto"
    """`exact` equals the untiled decode, `blended` feathers tiles of an opaque decoder, `auto` picks exact where
    the decoder is known; `stock` is the host's own decode and exists only inside a host."""
    precision_mode: PrecisionMode = "auto"
    """Arithmetic of the convolutions; `mixed` keeps the residual stream in the loaded dtype."""
    plan: Strategy = "auto"
    """Shape of the tiles: full-width `strips`, or fixed 2-D `tiles`; `auto` is the device's default."""
    tile_size: int = 768
    """Upper bound of a tile's edge in picture pixels (0 = the planner's choice); a strip's area stays within its
    square."""
    overlap: int = 96
    """Overlap of neighbouring tiles in picture pixels; matters to the blended method only."""
    chunk_frames: int = 0
    """Output frames per chunk of a video decode, 0 = the planner's choice."""
    seed: int = -1
    """Seed of decoders that add noise; -1 = the global generator."""
    batch_optimization: bool = True
    """Let one pass hold several pictures."""
    memory_prefetching: bool = True
    """Prepare the next pass's latent while this one computes."""
    adaptive_precision: bool = True
    """Redo a non-finite op in a wider dtype; off: report it as an error."""
    tensor_layout_optimization: bool = True
    """Use the device's fastest memory layout; off: contiguous (NCHW)."""
    advanced_caching: bool = True
    """Keep programs, plans and packed weights between decodes."""
    keep_bytes: int = KEEP_BYTES
    """Most bytes that stay in the pool after the decode."""
    chunk_overlap: int = 8
    """Output frames that neighbouring chunks of a video share; the blended method only, as exact chunks carry what
    they need. At least a lead-in of one latent frame is shared, and at most half a chunk."""
    chunk_lat: int = 0
    """Latent frames per chunk of an exact video decode, 0 = by `chunk_frames`."""
    kernel_backend: KernelBackend = "auto"
    """What convolutions run on wherever it takes them; all else runs on the device's default, as with `auto`."""
    fp16_accumulation: bool = False
    """Allow kernels that add up products in float16, which loses digits (`kitchen` does)."""
    cudnn: Use = "leave"
    """Torch's switch for cuDNN, which on ROCm is MIOpen, for the time of the decode; `leave` is as the host has it."""

    def __post_init__(self) -> None:
        """Check every field against its type and range."""
        hints = get_type_hints(type(self))
        for field in fields(self):
            value, hint = getattr(self, field.name), hints[field.name]
            allowed = get_args(hint)
            if allowed and value not in allowed:
                raise SettingsError(f"{field.name} is {value!r}; choose one of {', '.join(allowed)}")
            if hint is bool and not isinstance(value, bool):
                raise SettingsError(f"{field.name} is {value!r}; give true or false")
            if hint is int and (isinstance(value, bool) or not isinstance(value, int)):
                raise SettingsError(f"{field.name} is {value!r}; give a whole number")
        if self.tile_size != 0 and not 16 <= self.tile_size <= 16384:
            raise SettingsError(f"tile_size is {self.tile_size} pixels; give 0 (the planner chooses) or 16 to 16384")
        if not 0 <= self.overlap <= 8192:
            raise SettingsError(f"overlap is {self.overlap} pixels; give 0 to 8192")
        if not 0 <= self.chunk_frames <= 4096:
            raise SettingsError(f"chunk_frames is {self.chunk_frames}; give 0 (the planner chooses) to 4096")
        if not 0 <= self.chunk_lat <= 4096:
            raise SettingsError(f"chunk_lat is {self.chunk_lat} latent frames; give 0 (by chunk_frames) to 4096")
        if not 0 <= self.chunk_overlap <= 4096:
            raise SettingsError(f"chunk_overlap is {self.chunk_overlap} frames; give 0 to 4096")
        if not -1 <= self.seed < 2**64:
            raise SettingsError(f"seed is {self.seed}; give -1 (the global generator) or 0 to 2**64 - 1")
        if self.keep_bytes < 0:
            raise SettingsError(f"keep_bytes is {self.keep_bytes}; give 0 or more")
