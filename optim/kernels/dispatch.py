"""Which implementation runs a convolution, and why the others do not. Integers and names only."""

from __future__ import annotations

from dataclasses import dataclass

from ..device import DeviceProfile
from ..plan import Backend, Layout
from ..program import Conv
from ..tiling import TileGrid
from . import winograd

MIN_CHANNELS = 32
"""Below this the transforms cost more than the products they save."""
MIN_PIXELS = 1024
"""Output pixels of an op below which transforming its filter costs more than it saves (measured at 512 channels)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """The backend of one convolution."""

    backend: Backend
    refusals: tuple[str, ...]
    """Why `winograd` was not taken; empty where it was."""


def choose_backend(
    op: Conv, *, fold: bool, dtype: str, layout: Layout, grid: TileGrid, profile: DeviceProfile
) -> BackendChoice:
    """`winograd` where its constraints hold and the device gains by it, else `torch`."""
    refusals = tuple(_refusals(op, fold, dtype, layout, grid, profile))
    return BackendChoice(backend="torch" if refusals else "winograd", refusals=refusals)


def _refusals(op: Conv, fold: bool, dtype: str, layout: Layout, grid: TileGrid, profile: DeviceProfile) -> list[str]:
    why = []
    if profile.convolution != "winograd":
        why.append(f"{profile.kind} has faster convolutions of its own")
    if op.kernel[1:] != (3, 3) or (op.upsample == 2 and not fold):
        why.append("only 3x3 kernels, upsampled or not")
    if dtype != "float32":
        why.append(f"{dtype} would round the transformed values")
    if layout != "channels_last":
        why.append("needs channels_last")
    if min(op.in_channels, op.out_channels) < MIN_CHANNELS:
        why.append(f"fewer than {MIN_CHANNELS} channels")
    # the last strip may be shorter than the others
    last = grid.height % grid.rows or grid.rows if not grid.slides else grid.rows
    if not fold and min(last, grid.cols) < winograd.EDGE:
        why.append(f"a tile is smaller than {winograd.EDGE}x{winograd.EDGE}")
    if grid.computed < MIN_PIXELS:
        why.append(f"fewer than {MIN_PIXELS} pixels")
    return why
