"""The KL picture decoder of SD 1/2, SDXL, SD3, Flux, Flux.2 and kin, in ldm and diffusers names.

Sources: Rombach et al. 2022, arXiv:2112.10752 (decoder); Esser et al. 2021, arXiv:2012.09841 (its architecture).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import WeightsError
from ..program import Program
from .builder import Builder, hinted_groups
from .keys import Family, Keys

WORKING_DTYPES = ("bfloat16", "float32")
LATENT_NORM_EPS = 1e-4
"""Epsilon of Flux.2's latent batch norm."""

_ATTN = r"(norm|group_norm|q|k|v|proj_out|to_[qkv]|to_out\.0|query|key|value|proj_attn)"
_RES = r"(norm[12]|conv[12]|nin_shortcut|conv_shortcut)"
_LEAF = r"\.(weight|bias)"
_POST_QUANT = ("post_quant_conv", "decoder.post_quant_conv")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How one code base names the parts of the same decoder; `{}` stands for a number."""

    names: re.Pattern[str]
    """Every tensor name below `decoder.`; any other makes the decoder one that we do not know."""
    mid: tuple[str, str, str]
    """First res block, attention, second res block at latent resolution."""
    levels: str
    block: str
    attention: str
    upsample: str
    norm_out: str
    lowest_first: bool
    """True if level 0 is the lowest resolution, the first to run."""
    attention_optional: bool
    shortcuts: tuple[str, str]


_LDM = _Layout(
    names=re.compile(
        rf"decoder\.(conv_in|conv_out|norm_out|post_quant_conv|mid\.block_[12]\.{_RES}|mid\.attn_1\.{_ATTN}"
        rf"|up\.\d+\.(block\.\d+\.{_RES}|attn\.\d+\.{_ATTN}|upsample\.conv)){_LEAF}"
    ),
    mid=("decoder.mid.block_1", "decoder.mid.attn_1", "decoder.mid.block_2"),
    levels="decoder.up.", block="block", attention="attn", upsample="upsample.conv", norm_out="decoder.norm_out",
    lowest_first=False, attention_optional=False, shortcuts=("nin_shortcut", "conv_shortcut"),
)  # fmt: skip
_DIFFUSERS = _Layout(
    names=re.compile(
        rf"decoder\.(conv_in|conv_out|conv_norm_out|post_quant_conv|mid_block\.(resnets\.[01]\.{_RES}|attentions\.0\.{_ATTN})"
        rf"|up_blocks\.\d+\.(resnets\.\d+\.{_RES}|attentions\.\d+\.{_ATTN}|upsamplers\.0\.conv)){_LEAF}"
    ),
    mid=("decoder.mid_block.resnets.0", "decoder.mid_block.attentions.0", "decoder.mid_block.resnets.1"),
    levels="decoder.up_blocks.", block="resnets", attention="attentions", upsample="upsamplers.0.conv",
    norm_out="decoder.conv_norm_out", lowest_first=True, attention_optional=True,
    shortcuts=("conv_shortcut", "nin_shortcut"),
)  # fmt: skip


def _layout(keys: Keys) -> _Layout | None:
    """The layout whose names the decoder's tensors all carry, or None."""
    names = keys.below("decoder.")
    # A vector-quantised model snaps the latent to its codebook before the same decoder.
    if not names or keys.has("quantize.") or any(keys.ndim(name) > 4 for name in names):
        return None
    for layout in (_LDM, _DIFFUSERS):
        known = all(layout.names.fullmatch(name) for name in names)
        if known and any(keys.has(part) for part in (*(f"{mid}." for mid in layout.mid), layout.levels)):
            return layout
    return None


def detect(keys: Keys) -> bool:
    """True for a KL decoder in either naming, even with tensors missing."""
    # HunyuanImage shares the ldm names but runs level 0 first, so its level 0 upsamples.
    return _layout(keys) is not None and not keys.has("decoder.up.0.upsample.")


def lower(keys: Keys, hints: Mapping[str, str]) -> Program:
    """A KL decoder of any width, depth, number of res blocks and latent channels. WeightsError on a missing tensor."""
    layout = _layout(keys)
    if layout is None:
        raise WeightsError("the weights are not those of a KL decoder; call detect() first")
    post_quant = next((name for name in _POST_QUANT if keys.has(f"{name}.")), None)
    latent_norm = keys.has("bn.running_")
    first = post_quant or "decoder.conv_in"
    channels = keys.shape(f"{first}.weight", 4)[1] * (4 if latent_norm else 1)
    build = Builder(keys, channels, groups=hinted_groups(hints))
    h = 0
    if latent_norm:
        h = build.denormalize("bn.running_mean", "bn.running_var", h, eps=LATENT_NORM_EPS)
        h = build.rearrange("bn.unpack", h, factor=2, order="channel_major")
    if post_quant:
        h = build.conv(post_quant, h)
    h = build.conv("decoder.conv_in", h)
    h = _lower_mid(build, layout, h)
    h = _lower_levels(build, layout, h)
    build.conv("decoder.conv_out", h, norm=build.norm(layout.norm_out, build.channels(h)), act="silu")
    return build.program(FAMILY.name, WORKING_DTYPES)


def _lower_mid(build: Builder, layout: _Layout, h: int) -> int:
    block_1, attention, block_2 = layout.mid
    h = build.res_block(block_1, h, shortcuts=layout.shortcuts)
    if build.keys.has(f"{attention}.") or not layout.attention_optional:
        h = build.attention(attention, h)
    return build.res_block(block_2, h, shortcuts=layout.shortcuts)


def _lower_levels(build: Builder, layout: _Layout, h: int) -> int:
    keys = build.keys
    n_levels = max(1, keys.count(layout.levels))
    if layout.lowest_first and keys.has(f"{layout.levels}{n_levels - 1}.{layout.upsample}."):
        n_levels += 1  # an upsample leads to a level that is missing as a whole
    order = range(n_levels)
    n_blocks = max(1, *(keys.count(f"{layout.levels}{level}.{layout.block}.") for level in order))
    for level in order if layout.lowest_first else reversed(order):
        scope = f"{layout.levels}{level}"
        for block in range(n_blocks):
            h = build.res_block(f"{scope}.{layout.block}.{block}", h, shortcuts=layout.shortcuts)
            if keys.has(f"{scope}.{layout.attention}.{block}."):
                h = build.attention(f"{scope}.{layout.attention}.{block}", h)
        if level != (n_levels - 1 if layout.lowest_first else 0):
            h = build.conv(f"{scope}.{layout.upsample}", h, upsample=2)
    return h


FAMILY = Family(name="kl", detect=detect, lower=lower)
