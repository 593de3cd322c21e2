"""The decoder of the Cosmos 1 continuous video tokenizer (8 T - 7 frames of T latent ones, x8 in space).

Every 3-D convolution is a spatial one with zeros around it and one along time that repeats the first frame before it;
norms see one frame, attention one frame and then, pixel by pixel, the frames so far. The last convolution gives
sub-bands of an inverse Haar transform. The first frame is decoded alone, so no frame depends on a later one.

Source: NVIDIA 2025, arXiv:2501.03575, section 3; https://github.com/NVIDIA/Cosmos-Tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import WeightsError
from ..program import Program
from ..video.ops import ClipAttention, ClipNorm, Skip, Unpack
from .clip_builder import ClipBuilder
from .keys import Family, Keys

WORKING_DTYPES = ("bfloat16", "float32")
LATENT_GAIN = 2.0
"""Latents come with a deviation of a half."""
NORM_EPS = 1e-6

_PICTURE = Unpack(t=4, s=4, haar=2)
_RES = r"(norm[12]\.norm|conv[12]\.[01]\.conv3d|nin_shortcut\.conv3d)"
_ATTN = r"[01]\.(norm\.norm|(q|k|v|proj_out)\.conv3d)"
_NAMES = re.compile(
    rf"decoder\.((conv_(in|out)\.[01]\.conv3d|norm_out\.norm|mid\.block_[12]\.{_RES}|mid\.attn_1\.{_ATTN}"
    rf"|up\.\d+\.(block\.\d+\.{_RES}|attn\.\d+\.{_ATTN}|upsample\.conv[123]\.conv3d))\.(weight|bias)|unpatcher3d\.\w+)"
)
_UP = "decoder.up."


def detect(keys: Keys) -> bool:
    """True for a factorised decoder, even with tensors missing."""
    names = keys.below("decoder.")
    # Files hold the wavelets below `unpatcher3d`, a loaded module may not: they are Haar's in either case. The discrete
    # tokenizer snaps the latent to a grid before the same decoder.
    if not names or keys.has("quantizer."):
        return False
    return all(_NAMES.fullmatch(name) for name in names)


def lower(keys: Keys, hints: Mapping[str, str]) -> Program:
    """A decoder of any width, depth and number of res blocks. WeightsError on a missing tensor.

    Without `latent_mean` and `latent_std` the latent is only doubled.
    """
    latent = keys.shape("post_quant_conv.conv3d.weight", 5)[1]
    build = ClipBuilder(keys, latent)
    h = _denormalize(build)
    h = build.conv("post_quant_conv.conv3d", h)
    h = _factorised(build, "decoder.conv_in", h)
    h = _res_block(build, "decoder.mid.block_1", h)
    h = _attentions(build, "decoder.mid.attn_1", h)
    h = _res_block(build, "decoder.mid.block_2", h)
    n_levels = max(1, keys.count(_UP))
    n_blocks = max(1, *(keys.count(f"{_UP}{level}.block.") for level in range(n_levels)))
    for level in reversed(range(n_levels)):
        for block in range(n_blocks):
            h = _res_block(build, f"{_UP}{level}.block.{block}", h)
            if keys.has(f"{_UP}{level}.attn.{block}."):
                h = _attentions(build, f"{_UP}{level}.attn.{block}", h)
        h = _upsample(build, f"{_UP}{level}.upsample", h)
    h = build.conv("decoder.conv_out.0.conv3d", h, norm=_norm(build, "decoder.norm_out.norm", h), act="silu")
    build.conv("decoder.conv_out.1.conv3d", h, time_border="replicate", unpack=_PICTURE, first_frame="drop")
    return build.program(FAMILY.name, WORKING_DTYPES)


def _denormalize(build: ClipBuilder) -> int:
    """2 z * deviation + mean, both per channel and frame modulo a period that their size tells."""
    keys, channels, names = build.keys, build.channels(0), ("latent_std", "latent_mean")
    if not any(name in keys for name in names):
        return build.scale("latent", 0, scale=None, shift=None, before=LATENT_GAIN)
    (size,) = keys.shape(names[0], 1)
    if size % channels or not size:
        raise WeightsError(
            f"{keys.full(names[0])!r} has {size} values, which {channels} latent channels do not divide; the file is "
            "damaged"
        )
    build.expect(names[1], (size,))
    return build.scale("latent", 0, scale=names[0], shift=names[1], period=size // channels, before=LATENT_GAIN)


def _norm(build: ClipBuilder, name: str, source: int) -> ClipNorm:
    """One group: statistics over all channels and pixels of a frame."""
    return build.group_norm(name, source, groups=1, eps=NORM_EPS, scope=1)


def _factorised(
    build: ClipBuilder, name: str, source: int, *, norm: ClipNorm | None = None, residual: int | None = None
) -> int:
    """A 1xkxk convolution, then one along time; SiLU follows the norm."""
    h = build.conv(f"{name}.0.conv3d", source, norm=norm, act="silu" if norm else "none")
    return build.conv(f"{name}.1.conv3d", h, time_border="replicate", residual=residual)


def _res_block(build: ClipBuilder, name: str, source: int) -> int:
    hidden = _factorised(build, f"{name}.conv1", source, norm=_norm(build, f"{name}.norm1.norm", source))
    skip = source
    if build.keys.has(f"{name}.nin_shortcut.") or build.channels(source) != build.channels(hidden):
        skip = build.conv(f"{name}.nin_shortcut.conv3d", source)
    norm2 = _norm(build, f"{name}.norm2.norm", hidden)
    return _factorised(build, f"{name}.conv2", hidden, norm=norm2, residual=skip)


def _attentions(build: ClipBuilder, name: str, source: int) -> int:
    """Over each frame, then for each pixel over this frame and those before it."""
    h, channels = source, build.channels(source)
    for part in (0, 1):
        scope = f"{name}.{part}"
        q, k, v, proj = (build.linear(f"{scope}.{p}.conv3d", channels, channels) for p in ("q", "k", "v", "proj_out"))
        op = ClipAttention(
            name=build.keys.full(scope), inputs=(h,), output=0, norm=_norm(build, f"{scope}.norm.norm", h), qkv=None,
            q=q, k=k, v=v, proj=proj, channels=channels, scope="past" if part else "frame",
        )  # fmt: skip
        h = build.attention(op, h)
    return h


def _upsample(build: ClipBuilder, name: str, source: int) -> int:
    """Doubling in time, in space, in both or, at a level without these convolutions, in neither."""
    keys, h = build.keys, source
    if not keys.has(f"{name}."):
        return h
    spatial = keys.has(f"{name}.conv2.") or not keys.has(f"{name}.conv1.")
    if keys.has(f"{name}.conv1."):
        h = build.conv(
            f"{name}.conv1.conv3d", h, time_border="replicate", upsample_time="first_single", residual=h,
            skip=Skip(upsampled=True),
        )  # fmt: skip
    if spatial:
        h = build.conv(f"{name}.conv2.conv3d", h, upsample=2, residual=h, skip=Skip(upsampled=True))
    return build.conv(f"{name}.conv3.conv3d", h)


FAMILY = Family(name="cosmos", detect=detect, lower=lower)
