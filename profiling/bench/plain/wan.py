"""The yardstick for clips: a Wan 2.1 decoder as anybody would write it in torch, and seeded weights at any width.

A whole clip goes through each module at once, in contiguous layout; nothing here uses the engine. Written from the
published description and not from the lowering. Source: Wan Team 2025, arXiv:2503.20314.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

Shapes = dict[str, tuple[int, ...]]

_RESIDUAL_GAIN = 0.5
"""Each res block adds half a unit of deviation, so that the stream of a random decoder stays below 2."""


def _conv(shapes: Shapes, name: str, read: int, out: int, kernel: tuple[int, ...]) -> None:
    shapes[f"{name}.weight"] = (out, read, *kernel)
    shapes[f"{name}.bias"] = (out,)


def _res_block(shapes: Shapes, name: str, read: int, out: int) -> None:
    shapes[f"{name}.residual.0.gamma"] = (read, 1, 1, 1)
    _conv(shapes, f"{name}.residual.2", read, out, (3, 3, 3))
    shapes[f"{name}.residual.3.gamma"] = (out, 1, 1, 1)
    _conv(shapes, f"{name}.residual.6", out, out, (3, 3, 3))
    if read != out:
        _conv(shapes, f"{name}.shortcut", read, out, (1, 1, 1))


def wan_shapes(
    *, dim: int = 96, mult: Sequence[int] = (1, 2, 4, 4), z: int = 16, n_res: int = 2,
    doubles_frames: Sequence[bool] = (True, True, False), out: int = 3,
) -> Shapes:  # fmt: skip
    """Shapes of a Wan 2.1 decoder's tensors and of conv2 before it, by name; the defaults are the published size.

    mult: widths in units of `dim`, from the picture's resolution down. doubles_frames: for each upsampling, in the
    order they run.
    """
    widths = [dim * m for m in reversed(mult)]
    c = widths[0]
    shapes: Shapes = {}
    _conv(shapes, "conv2", z, z, (1, 1, 1))
    _conv(shapes, "decoder.conv1", z, c, (3, 3, 3))
    _res_block(shapes, "decoder.middle.0", c, c)
    shapes["decoder.middle.1.norm.gamma"] = (c, 1, 1)
    _conv(shapes, "decoder.middle.1.to_qkv", c, 3 * c, (1, 1))
    _conv(shapes, "decoder.middle.1.proj", c, c, (1, 1))
    _res_block(shapes, "decoder.middle.2", c, c)
    number = 0
    for level, width in enumerate(widths):
        for _ in range(n_res + 1):
            _res_block(shapes, f"decoder.upsamples.{number}", c, width)
            c, number = width, number + 1
        if level < len(widths) - 1:
            if doubles_frames[level]:
                _conv(shapes, f"decoder.upsamples.{number}.time_conv", c, 2 * c, (3, 1, 1))
            _conv(shapes, f"decoder.upsamples.{number}.resample.1", c, c // 2, (3, 3))
            c, number = c // 2, number + 1
    shapes["decoder.head.0.gamma"] = (c, 1, 1, 1)
    _conv(shapes, "decoder.head.2", c, out, (3, 3, 3))
    return shapes


def random_wan_weights(
    dim: int = 96, seed: int = 0, mult: Sequence[int] = (1, 2, 4, 4), z: int = 16, n_res: int = 2
) -> dict[str, Tensor]:
    """Seeded float32 weights of a Wan 2.1 decoder, by fan-in: a unit latent gives a clip of deviation near 0.5."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in wan_shapes(dim=dim, mult=mult, z=z, n_res=n_res).items():
        tensor = torch.randn(shape, generator=generator)
        if name.endswith(".gamma"):
            tensor = 1.0 + 0.05 * tensor
        elif len(shape) > 1:
            tensor *= math.prod(shape[1:]) ** -0.5 * (_RESIDUAL_GAIN if ".residual.6." in name else 1.0)
        else:
            tensor *= 0.05
        weights[name] = tensor
    return weights


class RMSNorm(nn.Module):
    """Each pixel's channels scaled to unit root mean square, times a gain per channel."""

    def __init__(self, shape: Sequence[int]) -> None:
        """`shape` is the gain's, channels first."""
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(tuple(shape)))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, …] -> [B, C, …]."""
        return functional.normalize(x, dim=1) * x.shape[1] ** 0.5 * self.gamma


class CausalConv(nn.Conv3d):
    """A 3-D convolution that sees its own frame and those before it; zeros stand before the first."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T, H, W] -> [B, C_out, T, H, W]."""
        t, h, w = self.kernel_size
        padded = functional.pad(x, (w // 2, w // 2, h // 2, h // 2, t - 1, 0))
        return super().forward(padded)


class ResBlock(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))), with a 1x1x1 convolution on x where the width changes."""

    def __init__(self, read: int, out: int) -> None:
        """From `read` to `out` channels."""
        super().__init__()
        self.residual = nn.Sequential(
            RMSNorm((read, 1, 1, 1)), nn.SiLU(), CausalConv(read, out, 3),
            RMSNorm((out, 1, 1, 1)), nn.SiLU(), nn.Identity(), CausalConv(out, out, 3),
        )  # fmt: skip
        self.shortcut = CausalConv(read, out, 1) if read != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """[B, read, T, H, W] -> [B, out, T, H, W]."""
        h: Tensor = self.residual(x)
        return h + self.shortcut(x)


class FrameAttention(nn.Module):
    """Single-head attention over the pixels of each frame."""

    def __init__(self, channels: int) -> None:
        """1x1 convolutions as projections."""
        super().__init__()
        self.norm = RMSNorm((channels, 1, 1))
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T, H, W] -> [B, C, T, H, W]."""
        b, c, t, h, w = x.shape
        frames = x.transpose(1, 2).reshape(b * t, c, h, w)
        # [B * T, 3 C, H, W] -> three of [B * T, 1 head, H * W, C]
        q, k, v = self.to_qkv(self.norm(frames)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        out = self.proj(mixed.squeeze(1).transpose(1, 2).reshape(b * t, c, h, w))
        return x + out.view(b, t, c, h, w).transpose(1, 2)


class Resample(nn.Module):
    """Doubles height and width, and with `time_conv` every frame but the first too."""

    def __init__(self, channels: int, doubles_frames: bool) -> None:
        """Halves the channels."""
        super().__init__()
        self.resample = nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(channels, channels // 2, 3, padding=1))
        self.time_conv = CausalConv(channels, 2 * channels, (3, 1, 1)) if doubles_frames else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T, H, W] -> [B, C / 2, T or 2 T - 1, 2 H, 2 W]."""
        if self.time_conv is not None and x.shape[2] > 1:
            b, c, t, h, w = x.shape
            # the first frame stays one; the pairs that the others become do not see it
            pairs = self.time_conv(x[:, :, 1:]).view(b, 2, c, t - 1, h, w)
            x = torch.cat([x[:, :, :1], pairs.permute(0, 2, 3, 1, 4, 5).reshape(b, c, 2 * (t - 1), h, w)], dim=2)
        b, c, t, h, w = x.shape
        frames = self.resample(x.transpose(1, 2).reshape(b * t, c, h, w))
        return frames.view(b, t, *frames.shape[1:]).transpose(1, 2)


class _Decoder(nn.Module):
    def __init__(self, dim: int, mult: Sequence[int], z: int, n_res: int, doubles: Sequence[bool], out: int) -> None:
        super().__init__()
        widths = [dim * m for m in reversed(mult)]
        c = widths[0]
        self.conv1 = CausalConv(z, c, 3)
        self.middle = nn.Sequential(ResBlock(c, c), FrameAttention(c), ResBlock(c, c))
        layers: list[nn.Module] = []
        for level, width in enumerate(widths):
            for _ in range(n_res + 1):
                layers.append(ResBlock(c, width))
                c = width
            if level < len(widths) - 1:
                layers.append(Resample(c, doubles[level]))
                c //= 2
        self.upsamples = nn.Sequential(*layers)
        self.head = nn.Sequential(RMSNorm((c, 1, 1, 1)), nn.SiLU(), CausalConv(c, out, 3))

    def forward(self, z: Tensor) -> Tensor:
        picture: Tensor = self.head(self.upsamples(self.middle(self.conv1(z))))
        return picture


class PlainWanDecoder(nn.Module):
    """conv2 and decoder of Wan 2.1; parameters carry the published names."""

    def __init__(
        self, *, dim: int = 96, mult: Sequence[int] = (1, 2, 4, 4), z: int = 16, n_res: int = 2,
        doubles_frames: Sequence[bool] = (True, True, False), out: int = 3,
    ) -> None:  # fmt: skip
        """As in `wan_shapes`."""
        super().__init__()
        self.conv2 = CausalConv(z, z, 1)
        self.decoder = _Decoder(dim, mult, z, n_res, doubles_frames, out)

    @classmethod
    def from_weights(cls, weights: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32) -> PlainWanDecoder:
        """The decoder that these tensors (published names; others are ignored) are of; float32 ones are not copied.

        ValueError if a tensor is missing or does not fit.
        """
        own = {k: w.detach().to(dtype) for k, w in weights.items() if k.startswith(("decoder.", "conv2."))}
        try:
            layout = _layout_of(own)
        except (KeyError, ValueError, IndexError) as e:
            raise ValueError(f"not a whole Wan 2.1 decoder ({e}); give decoder.conv1.weight and so on") from e
        with torch.device("meta"):
            module = cls(**layout)
        try:
            module.load_state_dict(own, assign=True)
        except RuntimeError as e:
            raise ValueError(f"the tensors do not make a Wan 2.1 decoder: {e}") from e
        return module.eval().requires_grad_(False)

    def forward(self, latent: Tensor) -> Tensor:
        """[B, z, t, h, w] -> raw clip [B, 3, frames, H, W], about -1 to 1."""
        picture: Tensor = self.decoder(self.conv2(latent))
        return picture

    @torch.no_grad()
    def decode(self, latent: Tensor) -> Tensor:
        """`forward` without gradients."""
        picture: Tensor = self(latent)
        return picture


class _Layout(TypedDict):
    dim: int
    mult: list[int]
    z: int
    n_res: int
    doubles_frames: list[bool]
    out: int


def _layout_of(weights: Mapping[str, Tensor]) -> _Layout:
    """What the shapes tell of the decoder. KeyError, ValueError for tensors that are missing."""
    numbers = sorted({int(name.split(".")[2]) for name in weights if name.startswith("decoder.upsamples.")})
    resamples = [n for n in numbers if f"decoder.upsamples.{n}.resample.1.weight" in weights]
    per_level = resamples[0]
    starts = [0, *(n + 1 for n in resamples)]
    widths = [weights[f"decoder.upsamples.{n}.residual.2.weight"].shape[0] for n in starts]
    dim = widths[-1]
    return _Layout(
        dim=dim, mult=[w // dim for w in reversed(widths)], z=weights["decoder.conv1.weight"].shape[1],
        n_res=per_level - 1,
        doubles_frames=[f"decoder.upsamples.{n}.time_conv.weight" in weights for n in resamples],
        out=weights["decoder.head.2.weight"].shape[0],
    )  # fmt: skip
