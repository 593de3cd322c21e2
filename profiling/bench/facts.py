"""What may make times doubtful, read before and after: load, clocks that move apart, heat. None where not told."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..ab.samples import load_average
from .results import RunFacts

SYS = Path("/sys")
_HOT_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
"""hwmon drivers that read a CPU's temperature."""


def read_temperature(sys_root: Path = SYS, card: Path | None = None) -> float | None:
    """Degrees Celsius of a DRM card's device folder, else of the CPU: the hottest of its sensors.

    Source: the kernel's documentation of hwmon, temp*_input in thousandths.
    """
    folder = sys_root / "class" / "hwmon" if card is None else card / "hwmon"
    found = []
    for chip in _children(folder):
        if card is None and _text(chip / "name") not in _HOT_CHIPS:
            continue
        found += [value / 1000 for path in _children(chip) if (value := _temperature_of(path)) is not None]
    return max(found, default=None)


def _temperature_of(path: Path) -> int | None:
    return _number(path) if path.name.startswith("temp") and path.name.endswith("_input") else None


def read_throttle_count(sys_root: Path = SYS) -> int | None:
    """Times that any core lowered its clock because of heat. Source: Intel's thermal_throttle folders."""
    folders = [p / "thermal_throttle" for p in _children(sys_root / "devices" / "system" / "cpu")]
    counts = [_number(folder / "core_throttle_count") for folder in folders]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """Where facts come from; tests pass fakes."""

    wall_ns: Callable[[], int] = time.time_ns
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    load: Callable[[], float | None] = load_average
    temperature: Callable[[], float | None] = read_temperature
    throttles: Callable[[], int | None] = read_throttle_count


class FactsWatch:
    """Facts from now until `finish`."""

    def __init__(self, readers: Readers | None = None) -> None:
        """Take the first readings."""
        self._read = readers or Readers()
        self._load, self._temperature = self._read.load(), self._read.temperature()
        self._throttles = self._read.throttles()
        self._wall, self._start = self._read.wall_ns(), self._read.monotonic_ns()

    def finish(self) -> RunFacts:
        """The last readings beside the first."""
        run_ns = self._read.monotonic_ns() - self._start
        wall_ns = self._read.wall_ns() - self._wall
        throttles = self._read.throttles()
        both = self._throttles is not None and throttles is not None
        return RunFacts(
            load_before=self._load, load_after=self._read.load(), cores=os.cpu_count(),
            wait_policy=os.environ.get("OMP_WAIT_POLICY"), clock_drift_ns=wall_ns - run_ns, run_ns=run_ns,
            temperature_before_c=self._temperature, temperature_after_c=self._read.temperature(),
            throttled=(throttles or 0) > (self._throttles or 0) if both else None,
        )  # fmt: skip


def merged(parts: tuple[RunFacts, ...]) -> RunFacts:
    """Facts of a run whose samples come from several processes, in order."""
    if not parts:
        return RunFacts()
    first, last = parts[0], parts[-1]
    known = [p.throttled for p in parts if p.throttled is not None]
    drifts = [p.clock_drift_ns for p in parts if p.clock_drift_ns is not None]
    lengths = [p.run_ns for p in parts if p.run_ns is not None]
    return RunFacts(
        load_before=first.load_before, load_after=last.load_after, cores=first.cores, wait_policy=first.wait_policy,
        clock_drift_ns=sum(drifts) if drifts else None, run_ns=sum(lengths) if lengths else None,
        temperature_before_c=first.temperature_before_c, temperature_after_c=last.temperature_after_c,
        throttled=any(known) if known else None,
    )  # fmt: skip


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str | None:
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    try:
        return int(_text(path) or "")
    except ValueError:
        return None
