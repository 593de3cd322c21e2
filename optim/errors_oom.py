"""Which exceptions mean that memory ran out. One function, so that every caller agrees."""

from __future__ import annotations

import torch

_OUT_OF_MEMORY_CODE = 2
"""cudaErrorMemoryAllocation and hipErrorOutOfMemory, as torch.AcceleratorError.error_code carries them."""
_TYPES: tuple[type[BaseException], ...] = (getattr(torch, "OutOfMemoryError", MemoryError), MemoryError)
_PHRASES = ("out of memory", "can't allocate memory", "not enough memory")
"""What torch's device and host allocators say (the last one on Windows), in lower case."""


def is_out_of_memory(exc: BaseException) -> bool:
    """True for every form in which torch or Python reports a failed allocation.

    ROCm builds report some failures as plain RuntimeError or AcceleratorError, so the type alone does not decide;
    any other RuntimeError (a wrong shape, say) is not one.
    """
    if isinstance(exc, _TYPES):
        return True
    if not isinstance(exc, RuntimeError):
        return False
    if getattr(exc, "error_code", None) == _OUT_OF_MEMORY_CODE:
        return True
    text = str(exc).lower()
    return any(phrase in text for phrase in _PHRASES)
