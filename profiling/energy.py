"""Energy of the device during a decode, where the platform tells: amdgpu's hwmon files, else the package amdsmi.

It is the whole device's, idle power and other programs' work included; on an APU the CPU cores' as well. Sources: the
kernel's documentation of hwmon (energy1_input in microjoules since the driver was loaded, power1_average and
power1_input in microwatts) and of amdgpu, whose power sensors count an APU's CPU in; AMD SMI's Python reference
(amdsmi_get_energy_count). Nothing is read for a decode on a CPU, and nothing at import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..optim.accelerator import is_gpu, is_hip
from .parts import EnergyFrom

SAMPLE_EVERY_NS = 250_000_000
"""Least time between two samples of a power sensor: asking amdgpu's firmware takes up to a millisecond."""
Read = Callable[[], int | None]
"""A reading, or None where it failed."""


class EnergyMeter(Protocol):
    """The energy of one decode, from start to end, on the thread that decodes."""

    source: EnergyFrom

    def begin(self, now_ns: int) -> None:
        """The decode starts now."""

    def tick(self, now_ns: int) -> None:
        """Something happened; called often, reads rarely or never."""

    def end(self, now_ns: int) -> int | None:
        """Microjoules since `begin`; None where a reading failed or the sensor does not move."""


class CounterMeter:
    """Reads a counter of microjoules twice."""

    def __init__(self, read_uj: Read, source: EnergyFrom = "counter") -> None:
        """`read_uj` gives microjoules since some time in the past."""
        self.source = source
        self._read = read_uj
        self._start: int | None = None

    def begin(self, now_ns: int) -> None:
        """See EnergyMeter."""
        self._start = self._read()

    def tick(self, now_ns: int) -> None:
        """See EnergyMeter. A counter need not be looked at meanwhile."""

    def end(self, now_ns: int) -> int | None:
        """See EnergyMeter. None too for a counter that fell: it began anew, or passed its end."""
        start, stop = self._start, self._read()
        return None if start is None or stop is None or stop <= start else stop - start


class PowerMeter:
    """Reads microwatts at the start, at the end, and at events between, at most four times a second.

    Between two samples the power is taken to have changed evenly.
    """

    source: EnergyFrom = "power"

    def __init__(self, read_uw: Read, every_ns: int = SAMPLE_EVERY_NS) -> None:
        """`read_uw` gives the power now."""
        self._read = read_uw
        self._every_ns = every_ns
        self._begun = False
        self._last: tuple[int, int] | None = None
        self._next_ns = 0
        self._twice = 0  # microwatts x nanoseconds x 2

    def begin(self, now_ns: int) -> None:
        """See EnergyMeter."""
        self._twice = 0
        self._last = None
        self._sample(now_ns)
        self._begun = self._last is not None

    def tick(self, now_ns: int) -> None:
        """See EnergyMeter. A sample that fails is left out."""
        if now_ns >= self._next_ns:
            self._sample(now_ns)

    def end(self, now_ns: int) -> int | None:
        """See EnergyMeter. None too where start or end could not be read."""
        if not self._begun or not self._sample(now_ns):
            return None
        return self._twice // 2_000_000_000 or None

    def _sample(self, now_ns: int) -> bool:
        self._next_ns = now_ns + self._every_ns
        power = self._read()
        if power is None:
            return False
        if self._last is not None:
            then_ns, before = self._last
            self._twice += (before + power) * (now_ns - then_ns)
        self._last = (now_ns, power)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergySource:
    """What one device's energy is read from."""

    kind: EnergyFrom
    read: Read

    def meter(self) -> EnergyMeter:
        """A meter for one decode."""
        return PowerMeter(self.read) if self.kind == "power" else CounterMeter(self.read, self.kind)


def meter_for(device: str) -> EnergyMeter | None:
    """A meter for one decode on a torch device; None for a CPU, and where nothing tells."""
    if not is_gpu(device) or not is_hip():
        return None
    source = _source_of(device)
    return None if source is None else source.meter()


@functools.lru_cache(maxsize=16)
def _source_of(device: str) -> EnergySource | None:
    """Looked for once per device and process."""
    import torch

    from ..optim.device_readers import SYS, find_card, read_pci_address

    pci = read_pci_address(torch.device(device))
    card = find_card(pci, SYS)
    return (None if card is None else hwmon_source(card)) or amdsmi_source(pci, _import_amdsmi)


def hwmon_source(card: Path) -> EnergySource | None:
    """The sensor of a DRM card's device folder: a counter, else its power; None where neither can be read."""
    try:
        folders = sorted((card / "hwmon").iterdir())
    except OSError:
        return None
    wanted: tuple[tuple[str, EnergyFrom], ...] = (
        ("energy1_input", "counter"), ("power1_average", "power"), ("power1_input", "power"),
    )  # fmt: skip
    for name, kind in wanted:
        for folder in folders:
            read = functools.partial(read_number, folder / name)
            if read() is not None:
                return EnergySource(kind=kind, read=read)
    return None


def read_number(path: Path) -> int | None:
    """A file's whole number from 0; None where it cannot be read, as while a card sleeps."""
    try:
        number = int(path.read_bytes())
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None


def amdsmi_source(pci: str | None, load: Callable[[], Any]) -> EnergySource | None:
    """AMD SMI's counter of the GPU at a PCI address; None without the package, a driver, or such a counter.

    `load` gives the package amdsmi. Its library stays initialised for the life of the process.
    """
    if pci is None:
        return None
    try:
        smi = load()
        smi.amdsmi_init()
        handle = smi.amdsmi_get_processor_handle_from_bdf(f"{pci}.0")
    except Exception:  # not installed, no library, no driver, or another's version of all three
        return None

    def read_uj() -> int | None:
        try:
            found = smi.amdsmi_get_energy_count(handle)
            ticks = found["energy_accumulator"] if "energy_accumulator" in found else found["power"]
            return int(ticks * found["counter_resolution"])
        except Exception:  # its own exceptions have no base that every version shares
            return None

    return EnergySource(kind="amdsmi", read=read_uj) if read_uj() else None


def _import_amdsmi() -> Any:
    import importlib

    return importlib.import_module("amdsmi")
