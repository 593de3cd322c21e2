"""What the machine does throughout a benchmark: CPU, memory, GPU and disk, read by a thread at even intervals.

Sources: /proc/stat, /proc/meminfo and /proc/vmstat (proc(5)); amdgpu's gpu_busy_percent and mem_info_* of a DRM card,
and its hwmon files (freq1_input in Hz, power1_* in microwatts, temp*_input in thousandths of a degree).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...optim.device_readers import SYS, read_host_pool, read_pool
from ..energy import read_number
from .facts import read_temperature
from .results import SeriesLine

INTERVAL_S = 0.5
MAX_POINTS = 2000
"""Of one series. Beyond it every other point goes, and the rest are twice as far apart."""
PROC = Path("/proc")
Read = Callable[[], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensor:
    """One thing to read."""

    name: str
    unit: str
    read: Read
    """The level now, or for a `rate` a count that only grows; None where it cannot be read."""
    rate: bool = False
    """What is kept is the growth per second."""
    scale: float = 1.0


def sensors_for(card: Path | None, proc: Path = PROC) -> tuple[Sensor, ...]:
    """Every sensor of the machine, and of an amdgpu card's device folder; what cannot be read gives no series."""
    found = [
        Sensor(name="cpu_share", unit="share", read=_CpuShare(proc / "stat")),
        Sensor(name="memory_used_bytes", unit="bytes", read=_memory_used),
        Sensor(name="read_bytes", unit="bytes/s", read=_counter(proc / "vmstat", "pgpgin"), rate=True, scale=1024),
        Sensor(name="written_bytes", unit="bytes/s", read=_counter(proc / "vmstat", "pgpgout"), rate=True, scale=1024),
    ]
    if card is None:
        found.append(Sensor(name="cpu_temperature_c", unit="°C", read=read_temperature))
        return tuple(found)
    return (
        *found,
        Sensor(name="gpu_busy_share", unit="share", read=_first(card, ("gpu_busy_percent",)), scale=0.01),
        Sensor(name="gpu_memory_bytes", unit="bytes", read=lambda: _gpu_memory(card)),
        Sensor(name="gpu_clock_hz", unit="Hz", read=_first(card, ("hwmon/*/freq1_input",))),
        Sensor(
            name="gpu_power_w", unit="W", read=_first(card, ("hwmon/*/power1_average", "hwmon/*/power1_input")),
            scale=1e-6,
        ),
        Sensor(name="gpu_temperature_c", unit="°C", read=lambda: read_temperature(SYS, card)),
    )  # fmt: skip


class Sampler:
    """Reads sensors from `start` to `finish`. A sensor that raises gives None for that moment."""

    def __init__(
        self, sensors: Sequence[Sensor], *, interval_s: float = INTERVAL_S, max_points: int = MAX_POINTS,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:  # fmt: skip
        """Nothing is read yet."""
        self._sensors = tuple(sensors)
        self._interval_s, self._max_points, self._now_ns = interval_s, max(2, max_points), now_ns
        self._began = 0
        self._at: list[int] = []
        self._rows: list[tuple[float | None, ...]] = []
        self._counts: list[tuple[int, float] | None] = [None] * len(self._sensors)
        self._every = 1
        self._ticks = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Read at once, and then again and again on a thread."""
        self._began = self._now_ns()
        self.tick()
        self._thread = threading.Thread(target=self._loop, name="halo-vae-sampler", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._over.wait(self._interval_s):
            self.tick()

    def tick(self) -> None:
        """Read every sensor now, if it is time."""
        due = self._ticks % self._every == 0
        self._ticks += 1
        if not due:
            return
        now = self._now_ns()
        self._rows.append(tuple(self._read(i, now) for i in range(len(self._sensors))))
        self._at.append(now - self._began)
        if len(self._at) > self._max_points:
            self._at, self._rows, self._every = self._at[::2], self._rows[::2], 2 * self._every

    def _read(self, i: int, now: int) -> float | None:
        sensor = self._sensors[i]
        try:
            value = sensor.read()
        except Exception:  # a sensor that goes away must not end the benchmark
            value = None
        if not sensor.rate:
            return None if value is None else value * sensor.scale
        before, self._counts[i] = self._counts[i], None if value is None else (now, value)
        if before is None or value is None or now <= before[0] or value < before[1]:
            return None
        return (value - before[1]) * sensor.scale * 1e9 / (now - before[0])

    def finish(self, session: str, host: str) -> tuple[SeriesLine, ...]:
        """Stop, and give a series of each sensor that could ever be read."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        at = tuple(self._at)
        found = []
        for i, sensor in enumerate(self._sensors):
            values = tuple(row[i] for row in self._rows)
            if any(value is not None for value in values):
                found.append(
                    SeriesLine(session=session, host=host, name=sensor.name, unit=sensor.unit, at_ns=at, values=values)
                )
        return tuple(found)


class _CpuShare:
    """Share of all cores' time since the last reading that was not idle."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before: tuple[int, int] | None = None

    def __call__(self) -> float | None:
        try:
            fields = [int(part) for part in self._path.read_text("ascii").splitlines()[0].split()[1:9]]
        except (OSError, ValueError, IndexError):
            return None
        total, idle = sum(fields), sum(fields[3:5])
        before, self._before = self._before, (total, idle)
        if before is None or total <= before[0]:
            return None
        return min(1.0, max(0.0, 1.0 - (idle - before[1]) / (total - before[0])))


def _memory_used() -> float | None:
    pool = read_host_pool()
    if pool is None or pool.total_bytes is None or pool.free_bytes is None:
        return None
    return float(pool.total_bytes - pool.free_bytes)


def _gpu_memory(card: Path) -> float | None:
    """Bytes in use of the card's own memory and of what it maps of the host's."""
    pools = [pool for name in ("vram", "gtt") if (pool := read_pool(card, name)) is not None]
    used = [p.total_bytes - p.free_bytes for p in pools if p.total_bytes is not None and p.free_bytes is not None]
    return float(sum(used)) if used else None


def _counter(path: Path, name: str) -> Read:
    """A "name number" line of a file."""

    def read() -> float | None:
        try:
            for line in path.read_text("ascii").splitlines():
                key, _, number = line.partition(" ")
                if key == name:
                    return float(int(number))
        except (OSError, ValueError):
            pass
        return None

    return read


def _first(card: Path, patterns: Sequence[str]) -> Read:
    """The first file that holds a number now."""

    def read() -> float | None:
        for pattern in patterns:
            for path in sorted(card.glob(pattern)):
                value = read_number(path)
                if value is not None:
                    return float(value)
        return None

    return read
