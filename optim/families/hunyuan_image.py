"""The HunyuanImage 2.1 decoder, x32: ldm names, but level 0 is the lowest, and levels end in a depth-to-space.

Sources: https://github.com/Tencent-Hunyuan/HunyuanImage-2.1; its repeated-channel shortcuts are those of deep
compression, Chen et al. 2024, arXiv:2410.10733.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..program import Program
from .builder import Builder, hinted_groups
from .keys import Family, Keys

WORKING_DTYPES = ("float16", "bfloat16", "float32")
_SHORTCUTS = ("nin_shortcut", "conv_shortcut")
_RES = r"(norm[12]|conv[12]|nin_shortcut|conv_shortcut)"
_NAMES = re.compile(
    rf"decoder\.(conv_in|conv_out|norm_out|mid\.block_[12]\.{_RES}|mid\.attn_1\.(norm|q|k|v|proj_out)"
    rf"|up\.\d+\.(block\.\d+\.{_RES}|upsample\.conv))\.(weight|bias)"
)


def detect(keys: Keys) -> bool:
    """True if every decoder tensor has a known name and level 0 upsamples (in a KL decoder level 0 is the picture)."""
    names = keys.below("decoder.")
    known = all(_NAMES.fullmatch(name) and keys.ndim(name) <= 4 for name in names)
    return known and keys.has("decoder.up.0.upsample.")


def lower(keys: Keys, hints: Mapping[str, str]) -> Program:
    """A HunyuanImage decoder of any width and depth. WeightsError on a missing tensor."""
    build = Builder(keys, keys.shape("decoder.conv_in.weight", 4)[1], groups=hinted_groups(hints))
    h = build.conv("decoder.conv_in", 0, residual=0, repeat=True)
    h = build.res_block("decoder.mid.block_1", h, shortcuts=_SHORTCUTS)
    h = build.attention("decoder.mid.attn_1", h)
    h = build.res_block("decoder.mid.block_2", h, shortcuts=_SHORTCUTS)
    n_levels = keys.count("decoder.up.")
    n_blocks = max(1, *(keys.count(f"decoder.up.{level}.block.") for level in range(n_levels)), 0)
    for level in range(n_levels):
        scope = f"decoder.up.{level}"
        for block in range(n_blocks):
            h = build.res_block(f"{scope}.block.{block}", h, shortcuts=_SHORTCUTS)
        # The last level may upsample too, when there are as many levels as doublings.
        if level < n_levels - 1 or keys.has(f"{scope}.upsample."):
            h = build.conv(f"{scope}.upsample.conv", h, residual=h, repeat=True, depth_to_space=2)
    build.conv("decoder.conv_out", h, norm=build.norm("decoder.norm_out", build.channels(h)), act="silu")
    return build.program(FAMILY.name, WORKING_DTYPES)


FAMILY = Family(name="hunyuan_image", detect=detect, lower=lower)
