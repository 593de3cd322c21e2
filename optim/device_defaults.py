"""What a decode does by itself on each family of devices, and why: one table. Tuning and settings override it.

The figures behind it are other people's, or reasons; what was measured says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .gfx import Family

Strategy = Literal["strips", "tiles"]
Layout = Literal["channels_last", "contiguous"]
AttentionKernel = Literal["sdpa", "matmul"]
Convolution = Literal["direct", "winograd"]
Convolution3d = Literal["conv2d_sum", "conv3d"]

MIB = 1 << 20
MEGAPIXEL = 1 << 20
APU_BATCH = 8
"""Most pictures per pass on an APU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """Why each default is what it is; a sentence's end after "default: "."""

    strategy: str = "not looked into"
    tile_bytes: str = "not looked into"
    pass_pixels: str = "not looked into"
    precision: str = "not looked into"
    batch_cap: str = "not looked into"
    layout: str = "not looked into"
    attention: str = "not looked into"
    convolution: str = "not looked into"
    convolution3d: str = "not looked into"


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyDefaults:
    """One row of the table."""

    strategy: Strategy
    tile_bytes: int
    """Bytes of the widest map of one tile."""
    pass_pixels: int
    """Picture pixels per pass."""
    native_dtypes: tuple[str, ...]
    """Precision order: dtypes that the device multiplies at full speed, first choice first. Of a CPU it is read."""
    batch_cap: int
    layout: Layout
    attention: AttentionKernel
    convolution: Convolution
    convolution3d: Convolution3d
    unfolds: bool
    """The framework's convolution may copy its input once per tap: counted in the predicted peak."""
    reasons: Reasons


_SUM_3D = "MIOpen's 3-D kernels are slow on RDNA, and one 2-D convolution for each tap asks for no new kind of kernel"
_HIP_REASONS = Reasons(
    strategy="a new convolution shape may cost a kernel search, and fixed tiles have the same shapes at any resolution",
    tile_bytes="without MIOpen a convolution unfolds its input ninefold, and so large a tile unfolds to 288 MiB",
    pass_pixels="a picture of 1024x1024 fills the chip",
    precision="the chip multiplies float16 and bfloat16 matrices natively, and float16 keeps more digits",
    batch_cap="more pictures per pass gain nothing",
    layout="torch hands MIOpen channels_last maps only on request, and others measured them many times slower on RDNA",
    attention="fused attention may return NaN for the wide heads of a VAE, so scores are computed chunk by chunk",
    convolution="matrix hardware beats transforms in float32",
    convolution3d=_SUM_3D,
)
_RDNA = FamilyDefaults(
    strategy="tiles", tile_bytes=32 * MIB, pass_pixels=MEGAPIXEL, native_dtypes=("float16", "bfloat16"), batch_cap=16,
    layout="contiguous", attention="matmul", convolution="direct", convolution3d="conv2d_sum", unfolds=True,
    reasons=_HIP_REASONS,
)  # fmt: skip
_HALF_ONLY = replace(
    _RDNA,
    native_dtypes=("float16",),
    reasons=replace(_HIP_REASONS, precision="the chip packs float16 in pairs and has no bfloat16 arithmetic"),
)
_CUDA = FamilyDefaults(
    strategy="tiles", tile_bytes=64 * MIB, pass_pixels=MEGAPIXEL, native_dtypes=("float16", "bfloat16"), batch_cap=16,
    layout="channels_last", attention="sdpa", convolution="direct", convolution3d="conv2d_sum", unfolds=False,
    reasons=Reasons(
        strategy="cuDNN picks a kernel for each new shape, and fixed tiles have the same shapes at any resolution",
        tile_bytes="large enough to fill the chip, small beside its memory",
        pass_pixels="a picture of 1024x1024 fills the chip",
        precision="tensor cores multiply float16 and bfloat16, and float16 keeps more digits",
        batch_cap="more pictures per pass gain nothing",
        layout="tensor cores read channels_last",
        attention="fused attention needs no memory for scores",
        convolution="tensor cores beat transforms in float32",
        convolution3d="one 2-D convolution for each tap has the shapes that pictures have",
    ),
)  # fmt: skip
TABLE: dict[Family, FamilyDefaults] = {
    "rdna2": _HALF_ONLY,
    "rdna3": _RDNA,
    "rdna3.5": _RDNA,
    "rdna4": _RDNA,
    "cdna": replace(
        _RDNA,
        pass_pixels=4 * MEGAPIXEL,
        reasons=replace(
            _HIP_REASONS,
            pass_pixels="more than 200 compute units take four pictures of 1024x1024 to fill",
            layout="torch hands MIOpen channels_last maps only on request",
        ),
    ),
    "cuda": _CUDA,
    "cpu": FamilyDefaults(
        strategy="strips", tile_bytes=16 * MIB, pass_pixels=512 * 512, native_dtypes=("float32",), batch_cap=16,
        layout="channels_last", attention="sdpa", convolution="winograd", convolution3d="conv2d_sum", unfolds=False,
        reasons=Reasons(
            strategy="a new shape costs nothing here, and strips need no re-layout and carry their halo",
            tile_bytes="larger tiles leave the caches, and smaller ones spend their time on calls",
            pass_pixels="a picture of 512x512 keeps all cores busy",
            precision="read from the processor",
            batch_cap="more pictures per pass gain nothing",
            layout="measured: 1.5 times faster than contiguous maps",
            attention="fused attention needs no memory for scores",
            convolution="measured: transforms save arithmetic in float32",
            convolution3d="one 2-D convolution for each tap, where transforms do not fit",
        ),
    ),
    "other": replace(
        _CUDA, tile_bytes=32 * MIB,
        reasons=Reasons(
            strategy="fixed tiles do no harm on a device that nothing is known of",
            tile_bytes="small, as nothing is known of this device",
            pass_pixels="nothing is known of this device",
            precision="as on most devices; ops that are not finite are widened",
            batch_cap="more pictures per pass gain nothing",
            layout="as on most devices",
            attention="fused attention needs no memory for scores",
            convolution="the framework knows its device best",
            convolution3d="one 2-D convolution for each tap has the shapes that pictures have",
        ),
    ),
}  # fmt: skip
"""By family. A HIP device that is none of the families known takes UNKNOWN_HIP instead of `other`."""
UNKNOWN_HIP = replace(
    _HALF_ONLY,
    reasons=replace(_HIP_REASONS, precision="every AMD chip has float16; bfloat16 is emulated on unknown ones"),
)


def defaults_for(family: Family, *, hip: bool, apu: bool, capability: tuple[int, int] | None = None) -> FamilyDefaults:
    """The row of a device. `capability` is a CUDA device's; None where it is not known."""
    row = UNKNOWN_HIP if hip and family == "other" else TABLE[family]
    if family == "cuda" and capability is not None and capability < (8, 0):
        row = _older_cuda(row, capability)
    if apu and family != "cpu":
        why = "an APU shares its memory and its bandwidth with the processor"
        row = replace(row, batch_cap=APU_BATCH, reasons=replace(row.reasons, batch_cap=why))
    return row


def _older_cuda(row: FamilyDefaults, capability: tuple[int, int]) -> FamilyDefaults:
    name = f"sm_{capability[0]}{capability[1]}"
    if capability >= (7, 0):
        return replace(
            row, native_dtypes=("float16",), reasons=replace(row.reasons, precision=f"{name} has no bfloat16 products")
        )
    why = f"{name} multiplies 16-bit dtypes no faster"
    return replace(row, native_dtypes=("float32",), reasons=replace(row.reasons, precision=why))
