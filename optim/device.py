"""What a decode runs on, as data: tests build fake ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .workers import worker_count

Kind = Literal["cpu", "cuda", "hip", "other"]


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
    strategy: Literal["strips", "tiles"]
    """Default plan: strips where a new shape costs nothing, tiles where it costs a kernel search."""
    layout: Literal["channels_last", "contiguous"]
    batch_cap: int
    """Most pictures per pass."""
    pass_pixels: int
    """Picture pixels that one pass may hold before batching stops paying."""
    tile_bytes: int
    """Bytes of the widest map of one tile: bounds staging and kernel results."""
    attention: Literal["sdpa", "matmul"]
    convolution: Literal["direct", "winograd"] = "direct"
    """Algorithm of float32 3x3 convolutions: the framework's own, or Winograd's out of matrix products."""
    convolution3d: Literal["conv2d_sum", "conv3d"] = "conv2d_sum"
    """3-D kernels: one 2-D convolution for each tap on shifted frames, added up, or the framework's own 3-D one."""
    workers: int = 1
    """Threads that share Winograd's blocks (workers.py)."""


def describe_device(device: torch.device | str = "cpu") -> DeviceProfile:
    """The profile of a torch device. Reads version strings only; no allocation, no kernel."""
    dev = torch.device(device)
    if dev.type == "cpu":
        return DeviceProfile(
            kind="cpu",
            name="cpu",
            native_dtypes=_cpu_dtypes(),
            unified_memory=True,
            budget_bytes=available_host_bytes(),
            strategy="strips",
            layout="channels_last",
            batch_cap=16,
            pass_pixels=512 * 512,
            tile_bytes=16 << 20,
            attention="sdpa",
            convolution="winograd",
            workers=worker_count(),
        )
    hip = dev.type == "cuda" and torch.version.hip is not None
    kind: Kind = "hip" if hip else "cuda" if dev.type == "cuda" else "other"
    return DeviceProfile(
        kind=kind,
        name=str(dev),
        native_dtypes=("float16", "bfloat16"),
        unified_memory=False,
        budget_bytes=None,
        strategy="tiles",
        layout="contiguous" if hip else "channels_last",
        batch_cap=8 if hip else 16,
        pass_pixels=1024 * 1024,
        tile_bytes=64 << 20,
        attention="matmul" if hip else "sdpa",
    )


def _cpu_dtypes() -> tuple[str, ...]:
    """bf16 where the CPU multiplies it natively (AVX512-BF16 or AMX); fp16 convolution is emulated on all we know."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    native = any(getattr(torch.cpu, name, lambda: False)() for name in checks)
    return ("bfloat16", "float32") if native else ("float32",)


def available_host_bytes() -> int | None:
    """MemAvailable of the host, or None where it cannot be read. Source: /proc/meminfo."""
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


class SideStream:
    """A second queue of a GPU for copies; does nothing on devices without one."""

    def __init__(self, device: torch.device) -> None:
        """Create the stream on a CUDA or HIP device."""
        streams: Any = torch.cuda
        self._stream = streams.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Work queued in the block goes to the side stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def is_done(self) -> bool:
        """True where nothing is under way."""
        return self._stream is None or bool(self._stream.query())

    def join(self) -> None:
        """Make the current stream wait for what was queued here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
