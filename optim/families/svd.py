"""The decoder of Stable Video Diffusion: a KL picture decoder whose res blocks also mix frames (x8; T frames of T).

Each res block runs on single frames; a second one along time, whose norms see the whole clip, is blended in by a
learned share. Norms and attention of the picture part see one frame. All frames of a clip are decoded together, which
is what the statistics over the clip mean.

Source: Blattmann et al. 2023, arXiv:2311.15127, after arXiv:2304.08818 (temporal layers in the decoder).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import WeightsError
from ..program import Program
from ..video.ops import ClipAttention
from .builder import NORM_EPS, hinted_groups
from .clip_builder import ClipBuilder
from .keys import Family, Keys

WORKING_DTYPES = ("bfloat16", "float32")
TIME_NORM_EPS = 1e-5

_TIME = r"time_stack\.(in_layers\.[02]|out_layers\.[03])"
_RES = rf"(mix_factor|(norm[12]|conv[12]|nin_shortcut|{_TIME})\.(weight|bias))"
_LEAF = r"\.(weight|bias)"
_NAMES = re.compile(
    rf"decoder\.((conv_in|conv_out|conv_out\.time_mix_conv|norm_out|mid\.attn_1\.(norm|q|k|v|proj_out)){_LEAF}"
    rf"|mid\.block_[12]\.{_RES}|up\.\d+\.(block\.\d+\.{_RES}|upsample\.conv{_LEAF}))"
)
_TELLING = re.compile(r".*\.(mix_factor|time_stack\..*|time_mix_conv\..*)")
_UP = "decoder.up."


def detect(keys: Keys) -> bool:
    """True for a KL decoder in ldm names with layers along time in its res blocks, even with tensors missing."""
    names = keys.below("decoder.")
    # The host decodes these without the convolution that other KL models have before the decoder.
    if keys.has("post_quant_conv.") or not any(_TELLING.fullmatch(name) for name in names):
        return False
    return all(_NAMES.fullmatch(name) for name in names)


def lower(keys: Keys, hints: Mapping[str, str]) -> Program:
    """A decoder of any width, depth, number of res blocks and latent channels. WeightsError on a missing tensor."""
    latent = keys.shape("decoder.conv_in.weight", 4)[1]
    build, groups = ClipBuilder(keys, latent), hinted_groups(hints)
    h = build.conv("decoder.conv_in", 0, form="conv2d")
    h = _res_block(build, "decoder.mid.block_1", h, groups)
    h = _attention(build, "decoder.mid.attn_1", h, groups)
    h = _res_block(build, "decoder.mid.block_2", h, groups)
    n_levels = max(1, keys.count(_UP))
    n_blocks = max(1, *(keys.count(f"{_UP}{level}.block.") for level in range(n_levels)))
    for level in reversed(range(n_levels)):
        for block in range(n_blocks):
            h = _res_block(build, f"{_UP}{level}.block.{block}", h, groups)
        if level:
            h = build.conv(f"{_UP}{level}.upsample.conv", h, form="conv2d", upsample=2)
    norm = build.group_norm("decoder.norm_out", h, groups=groups, eps=NORM_EPS, scope=1)
    h = build.conv("decoder.conv_out", h, form="conv2d", norm=norm, act="silu")
    build.conv("decoder.conv_out.time_mix_conv", h, causal=False)
    return build.program(FAMILY.name, WORKING_DTYPES)


def _res_block(build: ClipBuilder, name: str, source: int, groups: int) -> int:
    """The picture's res block, then share * (what the one along time adds)."""
    keys = build.keys
    norm1 = build.group_norm(f"{name}.norm1", source, groups=groups, eps=NORM_EPS, scope=1)
    hidden = build.conv(f"{name}.conv1", source, form="conv2d", norm=norm1, act="silu")
    skip = source
    if keys.has(f"{name}.nin_shortcut.") or build.channels(source) != build.channels(hidden):
        skip = build.conv(f"{name}.nin_shortcut", source, form="conv2d")
    norm2 = build.group_norm(f"{name}.norm2", hidden, groups=groups, eps=NORM_EPS, scope=1)
    frame = build.conv(f"{name}.conv2", hidden, form="conv2d", norm=norm2, act="silu", residual=skip)

    time, share = f"{name}.time_stack", f"{name}.mix_factor"
    if (shape := keys.shape(share)) not in ((), (1,)):
        raise WeightsError(f"{keys.full(share)!r} has shape {list(shape)}, but a scalar is expected")
    norm3 = build.group_norm(f"{time}.in_layers.0", frame, groups=groups, eps=TIME_NORM_EPS, scope=0)
    hidden = build.conv(f"{time}.in_layers.2", frame, norm=norm3, act="silu", causal=False)
    norm4 = build.group_norm(f"{time}.out_layers.0", hidden, groups=groups, eps=TIME_NORM_EPS, scope=0)
    # s (x + h) + (1 - s) x = x + s h
    return build.conv(
        f"{time}.out_layers.3", hidden, norm=norm4, act="silu", causal=False, residual=frame, gain=share
    )  # fmt: skip


def _attention(build: ClipBuilder, name: str, source: int, groups: int) -> int:
    channels = build.channels(source)
    norm = build.group_norm(f"{name}.norm", source, groups=groups, eps=NORM_EPS, scope=1)
    q, k, v, proj = (build.linear(f"{name}.{part}", channels, channels) for part in ("q", "k", "v", "proj_out"))
    op = ClipAttention(
        name=build.keys.full(name), inputs=(source,), output=0, norm=norm, qkv=None, q=q, k=k, v=v, proj=proj,
        channels=channels, scope="frame",
    )  # fmt: skip
    return build.attention(op, source)


FAMILY = Family(name="svd", detect=detect, lower=lower)
