"""Gives memory that was freed back to the system, so that it is not resident beside what comes next."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch

from .accelerator import empty_gpu_cache


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None with other C libraries and systems."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
    return found


def trim_heap() -> bool:
    """Return freed heap to the system. False where the C library cannot.

    glibc raises its mmap threshold to 32 MiB once a large allocation was freed: from then on a kernel's result is heap
    that stays resident after it is freed, at every size that an earlier resolution needed.
    """
    trim = _malloc_trim()
    if trim is None:
        return False
    trim(0)
    return True


def give_back(device: torch.device) -> None:
    """Return memory that was freed but kept for the next allocation: the heap's, and that of torch's GPU allocator.

    Libraries that allocate for themselves find it only then, and so do other programs.
    """
    trim_heap()
    empty_gpu_cache(device)
