"""TAEHV, the tiny decoder of video latents: Wan 2.1 and HunyuanVideo, HunyuanVideo 1.5, Wan 2.2 and LTX-2.

Source: https://github.com/madebyollin/taehv. The layers are numbered as in a sequence: 0 clamp, 1 convolution, 2
activation, then three times three blocks that also see the frame before, a nearest-neighbour doubling, a 1x1
convolution that makes frames, and a convolution; 21 activation, 22 convolution.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch

from ..errors import WeightsError
from ..program import Program
from ..video.ops import ClipActivation, Unpack
from .clip_builder import ClipBuilder
from .keys import Family, Keys

WORKING_DTYPES = ("bfloat16", "float32")
_STAGES = (((3, 4, 5), 7, 8), ((9, 10, 11), 13, 14), ((15, 16, 17), 19, 20))
"""Blocks, frame maker and convolution of each resolution, lowest first."""
_LAST = 22
_NAMES = re.compile(r"decoder\.\d+\.((conv\.([024]\.)?)?(weight|bias)|skip\.weight)")
_COLOURS = 3
_LEAKY_CHANNELS = 32
"""HunyuanVideo 1.5's has leaky activations; its latent has this many channels."""
HUNYUAN_CHANNELS = 16
HUNYUAN_SCALE = 0.476986
HUNYUAN15_SCALE = 1.03682


def detect(keys: Keys) -> bool:
    """True for `decoder.…` numbered as TAEHV numbers it, even with tensors missing; never for a picture's TAESD."""
    names = keys.below("decoder.")
    if not names or not all(_NAMES.fullmatch(name) for name in names):
        return False
    if any(f"decoder.{grow}.conv.weight" in keys for _, grow, _ in _STAGES):
        return True
    # blocks that read two frames; those of TAESD read one
    first = [f"decoder.{n}.conv.0.weight" for blocks, _, _ in _STAGES for n in blocks]
    return any(keys.ndim(name) == 4 and _pair(keys.shape(name)) for name in first if name in keys)


def _pair(shape: tuple[int, ...]) -> bool:
    return shape[1] == 2 * shape[0]


def lower(keys: Keys, hints: Mapping[str, str]) -> Program:
    """A TAEHV decoder of any width; 4 T - 3 frames (8 T - 7 with three frame makers). WeightsError on a missing tensor.

    The hint `latent_scale` is a number that the latent is multiplied by first, where the decoder expects latents as a
    diffusion model sees them (its `process_in`). A host that knows must say, as weights it has cast tell nothing.
    Without the hint the file decides: 1.03682 for 32 channels (HunyuanVideo 1.5); 0.476986 for 16 channels stored as
    float16 (HunyuanVideo; the same decoder for Wan 2.1 is published in other dtypes); else 1. The clip spans 0 to 1,
    but for 32 channels -1 to 1.
    """
    channels = keys.shape("decoder.1.weight", 4)[1]
    build = ClipBuilder(keys, channels)
    act: ClipActivation = "leaky_relu" if channels == _LEAKY_CHANNELS else "relu"
    scale = _latent_scale(keys, hints, channels)
    h = 0 if scale == 1.0 else build.scale("decoder.0", 0, before=scale, scale=None, shift=None)
    h = build.conv("decoder.1", h, form="conv2d", act="tanh3", post_act=act)
    made = 1
    for blocks, grow, conv in _STAGES:
        for number in blocks:
            h = _block(build, f"decoder.{number}", h, act)
        t = _frames_made(keys, f"decoder.{grow}.conv")
        made *= t
        # 1x1, so it may come before the doubling, which costs a quarter
        h = build.conv(
            f"decoder.{grow}.conv", h, form="conv2d", bias=False, unpack=Unpack(t=t, order="tchw") if t > 1 else None
        )
        h = build.conv(f"decoder.{conv}", h, form="conv2d", upsample=2, bias=False)
    last = f"decoder.{_LAST}"
    s = _pixels_made(keys, last)
    build.conv(last, h, form="conv2d", act=act, unpack=Unpack(s=s) if s > 1 else None, drop=made - 1)
    return build.program(FAMILY.name, WORKING_DTYPES, unit_range=channels != _LEAKY_CHANNELS)


def _latent_scale(keys: Keys, hints: Mapping[str, str], channels: int) -> float:
    text = hints.get("latent_scale")
    if text is None:
        if channels == _LEAKY_CHANNELS:
            return HUNYUAN15_SCALE
        stored_half = channels == HUNYUAN_CHANNELS and keys.dtype("decoder.1.weight") == torch.float16
        return HUNYUAN_SCALE if stored_half else 1.0
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale) or scale <= 0:
        raise WeightsError(f"the hint latent_scale is {text!r}; give a number above 0, or 1 for latents as they come")
    return scale


def _block(build: ClipBuilder, name: str, h: int, act: ClipActivation) -> int:
    """act(three convolutions, the first of this frame and the one before, + skip)."""
    hidden = build.conv(f"{name}.conv.0", h, form="past")
    hidden = build.conv(f"{name}.conv.2", hidden, form="conv2d", act=act)
    widened = f"{name}.skip.weight" in build.keys or build.channels(hidden) != build.channels(h)
    skip = build.conv(f"{name}.skip", h, form="conv2d", bias=False) if widened else h
    return build.conv(f"{name}.conv.4", hidden, form="conv2d", act=act, residual=skip, post_act=act)


def _frames_made(keys: Keys, name: str) -> int:
    """Frames that a frame maker makes of each, from its weight [t C, C, 1, 1]."""
    out, read, *_ = keys.shape(f"{name}.weight", 4)
    if out % read:
        raise WeightsError(
            f"{keys.full(name + '.weight')!r} gives {out} channels, which are no whole number of frames of {read}; the "
            "file is damaged"
        )
    return out // read


def _pixels_made(keys: Keys, name: str) -> int:
    """Pixels per side that the last convolution's channels hold."""
    out = keys.shape(f"{name}.weight", 4)[0]
    s = math.isqrt(out // _COLOURS)
    if _COLOURS * s * s != out:
        raise WeightsError(
            f"{keys.full(name + '.weight')!r} gives {out} channels, which are no square of pixels in {_COLOURS} "
            "colours; the file is damaged"
        )
    return s


FAMILY = Family(name="taehv", detect=detect, lower=lower)
