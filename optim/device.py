"""What a decode runs on, as data: tests build fake ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from .budget import budget_of
from .device_defaults import AttentionKernel, Convolution, Convolution3d, Layout, Reasons, Strategy, defaults_for
from .device_readers import Kind, Readings, Versions, read_device, read_host_pool
from .events import Choice, PeakPrediction
from .gfx import Family, family_of, is_apu, parse_gfx

if TYPE_CHECKING:
    from .kernels.backends import Constraints
    from .tuning import TunedEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One device and the defaults that follow from it."""

    kind: Kind
    name: str
    """Device string that torch understands ("cpu", "cuda:0")."""
    native_dtypes: tuple[str, ...]
    """Dtypes whose convolutions run at full speed, narrowest preferred first."""
    unified_memory: bool
    """True where the device shares the host's memory (CPU, APU)."""
    budget_bytes: int | None
    """Bytes a decode may take; None = unknown, plan for the least."""
    strategy: Strategy
    """Default plan: strips where a new shape costs nothing, tiles where it costs a kernel search."""
    layout: Layout
    batch_cap: int
    """Most pictures per pass."""
    pass_pixels: int
    """Picture pixels that one pass may hold before batching stops paying."""
    tile_bytes: int
    """Bytes of the widest map of one tile: bounds staging and kernel results."""
    attention: AttentionKernel
    convolution: Convolution = "direct"
    """Algorithm of float32 3x3 convolutions: the framework's own, or Winograd's out of matrix products."""
    convolution3d: Convolution3d = "conv2d_sum"
    """3-D kernels: one 2-D convolution for each tap on shifted frames, added up, or the framework's own 3-D one."""
    workers: int = 1
    """Threads that share Winograd's blocks (workers.py)."""
    unfolds: bool = False
    """The framework's convolution may copy its input once per tap."""
    gfx: str | None = None
    """Base name of an AMD chip ("gfx1151"); None elsewhere and where it is not told."""
    family: Family = "other"
    compute_units: int | None = None
    versions: Versions | None = None
    budget_reason: str = ""
    """Names the reading that sets the budget, or why there is none."""
    invalid_readings: tuple[str, ...] = ()
    """Readings that cannot be true and were not used."""
    reasons: Reasons = Reasons()  # noqa: RUF009 (frozen)
    """Why each default is what it is."""
    tuned: TunedEntry | None = None
    """What was measured here for the decoder at hand; its choices stand in the fields above already."""
    backends: tuple[Constraints, ...] = ()
    """What convolution backends take here, where it is not what kernels/backends.py says of them."""

    def at_any_time(self) -> DeviceProfile:
        """The profile without what changes from decode to decode: its budget."""
        return replace(self, budget_bytes=None, budget_reason="", invalid_readings=())

    def needed_bytes(self, peak: PeakPrediction) -> int:
        """Bytes of the budget that a peak takes: the picture lies in the host's memory, which a card has no part in."""
        return peak.total if self.unified_memory else peak.working

    def fits(self, peak: PeakPrediction) -> bool:
        """True where the peak is within the budget, or the budget unknown."""
        return self.budget_bytes is None or self.needed_bytes(peak) <= self.budget_bytes

    @property
    def memory_choice(self) -> Choice:
        """The budget as a line of a plan: how much, why, and which readings were refused."""
        value = "unknown" if self.budget_bytes is None else f"{self.budget_bytes / 2**30:.2f} GiB"
        refused = "".join(f"; refused: {text}" for text in self.invalid_readings)
        return Choice(name="memory", value=value, reason=f"{self.budget_reason or 'given'}{refused}")


def describe_device(device: torch.device | str = "cpu") -> DeviceProfile:
    """The profile of a torch device now. Reads what the system tells; no allocation, no kernel."""
    return profile_from(read_device(torch.device(device)))


def profile_from(readings: Readings) -> DeviceProfile:
    """The profile that follows from readings: a pure function."""
    hip = readings.kind == "hip"
    gfx = (parse_gfx(readings.arch) or readings.driver_gfx) if hip else None
    kinds: dict[str, Family] = {"cpu": "cpu", "cuda": "cuda"}
    family = kinds.get(readings.kind) or family_of(gfx)
    unified = readings.kind == "cpu" or is_apu(gfx) or bool(readings.integrated)
    row = defaults_for(family, hip=hip, apu=unified, capability=readings.capability)
    budget = budget_of(readings, unified=unified)
    return DeviceProfile(
        kind=readings.kind,
        name=readings.name,
        native_dtypes=readings.native_dtypes or row.native_dtypes,
        unified_memory=unified,
        budget_bytes=budget.nbytes,
        strategy=row.strategy,
        layout=row.layout,
        batch_cap=row.batch_cap,
        pass_pixels=row.pass_pixels,
        tile_bytes=row.tile_bytes,
        attention=row.attention,
        convolution=row.convolution,
        convolution3d=row.convolution3d,
        workers=readings.workers,
        unfolds=row.unfolds,
        gfx=gfx,
        family=family,
        compute_units=readings.compute_units,
        versions=readings.versions,
        budget_reason=budget.reason,
        invalid_readings=budget.invalid,
        reasons=row.reasons,
    )


def available_host_bytes() -> int | None:
    """Memory the system can still give, or None where it cannot be read. Source: /proc/meminfo, or Windows."""
    pool = read_host_pool()
    return None if pool is None else pool.free_bytes
