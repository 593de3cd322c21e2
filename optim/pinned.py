"""Locks pages of host memory, so that copies to and from a GPU run at the full speed of the bus."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from .accelerator import GPU, gpu_runtime

_DEFAULT_FLAGS = 0


class Registrar(Protocol):
    """The part of the GPU's runtime that locks pages; its calls return 0 where they succeed."""

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> Any:  # noqa: N802 (the runtime's name)
        """Lock [pointer, pointer + nbytes)."""

    def cudaHostUnregister(self, pointer: int) -> Any:  # noqa: N802 (the runtime's name)
        """Unlock what was locked from `pointer` on."""


def lock_pages(memory: Tensor, runtime: Callable[[], Registrar | None] = gpu_runtime) -> bool:
    """Lock the pages of a flat tensor for as long as it lives. False where that cannot be done; it works unlocked too.

    Registered in place: torch's own pinned memory is taken in powers of two and never given back.
    """
    found = runtime()
    if found is None or not hasattr(found, "cudaHostRegister") or memory.device.type != "cpu" or not memory.numel():
        return False
    pointer = memory.data_ptr()
    try:
        status = int(found.cudaHostRegister(pointer, memory.numel() * memory.element_size(), _DEFAULT_FLAGS))
    except RuntimeError:
        status = -1
    if status != 0:
        _forget_error()
        return False
    weakref.finalize(memory, found.cudaHostUnregister, pointer).atexit = False
    return True


def _forget_error() -> None:
    """Have torch meet the runtime's last error here, so that no later kernel is blamed for it."""
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.zeros(1, device=GPU).add_(1).cpu()
