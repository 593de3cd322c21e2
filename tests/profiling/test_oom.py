from __future__ import annotations

import gc
import weakref

import pytest
import torch

from halo_vae.optim.errors import HaloError, NonFiniteError
from halo_vae.optim.errors_oom import (
    DecodeOutOfMemoryError,
    first_line,
    forget_frames,
    is_device_lost,
    is_out_of_memory,
)


def accelerator_error(text: str, code: int | None = None) -> BaseException:
    error = torch.AcceleratorError(text)
    if code is not None:
        error.error_code = code
    return error


SHORTAGES = [
    torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2 GiB"),
    RuntimeError("HIP error: out of memory"),  # a plain RuntimeError on ROCm
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),  # Windows
    MemoryError(),
    accelerator_error("HIP error: out of memory"),
    accelerator_error("HIP error: see the log", 2),  # only the code tells
    RuntimeError("hipErrorOutOfMemory"),
    RuntimeError("HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("miopenStatusAllocFailed"),
    RuntimeError("MIOpen Error: handlehip.cpp:70: Memory not available to allocate buffer: 655360000"),
    DecodeOutOfMemoryError("it ran out of memory", need_bytes=1, free_bytes=None, tried=()),
]
LOST = [
    RuntimeError("HIP error: an illegal memory access was encountered"),
    RuntimeError("HIP error: hipErrorIllegalAddress"),
    RuntimeError("HIP error: unspecified launch failure"),
    RuntimeError("CUDA error: the launch timed out and was terminated"),
    RuntimeError("HIP error: device lost"),
    accelerator_error("HIP error: see the log", 719),
    accelerator_error("HIP error: see the log", 700),
    accelerator_error("HIP error: out of memory", 719),  # what a broken device says does not count
    torch.OutOfMemoryError("HIP error: an illegal memory access was encountered; out of memory"),
]
OTHERS = [
    RuntimeError("expected input to have 16 channels"),
    accelerator_error("HIP error: invalid device function", 98),
    ValueError("out of memory"),  # not an allocator's error
    NonFiniteError("conv is not finite even in float32", op="conv", dtype="float32"),
    RuntimeError("HIP error: too many resources requested for launch"),
    *LOST,
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda e: f"{type(e).__name__}: {e}")
def test_shortages_are_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=lambda e: f"{type(e).__name__}: {e}")
def test_other_errors_are_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("error", LOST, ids=lambda e: f"{type(e).__name__}: {e}")
def test_lost_devices_are_recognised(error: BaseException) -> None:
    assert is_device_lost(error)


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda e: f"{type(e).__name__}: {e}")
def test_a_shortage_is_no_lost_device(error: BaseException) -> None:
    assert not is_device_lost(error)


def test_the_error_with_figures_is_one_that_hosts_know() -> None:
    error = DecodeOutOfMemoryError("no room", need_bytes=3, free_bytes=None, tried=["smaller tiles"])
    assert isinstance(error, torch.OutOfMemoryError)
    assert isinstance(error, HaloError)
    assert (error.need_bytes, error.free_bytes, error.tried) == (3, None, ("smaller tiles",))


def test_frames_of_an_error_and_its_causes_are_forgotten() -> None:
    held = []

    def fail() -> None:
        mine = torch.zeros(10)
        held.append(weakref.ref(mine))
        try:
            other = torch.zeros(10)
            held.append(weakref.ref(other))
            raise ValueError("first\nline")
        except ValueError as cause:
            raise RuntimeError from cause

    kept = None
    try:
        fail()
    except RuntimeError as error:
        kept = error
    assert kept is not None
    assert all(ref() is not None for ref in held)
    assert forget_frames(kept) is kept
    gc.collect()
    assert all(ref() is None for ref in held)
    assert first_line(kept) == "RuntimeError"
    assert kept.__cause__ is not None
    assert first_line(kept.__cause__) == "first"
    kept.__cause__.__context__ = kept  # a ring of causes ends
    forget_frames(kept)
