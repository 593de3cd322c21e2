from __future__ import annotations

import pytest
import torch

from halo_vae.optim.errors_oom import is_out_of_memory


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
]
OTHERS = [
    RuntimeError("expected input to have 16 channels"),
    accelerator_error("HIP error: invalid device function", 98),
    ValueError("out of memory"),  # not an allocator's error
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda e: f"{type(e).__name__}: {e}")
def test_shortages_are_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=lambda e: f"{type(e).__name__}: {e}")
def test_other_errors_are_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)
