"""Torch's process-wide state as plain values, read in every way that torch offers; its switches set by hand; the ways
in which a decode ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from halo_vae.tests.fixtures import device_memory_error

_BACKENDS: Any = torch.backends
_OLD: Mapping[str, Callable[[], object]] = {
    "cudnn.allow_tf32": lambda: _BACKENDS.cudnn.allow_tf32,
    "matmul.allow_tf32": lambda: _BACKENDS.cuda.matmul.allow_tf32,
    "float32_matmul_precision": torch.get_float32_matmul_precision,
}
_PLACES: Mapping[str, Callable[[], Any]] = {
    "all": lambda: _BACKENDS,
    "cuda": lambda: _BACKENDS.cudnn,
    "cuda.matmul": lambda: _BACKENDS.cuda.matmul,
    "cuda.conv": lambda: _BACKENDS.cudnn.conv,
    "cuda.rnn": lambda: _BACKENDS.cudnn.rnn,
    "mkldnn": lambda: _BACKENDS.mkldnn,
    "mkldnn.matmul": lambda: _BACKENDS.mkldnn.matmul,
    "mkldnn.conv": lambda: _BACKENDS.mkldnn.conv,
}
PREFIXES = ("PYTORCH_", "MIOPEN_", "HSA_", "HIP_", "TORCH_")


def has_precisions() -> bool:
    """True where torch has a precision per operation (since 2.9)."""
    return hasattr(_BACKENDS.cuda.matmul, "fp32_precision")


def precisions() -> dict[str, str]:
    """The precision of float32 by place; empty where torch has no such thing."""
    if not has_precisions():
        return {}
    places = {name: place() for name, place in _PLACES.items() if name != "cuda.rnn" or hasattr(_BACKENDS.cudnn, "rnn")}
    return {name: str(place.fp32_precision) for name, place in places.items()}


def booleans() -> dict[str, bool]:
    """The switches that are on or off, by the name that the package gives them."""
    return {name: read() for name, (read, _) in BOOLEANS.items()}


def state() -> dict[str, object]:
    """Everything, with "raises" for what torch refuses to tell."""
    found: dict[str, object] = {**booleans(), **precisions()}
    for name, read in _OLD.items():
        try:
            found[name] = read()
        except RuntimeError:
            found[name] = "raises"
    for name in ("fp16", "bf16"):
        split = getattr(_BACKENDS.cuda.matmul, f"allow_{name}_reduced_precision_reduction_split_k", None)
        found[f"{name}_split_k"] = split
    found["deterministic"] = _BACKENDS.cudnn.deterministic
    found["default dtype"] = str(torch.get_default_dtype())
    found["grad"] = torch.is_grad_enabled()
    found["inference"] = torch.is_inference_mode_enabled()
    found["autocast"] = torch.is_autocast_enabled()
    found["threads"] = torch.get_num_threads()
    found["environment"] = {k: v for k, v in os.environ.items() if k.startswith(PREFIXES)}
    return found


def _attribute(owner: Any, name: str) -> tuple[Callable[[], bool], Callable[[bool], object]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _call(read: str, write: str) -> tuple[Callable[[], bool], Callable[[bool], object]]:
    return lambda: getattr(_BACKENDS.cuda, read)(), lambda value: getattr(_BACKENDS.cuda, write)(value)


_MATMUL = _BACKENDS.cuda.matmul
_ALL = {
    "cudnn": _attribute(_BACKENDS.cudnn, "enabled"),
    "benchmark": _attribute(_BACKENDS.cudnn, "benchmark"),
    "fp16_accumulation": _attribute(_MATMUL, "allow_fp16_accumulation"),
    "fp16_reduced_sums": _attribute(_MATMUL, "allow_fp16_reduced_precision_reduction"),
    "bf16_reduced_sums": _attribute(_MATMUL, "allow_bf16_reduced_precision_reduction"),
    "sdpa_reduced_sums": _call("fp16_bf16_reduction_math_sdp_allowed", "allow_fp16_bf16_reduction_math_sdp"),
    "sdpa_flash": _call("flash_sdp_enabled", "enable_flash_sdp"),
    "sdpa_mem_efficient": _call("mem_efficient_sdp_enabled", "enable_mem_efficient_sdp"),
    "sdpa_math": _call("math_sdp_enabled", "enable_math_sdp"),
    "sdpa_cudnn": _call("cudnn_sdp_enabled", "enable_cudnn_sdp"),
}


def _exists(read: Callable[[], bool]) -> bool:
    try:
        read()
    except AttributeError:  # of a newer torch
        return False
    return True


BOOLEANS = {name: pair for name, pair in _ALL.items() if _exists(pair[0])}
"""How to read and to set each switch that this torch has."""


@contextmanager
def given(**values: bool) -> Iterator[None]:
    """Some switches as the user has set them, for one test."""
    before = {name: BOOLEANS[name][0]() for name in values}
    try:
        for name, value in values.items():
            BOOLEANS[name][1](value)
        yield
    finally:
        for name, value in before.items():
            BOOLEANS[name][1](value)


class Stop(BaseException):
    """As hosts cancel."""


EXITS: dict[str, Callable[[], BaseException] | None] = {
    "success": None, "error": lambda: ValueError("error"), "cancel": Stop, "memory": device_memory_error,
}  # fmt: skip


def leave_by(name: str) -> None:
    """End a block that way."""
    make = EXITS[name]
    if make is not None:
        raise make()


def running(work: Callable[[], object], name: str) -> None:
    """Run work that is expected to end that way."""
    make = EXITS[name]
    if make is None:
        work()
        return
    with pytest.raises(type(make())):
        work()
