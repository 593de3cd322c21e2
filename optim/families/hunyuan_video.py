"""The 3-D decoders of Hunyuan: HunyuanVideo 1.0 (x8), HunyuanVideo 1.5 and the HunyuanImage refiner (x16); time x4.

All share the ldm names. 1.0: group norms, replicated borders, causal in time, and after the middle the statistics of
two latent frames at a time. So ComfyUI decodes; diffusers takes statistics of the whole clip and lets a frame attend to
no later one, and its names are lowered to what ComfyUI does with them. 1.5: norms per pixel, and levels that end in a
depth-to-space with repeated shortcuts. The refiner: as 1.5, but with group norms over the whole clip and zeros beyond
all borders, before the first frame and after the last.

Sources: Kong et al. 2024, arXiv:2412.03603; https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5;
https://github.com/Tencent-Hunyuan/HunyuanImage-2.1; Chen et al. 2024, arXiv:2410.10733 (repeated shortcuts).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import WeightsError
from ..program import Program
from ..video.ops import ClipAttention, ClipNorm, FirstFrame, Skip, TimeUpsample, Unpack
from .builder import NORM_EPS, hinted_groups
from .clip_builder import ClipBuilder
from .keys import Family, Keys

WORKING_DTYPES_1_0 = ("bfloat16", "float16", "float32")
WORKING_DTYPES = ("float16", "bfloat16", "float32")
FRAME_DOUBLINGS = 2
"""HunyuanVideo 1.0 doubles frames at its last two upsamplings; the weights do not tell which they are."""
STATISTICS_FRAMES = 2
"""Latent frames whose statistics HunyuanVideo 1.0 takes together after the middle."""

_LEAF = r"\.(weight|bias)"
_QKV = r"(q|k|v|proj_out)"
_DIFFUSERS_ATTN = r"(group_norm|to_[qkv]|to_out\.0|query|key|value|proj_attn)"


def _ldm(*, conv: str, norm: str) -> re.Pattern[str]:
    """Every tensor name below `decoder.` where convolutions and norms end so; `temb_proj` is never read."""
    res = rf"(norm[12]{norm}|(conv[12]|nin_shortcut){conv}{_LEAF}|temb_proj{_LEAF})"
    return re.compile(
        rf"decoder\.(conv_(in|out){conv}{_LEAF}|norm_out{norm}|mid\.block_[12]\.{res}|mid\.attn_1\.(norm{norm}|{_QKV}{_LEAF})"
        rf"|up\.\d+\.(block\.\d+\.{res}|upsample\.conv{conv}{_LEAF}))"
    )


_NAMES_1_0 = _ldm(conv=r"\.conv", norm=_LEAF)
_NAMES_1_5 = _ldm(conv=r"\.conv", norm=r"\.gamma")
_NAMES_REFINER = _ldm(conv="", norm=_LEAF)
_DIFFUSERS_RES = rf"(norm[12]{_LEAF}|(conv[12]|conv_shortcut)\.conv{_LEAF})"
_NAMES_DIFFUSERS = re.compile(
    rf"decoder\.(conv_(in|out)\.conv{_LEAF}|conv_norm_out{_LEAF}"
    rf"|mid_block\.(resnets\.[01]\.{_DIFFUSERS_RES}|attentions\.0\.{_DIFFUSERS_ATTN}{_LEAF})"
    rf"|up_blocks\.\d+\.(resnets\.\d+\.{_DIFFUSERS_RES}|upsamplers\.0\.conv\.conv{_LEAF}))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """How one code base names the parts of the same decoder."""

    mid: tuple[str, str, str]
    """First res block, attention, second res block at latent resolution."""
    attention: tuple[tuple[str, str, str, str, str], ...]
    """Names that norm, query, key, value and output projection go by."""
    levels: str
    block: str
    upsample: str
    norm_out: str
    shortcut: str


_LDM = _Layout(
    mid=("decoder.mid.block_1", "decoder.mid.attn_1", "decoder.mid.block_2"),
    attention=(("norm", "q", "k", "v", "proj_out"),), levels="decoder.up.", block="block", upsample="upsample.conv",
    norm_out="decoder.norm_out", shortcut="nin_shortcut",
)  # fmt: skip
_DIFFUSERS = _Layout(
    mid=("decoder.mid_block.resnets.0", "decoder.mid_block.attentions.0", "decoder.mid_block.resnets.1"),
    attention=(
        ("group_norm", "to_q", "to_k", "to_v", "to_out.0"),
        ("group_norm", "query", "key", "value", "proj_attn"),
    ),
    levels="decoder.up_blocks.", block="resnets", upsample="upsamplers.0.conv", norm_out="decoder.conv_norm_out",
    shortcut="conv_shortcut",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Statistics:
    """Frames whose statistics a group norm takes together, as in ClipNorm."""

    scope: int
    offset: int = 0


_WHOLE_CLIP = _Statistics(scope=0)


class _Lowering:
    """What the three decoders share: res blocks, the attention, and how convolutions and norms are made."""

    def __init__(self, build: ClipBuilder, layout: _Layout, *, groups: int | None, padded: bool) -> None:
        """groups: of the group norms, None: norms per pixel; padded: causal with replicated borders, else zeros."""
        self.build = build
        self.layout = layout
        self._groups = groups
        self._padded = padded

    def norm(self, name: str, source: int, statistics: _Statistics) -> ClipNorm:
        """The norm `name` over a value."""
        if self._groups is None:
            return self.build.rms_norm(f"{name}.gamma", source)
        return self.build.group_norm(
            name, source, groups=self._groups, eps=NORM_EPS, scope=statistics.scope, offset=statistics.offset
        )

    def name(self, name: str) -> str:
        """Full prefix of a convolution's tensors: the padded ones wrap it."""
        return f"{name}.conv" if self._padded else name

    def conv(
        self, name: str, source: int, *, norm: ClipNorm | None = None, upsample_time: TimeUpsample = "none",
        upsample: int = 1, first_frame: FirstFrame = "same", last_of_one: bool = False, unpack: Unpack | None = None,
        residual: int | None = None, skip: Skip | None = None,
    ) -> int:  # fmt: skip
        """Convolution `name` with the decoder's borders; SiLU follows the norm."""
        return self.build.conv(
            self.name(name), source, norm=norm, act="none" if norm is None else "silu", causal=self._padded,
            time_border="replicate" if self._padded else "zero", border="replicate" if self._padded else "zero",
            upsample_time=upsample_time, upsample=upsample, first_frame=first_frame, last_of_one=last_of_one,
            unpack=unpack, residual=residual, skip=skip,
        )  # fmt: skip

    def res_block(self, name: str, source: int, statistics: _Statistics) -> int:
        """source + conv2(norm2(conv1(norm1(source)))), through the shortcut where there is one."""
        hidden = self.conv(f"{name}.conv1", source, norm=self.norm(f"{name}.norm1", source, statistics))
        shortcut, skip = f"{name}.{self.layout.shortcut}", source
        if self.build.keys.has(f"{shortcut}.") or self.build.channels(source) != self.build.channels(hidden):
            skip = self.conv(shortcut, source)
        norm2 = self.norm(f"{name}.norm2", hidden, statistics)
        return self.conv(f"{name}.conv2", hidden, norm=norm2, residual=skip)

    def middle(self, source: int) -> int:
        """Res block, attention over the whole clip, res block."""
        block_1, attention, block_2 = self.layout.mid
        h = self._attention(attention, self.res_block(block_1, source, _WHOLE_CLIP))
        return self.res_block(block_2, h, _WHOLE_CLIP)

    def blocks(self, level: str, count: int, source: int, statistics: _Statistics) -> int:
        """The res blocks of a level."""
        for block in range(count):
            source = self.res_block(f"{level}.{self.layout.block}.{block}", source, statistics)
        return source

    def count_levels(self) -> tuple[int, int]:
        """(levels, res blocks of each)."""
        keys, layout = self.build.keys, self.layout
        levels = max(1, keys.count(layout.levels))
        return levels, max(1, *(keys.count(f"{layout.levels}{i}.{layout.block}.") for i in range(levels)), 0)

    def _attention(self, name: str, source: int) -> int:
        build, channels = self.build, self.build.channels(source)
        parts = max(self.layout.attention, key=lambda names: sum(build.keys.has(f"{name}.{n}.") for n in names))
        norm, q, k, v, proj = (f"{name}.{part}" for part in parts)
        op = ClipAttention(
            name=build.keys.full(name), inputs=(), output=0, channels=channels, scope="clip",
            norm=self.norm(norm, source, _WHOLE_CLIP), qkv=None, q=build.linear(q, channels, channels),
            k=build.linear(k, channels, channels), v=build.linear(v, channels, channels),
            proj=build.linear(proj, channels, channels),
        )  # fmt: skip
        return build.attention(op, source)


# -- which is which


def _all_known(keys: Keys, names: re.Pattern[str], sign: str) -> bool:
    """True if the pattern knows all decoder tensors, one has five axes, and one is below a sign of the layout."""
    found = keys.below("decoder.")
    known = all(names.fullmatch(name) for name in found)
    return known and any(keys.ndim(name) == 5 for name in found) and any(sign in name for name in found)


def _lowest_first(keys: Keys) -> bool:
    """True where level 0 upsamples: it is the lowest resolution. In HunyuanVideo 1.0 it is the picture's."""
    return keys.has("decoder.up.0.upsample.")


def _layout_1_0(keys: Keys) -> _Layout | None:
    if _all_known(keys, _NAMES_1_0, ".conv.") and not _lowest_first(keys):
        return _LDM
    return _DIFFUSERS if _all_known(keys, _NAMES_DIFFUSERS, ".conv.") else None


def detect_1_0(keys: Keys) -> bool:
    """True for a HunyuanVideo 1.0 decoder in ldm or diffusers names, even with tensors missing."""
    return _layout_1_0(keys) is not None


def detect_1_5(keys: Keys) -> bool:
    """True for a HunyuanVideo 1.5 decoder, even with tensors missing."""
    return _all_known(keys, _NAMES_1_5, ".gamma")


def detect_refiner(keys: Keys) -> bool:
    """True for the decoder of a HunyuanImage refiner, even with tensors missing."""
    return _all_known(keys, _NAMES_REFINER, "decoder.up.") and _lowest_first(keys)


# -- lowering


def lower_1_0(keys: Keys, hints: Mapping[str, str]) -> Program:
    """A HunyuanVideo 1.0 decoder of any width, depth and latent channels. WeightsError on a missing tensor."""
    layout = _layout_1_0(keys)
    if layout is None:
        raise WeightsError("the weights are not those of a HunyuanVideo decoder; call detect() first")
    post_quant = keys.has("post_quant_conv.")
    first = "post_quant_conv" if post_quant else "decoder.conv_in.conv"
    build = ClipBuilder(keys, keys.shape(f"{first}.weight", 5)[1])
    lowering = _Lowering(build, layout, groups=hinted_groups(hints), padded=True)
    h = build.conv(first, 0) if post_quant else 0
    h = lowering.middle(lowering.conv("decoder.conv_in", h))
    n_levels, n_blocks = lowering.count_levels()
    if layout is _DIFFUSERS and keys.has(f"{layout.levels}{n_levels - 1}.{layout.upsample}."):
        n_levels += 1  # an upsample leads to a level that is missing as a whole
    rate = 1
    for step in range(n_levels):
        scope = f"{layout.levels}{step if layout is _DIFFUSERS else n_levels - 1 - step}"
        h = lowering.blocks(scope, n_blocks, h, _two_latents(rate))
        if step < n_levels - 1:
            in_time = step >= n_levels - 1 - FRAME_DOUBLINGS
            mode: TimeUpsample = "first_single" if in_time else "none"
            h = lowering.conv(f"{scope}.{layout.upsample}", h, upsample=2, upsample_time=mode)
            rate *= 2 if in_time else 1
    lowering.conv("decoder.conv_out", h, norm=lowering.norm(layout.norm_out, h, _two_latents(rate)))
    return build.program(HUNYUAN_VIDEO.name, WORKING_DTYPES_1_0)


def _two_latents(rate: int) -> _Statistics:
    """Scopes of two latent frames where each is `rate` frames, but the first, which is one."""
    return _Statistics(scope=STATISTICS_FRAMES * rate, offset=rate - 1)


def lower_1_5(keys: Keys, hints: Mapping[str, str]) -> Program:
    """A HunyuanVideo 1.5 decoder of any width, depth and latent channels. WeightsError on a missing tensor."""
    return _lower_repeating(keys, HUNYUAN15.name, groups=None, causal=True)


def lower_refiner(keys: Keys, hints: Mapping[str, str]) -> Program:
    """A HunyuanImage refiner's decoder of any width and depth. WeightsError on a missing tensor."""
    return _lower_repeating(keys, HUNYUAN_REFINER.name, groups=hinted_groups(hints), causal=False)


def _lower_repeating(keys: Keys, family: str, *, groups: int | None, causal: bool) -> Program:
    """Level 0 is the lowest; levels end in a depth-to-space, to which their input, repeated, is added."""
    conv_in = "decoder.conv_in.conv.weight" if causal else "decoder.conv_in.weight"
    width, latent_channels = keys.shape(conv_in, 5)[:2]
    if width % latent_channels:
        raise WeightsError(
            f"{keys.full(conv_in)!r} gives {width} channels, to which the latent's {latent_channels} cannot be added; "
            "the file is damaged"
        )
    build = ClipBuilder(keys, latent_channels)
    lowering = _Lowering(build, _LDM, groups=groups, padded=causal)
    h = lowering.conv("decoder.conv_in", 0, residual=0, skip=Skip(repeat=width // latent_channels))
    h = lowering.middle(h)
    n_levels, n_blocks = lowering.count_levels()
    for level in range(n_levels):
        scope = f"{_LDM.levels}{level}"
        h = lowering.blocks(scope, n_blocks, h, _WHOLE_CLIP)
        if level < n_levels - 1 or keys.has(f"{scope}.{_LDM.upsample}."):
            following = f"{_LDM.levels}{level + 1}.block.0.conv1" if level < n_levels - 1 else "decoder.conv_out"
            h = _unpacking(lowering, f"{scope}.{_LDM.upsample}", h, following, causal)
    norm = lowering.norm(_LDM.norm_out, h, _WHOLE_CLIP)
    lowering.conv("decoder.conv_out", h, norm=norm, last_of_one=not causal)
    return build.program(family, WORKING_DTYPES)


def _unpacking(lowering: _Lowering, name: str, source: int, following: str, causal: bool) -> int:
    """Convolution and depth-to-space, also in time where its channels are eight times what the next level reads."""
    keys, have = lowering.build.keys, lowering.build.channels(source)
    weight, following = f"{lowering.name(name)}.weight", f"{lowering.name(following)}.weight"
    out, wanted = keys.shape(weight, 5)[0], keys.shape(following, 5)[1]
    if out not in (4 * wanted, 8 * wanted):
        raise WeightsError(
            f"{keys.full(weight)!r} gives {out} channels, but four or eight times the {wanted} that "
            f"{keys.full(following)!r} reads are expected; the file is damaged"
        )
    unpack = Unpack(t=out // (4 * wanted), s=2, order="thwc")
    first_frame: FirstFrame = "single" if causal and unpack.t > 1 else "same"
    # The first frame has half the offsets to fill where it is unpacked alone.
    if out % (have * (unpack.t if causal else 1)):
        raise WeightsError(
            f"{keys.full(weight)!r} gives {out} channels, to which {have} cannot be added; the file is damaged"
        )
    skip = Skip(repeat=out // have, unpack=unpack)
    return lowering.conv(name, source, unpack=unpack, first_frame=first_frame, residual=source, skip=skip)


HUNYUAN_VIDEO = Family(name="hunyuan_video", detect=detect_1_0, lower=lower_1_0)
HUNYUAN15 = Family(name="hunyuan15", detect=detect_1_5, lower=lower_1_5)
HUNYUAN_REFINER = Family(name="hunyuan_refiner", detect=detect_refiner, lower=lower_refiner)
