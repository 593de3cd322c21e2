"""TAESD, the tiny decoder, for latents of any width, and its Flux.2 form (packed latents, pooled branches).

Source: https://github.com/madebyollin/taesd. The layers are numbered as in a sequence: 0 clamp, 1 convolution, 2 ReLU,
then blocks, and before each convolution that a number is skipped for, a nearest-neighbour doubling.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..program import Program
from .builder import Builder
from .keys import Family, Keys

WORKING_DTYPES = ("bfloat16", "float32")
POOL_GROUPS = 4
POOL_EPS = 1e-5
_FIRST_BLOCK = 3
_NAMES = re.compile(
    r"\d+\.((conv\.[024]\.)?(weight|bias)|skip\.weight|pool\.(0|3)\.weight|pool\.1\.(weight|bias))",
)


def _scope(keys: Keys) -> str | None:
    """What precedes the layer numbers: "taesd_decoder.", or "" in a file of the decoder alone; None: neither."""
    names = keys.below("taesd_decoder.")
    if names:
        known = all(_NAMES.fullmatch(name.removeprefix("taesd_decoder.")) for name in names)
        return "taesd_decoder." if known and _flat(keys, names) else None
    bare = tuple(keys)
    # The encoder's own file starts at layer 0, which is a parameterless clamp here.
    if keys.prefix or "1.weight" not in keys or "0.weight" in keys or not keys.has(f"{_FIRST_BLOCK}.conv."):
        return None
    return "" if all(_NAMES.fullmatch(name) for name in bare) and _flat(keys, bare) else None


def _flat(keys: Keys, names: tuple[str, ...]) -> bool:
    return all(keys.ndim(name) <= 4 for name in names)


def detect(keys: Keys) -> bool:
    """True for `taesd_decoder.…`, or a bare decoder file numbered from 1, even with tensors missing."""
    return _scope(keys) is not None


def lower(keys: Keys, hints: Mapping[str, str]) -> Program:
    """A TAESD decoder of any width and depth; the picture spans -1 to 1. WeightsError on a missing tensor.

    Without `vae_scale` and `vae_shift` the latent is taken as it comes: it must be in TAESD's own range already.
    Packed 2x2 latents (Flux.2) follow from the pooled branches or from the hint `tae_latent_channels`.
    """
    scope = _scope(keys) or ""
    width = keys.shape(f"{scope}1.weight", 4)[1]
    numbers = keys.numbers(scope)
    # All blocks at latent resolution are pooled or none is, so those below a pooled one must be.
    last_pooled = max((n for n in numbers if keys.has(f"{scope}{n}.pool.")), default=-1)
    packed = last_pooled >= 0 or hints.get("tae_latent_channels") == str(4 * width)
    build = Builder(keys, 4 * width if packed else width)
    h = 0
    if "vae_scale" in keys or "vae_shift" in keys:
        h = build.shift_scale("vae_shift", "vae_scale", h)
    if packed:
        h = build.rearrange(f"{scope}unpack", h, factor=2, order="channel_major")
    h = build.conv(f"{scope}1", h, act="tanh3", post_act="relu")
    last = max(numbers)
    # The sequence ends in a convolution; one that ends in a block, or right after a doubling, lost its end.
    if keys.has(f"{scope}{last}.conv.") or last - 1 not in numbers:
        last += 1
    doubled = False
    for number in range(_FIRST_BLOCK, last):
        if doubled:
            h = build.conv(f"{scope}{number}", h, upsample=2, bias=f"{scope}{number}.bias" in keys)
            doubled = False
        elif _doubles(keys, scope, number):
            doubled = True
        else:
            h = _lower_block(build, f"{scope}{number}", h, pooled=number <= last_pooled)
    build.conv(f"{scope}{last}", h, gain=2.0, offset=-1.0)
    return build.program(FAMILY.name, WORKING_DTYPES)


def _doubles(keys: Keys, scope: str, number: int) -> bool:
    """True if the layer is the parameterless doubling: a convolution follows, or its absence before the next block."""

    def has(n: int, part: str) -> bool:
        return keys.has(f"{scope}{n}.{part}")

    if has(number, "") or has(number + 1, "conv."):
        return False
    return has(number + 1, "weight") or has(number + 2, "conv.")


def _lower_block(build: Builder, name: str, h: int, *, pooled: bool) -> int:
    """relu(three convolutions + skip); a pooled branch, where there is one, is added to the input first."""
    keys = build.keys
    if pooled:
        wide = build.conv(f"{name}.pool.0", h, bias=False)
        norm = build.norm(f"{name}.pool.1", build.channels(wide), groups=POOL_GROUPS, eps=POOL_EPS)
        h = build.conv(f"{name}.pool.3", wide, norm=norm, act="relu", residual=h, bias=False)
    hidden = build.conv(f"{name}.conv.0", h)
    hidden = build.conv(f"{name}.conv.2", hidden, act="relu")
    # conv.4 keeps the width of conv.2, so the skip is due exactly where the block changes its input's width.
    widened = f"{name}.skip.weight" in keys or build.channels(hidden) != build.channels(h)
    skip = build.conv(f"{name}.skip", h, bias=False) if widened else h
    return build.conv(f"{name}.conv.4", hidden, act="relu", residual=skip, post_act="relu")


FAMILY = Family(name="taesd", detect=detect, lower=lower)
