"""The Wan video decoders: 2.1 (also Qwen-Image and kin; x8, time x4) and 2.2 5B (x16, time x4), in two namings.

Everything after the middle is local: RMS norms per pixel, and convolutions that are causal in time with zeros before
the first frame. The first latent frame is one frame, each further one four. Widths, latent and picture channels, the
number of levels, and which of them double the frames are read from the weights.

Source: Wan Team 2025, arXiv:2503.20314 (the decoder); https://github.com/Wan-Video/Wan2.2 (the repeated shortcuts).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import WeightsError
from ..program import Program
from ..video.ops import ClipAttention, Skip, Unpack
from .clip_builder import ClipBuilder
from .keys import Family, Keys

WORKING_DTYPES = ("bfloat16", "float16", "float32")

_FRAME_PAIRS = Unpack(t=2, order="tchw")
"""A time convolution gives the channels of the first frame of a pair, then those of the second."""
_PICTURE = Unpack(s=2, order="ctwh")
"""Wan 2.2's last 2x2 pixels: the column is slower than the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The names inside a res block."""

    norm1: str
    conv1: str
    norm2: str
    conv2: str
    shortcut: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How one code base names the parts of the same decoder."""

    names: re.Pattern[str]
    """Every tensor name below `decoder.`; any other makes the decoder one that we do not know."""
    post_quant: str
    conv_in: str
    mid: tuple[str, str, str]
    """First res block, attention, second res block at latent resolution."""
    levels: str
    row: str
    """What precedes the number of a block within its level."""
    parts: _Parts
    norm_out: str
    conv_out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """Scopes of one resolution: its res blocks, then what leads to the next resolution."""

    blocks: tuple[str, ...]
    resample: str | None


_LEAF = r"\.(weight|bias)"
_RES = rf"(residual\.([03]\.gamma|[26]{_LEAF})|shortcut{_LEAF})"
_ATTN = rf"(norm\.gamma|(to_qkv|proj){_LEAF})"
_UP = rf"(resample\.1|time_conv){_LEAF}"
_WAN = _Layout(
    names=re.compile(
        rf"decoder\.(conv1{_LEAF}|middle\.([02]\.{_RES}|1\.{_ATTN})|upsamples\.\d+\.(upsamples\.\d+\.)?({_RES}|{_UP})"
        rf"|head\.(0\.gamma|2{_LEAF}))"
    ),
    post_quant="conv2", conv_in="decoder.conv1", mid=("decoder.middle.0", "decoder.middle.1", "decoder.middle.2"),
    levels="decoder.upsamples.", row="upsamples.",
    parts=_Parts(norm1="residual.0", conv1="residual.2", norm2="residual.3", conv2="residual.6", shortcut="shortcut"),
    norm_out="decoder.head.0", conv_out="decoder.head.2",
)  # fmt: skip
_DIFFUSERS_RES = rf"(norm[12]\.gamma|(conv[12]|conv_shortcut){_LEAF})"
_DIFFUSERS = _Layout(
    names=re.compile(
        rf"decoder\.(conv_(in|out){_LEAF}|norm_out\.gamma|mid_block\.(resnets\.[01]\.{_DIFFUSERS_RES}"
        rf"|attentions\.0\.{_ATTN})|up_blocks\.\d+\.(resnets\.\d+\.{_DIFFUSERS_RES}|(upsamplers\.0|upsampler)\.{_UP}))"
    ),
    post_quant="post_quant_conv", conv_in="decoder.conv_in",
    mid=("decoder.mid_block.resnets.0", "decoder.mid_block.attentions.0", "decoder.mid_block.resnets.1"),
    levels="decoder.up_blocks.", row="resnets.",
    parts=_Parts(norm1="norm1", conv1="conv1", norm2="norm2", conv2="conv2", shortcut="conv_shortcut"),
    norm_out="decoder.norm_out", conv_out="decoder.conv_out",
)  # fmt: skip
_NESTED = re.compile(r"decoder\.(upsamples\.\d+\.upsamples|up_blocks\.\d+\.upsampler)\..*")


def _layout(keys: Keys) -> _Layout | None:
    """The layout whose names the decoder's tensors all carry, or None."""
    names = keys.below("decoder.")
    for layout in (_WAN, _DIFFUSERS):
        known = bool(names) and all(layout.names.fullmatch(name) for name in names)
        # Both parts carry norms with a `gamma`, which no other family with these names has.
        if known and any(name.endswith(".gamma") for name in names):
            return layout
    return None


def _nested(keys: Keys) -> bool:
    return any(_NESTED.fullmatch(name) for name in keys.below("decoder.up"))


def detect_wan21(keys: Keys) -> bool:
    """True for a Wan 2.1 decoder in either naming, even with tensors missing."""
    return _layout(keys) is not None and not _nested(keys)


def detect_wan22(keys: Keys) -> bool:
    """True for a Wan 2.2 decoder in either naming, even with tensors missing."""
    return _layout(keys) is not None and _nested(keys)


def lower_wan21(keys: Keys, hints: Mapping[str, str]) -> Program:
    """A Wan 2.1 decoder of any width, depth, latent and picture channels. WeightsError on a missing tensor."""
    return _lower(keys, "wan21", repeats=False)


def lower_wan22(keys: Keys, hints: Mapping[str, str]) -> Program:
    """A Wan 2.2 decoder: levels with repeated shortcuts, and 2x2 pixels a head. WeightsError on a missing tensor."""
    return _lower(keys, "wan22", repeats=True)


def _lower(keys: Keys, family: str, *, repeats: bool) -> Program:
    layout = _layout(keys)
    if layout is None:
        raise WeightsError("the weights are not those of a Wan decoder; call detect() first")
    post_quant = keys.has(f"{layout.post_quant}.")
    first = layout.post_quant if post_quant else layout.conv_in
    build = ClipBuilder(keys, keys.shape(f"{first}.weight", 5)[1])
    h = build.conv(layout.post_quant, 0) if post_quant else 0
    h = build.conv(layout.conv_in, h)
    block_1, attention, block_2 = layout.mid
    h = _res_block(build, layout.parts, block_1, h)
    h = _attention(build, attention, h)
    h = _res_block(build, layout.parts, block_2, h)
    for level in _levels(keys, layout, nested=repeats):
        source = h
        for block in level.blocks:
            h = _res_block(build, layout.parts, block, h)
        if level.resample is not None:
            h = _resample(build, level.resample, h, source if repeats else None)
    norm = build.rms_norm(f"{layout.norm_out}.gamma", h)
    build.conv(layout.conv_out, h, norm=norm, act="silu", unpack=_PICTURE if repeats else None)
    return build.program(family, WORKING_DTYPES)


def _res_block(build: ClipBuilder, parts: _Parts, name: str, source: int) -> int:
    """source + conv2(norm2(conv1(norm1(source)))), through the shortcut where there is one."""
    norm1 = build.rms_norm(f"{name}.{parts.norm1}.gamma", source)
    hidden = build.conv(f"{name}.{parts.conv1}", source, norm=norm1, act="silu")
    shortcut, skip = f"{name}.{parts.shortcut}", source
    if build.keys.has(f"{shortcut}.") or build.channels(source) != build.channels(hidden):
        skip = build.conv(shortcut, source)
    norm2 = build.rms_norm(f"{name}.{parts.norm2}.gamma", hidden)
    return build.conv(f"{name}.{parts.conv2}", hidden, norm=norm2, act="silu", residual=skip)


def _attention(build: ClipBuilder, name: str, source: int) -> int:
    """Single-head attention over the pixels of each frame."""
    channels = build.channels(source)
    op = ClipAttention(
        name=build.keys.full(name), inputs=(), output=0, channels=channels, scope="frame",
        norm=build.rms_norm(f"{name}.norm.gamma", source), qkv=build.linear(f"{name}.to_qkv", 3 * channels, channels),
        proj=build.linear(f"{name}.proj", channels, channels),
    )  # fmt: skip
    return build.attention(op, source)


def _resample(build: ClipBuilder, name: str, source: int, shortcut: int | None) -> int:
    """Frames doubled where there is a time convolution, then pixels; plus the level's input, repeated, in Wan 2.2."""
    keys, h = build.keys, source
    in_time = keys.has(f"{name}.time_conv.")
    if in_time:
        h = build.conv(f"{name}.time_conv", h, first_frame="bypass", unpack=_FRAME_PAIRS)
    weight = f"{name}.resample.1.weight"
    skip = None
    if shortcut is not None:
        unpack = Unpack(t=2 if in_time else 1, s=2)
        skip = Skip(repeat=_repeat(keys, weight, 4 * unpack.t, build.channels(shortcut)), unpack=unpack)
    return build.conv(f"{name}.resample.1", h, form="conv2d", upsample=2, residual=shortcut, skip=skip)


def _repeat(keys: Keys, weight: str, offsets: int, channels: int) -> int:
    """How often each channel of a level's input is taken to fill all offsets of what the level gives."""
    wanted = keys.shape(weight, 4)[0] * offsets
    if wanted % channels:
        raise WeightsError(
            f"{keys.full(weight)!r} gives {wanted // offsets} channels, to which {channels} cannot be added; "
            "the file is damaged"
        )
    return wanted // channels


def _levels(keys: Keys, layout: _Layout, *, nested: bool) -> list[_Level]:
    """The levels in the order they run; all but the last lead on, and all have as many blocks as the fullest."""
    if layout is _WAN and not nested:
        return _flat_levels(keys, layout)
    count = max(1, keys.count(layout.levels))
    rows = [f"{layout.levels}{number}.{layout.row}" for number in range(count + 1)]
    n_blocks = max(1, *(_count_blocks(keys, row) for row in rows))
    up = f"{layout.row}{n_blocks}" if layout is _WAN else ("upsampler" if nested else "upsamplers.0")
    resamples = [f"{layout.levels}{number}.{up}" for number in range(count)]
    if not _is_resample(keys, resamples[-1]):
        rows, resamples = rows[:-1], resamples[:-1]  # otherwise the level it leads to is missing as a whole
    return [
        _Level(blocks=tuple(f"{row}{n}" for n in range(n_blocks)), resample=resample)
        for row, resample in zip(rows, [*resamples, None], strict=True)
    ]


def _flat_levels(keys: Keys, layout: _Layout) -> list[_Level]:
    """Wan 2.1: blocks and resamplings of all levels are numbered in one row."""
    levels: list[_Level] = []
    blocks: list[str] = []
    count = keys.count(layout.levels)
    for scope in (f"{layout.levels}{number}" for number in range(count)):
        if _is_resample(keys, scope):
            levels.append(_Level(blocks=tuple(blocks), resample=scope))
            blocks = []
        else:
            blocks.append(scope)
    n_blocks = max((len(level.blocks) for level in levels), default=1)
    blocks += [f"{layout.levels}{number}" for number in range(count, count + n_blocks - len(blocks))]
    return [*levels, _Level(blocks=tuple(blocks), resample=None)]


def _count_blocks(keys: Keys, row: str) -> int:
    count = keys.count(row)
    return count - 1 if count and _is_resample(keys, f"{row}{count - 1}") else count


def _is_resample(keys: Keys, scope: str) -> bool:
    return keys.has(f"{scope}.resample.") or keys.has(f"{scope}.time_conv.")


WAN21 = Family(name="wan21", detect=detect_wan21, lower=lower_wan21)
WAN22 = Family(name="wan22", detect=detect_wan22, lower=lower_wan22)
