"""Which exceptions mean that memory ran out. One function, so that every caller agrees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from .errors import HaloError

E = TypeVar("E", bound=BaseException)

_OUT_OF_MEMORY_CODE = 2
"""cudaErrorMemoryAllocation and hipErrorOutOfMemory, as torch.AcceleratorError.error_code carries them."""
_TYPES: tuple[type[BaseException], ...] = (getattr(torch, "OutOfMemoryError", MemoryError), MemoryError)
_PHRASES = (
    "out of memory",
    "outofmemory",
    "can't allocate memory",
    "not enough memory",
    "memory not available to allocate",
    "status_alloc_failed",
    "statusallocfailed",
)
"""In lower case, what is said by torch's device and host allocators (`not enough memory` on Windows), HIP
(`hipErrorOutOfMemory`), MIOpen (for its workspace: `Memory not available to allocate buffer`,
`miopenStatusAllocFailed`) and by hipBLAS and cuBLAS (`HIPBLAS_STATUS_ALLOC_FAILED`).
Sources: https://github.com/ROCm/MIOpen/issues/47, https://github.com/ROCm/rocm-libraries/issues/2801."""
_LOST_CODES = frozenset({46, 100, 214, 700, 702, 709, 710, 716, 717, 718, 719, 999})
"""Of CUDA and HIP alike: device unavailable, no device, uncorrectable ECC error, illegal address, launch timeout,
context destroyed, device assertion, misaligned address, invalid address space and program counter, launch failure,
unknown."""
_LOST_PHRASES = (
    "illegal memory access",
    "illegal address",
    "illegaladdress",
    "memory access fault",
    "launch failure",
    "launchfailure",
    "launch timed out",
    "launchtimeout",
    "device lost",
    "devicelost",
    "device hang",
    "device removed",
    "context is destroyed",
    "contextisdestroyed",
)


class DecodeOutOfMemoryError(HaloError, torch.OutOfMemoryError):
    """Memory ran out in every way a decode could be run; torch's own error type, as hosts know that one.

    Attributes:
        need_bytes: what the last plan takes, or None where nobody can tell.
        free_bytes: what is free by now, or None where that is unknown.
        tried: what was given up, in order.
    """

    def __init__(self, message: str, *, need_bytes: int | None, free_bytes: int | None, tried: Sequence[str]) -> None:
        """Store the figures beside the sentence."""
        super().__init__(message)
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes
        self.tried = tuple(tried)


def is_out_of_memory(exc: BaseException) -> bool:
    """True for every form in which torch, its libraries or Python report a failed allocation.

    ROCm builds report some failures as plain RuntimeError or AcceleratorError, so the type alone does not decide;
    any other RuntimeError (a wrong shape, say) is not one, and neither is what a lost device says.
    """
    if is_device_lost(exc):
        return False
    if isinstance(exc, _TYPES):
        return True
    if not isinstance(exc, RuntimeError):
        return False
    if getattr(exc, "error_code", None) == _OUT_OF_MEMORY_CODE:
        return True
    text = str(exc).lower()
    return any(phrase in text for phrase in _PHRASES)


def is_device_lost(exc: BaseException) -> bool:
    """True where the device or what runs on it is broken, so that nothing in this process may be tried again.

    An out-of-memory text does not change that: after such a failure, later calls fail in any words.
    """
    if not isinstance(exc, RuntimeError):
        return False
    if getattr(exc, "error_code", None) in _LOST_CODES:
        return True
    text = str(exc).lower()
    return any(phrase in text for phrase in _LOST_PHRASES)


def first_line(exc: BaseException) -> str:
    """The first line of an exception's text, or its type's name where it has none."""
    return next(iter(str(exc).splitlines()), type(exc).__name__)


def forget_frames(exc: E) -> E:
    """The exception without the frames that it and its causes came through, whose locals would stay alive with it."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [exc]
    while waiting:
        error = waiting.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            error.__traceback__ = None
            waiting += [error.__cause__, error.__context__]
    return exc
