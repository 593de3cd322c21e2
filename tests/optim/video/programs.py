"""Random small programs of clips: every kind of op, norm, border, upsampling, unpacking and skip, in any order."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

from torch import Tensor

from halo_vae.optim.program import Linear, Op, Program, Value
from halo_vae.optim.video.frames import out_count, upsampled_count
from halo_vae.optim.video.ops import (
    ClipAttention,
    ClipConv,
    ClipNorm,
    ClipScale,
    LatentModulation,
    Modulation,
    Skip,
    Unpack,
)
from halo_vae.tests.optim.video.helpers import ProgramWeights, program_of

LENGTHS = range(1, 7)
"""Latent frames that every program is good for."""
WIDTHS = (4, 6, 8)
LATENT = 4
"""Channels of the latent."""
ORDERS = tuple("".join(p) for p in itertools.permutations("cthw"))
MOST_FRAMES, MOST_PIXELS = 4, 4
"""Largest scales in time and space."""


@dataclass
class RandomProgram:
    """Draws ops one after the other; each reads values that are there already."""

    rng: random.Random
    weights: ProgramWeights
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=lambda: [Value(channels=LATENT, scale=(1, 1, 1))])
    counts: list[tuple[int, ...]] = field(default_factory=lambda: [tuple(LENGTHS)])
    """Frames of each value, by latent frames."""
    noisy: bool = False

    def draw(self, n_ops: int) -> Program:
        """A program of that many ops and an ending in three channels."""
        if self.rng.random() < 0.3:
            self.scale()
        for _ in range(n_ops):
            if self.rng.random() < 0.2:
                self.attention()
            else:
                self.conv()
        self.conv(out=3)
        return program_of(self.ops, self.values)

    # -- ops

    def scale(self) -> None:
        c, period = LATENT, self.rng.choice((1, 1, 3))
        name = f"scale{len(self.ops)}"
        op = ClipScale(
            name=name, inputs=(0,), output=1, period=period, before=self.rng.choice((1.0, 0.7)),
            scale=self.weights.normal(f"{name}.scale", c * period, scale=0.2, shift=1.0),
            shift=self.rng.choice((None, self.weights.normal(f"{name}.shift", c * period, scale=0.2))),
            noise_share=0.25 if self._draws_noise(0.5) else 0.0, act=self.rng.choice(("none", "tanh3")),
        )  # fmt: skip
        self._add(op, Value(channels=c, scale=(1, 1, 1)))

    def attention(self) -> None:
        v = len(self.values) - 1
        c, name = self.values[v].channels, f"attn{len(self.ops)}"

        def linear(part: str, out: int) -> Linear:
            bias = self.weights.normal(f"{name}.{part}.bias", out, scale=0.1) if self.rng.random() < 0.7 else None
            return Linear(weight=self.weights.normal(f"{name}.{part}", out, c, scale=c**-0.5), bias=bias)

        stacked = self.rng.random() < 0.5
        parts = {} if stacked else {part: linear(part, c) for part in "qkv"}
        op = ClipAttention(
            name=name, inputs=(v,), output=len(self.values), norm=self._norm(name, v), channels=c,
            qkv=linear("qkv", 3 * c) if stacked else None, **parts, proj=linear("proj", c),
            scope=self.rng.choice(("frame", "clip", "past")),
        )  # fmt: skip
        self._add(op, self.values[v])

    def conv(self, out: int | None = None) -> None:
        """A convolution; `out` makes it the last."""
        rng, name = self.rng, f"conv{len(self.ops)}"
        source = len(self.values) - 1 if out or rng.random() < 0.85 else rng.randrange(len(self.values))
        value = self.values[source]
        op = self._bare(name, source, out or rng.choice(WIDTHS))
        if rng.random() < 0.6:
            op = self._in_time_and_space(op, value)
        channels = op.out_channels
        if out is None and rng.random() < 0.4:
            op = self._unpacked(op, value)
        elif rng.random() < 0.15:
            op = replace(op, gain=self.weights.normal(f"{name}.gain"))
        if op.first_frame == "same" and rng.random() < 0.1 and min(self._made(op)) > 1:
            op = replace(op, drop=1)
        if op.first_frame == "same" and op.drop == 0 and rng.random() < 0.1:
            op = replace(op, last_of_one=True)
        if op.unpack is None and self._draws_noise(0.1):
            op = replace(op, noise=self.weights.normal(f"{name}.noise", channels, 1, 1, scale=0.3))
        if rng.random() < 0.6 and (skips := self._skips(op, channels)):
            v, skip = rng.choice(skips)
            op = replace(op, inputs=(source, v), skip=skip)
        if rng.random() < 0.2:
            op = replace(op, post_act=rng.choice(("relu", "leaky_relu", "silu")))
        if rng.random() < 0.1:
            op = replace(op, out_gain=0.5, out_offset=0.1)
        if op.bias is None and rng.random() < 0.8:
            op = replace(op, bias=self.weights.normal(f"{name}.bias", op.out_channels, scale=0.2))
        self._add(op, Value(channels=channels, scale=self._scale(op)))

    # -- pieces of a convolution

    def _bare(self, name: str, source: int, out: int) -> ClipConv:
        rng, c = self.rng, self.values[source].channels
        kernel = rng.choice(((3, 3, 3), (3, 3, 3), (3, 1, 1), (1, 3, 3), (1, 1, 1), (2, 3, 3)))
        back = rng.choice((0, 0, 1, 2)) if kernel[0] == 3 else 0
        form = {(1, 3, 3): "conv2d", (1, 1, 1): "linear", (2, 3, 3): "past"}.get(kernel, "conv3d")
        form = "conv3d" if kernel[0] == 1 and rng.random() < 0.5 else form
        return ClipConv(
            name=name, inputs=(source,), output=len(self.values), weight="", form=form, bias=None,  # type: ignore[arg-type]
            in_channels=c, out_channels=out, kernel=kernel, front=kernel[0] - 1 - back, back=back,
            norm=self._norm(name, source) if rng.random() < 0.5 else None,
            act=rng.choice(("none", "none", "silu", "relu", "leaky_relu", "tanh3")),
            border=rng.choice(("zero", "zero", "replicate", "reflect")),
            time_border=rng.choice(("zero", "replicate")),
        )  # fmt: skip

    def _in_time_and_space(self, op: ClipConv, value: Value) -> ClipConv:
        if value.scale[0] * 2 <= MOST_FRAMES and self.rng.random() < 0.5:
            op = replace(op, upsample_time=self.rng.choice(("first_single", "odd_single")))
        if value.scale[1] * 2 <= MOST_PIXELS and self.rng.random() < 0.6:
            op = replace(op, upsample=2)
        return op

    def _unpacked(self, op: ClipConv, value: Value) -> ClipConv:
        """The same with `out_channels` times what it makes of each channel."""
        rng, channels = self.rng, op.out_channels
        t = 2 if self._scale(op)[0] * 2 <= MOST_FRAMES and rng.random() < 0.7 else 1
        s = 2 if self._scale(op)[1] * 2 <= MOST_PIXELS and rng.random() < 0.5 else 1
        if (t, s) == (2, 2) and rng.random() < 0.3:
            unpack = Unpack(t=2, s=2, haar=1)
        else:
            unpack = Unpack(t=t, s=s, order=rng.choice(ORDERS))
        firsts = ["same"]
        if t > 1 and op.upsample_time == "none":
            firsts += ["drop", "drop"]
            if not unpack.haar:
                firsts += ["single", "single"]
            if s == op.upsample == 1 and channels == value.channels:
                firsts += ["bypass"] * 3
        return replace(op, unpack=unpack, out_channels=channels * t * s * s, first_frame=rng.choice(firsts))  # type: ignore[arg-type]

    def _made(self, op: ClipConv) -> tuple[int, ...]:
        """Frames that a skip must have once unpacked: before any are dropped at the start."""
        t, fewer = op.frames_per_conv, op.frames_per_conv - 1 if op.first_frame != "same" else 0
        return tuple(t * upsampled_count(op.upsample_time, n) - fewer for n in self.counts[op.inputs[0]])

    def _skips(self, op: ClipConv, channels: int) -> list[tuple[int, Skip]]:
        """Every (value, skip) that fits."""
        found = []
        scale, made = self._scale(op), self._made(op)
        t = op.frames_per_conv
        for v, value in enumerate(self.values):
            c, counts = value.channels, self.counts[v]
            if value.scale[1] < self.values[op.inputs[0]].scale[1]:
                continue  # tiles are cut at the source's resolution, so a skipped value is at least as fine
            if counts == made and value.scale[1:] == scale[1:] and channels % c == 0:
                repeat = channels // c
                found.append((v, Skip(repeat=repeat, tile=repeat > 1 and self.rng.random() < 0.5)))
            grow = scale[1] // value.scale[1]
            if (
                (op.upsample == 2 or op.upsample_time != "none") and op.unpack is None and c == channels
                and counts == self.counts[op.inputs[0]] and value.scale == self.values[op.inputs[0]].scale
            ):  # fmt: skip
                found.append((v, Skip(upsampled=True)))
            if op.unpack is not None and op.upsample_time == "none":
                times = [t]
            elif op.unpack is None and op.upsample_time == "none":
                times = [1, 2]
            else:
                times = []
            for t_skip in times:
                lead = t_skip - 1 if op.first_frame != "same" else 0
                leads = {lead} if op.unpack is not None else {0, t_skip - 1}
                fits = [k for k in leads if tuple(t_skip * n - k for n in counts) == made]
                need = channels * t_skip * grow**2
                if not fits or scale[1] % value.scale[1] or need % c or (t_skip, grow) == (1, 1):
                    continue
                repeat, tile = need // c, False
                if op.first_frame == "single":
                    if repeat % t_skip:
                        continue
                elif channels % max(1, c // (t_skip * grow**2)) == 0 and c % (t_skip * grow**2) == 0:
                    tile = self.rng.random() < 0.5
                unpack = Unpack(t=t_skip, s=grow, order=self.rng.choice(ORDERS))
                found.append((v, Skip(repeat=repeat, tile=tile, unpack=unpack)))
        return found

    # -- norms

    def _norm(self, name: str, v: int) -> ClipNorm:
        rng, c = self.rng, self.values[v].channels
        kind = rng.choice(("group", "group", "rms", "pixel", "layer"))
        weight, bias = None, None
        if kind != "pixel":
            weight = self.weights.normal(f"{name}.norm", c, scale=0.2, shift=1.0)
            bias = None if kind == "rms" else self.weights.normal(f"{name}.norm.bias", c, scale=0.2)
        norm = ClipNorm(kind=kind, weight=weight, bias=bias, eps=1e-3)
        if kind == "group":
            norm = replace(
                norm, groups=c // 2, scope=rng.choice((0, 1, 1, 2, 3, 4)), scope_offset=rng.choice((0, 0, 1, 3))
            )
        if kind in ("pixel", "layer") and rng.random() < 0.4:
            norm = replace(norm, modulation=self._modulation(name, c))
        # the reference cannot resize the frames after the first of a clip of one frame
        if kind in ("group", "rms") and self.counts[v][0] in (1, 2, 4) and rng.random() < 0.15:
            parts = [
                Linear(
                    weight=self.weights.normal(f"{name}.{part}", c, LATENT, scale=0.2),
                    bias=self.weights.normal(f"{name}.{part}.bias", c, scale=0.2, shift=shift),
                )
                for part, shift in (("latent_scale", 1.0), ("latent_shift", 0.0))
            ]
            norm = replace(norm, latent=LatentModulation(scale=parts[0], shift=parts[1]))
        return norm

    def _modulation(self, name: str, c: int) -> Modulation:
        normal, hidden, rows = self.weights.normal, 8, 3
        return Modulation(
            table=normal(f"{name}.table", rows, c, scale=0.2), shift_row=0, scale_row=2, timestep=0.05,
            multiplier=self.rng.choice((None, normal(f"{name}.times", scale=0.1, shift=1000.0))),
            first=Linear(weight=normal(f"{name}.first", hidden, 256, scale=0.05), bias=None),
            second=Linear(weight=normal(f"{name}.second", rows * c, hidden, scale=0.2), bias=None),
        )  # fmt: skip

    def _draws_noise(self, likely: float) -> bool:
        """At most one op does: only on a chain of ops is the order of several one that a reference has."""
        if self.noisy or self.rng.random() >= likely:
            return False
        self.noisy = True
        return True

    # -- book-keeping

    def _scale(self, op: ClipConv) -> tuple[int, int, int]:
        t, h, w = self.values[op.inputs[0]].scale
        unpack = op.unpack or Unpack()
        grow = op.upsample * unpack.s
        return t * unpack.t * (1 if op.upsample_time == "none" else 2), h * grow, w * grow

    def _add(self, op: Op, value: Value) -> None:
        if isinstance(op, ClipConv):
            op = replace(op, weight=self._weight(op))
        self.ops.append(op)
        self.values.append(value)
        self.counts.append(tuple(out_count(op, n, t) for n, t in zip(self.counts[op.inputs[0]], LENGTHS, strict=True)))
        assert min(self.counts[-1]) >= 1

    def _weight(self, op: ClipConv) -> str:
        kt, kh, kw = op.kernel
        c, k = op.in_channels, op.out_channels
        shape = {
            "conv3d": (k, c, kt, kh, kw), "conv2d": (k, c, kh, kw), "linear": (k, c), "past": (k, 2 * c, kh, kw)
        }[op.form]  # fmt: skip
        return self.weights.normal(f"{op.name}.weight", *shape, scale=(c * kt * kh * kw) ** -0.5)


def random_program(seed: int, n_ops: int = 6) -> tuple[Program, dict[str, Tensor]]:
    """A program and its weights."""
    weights = ProgramWeights(seed)
    program = RandomProgram(rng=random.Random(seed), weights=weights).draw(n_ops)
    return program, weights.tensors
