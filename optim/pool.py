"""Slabs of memory that live across decodes; one decode at a time uses them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .accelerator import is_gpu
from .arena import align
from .pinned import lock_pages

Touched = tuple[tuple[int, int], ...]
"""Ranges [first, last) of bytes that were in use since the memory was new; they do not meet."""
GRAIN = 2 << 20
"""Bytes: slabs are multiples of this, the size of a huge page, so that nearly equal requests share a slab."""


def slab_bytes(nbytes: int) -> int:
    """Size class of a request."""
    return -(-nbytes // GRAIN) * GRAIN if nbytes else 0


def _allocate(nbytes: int, device: torch.device) -> Tensor:
    # outside inference mode, so that later decodes may write to it inside or outside
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


class Slab:
    """A lease on a piece of pooled memory: `nbytes` is the size class asked for, `memory` may be more."""

    def __init__(self, memory: Tensor, nbytes: int, touched: Touched) -> None:
        """`touched` are the ranges that were in use before."""
        self.memory = memory
        self.nbytes = nbytes
        self.touched = touched

    def take(self, offset: int, nbytes: int) -> tuple[Tensor, bool]:
        """The bytes [offset, offset + nbytes) and whether all of them had been used before (no new memory)."""
        start, stop = offset, offset + align(nbytes)
        hit = any(first <= start and stop <= last for first, last in self.touched)
        if not hit:
            near = [(first, last) for first, last in self.touched if first <= stop and start <= last]
            apart = [span for span in self.touched if span not in near]
            near.append((start, stop))
            self.touched = (*apart, (min(first for first, _ in near), max(last for _, last in near)))
        return self.memory[offset : offset + nbytes], hit


class MemoryPool:
    """Keeps slabs between decodes. `lease` holds the pool: a second decode waits for the first."""

    def __init__(self, source: Callable[[int, torch.device], Tensor] = _allocate) -> None:
        """`source` gives fresh memory; tests count its calls."""
        self._source = source
        self._lock = threading.RLock()
        self._kept: dict[torch.device, list[tuple[Tensor, Touched]]] = {}
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.high_water_bytes = 0
        """Most bytes leased at once since the last `reset_high_water`."""
        self._leased_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes kept for later."""
        # over copies: another thread may be decoding, and its lock is held to the end
        return sum(memory.numel() for slabs in list(self._kept.values()) for memory, _ in list(slabs))

    def reset_high_water(self) -> None:
        """Start measuring the peak anew."""
        self.high_water_bytes = 0

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the pool for a whole decode."""
        with self._lock:
            yield

    @contextmanager
    def lease(
        self, nbytes: int, device: torch.device, keep_bytes: int, *, beside: torch.device | None = None
    ) -> Iterator[Slab]:
        """A slab for the time of the block; on leaving, however, at most `keep_bytes` stay in the pool.

        `beside` is the device that copies from and to a slab in the host's memory: fresh pages are locked for a GPU.
        """
        with self._lock:
            slab = self._take(slab_bytes(nbytes), device)
            if beside is not None and is_gpu(beside) and not slab.touched:
                lock_pages(slab.memory)
            self._leased_bytes += slab.nbytes
            self.high_water_bytes = max(self.high_water_bytes, self._leased_bytes)
            try:
                yield slab
            finally:
                self._leased_bytes -= slab.nbytes
                self._kept.setdefault(device, []).append((slab.memory, slab.touched))
                self.trim(keep_bytes)

    def _take(self, nbytes: int, device: torch.device) -> Slab:
        slabs = self._kept.get(device, [])
        fitting = [i for i, (memory, _) in enumerate(slabs) if memory.numel() >= nbytes]
        if fitting:
            memory, touched = slabs.pop(min(fitting, key=lambda i: slabs[i][0].numel()))
            self.hits += 1
            return Slab(memory, nbytes, touched)
        # a smaller slab would only lie beside the new one: give it back first
        self.evictions += len(slabs)
        slabs.clear()
        self.misses += 1
        return Slab(self._source(nbytes, device), nbytes, ())

    def trim(self, keep_bytes: int) -> None:
        """Give memory back, the largest slabs first, until at most `keep_bytes` are held."""
        with self._lock:
            for slabs in self._kept.values():
                slabs.sort(key=lambda s: s[0].numel())
            while self.held_bytes > keep_bytes:
                fullest = max((s for s in self._kept.values() if s), key=lambda s: s[-1][0].numel())
                fullest.pop()
                self.evictions += 1

    def clear(self) -> None:
        """Give everything back."""
        self.trim(0)
