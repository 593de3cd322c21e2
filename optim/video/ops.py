"""Ops of video decoders: a value is a stream of frames, an op turns source frames into output frames, in order.

A program of these ops is run for each clip by itself; frame indices below are global, counted from the clip's start,
so that no rule depends on where a chunk begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..program import Linear, Op, Program

Border = Literal["zero", "replicate", "reflect"]
"""What lies beyond the picture's edge; `reflect` does not repeat the edge pixel."""
NormKind = Literal["group", "rms", "pixel", "layer"]
ClipActivation = Literal["none", "silu", "relu", "leaky_relu", "tanh3"]
"""`leaky_relu` has slope 0.2; `tanh3` is tanh(x / 3) * 3."""
TimeUpsample = Literal["none", "first_single", "odd_single"]
"""Nearest x2 in time. `first_single`: n frames become 2 n - 1, the first is not doubled. `odd_single`: so for an odd
number of frames above 1; an even number is doubled throughout, and a single frame stays one."""
FirstFrame = Literal["same", "drop", "single", "bypass"]
"""What becomes of the first conv frame where `unpack` makes `t` frames of each; all but `same` give t n - (t - 1).
`drop`: the first t - 1 output frames are dropped. `single`: it is unpacked with t = 1, of which the first channels are
kept (HunyuanVideo 1.5). `bypass`: it passes the convolution untouched, and the others see zeros in its place (Wan)."""
WeightForm = Literal["conv3d", "conv2d", "linear", "past"]
"""[K, C, kt, kh, kw]; [K, C, kh, kw]; [K, C]; or [K, 2 C, kh, kw] over (this frame, the one before) in the channels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Modulation:
    """y * (1 + scale) + shift per channel: constants out of a timestep embedding (PixArt-style AdaLN, LTX-Video).

    scale and shift are rows of `table` plus the same rows of the embedding
    linear_2(silu(linear_1(sinusoid(timestep * multiplier)))), reshaped to [rows, C].
    """

    table: str
    """[rows, C]."""
    shift_row: int
    scale_row: int
    first: Linear
    """[hidden, 256]."""
    second: Linear
    """[rows * C, hidden]."""
    timestep: float
    multiplier: str | None
    """Name of a scalar tensor that the timestep is multiplied by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentModulation:
    """y * scale(z) + shift(z) with 1x1 convolutions of the latent, resized by nearest neighbour (CogVideoX).

    In time, output frame f of n reads latent frame by the rule of nearest resizing; with an odd n above 1 the first
    frame reads the first latent frame and the others are resized among themselves.
    """

    scale: Linear
    shift: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipNorm:
    """A normalisation. `group`: GroupNorm with statistics over the frames of one scope; the others are per pixel.

    `rms`: x / max(|x|, eps) * sqrt(C) * weight, |x| the length of the channel vector. `pixel`:
    x / sqrt(mean(x^2) + eps). `layer`: LayerNorm over the channels.
    """

    kind: NormKind
    weight: str | None = None
    bias: str | None = None
    groups: int = 1
    eps: float
    scope: int = 1
    """`group` only. Frames whose statistics are taken together; 0 = the whole clip."""
    scope_offset: int = 0
    """Frame f belongs to scope (f + scope_offset) // scope."""
    modulation: Modulation | None = None
    latent: LatentModulation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpack:
    """Channels become frames, rows and columns: [C t s s] -> [C] with t frames and s x s pixels for each one."""

    t: int = 1
    s: int = 1
    order: str = "cthw"
    """How the channel axis is composed, slowest first: a permutation of c, t, h, w."""
    haar: int = 0
    """Levels of an inverse 3-D Haar transform instead (t = s = 2**haar, Cosmos); `order` does not matter then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A value added to a convolution's output: inputs[1], with channels repeated and unpacked, or upsampled."""

    repeat: int = 1
    tile: bool = False
    """The channels are repeated as a whole after unpacking (tensor.repeat); else one by one before it
    (repeat_interleave)."""
    unpack: Unpack | None = None
    """None: as it is. Otherwise its first frame follows the op's `first_frame`; where that is `same` and the op itself
    makes no frames (no `unpack`, or one with t = 1), the first t - 1 frames are dropped (Wan 2.2)."""
    upsampled: bool = False
    """Nearest-upsampled in time and space as the op's source is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConv(Op):
    """unpack(gain * conv(pad(upsample(act(norm(src))))) + noise) + skip, then post_act, out_gain and out_offset.

    Stride 1; the convolution keeps the number of frames, rows and columns of what it reads: `front` + `back` frames
    and (k - 1) / 2 pixels per side lie beyond the ends. Without `skip`, inputs has one entry.
    """

    weight: str
    form: WeightForm = "conv3d"
    bias: str | None
    in_channels: int
    out_channels: int
    """Channels of the convolution, before unpacking."""
    kernel: tuple[int, int, int]
    """(kt, kh, kw); kt = 2 for the form `past`."""
    norm: ClipNorm | None = None
    act: ClipActivation = "none"
    front: int = 0
    """Frames before the first; front + back = kt - 1."""
    back: int = 0
    time_border: Literal["zero", "replicate"] = "zero"
    border: Border = "zero"
    upsample_time: TimeUpsample = "none"
    upsample: int = 1
    """Nearest factor along H and W, 1 or 2."""
    first_frame: FirstFrame = "same"
    drop: int = 0
    """Output frames dropped from the start, after `first_frame`."""
    last_of_one: bool = False
    """A clip of one latent frame keeps only the last output frame."""
    unpack: Unpack | None = None
    skip: Skip | None = None
    gain: str | None = None
    """Name of a scalar whose sigmoid scales the convolution."""
    noise: str | None = None
    """Name of a per-channel scale [C, 1, 1] of noise drawn per decode, one map [H, W] for all frames."""
    post_act: ClipActivation = "none"
    out_gain: float = 1.0
    out_offset: float = 0.0

    @property
    def halo(self) -> int:
        """Pixels of context per side, at the resolution the convolution runs at."""
        return self.kernel[1] // 2

    @property
    def residual(self) -> int | None:
        """The value that `skip` adds, or None."""
        return self.inputs[1] if self.skip is not None else None

    @property
    def frames_per_conv(self) -> int:
        """Output frames of one conv frame."""
        return 1 if self.unpack is None else self.unpack.t


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipAttention(Op):
    """out = src + proj(softmax(q k^T / sqrt(C)) v), one head, q, k, v from norm(src).

    Scope `frame`: over H x W of each frame; `clip`: over T x H x W without a mask; `past`: per pixel over this frame
    and those before it (Cosmos).
    """

    norm: ClipNorm
    qkv: Linear | None
    """Stacked [3 C, C] weights, or None."""
    q: Linear | None = None
    k: Linear | None = None
    v: Linear | None = None
    proj: Linear
    channels: int
    scope: Literal["frame", "clip", "past"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipScale(Op):
    """x * a + b per channel at latent resolution, after noise: x = noise_share * randn + (1 - noise_share) * x.

    `scale`, `shift`: names of tensors [C], or [C * period] read at channel c and frame t as [c, t mod period].
    `before` multiplies the input first.
    """

    scale: str | None
    shift: str | None
    period: int = 1
    before: float = 1.0
    noise_share: float = 0.0
    act: ClipActivation = "none"


def is_video(program: Program) -> bool:
    """True where the program decodes clips."""
    return isinstance(program.ops[0], (ClipConv, ClipAttention, ClipScale))
