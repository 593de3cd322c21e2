"""Which implementation runs a convolution, and why the one that was wanted does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from ..device import DeviceProfile
from ..plan import Backend, Layout
from ..program import Conv
from ..settings import DecodeSettings
from ..tiling import TileGrid
from .backends import MIN_CHANNELS as MIN_CHANNELS  # others ask here for them
from .backends import MIN_PIXELS as MIN_PIXELS
from .backends import ConvCase, constraints_of, picture_case, refusals

DEFAULTS = DecodeSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """The backend of one convolution."""

    backend: Backend
    refusals: tuple[str, ...]
    """Why the backend that was asked for was not taken, or with `auto` the fastest one; empty where it was."""


def choose_backend(
    op: Conv,
    *,
    fold: bool,
    dtype: str,
    layout: Layout,
    grid: TileGrid,
    profile: DeviceProfile,
    settings: DecodeSettings = DEFAULTS,
) -> BackendChoice:
    """What was asked for where its constraints hold, else the device's default: `winograd` where it gains by it."""
    case = picture_case(op, fold=fold, dtype=dtype, layout=layout, grid=grid)
    if settings.kernel_backend == "auto":
        return _default(case, profile, settings)
    why = refusals(constraints_of(settings.kernel_backend, profile), case, profile, settings)
    if not why:
        return BackendChoice(backend=cast(Backend, settings.kernel_backend), refusals=())
    return BackendChoice(backend=_default(case, profile, settings).backend, refusals=why)


def _default(case: ConvCase, profile: DeviceProfile, settings: DecodeSettings) -> BackendChoice:
    why = refusals(constraints_of("winograd", profile), case, profile, settings)
    if profile.convolution != "winograd":
        why = (f"{profile.kind} has faster convolutions of its own", *why)
    return BackendChoice(backend="torch" if why else "winograd", refusals=why)


def choose_layout(settings: DecodeSettings, profile: DeviceProfile) -> tuple[Layout, str]:
    """The layout of maps and the reason: the device's default, unless the backend asked for takes another one only."""
    if not settings.tensor_layout_optimization:
        return "contiguous", "layout optimisation is off"
    if settings.kernel_backend != "auto":
        layouts = constraints_of(settings.kernel_backend, profile).layouts
        if profile.layout not in layouts:
            return cast(Layout, layouts[0]), f"rule: the only one that {settings.kernel_backend} takes"
    return profile.layout, f"default: {profile.reasons.layout}"
