"""Host clock, device timer, and phase timelines. The only file of the package that synchronises a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from ..optim.accelerator import gpu_api, is_gpu
from ..optim.events import PHASES, Phase
from .parts import PhaseTimes

FOLD_EVENTS = 1024
"""Pending events after which those already passed are read and used again."""


class Clock(Protocol):
    """Host time."""

    def now_ns(self) -> int:
        """Nanoseconds from an arbitrary start; never falls."""


class SystemClock:
    """Source: time.perf_counter_ns."""

    def now_ns(self) -> int:
        """See Clock."""
        return time.perf_counter_ns()


class DeviceTimer(Protocol):
    """A device that runs behind the host: it can be waited for, and may time its own queue."""

    has_events: bool

    def sync(self) -> None:
        """Wait until the device has done all it was given."""

    def event(self) -> Any:
        """A marker at the end of the device's queue; only where `has_events`."""

    def reached(self, event: Any) -> bool:
        """True when the device has passed the marker. Does not wait."""

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """Device time between two markers it has passed."""

    def recycle(self, event: Any) -> None:
        """The marker is not needed any more."""


class TorchTimer:
    """A CUDA or HIP device. Source: torch.cuda.Event, torch.cuda.synchronize."""

    has_events = True

    def __init__(self, device: str) -> None:
        """Remember the device; touches nothing yet."""
        import torch

        self._api = gpu_api()
        self._device = torch.device(device)
        self._make_event: Callable[..., Any] = self._api.Event
        self._free: list[Any] = []

    def sync(self) -> None:
        """See DeviceTimer."""
        self._api.synchronize(self._device)

    def event(self) -> Any:
        """See DeviceTimer."""
        event = self._free.pop() if self._free else self._make_event(enable_timing=True)
        event.record(self._api.current_stream(self._device))
        return event

    def reached(self, event: Any) -> bool:
        """See DeviceTimer."""
        return bool(event.query())

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """See DeviceTimer."""
        return int(start.elapsed_time(end) * 1_000_000)

    def recycle(self, event: Any) -> None:
        """See DeviceTimer."""
        self._free.append(event)


class WaitTimer:
    """A device that can only be waited for (mps, xpu, ...): phases are host times and the rest is `sync`."""

    has_events = False

    def __init__(self, wait: Callable[[], None]) -> None:
        """`wait` returns when the device is idle."""
        self._wait = wait

    def sync(self) -> None:
        """See DeviceTimer."""
        self._wait()

    def event(self) -> Any:
        """No events here."""
        return None

    def reached(self, event: Any) -> bool:
        """No events here."""
        return False

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """No events here."""
        return 0

    def recycle(self, event: Any) -> None:
        """No events here."""


def timer_for(device: str) -> DeviceTimer | None:
    """The timer of a torch device; None for the CPU, which never runs behind."""
    import torch

    kind = torch.device(device).type
    if kind == "cpu":
        return None
    if is_gpu(device):
        return TorchTimer(device)
    wait = getattr(getattr(torch, kind, None), "synchronize", None)
    return WaitTimer(wait) if wait is not None else None


class Timeline(Protocol):
    """Adds up time per phase between marks."""

    def mark(self, phase: Phase, now_ns: int) -> None:
        """From now on time belongs to `phase`."""

    def close(self, now_ns: int) -> None:
        """The last phase ends; called once the device is idle."""

    def times(self, wall_ns: int) -> PhaseTimes:
        """The phases, with `other` as what is left of the wall time. Only after `close`."""


class HostTimeline:
    """Phases by the host clock."""

    def __init__(self, start_ns: int) -> None:
        """The first phase is `other`."""
        self._spent = dict.fromkeys(PHASES, 0)
        self._phase: Phase = "other"
        self._since = start_ns

    def mark(self, phase: Phase, now_ns: int) -> None:
        """See Timeline."""
        self._spent[self._phase] += now_ns - self._since
        self._phase, self._since = phase, now_ns

    def close(self, now_ns: int) -> None:
        """See Timeline."""
        self.mark("other", now_ns)

    def times(self, wall_ns: int) -> PhaseTimes:
        """See Timeline."""
        return _phase_times(self._spent, wall_ns)


class EventTimeline:
    """Phases by events on the device's queue, read when the device has passed them."""

    def __init__(self, timer: DeviceTimer, tell: Callable[[Phase, int], None] | None = None) -> None:
        """The first phase is `other`, from now. `tell` hears of each stretch of a phase in order, with its ns."""
        self._timer = timer
        self._tell = tell
        self._spent = dict.fromkeys(PHASES, 0)
        self._pending: list[tuple[Phase, Any]] = [("other", timer.event())]

    def mark(self, phase: Phase, now_ns: int) -> None:
        """See Timeline."""
        if phase == self._pending[-1][0]:
            return
        self._pending.append((phase, self._timer.event()))
        if len(self._pending) >= FOLD_EVENTS and self._timer.reached(self._pending[FOLD_EVENTS // 2][1]):
            self._fold(FOLD_EVENTS // 2)

    def close(self, now_ns: int) -> None:
        """See Timeline."""
        self._fold(len(self._pending) - 1)

    def times(self, wall_ns: int) -> PhaseTimes:
        """See Timeline."""
        return _phase_times(self._spent, wall_ns)

    def _fold(self, n: int) -> None:
        for (phase, start), (_, end) in zip(self._pending[:n], self._pending[1 : n + 1], strict=True):
            ns = self._timer.elapsed_ns(start, end)
            self._spent[phase] += ns
            if self._tell is not None:
                self._tell(phase, ns)
            self._timer.recycle(start)
        del self._pending[:n]


def _phase_times(spent: dict[Phase, int], wall_ns: int) -> PhaseTimes:
    named = {p: ns for p, ns in spent.items() if p != "other"}
    other = max(0, wall_ns - sum(named.values()))
    return PhaseTimes(**{f"{p}_ns": ns for p, ns in named.items()}, other_ns=other)
