"""Random weights of a Wan 2.1 decoder at any width, so that clip decodes can be timed without the published file.

Written from the published layout and not from the lowering. Source: Wan Team 2025, arXiv:2503.20314.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

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
