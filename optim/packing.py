"""Weights as kernels want them: cast, folded, re-laid-out; kept per decoder, with hits and misses counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .events import DecodeObserver
from .plan import Layout
from .program import Conv, Linear
from .weights import WeightSource

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def fold_nearest(weight: Tensor) -> Tensor:
    """A 3x3 kernel after nearest-2x upsampling as a 2x2 kernel with four times the outputs.

    [C_out, C_in, 3, 3] -> [4 C_out, C_in, 2, 2].

    Output phase (i, j) of pixel (y, x) reads rows y - 1 + i and y + i only: two of the three taps fall on one source
    row and add up. Phase (i, j) is block i * 2 + j of the outputs. Exact up to the rounding of the sums,
    taken in float32.
    """
    w = weight.float()
    rows = ((w[:, :, 0], w[:, :, 1] + w[:, :, 2]), (w[:, :, 0] + w[:, :, 1], w[:, :, 2]))
    phases = []
    for pair in rows:
        for right in range(2):
            cols = [
                torch.stack((r[..., 0] + r[..., 1], r[..., 2]) if right else (r[..., 0], r[..., 1] + r[..., 2]), -1)
                for r in pair
            ]
            phases.append(torch.stack(cols, 2))
    return torch.cat(phases).to(weight.dtype)


@dataclass(frozen=True, slots=True)
class _Key:
    name: str
    dtype: torch.dtype
    device: torch.device
    form: str


class PackedWeights:
    """What one decoder's weights were turned into: only what had to be converted is kept."""

    def __init__(self, source: WeightSource) -> None:
        """Nothing is packed yet."""
        self._source = source
        self._kept: dict[_Key, Tensor] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        with self._lock:
            return sum(t.numel() * t.element_size() for t in self._kept.values())

    def clear(self) -> None:
        """Drop everything kept."""
        with self._lock:
            self._kept.clear()

    def vector(self, name: str | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """A small tensor (bias, norm weight) as it is."""
        return None if name is None else self._source.get(name, dtype, device)

    def conv(
        self,
        op: Conv,
        *,
        fold: bool,
        dtype: torch.dtype,
        device: torch.device,
        layout: Layout,
        keep: bool,
        observer: DecodeObserver,
    ) -> tuple[Tensor, Tensor | None]:
        """(weight, bias) of a convolution, folded if asked; bias [4 C_out] then."""
        weight = self._matrix(op.weight, "folded" if fold else "plain", dtype, device, keep, observer)
        bias = self.vector(op.bias, dtype, device)
        if layout == "channels_last" and device.type != "cpu":
            # a CPU backend re-orders weights per call whatever their layout; others would convert on every call
            weight = weight.contiguous(memory_format=torch.channels_last)
        return weight, bias.repeat(4) if fold and bias is not None else bias

    def linear(
        self, linear: Linear, *, dtype: torch.dtype, device: torch.device, keep: bool, observer: DecodeObserver
    ) -> tuple[Tensor, Tensor | None]:
        """(weight [C_out, C_in], bias) of a per-pixel projection."""
        weight = self._matrix(linear.weight, "plain", dtype, device, keep, observer)
        return weight.reshape(weight.shape[0], -1), self.vector(linear.bias, dtype, device)

    def plain(
        self, name: str, dtype: torch.dtype, device: torch.device, *, keep: bool, observer: DecodeObserver
    ) -> Tensor:
        """A weight as it is stored, cast where it has to be."""
        return self._matrix(name, "plain", dtype, device, keep, observer)

    def folded(
        self,
        key: str,
        part: Callable[[], Tensor],
        dtype: torch.dtype,
        device: torch.device,
        *,
        keep: bool,
        observer: DecodeObserver,
    ) -> Tensor:
        """`fold_nearest` of a float32 part of a weight [K, C, 3, 3], kept under `key`; read only where it is new."""
        found = self._kept_as(_Key(key, dtype, device, "folded"), keep, observer)
        if found is not None:
            return found
        with torch.inference_mode(False), torch.no_grad():
            made = fold_nearest(part().clone()).to(dtype).contiguous(memory_format=torch.channels_last)
        return self._keep(_Key(key, dtype, device, "folded"), made, keep, observer)

    def _kept_as(self, key: _Key, keep: bool, observer: DecodeObserver) -> Tensor | None:
        with self._lock:
            found = self._kept.get(key) if keep else None
        observer.cache_lookup("packed", found is not None)
        return found

    def _keep(self, key: _Key, made: Tensor, keep: bool, observer: DecodeObserver) -> Tensor:
        observer.converted(made.numel() * made.element_size())
        if keep:
            with self._lock:
                self._kept[key] = made
        return made

    def _matrix(
        self, name: str, form: str, dtype: torch.dtype, device: torch.device, keep: bool, observer: DecodeObserver
    ) -> Tensor:
        spec = self._source.specs.get(name)
        if form == "plain" and (spec is None or spec.dtype == dtype):
            return self._source.get(name, dtype, device)
        key = _Key(name, dtype, device, form)
        found = self._kept_as(key, keep, observer)
        if found is not None:
            return found
        # fold before narrowing, so that the sums are taken of the stored values
        with torch.inference_mode(False), torch.no_grad():
            made = self._source.get(name, torch.float32 if form == "folded" else dtype, device)
            made = (
                fold_nearest(made).to(dtype).contiguous(memory_format=torch.channels_last) if form == "folded" else made
            )
        return self._keep(key, made, keep, observer)
