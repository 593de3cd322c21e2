"""A decoder as a short program of fused ops over numbered values. Holds no tensors, imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Size = tuple[int, int, int]
"""(T, H, W) in elements of the value described; picture decoders have T = 1."""
Activation = Literal["none", "silu", "relu", "tanh3"]
"""`tanh3` is tanh(x / 3) * 3, the soft clamp of TAESD."""
BlockOrder = Literal["channel_major", "block_major"]
"""Where the 2x2 offsets (i, j) sit in the channel axis of a depth-to-space: `channel_major` reads channel
c * 4 + i * 2 + j (as torch's pixel_shuffle), `block_major` reads channel (i * 2 + j) * C + c."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """GroupNorm over (C / groups, H, W) of each picture. Source: Wu & He 2018, arXiv:1803.08494."""

    weight: str
    bias: str
    groups: int
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A per-pixel projection; the weight is [C_out, C_in] or [C_out, C_in, 1, 1]."""

    weight: str
    bias: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One activation map [B, C, T, H, W]."""

    channels: int
    scale: Size
    """Elements per latent element along T, H, W."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One step of a lowered decoder. Values are numbered; value 0 is the latent."""

    name: str
    """State-dict prefix ("decoder.up.3.block.0.conv1"): labels every profile row."""
    inputs: tuple[int, ...]
    """Values read; the first is the main source."""
    output: int
    """Value written, once only, so that its buffer is free after the last reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conv(Op):
    """post_act(conv(pad(upsample(act(norm(src))))) + repeat(residual)), then depth-to-space, gain and offset.

    Stride 1, zero padding of k // 2 applied after norm, activation and upsampling; `inputs` is (src,) or
    (src, residual).
    """

    weight: str
    """[C_out, C_in, kH, kW]."""
    bias: str | None
    in_channels: int
    out_channels: int
    """Channels of the convolution, before depth-to-space."""
    kernel: Size
    norm: Norm | None = None
    act: Activation = "none"
    upsample: int = 1
    """Nearest-neighbour factor along H and W, 1 or 2."""
    residual_repeat: int = 1
    """Each residual channel is added to this many neighbouring output channels (repeat_interleave)."""
    post_act: Activation = "none"
    depth_to_space: int = 1
    """Factor along H and W, 1 or 2; block_major order."""
    gain: float = 1.0
    offset: float = 0.0

    @property
    def residual(self) -> int | None:
        """The value added to the convolution, or None."""
        return self.inputs[1] if len(self.inputs) > 1 else None

    @property
    def halo(self) -> int:
        """Elements of context a tile reads on each side, at the resolution the convolution runs at."""
        return self.kernel[1] // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Op):
    """out = src + proj(softmax(q k^T / sqrt(C)) v) with q, k, v from norm(src): one head over all H x W."""

    norm: Norm
    q: Linear
    k: Linear
    v: Linear
    proj: Linear
    channels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointwise(Op):
    """Per-element arithmetic at latent resolution.

    `denormalize`: x * sqrt(weights[1] + eps) + weights[0], per channel (mean, variance of a latent batch norm).
    `shift_scale`: (x - weights[0]) * weights[1], scalars.
    """

    kind: Literal["denormalize", "shift_scale"]
    weights: tuple[str, str]
    eps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rearrange(Op):
    """Depth-to-space by `factor` along H and W."""

    factor: int
    order: BlockOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A decoder as straight-line ops in an order that runs. ValueError if it is not runnable."""

    family: str
    """Name of the family that lowered it ("kl", "hunyuan_image", "taesd")."""
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    """values[0] is the latent; the last op's output is the picture."""
    working_dtypes: tuple[str, ...]
    """Dtypes the decoder is known to survive ("float16", "bfloat16", "float32"), preferred first."""
    unit_range: bool = False
    """The raw picture spans 0 to 1; otherwise -1 to 1."""

    def __post_init__(self) -> None:
        """Check that every value is written once and before it is read."""
        written = {0}
        for op in self.ops:
            if missing := set(op.inputs) - written:
                raise ValueError(f"{op.name} reads values {sorted(missing)} before an op writes them")
            if op.output in written:
                raise ValueError(f"{op.name} writes value {op.output}, which is already written")
            if op.output >= len(self.values):
                raise ValueError(f"{op.name} writes value {op.output}, but only {len(self.values)} are declared")
            written.add(op.output)
        if not self.ops:
            raise ValueError("a program needs at least one op")

    @property
    def latent_channels(self) -> int:
        """Channels of the latent."""
        return self.values[0].channels

    @property
    def output(self) -> int:
        """Index of the picture value."""
        return self.ops[-1].output

    @property
    def out_channels(self) -> int:
        """Channels of the picture."""
        return self.values[self.output].channels

    @property
    def scale(self) -> Size:
        """Picture elements per latent element, e.g. (1, 8, 8)."""
        return self.values[self.output].scale


def value_size(program: Program, value: int, latent: Size) -> Size:
    """Elements (T, H, W) of a value for a latent of that size."""
    s = program.values[value].scale
    return latent[0] * s[0], latent[1] * s[1], latent[2] * s[2]


def last_reader(program: Program) -> Mapping[int, int]:
    """Index of the last op that reads each value; the picture is read by the op after the last."""
    last = {program.output: len(program.ops)}
    for i, op in enumerate(program.ops):
        for v in op.inputs:
            if v != program.output:
                last[v] = i
    return last


def norm_groups(program: Program) -> Mapping[int, int]:
    """Group count of the norm that reads each value that a norm reads. ValueError on two different counts."""
    groups: dict[int, int] = {}
    for op in program.ops:
        norm = getattr(op, "norm", None)
        if norm is not None and groups.setdefault(op.inputs[0], norm.groups) != norm.groups:
            raise ValueError(f"value {op.inputs[0]} is read by norms with different group counts")
    return groups


def op_macs(program: Program, op: Op, latent: Size) -> int:
    """Multiply-accumulates of one op on one picture, as written (before any folding)."""
    t, h, w = value_size(program, op.inputs[0], latent)
    if isinstance(op, Conv):
        pixels = t * h * w * op.upsample**2
        return pixels * op.in_channels * op.out_channels * math.prod(op.kernel)
    if isinstance(op, Attention):
        n = h * w
        return t * (4 * n * op.channels**2 + 2 * n * n * op.channels)
    return 0


def program_macs(program: Program, latent: Size) -> int:
    """Multiply-accumulates of a decode of one picture."""
    return sum(op_macs(program, op, latent) for op in program.ops)
