"""Bytes that a decode may take of a device: a pure function of readings. Nothing is counted twice."""

from __future__ import annotations

from dataclasses import dataclass

from .device_readers import PoolReading, Readings

HOST_RESERVE = 2 << 30
"""Available system memory that an APU's budget leaves alone: the GPU's share cannot be swapped out, so what other
programs ask for during a decode has to come from here."""
LARGEST_POOL = 1 << 46
"""64 TiB: a pool that claims more is a counter that wrapped around."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What may be taken, and why that much."""

    nbytes: int | None
    """None = unknown."""
    reason: str
    """Names the reading that sets the limit."""
    invalid: tuple[str, ...]
    """Readings that were refused, or that raised, with what they said."""


def budget_of(readings: Readings, *, unified: bool) -> Budget:
    """The budget; `unified` where the device shares the host's memory.

    APU: free carve-out + min(free GTT, available system memory - reserve), at most what the runtime calls free. Other
    GPUs: what the runtime calls free. CPU: the available system memory.
    """
    check = _Checker(readings)
    if readings.kind == "cpu":
        free = check.free("system memory", readings.host)
        return check.done(free, "the system's available memory", "the system does not tell its available memory")
    if readings.kind == "other":
        return check.done(None, "", f"nothing is known of the memory of {readings.name}")
    runtime = check.runtime()
    if unified:
        return _unified(check, readings, runtime)
    own, what = runtime, f"what {check.runtime_name} calls free"
    if own is None:
        own, what = check.free("card memory", readings.carve_out), "the kernel driver's count of free card memory"
    return check.done(own, what, f"neither {check.runtime_name} nor the kernel driver tells how much memory is free")


def _unified(check: _Checker, readings: Readings, runtime: int | None) -> Budget:
    carve_out = check.free("carve-out", readings.carve_out)
    gtt = check.free("GTT", readings.gtt)
    host = check.free("system memory", readings.host)
    spare = None if host is None else max(0, host - HOST_RESERVE)
    if carve_out is None and gtt is None and readings.kind == "hip":
        # without them nobody can tell which part of the runtime's figure is the host's
        what = f"what {check.runtime_name} calls free; the sizes of carve-out and GTT cannot be read here"
        return check.done(runtime, what, f"neither {check.runtime_name} nor the kernel driver tells what is free")
    shares = [(n, name) for n, name in ((gtt, "GTT"), (spare, _HOST)) if n is not None]
    if readings.kind == "cuda":
        shares = [(n, name) for n, name in ((runtime, check.runtime_name), (spare, _HOST)) if n is not None]
        best, what = min(shares, default=(None, ""))
        return check.done(best, f"limited by {what}", "neither CUDA nor the system tells how much memory is free")
    shared, limit = min(shares, default=(0, "the carve-out, as neither GTT nor system memory can be read"))
    total = (carve_out or 0) + shared
    parts = f"{_gib(carve_out or 0)} of carve-out and {_gib(shared)} shared with the system"
    if runtime is not None and runtime < total:
        total, limit = runtime, f"what {check.runtime_name} calls free"
    return check.done(total, f"{parts}, limited by {limit}", "")


_MAY_BE_EMPTY = ("carve-out", "GTT")
_HOST = f"the system's available memory less {HOST_RESERVE >> 30} GiB for other programs"


class _Checker:
    """Believes readings that can be true, and keeps a list of the others."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._invalid = list(readings.errors)
        self._total: int | None = None
        self.runtime_name = "HIP" if readings.kind == "hip" else "CUDA"

    def free(self, name: str, pool: PoolReading | None) -> int | None:
        """Free bytes of a pool, or None where it was not read or cannot be true."""
        if pool is None or pool.free_bytes is None:
            return None
        free, total = pool.free_bytes, pool.total_bytes
        fault = None
        if free < 0 or (total is not None and total < 0):
            fault = "is negative"
        elif max(free, total or 0) > LARGEST_POOL:
            fault = "is more than any machine has"
        elif total == 0 and name not in _MAY_BE_EMPTY:
            fault = "is of a pool that holds nothing"
        elif total is not None and free > total:
            fault = "is more than there is"
        if fault is None:
            return free
        self._invalid.append(f"{name}: {free} bytes free of {'unknown' if total is None else total} {fault}")
        return None

    def runtime(self) -> int | None:
        """The runtime's free bytes."""
        pool = self._readings.device_pool
        if pool is None or pool.free_bytes is None or pool.total_bytes is None:
            if not any(error.startswith(f"{self.runtime_name} memory:") for error in self._readings.errors):
                self._invalid.append(f"{self.runtime_name}: free and total memory are not told")
            return None
        free = self.free(self.runtime_name, pool)
        self._total = None if free is None else pool.total_bytes
        return free

    def done(self, nbytes: int | None, reason: str, unknown: str) -> Budget:
        """The budget with what torch has taken already and would use again, never above the device's total."""
        readings = self._readings
        if nbytes is None:
            return Budget(nbytes=None, reason=unknown, invalid=tuple(self._invalid))
        if readings.cached_bytes:
            nbytes += readings.cached_bytes
            reason += f", and {_gib(readings.cached_bytes)} that torch holds unused"
        if self._total is not None and nbytes > self._total:
            nbytes, reason = self._total, f"all that {self.runtime_name} says there is"
        return Budget(nbytes=nbytes, reason=reason, invalid=tuple(self._invalid))


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
