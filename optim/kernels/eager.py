"""The reference form of every op: plain torch on whole maps, untiled and unfused. Correct first, never fast."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import LatentError
from ..program import Activation, Attention, Conv, Linear, Norm, Op, Pointwise, Program, Rearrange, last_reader
from ..weights import WeightSource


def run_eager(
    program: Program,
    weights: WeightSource,
    latent: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The raw picture [B, C, H, W] of a latent [B, C, h, w], about -1 to 1, neither shifted nor clamped.

    Everything runs in `dtype`; each map is dropped after its last reader. LatentError if the latent does not fit.
    """
    if latent.ndim != 4 or latent.shape[1] != program.latent_channels or not latent.numel():
        raise LatentError(
            f"the latent has shape {list(latent.shape)}; a {program.family} decoder with these weights takes "
            f"[batch, {program.latent_channels}, height, width]"
        )
    run = _Eager(weights, dtype, torch.device(device))
    last = last_reader(program)
    maps = {0: latent.detach().to(device=run.device, dtype=dtype)}
    with torch.no_grad():
        for i, op in enumerate(program.ops):
            maps[op.output] = run.op(op, [maps[v] for v in op.inputs])
            for v in set(op.inputs):
                if last[v] == i:
                    del maps[v]
    return maps[program.output]


def activate(x: Tensor, act: Activation) -> Tensor:
    """The activation of each element; `none` returns x itself."""
    if act == "silu":
        return functional.silu(x)
    if act == "relu":
        return functional.relu(x)
    if act == "tanh3":
        return torch.tanh(x / 3) * 3
    return x


def depth_to_space(x: Tensor, factor: int, order: str) -> Tensor:
    """[B, C * factor^2, H, W] -> [B, C, H * factor, W * factor], offsets ordered as `BlockOrder` says."""
    b, c, h, w = x.shape
    n = c // factor**2
    if order == "channel_major":
        x = x.reshape(b, n, factor, factor, h, w).permute(0, 1, 4, 2, 5, 3)
    else:
        x = x.reshape(b, factor, factor, n, h, w).permute(0, 3, 4, 1, 5, 2)
    return x.reshape(b, n, h * factor, w * factor)


class _Eager:
    """One decode's weights, dtype and device."""

    def __init__(self, weights: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._weights = weights
        self.dtype = dtype
        self.device = device

    def op(self, op: Op, inputs: list[Tensor]) -> Tensor:
        if isinstance(op, Conv):
            return self._conv(op, inputs)
        if isinstance(op, Attention):
            return self._attention(op, inputs[0])
        if isinstance(op, Pointwise):
            return self._pointwise(op, inputs[0])
        if isinstance(op, Rearrange):
            return depth_to_space(inputs[0], op.factor, op.order)
        raise TypeError(f"{op.name} is a {type(op).__name__}, which has no eager form")

    def _get(self, name: str) -> Tensor:
        return self._weights.get(name, self.dtype, self.device)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        return functional.group_norm(x, norm.groups, self._get(norm.weight), self._get(norm.bias), norm.eps)

    def _conv(self, op: Conv, inputs: list[Tensor]) -> Tensor:
        x = inputs[0]
        if op.norm is not None:
            x = self._norm(x, op.norm)
        x = activate(x, op.act)
        if op.upsample > 1:
            x = x.repeat_interleave(op.upsample, 2).repeat_interleave(op.upsample, 3)
        bias = self._get(op.bias) if op.bias is not None else None
        y = functional.conv2d(x, self._get(op.weight), bias, padding=(op.kernel[1] // 2, op.kernel[2] // 2))
        if op.residual is not None:
            y = y + inputs[1].repeat_interleave(op.residual_repeat, 1)
        y = activate(y, op.post_act)
        if op.depth_to_space > 1:
            y = depth_to_space(y, op.depth_to_space, "block_major")
        return y * op.gain + op.offset if (op.gain, op.offset) != (1.0, 0.0) else y

    def _linear(self, x: Tensor, linear: Linear) -> Tensor:
        bias = self._get(linear.bias) if linear.bias is not None else None
        return functional.linear(x, self._get(linear.weight).flatten(1), bias)

    def _attention(self, op: Attention, x: Tensor) -> Tensor:
        rows = self._norm(x, op.norm).flatten(2).transpose(1, 2)  # [B, C, H, W] -> [B, H * W, C]
        q, k, v = (self._linear(rows, part) for part in (op.q, op.k, op.v))
        scores = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(op.channels), dim=-1)
        return x + self._linear(scores @ v, op.proj).transpose(1, 2).reshape(x.shape)

    def _pointwise(self, op: Pointwise, x: Tensor) -> Tensor:
        first, second = (self._get(name) for name in op.weights)
        if op.kind == "denormalize":
            return x * torch.sqrt(second + op.eps).view(1, -1, 1, 1) + first.view(1, -1, 1, 1)
        return (x - first) * second
