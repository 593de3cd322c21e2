"""How fast a device copies memory: the measure for what a decode moves. Measured on request, never inside a decode."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ..optim.errors_oom import is_out_of_memory
from .clock import Clock, DeviceTimer, SystemClock, timer_for

BUFFER_BYTES = 64 << 20
"""Each of the two buffers: more than the last cache of APUs and desktop CPUs holds. On a server's CPU with a larger one
the rate is that of its cache, and a decode's share of it comes out low."""
REPEATS = 5


class CopyRates:
    """Bytes per second of plain copies, read plus written, per device: measured once, then known."""

    def __init__(
        self,
        *,
        nbytes: int = BUFFER_BYTES,
        repeats: int = REPEATS,
        clock: Clock | None = None,
        timer: Callable[[str], DeviceTimer | None] = timer_for,
    ) -> None:
        """Nothing is measured yet. ValueError for no bytes or no repeats."""
        if nbytes < 1 or repeats < 1:
            raise ValueError(f"nbytes is {nbytes} and repeats {repeats}; both must be at least 1")
        self._nbytes, self._repeats = nbytes, repeats
        self._clock: Clock = clock or SystemClock()
        self._timer = timer
        self._lock = threading.Lock()
        self._known: dict[str, int | None] = {}

    def known(self, device: str) -> int | None:
        """The rate of a device that was measured in this process; None of any other. Takes no time."""
        return self._known.get(_key(device))

    def measure(self, device: str) -> int | None:
        """The rate of a device, measured now unless it is known. None where there was no memory for the two buffers.

        A fraction of a second and 128 MiB on the device, which go back to torch afterwards. On a CPU it is the rate of
        torch's threads as they are set now.
        """
        key = _key(device)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._measured(key)
            return self._known[key]

    def _measured(self, device: str) -> int | None:
        try:
            source = torch.ones(self._nbytes, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                return None
            raise
        timer = self._timer(device)
        took = [self._time_copy(source, target, timer) for _ in range(self._repeats + 1)]
        # The first copy pays for the pages of the target. Of the others the fastest: what else runs on the machine can
        # only slow a copy down, and the buffers are too large for a lucky one in a cache.
        best = min(took[1:])
        return None if best <= 0 else 2 * self._nbytes * 1_000_000_000 // best

    def _time_copy(self, source: torch.Tensor, target: torch.Tensor, timer: DeviceTimer | None) -> int:
        if timer is not None:
            timer.sync()
        start = self._clock.now_ns()
        target.copy_(source)
        if timer is not None:
            timer.sync()
        return self._clock.now_ns() - start


PROCESS_RATES = CopyRates()
"""The rates that recordings of this process know."""


def _key(device: str) -> str:
    """One name per device: "cuda" is "cuda:0" unless another is current, which no record leaves open."""
    found = torch.device(device)
    return found.type if found.type == "cpu" else f"{found.type}:{found.index or 0}"
