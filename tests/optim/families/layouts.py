"""Tensor shapes of decoders with any hyperparameters, written from the published layouts and not from the lowering."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from halo_vae.optim.weights import TensorSpec

Shapes = dict[str, tuple[int, ...]]


def _conv(shapes: Shapes, name: str, read: int, out: int, k: int = 3, *, bias: bool = True) -> None:
    shapes[f"{name}.weight"] = (out, read, k, k)
    if bias:
        shapes[f"{name}.bias"] = (out,)


def _norm(shapes: Shapes, name: str, channels: int) -> None:
    shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (channels,)


def _res(shapes: Shapes, name: str, read: int, out: int, shortcut: str) -> None:
    _norm(shapes, f"{name}.norm1", read)
    _conv(shapes, f"{name}.conv1", read, out)
    _norm(shapes, f"{name}.norm2", out)
    _conv(shapes, f"{name}.conv2", out, out)
    if read != out:
        _conv(shapes, f"{name}.{shortcut}", read, out, 1)


def kl_ldm(z: int, widths: Sequence[int], *, n_res: int = 2, embed: int | None = None, out: int = 3) -> Shapes:
    """widths: channels of the levels, lowest resolution first; embed: latent channels before post_quant_conv."""
    shapes: Shapes = {}
    if embed is not None:
        _conv(shapes, "post_quant_conv", embed, z, 1)
    c = widths[0]
    _conv(shapes, "decoder.conv_in", z, c)
    _res(shapes, "decoder.mid.block_1", c, c, "nin_shortcut")
    _norm(shapes, "decoder.mid.attn_1.norm", c)
    for part in ("q", "k", "v", "proj_out"):
        _conv(shapes, f"decoder.mid.attn_1.{part}", c, c, 1)
    _res(shapes, "decoder.mid.block_2", c, c, "nin_shortcut")
    for i, width in enumerate(widths):
        level = len(widths) - 1 - i
        for j in range(n_res + 1):
            _res(shapes, f"decoder.up.{level}.block.{j}", c, width, "nin_shortcut")
            c = width
        if level:
            _conv(shapes, f"decoder.up.{level}.upsample.conv", c, c)
    _norm(shapes, "decoder.norm_out", c)
    _conv(shapes, "decoder.conv_out", c, out)
    return shapes


def kl_diffusers(z: int, widths: Sequence[int], *, n_res: int = 2, attention: str = "to", out: int = 3) -> Shapes:
    """attention: "to" (to_q, to_out.0), "old" (query, proj_attn), or "" for a middle without attention."""
    shapes: Shapes = {}
    c = widths[0]
    _conv(shapes, "post_quant_conv", z, z, 1)
    _conv(shapes, "decoder.conv_in", z, c)
    _res(shapes, "decoder.mid_block.resnets.0", c, c, "conv_shortcut")
    names = {"to": ("to_q", "to_k", "to_v", "to_out.0"), "old": ("query", "key", "value", "proj_attn"), "": ()}
    if attention:
        _norm(shapes, "decoder.mid_block.attentions.0.group_norm", c)
    for part in names[attention]:
        shapes[f"decoder.mid_block.attentions.0.{part}.weight"] = (c, c)
        shapes[f"decoder.mid_block.attentions.0.{part}.bias"] = (c,)
    _res(shapes, "decoder.mid_block.resnets.1", c, c, "conv_shortcut")
    for i, width in enumerate(widths):
        for j in range(n_res + 1):
            _res(shapes, f"decoder.up_blocks.{i}.resnets.{j}", c, width, "conv_shortcut")
            c = width
        if i < len(widths) - 1:
            _conv(shapes, f"decoder.up_blocks.{i}.upsamplers.0.conv", c, c)
    _norm(shapes, "decoder.conv_norm_out", c)
    _conv(shapes, "decoder.conv_out", c, out)
    return shapes


def hunyuan_image(z: int, widths: Sequence[int], *, n_res: int = 1, doublings: int | None = None) -> Shapes:
    """widths: lowest resolution first; doublings: by default one less than there are levels."""
    doublings = len(widths) - 1 if doublings is None else doublings
    shapes = kl_ldm(z, widths[:1], n_res=0)
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith(("decoder.up.", "decoder.norm_out"))}
    c = widths[0]
    for i, width in enumerate(widths):
        for j in range(n_res + 1):
            _res(shapes, f"decoder.up.{i}.block.{j}", c, width, "nin_shortcut")
            c = width
        if i < doublings:
            c = widths[min(i + 1, len(widths) - 1)]
            _conv(shapes, f"decoder.up.{i}.upsample.conv", width, 4 * c)
    _norm(shapes, "decoder.norm_out", c)
    _conv(shapes, "decoder.conv_out", c, 3)
    return shapes


def taesd(
    z: int, width: int = 64, *, blocks: Sequence[int] = (3, 3, 3, 1), pooled: bool = False, scaled: bool = True,
    scope: str = "taesd_decoder.",
) -> Shapes:  # fmt: skip
    """blocks: per resolution, lowest first; z: channels that the first convolution reads."""
    shapes: Shapes = {"vae_scale": (), "vae_shift": ()} if scaled else {}
    _conv(shapes, f"{scope}1", z, width)
    number = 3
    for level, count in enumerate(blocks):
        for _ in range(count):
            for part in (0, 2, 4):
                _conv(shapes, f"{scope}{number}.conv.{part}", width, width)
            if pooled and level == 0:
                _conv(shapes, f"{scope}{number}.pool.0", width, 4 * width, 1, bias=False)
                _norm(shapes, f"{scope}{number}.pool.1", 4 * width)
                _conv(shapes, f"{scope}{number}.pool.3", 4 * width, width, 1, bias=False)
            number += 1
        if level < len(blocks) - 1:
            _conv(shapes, f"{scope}{number + 1}", width, width, bias=False)
            number += 2
    _conv(shapes, f"{scope}{number}", width, 3)
    return shapes


def specs(shapes: Mapping[str, tuple[int, ...]], *, prefix: str = "") -> dict[str, TensorSpec]:
    """What a weight source would say about tensors of these shapes."""
    return {prefix + name: TensorSpec(shape=shape, dtype=torch.float16) for name, shape in shapes.items()}


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Seeded weights that keep activations near 1: convolutions by fan-in, norms around 1, biases small."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            weights[name] = noise * math.prod(shape[1:]) ** -0.5
        else:
            weights[name] = noise * 0.1 + (1.0 if name.endswith(".weight") or name == "vae_scale" else 0.0)
    return weights
