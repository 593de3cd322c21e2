"""What the tests on a device share. With HALO_VAE_GPU_TESTS_ON=cpu the device is the CPU, which checks the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from halo_vae.optim.accelerator import wait_for
from halo_vae.optim.decode import Decoder
from halo_vae.optim.pool import MemoryPool
from halo_vae.tests.conftest import GPU_TESTS_ON

ON_CPU = os.environ.get(GPU_TESTS_ON) == "cpu"
DEVICE = torch.device("cpu" if ON_CPU else "cuda:0")
MIB = 1 << 20


def on_device(decoder: Decoder) -> Decoder:
    """The decoder, on the device under test."""
    decoder.device = DEVICE
    return decoder


def allocated() -> int:
    """Bytes that torch has handed out on the device; 0 on the CPU, where nobody counts."""
    return 0 if ON_CPU else int(torch.cuda.memory_allocated(DEVICE))


def settle() -> None:
    """Wait for the device, and give back what torch keeps of its memory."""
    wait_for(DEVICE)
    if not ON_CPU:
        torch.cuda.empty_cache()


@contextmanager
def measured_peak() -> Iterator[list[int]]:
    """The most bytes allocated above the start of the block, in a list that is filled at its end."""
    found: list[int] = []
    settle()
    start = allocated()
    if not ON_CPU:
        torch.cuda.reset_peak_memory_stats(DEVICE)
    yield found
    wait_for(DEVICE)
    found.append(0 if ON_CPU else int(torch.cuda.max_memory_allocated(DEVICE)) - start)


@contextmanager
def capped(extra_bytes: int) -> Iterator[MemoryPool]:
    """A pool in a process that gets at most so many bytes more of the device than it has now.

    Torch's own limit on a GPU, so that every allocation counts; on the CPU the pool's source refuses.
    """
    if ON_CPU:
        yield MemoryPool(_limited(extra_bytes))
        return
    settle()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    limit = torch.cuda.memory_reserved(DEVICE) + extra_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), DEVICE)
    try:
        yield MemoryPool()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
        settle()


def _limited(most: int):  # type: ignore[no-untyped-def]
    def source(nbytes: int, device: torch.device) -> Tensor:
        if nbytes > most:
            raise torch.OutOfMemoryError(f"out of memory: {nbytes} bytes asked for, {most} allowed")
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    return source
