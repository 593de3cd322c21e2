"""The only file that touches torch.cuda, which is also what torch calls HIP devices. Nothing runs at import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

GPU = "cuda"
"""The device type of CUDA and HIP devices alike."""


def is_gpu(device: torch.device | str) -> bool:
    """True for a CUDA or HIP device. Asks about the device that is named, never whether the machine has one."""
    return torch.device(device).type == GPU


def is_hip() -> bool:
    """True where torch was built for ROCm."""
    return torch.version.hip is not None


def has_gpu() -> bool:
    """True where torch can use one."""
    return bool(torch.cuda.is_available())


def gpu_count() -> int:
    """GPUs that torch can use."""
    return int(torch.cuda.device_count())


def gpu_api() -> Any:
    """torch.cuda: events, streams, allocator counters of CUDA and HIP devices. Call it only for such a device."""
    return torch.cuda


def wait_for(device: torch.device) -> None:
    """Return when a CUDA or HIP device has done all it was given; at once for any other."""
    if is_gpu(device):
        gpu_api().synchronize(device)


def empty_gpu_cache(device: torch.device) -> None:
    """Return what torch's allocator keeps of a GPU's freed memory to the driver; nothing on other devices."""
    if is_gpu(device):
        gpu_api().empty_cache()


def gpu_runtime() -> Any:
    """The runtime under torch: HIP answers to CUDA's names. None without a GPU."""
    return gpu_api().cudart() if has_gpu() else None


class SideStream:
    """A second queue of a GPU for copies; does nothing on devices without one."""

    def __init__(self, device: torch.device) -> None:
        """Create the stream on a CUDA or HIP device."""
        self._stream = gpu_api().Stream(device) if is_gpu(device) else None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Work queued in the block goes to the side stream."""
        if self._stream is None:
            yield
            return
        with gpu_api().stream(self._stream):
            yield

    def is_done(self) -> bool:
        """True where nothing is under way."""
        return self._stream is None or bool(self._stream.query())

    def join(self) -> None:
        """Make the current stream wait for what was queued here."""
        if self._stream is not None:
            gpu_api().current_stream(self._stream.device).wait_stream(self._stream)
