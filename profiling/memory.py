"""Readers of memory counters: torch's caching allocator, the process, the system. None where a thing cannot be read."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..optim.accelerator import gpu_api, is_gpu, is_hip
from ..optim.device import available_host_bytes
from .parts import UNMEASURED, PeakReading

PROC = Path("/proc/self")


class MemoryCounter(Protocol):
    """One level that rises and falls, and its highest value."""

    def now_bytes(self) -> int | None:
        """The level now."""

    def peak_bytes(self) -> int | None:
        """The highest level since the last reset, or since the process began."""

    def reset_peak(self) -> bool:
        """Let the peak begin at the present level. False where that cannot be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCounters:
    """The counters that exist for one device; None for one that does not."""

    allocated: MemoryCounter | None
    reserved: MemoryCounter | None
    process: MemoryCounter | None
    available_bytes: int | None
    """System memory available at the time of asking."""


def counters_for(device: str) -> MemoryCounters:
    """Counters of decodes on `device`. torch.cuda is touched only when that is the device."""
    on_gpu = is_gpu(device)
    return MemoryCounters(
        allocated=AllocatorCounter(device, "allocated") if on_gpu else None,
        reserved=AllocatorCounter(device, "reserved") if on_gpu else None,
        process=process_counter(),
        available_bytes=system_available_bytes(),
    )


class AllocatorCounter:
    """Source: torch.cuda.memory_allocated or memory_reserved and their maxima (HIP devices too)."""

    def __init__(self, device: str, what: str) -> None:
        """`what` is "allocated" or "reserved"."""
        import torch

        self._api = gpu_api()
        self._now = getattr(self._api, f"memory_{what}")
        self._peak = getattr(self._api, f"max_memory_{what}")
        self._device = torch.device(device)

    def now_bytes(self) -> int | None:
        """See MemoryCounter."""
        return int(self._now(self._device))

    def peak_bytes(self) -> int | None:
        """See MemoryCounter."""
        return int(self._peak(self._device))

    def reset_peak(self) -> bool:
        """See MemoryCounter. Resets both of the device's maxima."""
        self._api.reset_peak_memory_stats(self._device)
        return True


class ProcCounter:
    """Resident set on Linux. Source: /proc/self/statm, VmHWM in /proc/self/status; reset by /proc/self/clear_refs."""

    def __init__(self, proc: Path, page_bytes: int) -> None:
        """`proc` is /proc/self."""
        self._proc = proc
        self._page_bytes = page_bytes

    def now_bytes(self) -> int | None:
        """See MemoryCounter."""
        try:
            return int((self._proc / "statm").read_bytes().split()[1]) * self._page_bytes
        except (OSError, ValueError, IndexError):
            return None

    def peak_bytes(self) -> int | None:
        """See MemoryCounter."""
        try:
            for line in (self._proc / "status").read_bytes().splitlines():
                if line.startswith(b"VmHWM:"):
                    return int(line.split()[1]) * 1024
        except (OSError, ValueError, IndexError):
            pass
        return None

    def reset_peak(self) -> bool:
        """See MemoryCounter. Other readers of this process's VmHWM see the reset too."""
        try:
            (self._proc / "clear_refs").write_bytes(b"5")
        except OSError:
            return False
        peak, now = self.peak_bytes(), self.now_bytes()
        # Some kernels and sandboxes accept the write and do nothing: believe it only if the mark came down.
        return peak is not None and now is not None and peak <= now + (4 << 20)


class PsutilCounter:
    """Resident set elsewhere. Source: psutil memory_info(): rss, and peak_wset, which only Windows has."""

    def __init__(self, process: Any) -> None:
        """`process` is a psutil.Process."""
        self._process = process

    def now_bytes(self) -> int | None:
        """See MemoryCounter."""
        return int(self._process.memory_info().rss)

    def peak_bytes(self) -> int | None:
        """See MemoryCounter."""
        peak = getattr(self._process.memory_info(), "peak_wset", None)
        return None if peak is None else int(peak)

    def reset_peak(self) -> bool:
        """See MemoryCounter. Windows keeps its peak for the life of the process."""
        return False


def process_counter(proc: Path | None = None) -> MemoryCounter | None:
    """The reader of this process's resident set: /proc, else psutil if it is installed, else None."""
    counter = ProcCounter(proc or PROC, _page_bytes())
    if counter.now_bytes() is not None:
        return counter
    try:
        import psutil

        found = PsutilCounter(psutil.Process())
        found.now_bytes()
    except Exception:  # not installed, or it reads /proc as well and there is none
        return None
    return found


def system_available_bytes() -> int | None:
    """Memory the system can still give: /proc/meminfo, else psutil if it is installed, else None."""
    known = available_host_bytes()
    if known is not None:
        return known
    try:
        import psutil

        return int(psutil.virtual_memory().available)
    except Exception:  # not installed, or it reads /proc as well and there is none
        return None


def accelerator_facts(device: str) -> tuple[str, str | None]:
    """(name, architecture) of a device: ("cpu", None), or what the driver says of a CUDA or HIP device."""
    import torch

    dev = torch.device(device)
    if not is_gpu(dev):
        return dev.type, None
    facts = gpu_api().get_device_properties(dev)
    arch = getattr(facts, "gcnArchName", None) if is_hip() else f"sm_{facts.major}{facts.minor}"
    return str(facts.name), arch


class PeakWatch:
    """One counter from the start of a decode to its end."""

    def __init__(self, counter: MemoryCounter | None) -> None:
        """Reset the peak where that can be done, and read the level."""
        self._counter = counter
        if counter is None:
            return
        self._was_reset = counter.reset_peak()
        self._start = counter.now_bytes()
        self._peak_before = counter.peak_bytes()

    def finish(self) -> PeakReading:
        """What the counter shows now.

        A peak that could not be reset is this decode's own only if it rose meanwhile; otherwise what the decode
        took above its start is unknown.
        """
        if self._counter is None:
            return UNMEASURED
        peak, before, start = self._counter.peak_bytes(), self._peak_before, self._start
        rose = peak is not None and before is not None and peak > before
        above: int | None = None
        if peak is not None and start is not None and (self._was_reset or rose):
            above = max(0, peak - start)
        return PeakReading(
            start_bytes=start,
            peak_bytes=peak,
            above_start_bytes=above,
            since_process_start=not self._was_reset,
        )


def _page_bytes() -> int:
    if sys.platform == "win32":
        return 4096
    import resource

    return resource.getpagesize()
