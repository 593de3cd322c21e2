"""Torch's process-wide switches: how each is read, set and put back, on every torch since 2.4.

A switch that this torch does not have raises AttributeError when it is used; what else it raises means that it cannot
be read or set now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

Float32Backend = Literal["cuda", "mkldnn"]
"""`cuda` is also what torch calls HIP devices, `mkldnn` computes on the CPU."""
SdpaKernel = Literal["flash", "mem_efficient", "math", "cudnn"]
SDPA_KERNELS: tuple[SdpaKernel, ...] = ("flash", "mem_efficient", "math", "cudnn")
Value = bool | frozenset[Float32Backend]
Undo = list[Callable[[], object]]
"""What puts things back, the last entry first."""

_BACKENDS: Any = torch.backends
_TORCH: Any = torch


@dataclass(frozen=True, slots=True)
class _Boolean:
    """A switch that is on or off."""

    read: Callable[[], bool]
    write: Callable[[bool], object]

    def apply(self, value: bool, undo: Undo) -> str | None:
        before = self.read()
        if before == value:
            return None
        undo.append(lambda: self.write(before))  # first, so that nothing is left if the next line is cut short
        self.write(value)
        return _text(before)


class _ReducedSums:
    """Sums of matrix products in their own narrow dtype; newer versions of torch know two numbers of it."""

    def __init__(self, dtype: Literal["fp16", "bf16"]) -> None:
        self._name = f"allow_{dtype}_reduced_precision_reduction"

    def apply(self, value: bool, undo: Undo) -> str | None:
        matmul, name = _BACKENDS.cuda.matmul, self._name
        before, split = getattr(matmul, name), getattr(matmul, f"{name}_split_k", None)
        if before == value:
            return None
        undo.append(lambda: setattr(matmul, name, before if split is None else (before, split)))
        setattr(matmul, name, value if split is None else (value, True if value else split))
        return _text(before)


# -- float32

_EXACT = ("ieee", "none")
"""What the precision of an operation may read as where float32 is not rounded; none is as torch was born."""


@dataclass(frozen=True, slots=True)
class _Node:
    """A place that holds a precision; an operation that has none of its own takes its backend's, and that the general
    one."""

    name: str
    place: Callable[[], Any]
    parent: _Node | None

    @property
    def value(self) -> str:
        return str(self.place().fp32_precision)

    def force(self, undo: Undo) -> None:
        """Make it ieee, itself or by its parent, so that each precision that is written over is the place's own."""
        before = self.value
        if before == "ieee":
            return
        if self.parent is not None and before != "none" and self.parent.value == before:
            self.parent.force(undo)  # it may well be inherited, and to write it back would make it the place's own
            if self.value == "ieee":
                return
        undo.append(lambda: self.write(before))
        self.write("ieee")

    def write(self, value: str) -> None:
        self.place().fp32_precision = value


_GENERAL = _Node("all", lambda: _BACKENDS, None)
_CUDA = _Node("cuda", lambda: _BACKENDS.cudnn, _GENERAL)
_MKLDNN = _Node("mkldnn", lambda: _BACKENDS.mkldnn, _GENERAL)
_OPERATIONS: Mapping[Float32Backend, tuple[_Node, ...]] = {
    "cuda": (
        _Node("cuda.matmul", lambda: _BACKENDS.cuda.matmul, _CUDA),
        _Node("cuda.conv", lambda: _BACKENDS.cudnn.conv, _CUDA),
    ),
    "mkldnn": (
        _Node("mkldnn.matmul", lambda: _BACKENDS.mkldnn.matmul, _MKLDNN),
        _Node("mkldnn.conv", lambda: _BACKENDS.mkldnn.conv, _MKLDNN),
    ),
}


class _Float32:
    """Float32 products and convolutions in full on some backends, not rounded to TF32 or bfloat16 on the way.

    Where torch has `fp32_precision` (since 2.9) only that is touched: reading `allow_tf32` raises as soon as anyone has
    used both. Backends are forced before operations: an operation that follows its backend, or torch's first default,
    then needs no writing, and so goes on following it afterwards.
    """

    def apply(self, value: frozenset[Float32Backend], undo: Undo) -> str | None:
        if hasattr(_BACKENDS.cuda.matmul, "fp32_precision"):
            found = [text for backend in sorted(value) for text in self._by_operation(backend, undo)]
        else:
            found = list(self._by_switch(value, undo))
        return ", ".join(found) or None

    @staticmethod
    def _by_operation(backend: Float32Backend, undo: Undo) -> Iterator[str]:
        rounded = [(node, node.value) for node in _OPERATIONS[backend] if node.value not in _EXACT]
        for node, before in rounded:
            assert node.parent is not None
            node.parent.force(undo)
            if node.value not in _EXACT:
                undo.append(lambda node=node, own=node.value: node.write(own))  # type: ignore[misc]
                node.write("ieee")
            yield f"{node.name} {before}"

    @staticmethod
    def _by_switch(value: frozenset[Float32Backend], undo: Undo) -> Iterator[str]:
        products = _TORCH.get_float32_matmul_precision()  # of every backend
        if value and products != "highest":
            undo.append(lambda: _TORCH.set_float32_matmul_precision(products))
            _TORCH.set_float32_matmul_precision("highest")
            yield f"matmul {products}"
        if "cuda" in value and _BACKENDS.cudnn.allow_tf32:
            undo.append(lambda: setattr(_BACKENDS.cudnn, "allow_tf32", True))
            _BACKENDS.cudnn.allow_tf32 = False
            yield "cuda.conv tf32"


# -- all of them


def _attribute(owner: Callable[[], Any], name: str) -> _Boolean:
    return _Boolean(lambda: bool(getattr(owner(), name)), lambda value: setattr(owner(), name, value))


def _sdpa(read: str, write: str) -> _Boolean:
    return _Boolean(lambda: bool(getattr(_BACKENDS.cuda, read)()), lambda value: getattr(_BACKENDS.cuda, write)(value))


SWITCHES: Mapping[str, Any] = {
    "cudnn": _attribute(lambda: _BACKENDS.cudnn, "enabled"),
    "benchmark": _attribute(lambda: _BACKENDS.cudnn, "benchmark"),
    "float32": _Float32(),
    "fp16_accumulation": _attribute(lambda: _BACKENDS.cuda.matmul, "allow_fp16_accumulation"),
    "fp16_reduced_sums": _ReducedSums("fp16"),
    "bf16_reduced_sums": _ReducedSums("bf16"),
    "sdpa_reduced_sums": _sdpa("fp16_bf16_reduction_math_sdp_allowed", "allow_fp16_bf16_reduction_math_sdp"),
    "sdpa_flash": _sdpa("flash_sdp_enabled", "enable_flash_sdp"),
    "sdpa_mem_efficient": _sdpa("mem_efficient_sdp_enabled", "enable_mem_efficient_sdp"),
    "sdpa_math": _sdpa("math_sdp_enabled", "enable_math_sdp"),
    "sdpa_cudnn": _sdpa("cudnn_sdp_enabled", "enable_cudnn_sdp"),
}
"""By name; each has `apply(value, undo)`, which sets it, adds what puts it back, and returns what it was before in
words (None where it was so already)."""


def put_back(undo: Undo) -> list[str]:
    """Run what is on the list, the last first, whatever single entries raise; what they raised, in words.

    A request to stop that arrives meanwhile is raised when all is done.
    """
    failures: list[str] = []
    stop: BaseException | None = None
    while undo:
        try:
            undo.pop()()
        except Exception as error:
            failures.append(str(error))
        except BaseException as error:
            stop = error
    if stop is not None:
        raise stop
    return failures


def _text(value: bool) -> str:
    return "on" if value else "off"
