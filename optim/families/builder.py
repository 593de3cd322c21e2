"""Builds a Program op by op: checks each tensor's shape against the map it reads, and numbers the values."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import WeightsError
from ..program import Activation, Attention, BlockOrder, Conv, Linear, Norm, Op, Pointwise, Program, Rearrange, Value
from .keys import Keys

NORM_GROUPS = 32
"""Group count of every KL-like decoder; it cannot be read from the weights."""
NORM_EPS = 1e-6
_ATTENTION_NAMES = (
    ("norm", "q", "k", "v", "proj_out"),
    ("group_norm", "to_q", "to_k", "to_v", "to_out.0"),
    ("group_norm", "query", "key", "value", "proj_attn"),
)
"""Norm, query, key, value and output projection, as ldm, diffusers and older diffusers name them."""


def hinted_groups(hints: Mapping[str, str]) -> int:
    """GroupNorm's group count: the hint `norm_groups`, else 32. WeightsError if the hint is not a positive number."""
    text = hints.get("norm_groups", str(NORM_GROUPS))
    if not text.isdigit() or int(text) < 1:
        raise WeightsError(f"the hint norm_groups is {text!r}; give a whole number of 1 or more")
    return int(text)


class Builder:
    """Collects ops and values; every method that adds an op returns the number of the value it writes."""

    def __init__(self, keys: Keys, latent_channels: int, *, groups: int = NORM_GROUPS, eps: float = NORM_EPS) -> None:
        """Start from a latent of that many channels."""
        self.keys = keys
        self._groups = groups
        self._eps = eps
        self._ops: list[Op] = []
        self._values = [Value(channels=latent_channels, scale=(1, 1, 1))]

    def channels(self, value: int) -> int:
        """Channels of a value."""
        return self._values[value].channels

    def norm(self, name: str, channels: int, *, groups: int | None = None, eps: float | None = None) -> Norm:
        """GroupNorm `name` over a map of that many channels. WeightsError if the groups do not divide them."""
        groups = self._groups if groups is None else groups
        self._expect(f"{name}.weight", (channels,))
        self._expect(f"{name}.bias", (channels,))
        if channels % groups:
            raise WeightsError(
                f"{self.keys.full(name)!r} has {channels} channels, which {groups} groups do not divide; "
                "if the decoder was trained with another group count, pass it as the hint norm_groups"
            )
        full = self.keys.full
        eps = self._eps if eps is None else eps
        return Norm(weight=full(f"{name}.weight"), bias=full(f"{name}.bias"), groups=groups, eps=eps)

    def conv(
        self, name: str, source: int, *, norm: Norm | None = None, act: Activation = "none", upsample: int = 1,
        residual: int | None = None, repeat: bool = False, post_act: Activation = "none", depth_to_space: int = 1,
        bias: bool = True, gain: float = 1.0, offset: float = 0.0,
    ) -> int:  # fmt: skip
        """Convolution `name`, kernel and width read from its weight [C_out, C_in, kH, kW].

        `repeat` lets the residual have fewer channels, each added to as many output channels as the widths ask for.
        """
        out, read, *kernel = self.keys.shape(f"{name}.weight", 4)
        weight, have = self.keys.full(f"{name}.weight"), self.channels(source)
        if read != have:
            raise WeightsError(f"{weight!r} reads {read} channels, but its input has {have}; the file is damaged")
        if kernel[0] % 2 == 0 or kernel[0] != kernel[1]:
            raise WeightsError(f"{weight!r} has a {kernel[0]}x{kernel[1]} kernel; only odd square kernels are known")
        if bias:
            self._expect(f"{name}.bias", (out,))
        if out % depth_to_space**2:
            raise WeightsError(f"{weight!r} gives {out} channels, which {depth_to_space**2} offsets do not divide")
        op = Conv(
            name=self.keys.full(name), inputs=(source,) if residual is None else (source, residual),
            output=len(self._values), weight=weight, bias=self.keys.full(f"{name}.bias") if bias else None,
            in_channels=read, out_channels=out, kernel=(1, kernel[0], kernel[1]), norm=norm, act=act, upsample=upsample,
            residual_repeat=1 if residual is None else self._repeat(weight, out, residual, repeat), post_act=post_act,
            depth_to_space=depth_to_space, gain=gain, offset=offset,
        )  # fmt: skip
        return self._add(op, out // depth_to_space**2, source, upsample * depth_to_space)

    def res_block(self, name: str, source: int, *, shortcuts: tuple[str, ...]) -> int:
        """source + conv2(norm2(conv1(norm1(source)))), through the first existing shortcut where there is one."""
        norm1 = self.norm(f"{name}.norm1", self.channels(source))
        hidden = self.conv(f"{name}.conv1", source, norm=norm1, act="silu")
        shortcut = self.keys.first_of(*(f"{name}.{part}.weight" for part in shortcuts))
        skip = source
        if shortcut in self.keys or self.channels(source) != self.channels(hidden):
            skip = self.conv(shortcut.removesuffix(".weight"), source)
        norm2 = self.norm(f"{name}.norm2", self.channels(hidden))
        return self.conv(f"{name}.conv2", hidden, norm=norm2, act="silu", residual=skip)

    def attention(self, name: str, source: int) -> int:
        """Single-head attention over H x W, whichever of the usual names its projections carry."""
        channels = self.channels(source)
        names = max(_ATTENTION_NAMES, key=lambda parts: sum(self.keys.has(f"{name}.{part}.") for part in parts))
        norm, q, k, v, proj = (f"{name}.{part}" for part in names)
        op = Attention(
            name=self.keys.full(name), inputs=(source,), output=len(self._values), channels=channels,
            norm=self.norm(norm, channels), q=self._linear(q, channels), k=self._linear(k, channels),
            v=self._linear(v, channels), proj=self._linear(proj, channels),
        )  # fmt: skip
        return self._add(op, channels, source, 1)

    def denormalize(self, mean: str, variance: str, source: int, *, eps: float) -> int:
        """x * sqrt(variance + eps) + mean per channel."""
        channels = self.channels(source)
        self._expect(mean, (channels,))
        self._expect(variance, (channels,))
        name, weights = self.keys.full(mean.rsplit(".", 1)[0]), (self.keys.full(mean), self.keys.full(variance))
        op = Pointwise(
            name=name, inputs=(source,), output=len(self._values), kind="denormalize", weights=weights, eps=eps
        )
        return self._add(op, channels, source, 1)

    def shift_scale(self, shift: str, scale: str, source: int) -> int:
        """(x - shift) * scale with two scalars."""
        for name in (shift, scale):
            if (shape := self.keys.shape(name)) not in ((), (1,)):
                raise WeightsError(f"{self.keys.full(name)!r} has shape {list(shape)}; a scalar is expected")
        weights = (self.keys.full(shift), self.keys.full(scale))
        op = Pointwise(name=weights[1], inputs=(source,), output=len(self._values), kind="shift_scale", weights=weights)
        return self._add(op, self.channels(source), source, 1)

    def rearrange(self, name: str, source: int, *, factor: int, order: BlockOrder) -> int:
        """Depth-to-space by `factor`; the source's channels must be divisible by its square (callers check)."""
        full = self.keys.full(name)
        op = Rearrange(name=full, inputs=(source,), output=len(self._values), factor=factor, order=order)
        return self._add(op, self.channels(source) // factor**2, source, factor)

    def program(self, family: str, working_dtypes: tuple[str, ...]) -> Program:
        """The finished program."""
        return Program(family=family, ops=tuple(self._ops), values=tuple(self._values), working_dtypes=working_dtypes)

    def _add(self, op: Op, channels: int, source: int, factor: int) -> int:
        t, h, w = self._values[source].scale
        self._values.append(Value(channels=channels, scale=(t, h * factor, w * factor)))
        self._ops.append(op)
        return op.output

    def _repeat(self, weight: str, out: int, residual: int, allowed: bool) -> int:
        have = self.channels(residual)
        if out % have or (out != have and not allowed):
            raise WeightsError(f"{weight!r} gives {out} channels, to which {have} cannot be added; the file is damaged")
        return out // have

    def _linear(self, name: str, channels: int) -> Linear:
        weight, bias = f"{name}.weight", f"{name}.bias"
        shape = self.keys.shape(weight)
        if shape not in ((channels, channels), (channels, channels, 1, 1)):
            raise WeightsError(
                f"{self.keys.full(weight)!r} has shape {list(shape)}; [{channels}, {channels}] is expected, with or "
                "without 1x1 at the end"
            )
        self._expect(bias, (channels,))
        return Linear(weight=self.keys.full(weight), bias=self.keys.full(bias))

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        got, full = self.keys.shape(name), self.keys.full(name)
        if got != shape:
            raise WeightsError(f"{full!r} has shape {list(got)}, but {list(shape)} is expected; the file is damaged")
