"""Weights of clip programs as kernels want them: one kernel per tap, constants of norms, projections."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import Tensor

from ..events import DecodeObserver
from ..packing import PackedWeights
from ..program import Linear
from .ops import ClipAttention, ClipConv, ClipNorm, Modulation

EMBEDDING = 256
"""Width of the sinusoidal timestep embedding."""


class ClipWeights:
    """Tensors of one decode, on one device."""

    def __init__(self, packed: PackedWeights, device: torch.device, observer: DecodeObserver, *, keep: bool) -> None:
        """`keep` caches what had to be cast or folded."""
        self._packed, self._device, self._observer, self._keep = packed, device, observer, keep

    def vector(self, name: str) -> Tensor:
        """A small tensor in float32."""
        found = self._packed.vector(name, torch.float32, self._device)
        assert found is not None
        return found

    def bias(self, op: ClipConv, dtype: torch.dtype) -> Tensor | None:
        """[K]."""
        return self._packed.vector(op.bias, dtype, self._device)

    def kernel(self, op: ClipConv, dtype: torch.dtype) -> Tensor:
        """[K, C, kt, kh, kw]; shares memory with the stored weight where the dtype is its own."""
        weight = self._packed.plain(op.weight, dtype, self._device, keep=self._keep, observer=self._observer)
        return _as_kernel(op, weight)

    def folded(self, op: ClipConv, dtype: torch.dtype) -> list[Tensor]:
        """For each tap [4 K, C, 2, 2]: nearest-2x upsampling and the 3x3 kernel in one."""
        return [
            self._packed.folded(
                f"{op.weight}[{k}]", partial(self._tap, op, k), dtype, self._device, keep=self._keep,
                observer=self._observer,
            )
            for k in range(op.kernel[0])
        ]  # fmt: skip

    def _tap(self, op: ClipConv, k: int) -> Tensor:
        """One tap [K, C, kh, kw] in float32, which is not kept."""
        weight = self._packed.plain(op.weight, torch.float32, self._device, keep=False, observer=self._observer)
        return _as_kernel(op, weight)[:, :, k]

    def projections(self, op: ClipAttention, dtype: torch.dtype) -> list[tuple[Tensor, Tensor | None]]:
        """(weight, bias) of q, k, v and the output projection."""
        proj = self.linear(op.proj, dtype)
        if op.qkv is not None:
            weight, bias = self.linear(op.qkv, dtype)
            parts = weight.chunk(3)
            biases = bias.chunk(3) if bias is not None else (None, None, None)
            return [*zip(parts, biases, strict=True), proj]
        assert op.q is not None
        assert op.k is not None
        assert op.v is not None
        return [*(self.linear(part, dtype) for part in (op.q, op.k, op.v)), proj]

    def linear(self, linear: Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """(weight [C_out, C_in], bias)."""
        return self._packed.linear(linear, dtype=dtype, device=self._device, keep=self._keep, observer=self._observer)

    def constants(self, norm: ClipNorm, channels: int) -> tuple[Tensor | None, Tensor | None]:
        """(gain, shift) [C] float32 that follow from the weights alone; a modulation is already in them."""
        gain = None if norm.weight is None else self.vector(norm.weight).reshape(channels)
        shift = None if norm.bias is None else self.vector(norm.bias).reshape(channels)
        if norm.modulation is None:
            return gain, shift
        scale, moved = self._modulation(norm.modulation, channels)
        gain = 1 + scale if gain is None else gain * (1 + scale)
        return gain, moved if shift is None else shift * (1 + scale) + moved

    def _modulation(self, m: Modulation, channels: int) -> tuple[Tensor, Tensor]:
        """(scale, shift) [C]. Source: AdaLN-single of PixArt-alpha, arXiv:2310.00426, with DDPM's sinusoids."""
        t = m.timestep * (self.vector(m.multiplier) if m.multiplier is not None else 1.0)
        half = EMBEDDING // 2
        steps = torch.arange(half, dtype=torch.float32, device=self._device)
        angles = t * torch.exp(steps * (-math.log(10000.0) / half))
        hidden = F.linear(torch.cat((angles.cos(), angles.sin())), *self.linear(m.first, torch.float32))
        embedding = F.linear(F.silu(hidden), *self.linear(m.second, torch.float32))
        rows = self.vector(m.table) + embedding.view(-1, channels)
        return rows[m.scale_row], rows[m.shift_row]


def _as_kernel(op: ClipConv, weight: Tensor) -> Tensor:
    """A stored weight as [K, C, kt, kh, kw]."""
    if op.form == "conv2d":
        return weight[:, :, None]
    if op.form == "linear":
        return weight[:, :, None, None, None]
    if op.form == "past":
        c = weight.shape[1] // 2
        return torch.stack((weight[:, c:], weight[:, :c]), 2)
    return weight
