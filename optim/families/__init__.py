"""Decoder families: each recognises its weights and lowers them to a Program."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import UnknownDecoderError
from ..program import Program
from ..weights import TensorSpec
from . import cogvideox, cosmos, hunyuan_image, hunyuan_video, kl, ltx, mochi, svd, taehv, taesd, wan
from .keys import PREFIXES, Family, Keys

__all__ = ["FAMILIES", "Family", "detect", "lower"]

FAMILIES: tuple[Family, ...] = (
    kl.FAMILY, hunyuan_image.FAMILY, taesd.FAMILY, wan.WAN21, wan.WAN22, hunyuan_video.HUNYUAN_VIDEO,
    hunyuan_video.HUNYUAN15, hunyuan_video.HUNYUAN_REFINER, cosmos.FAMILY, cogvideox.FAMILY, svd.FAMILY,
    ltx.FAMILY, mochi.FAMILY, taehv.FAMILY,
)  # fmt: skip
"""In the order they are tried; their names and shapes exclude each other."""
_KEYS_SHOWN = 6


def detect(specs: Mapping[str, TensorSpec]) -> str:
    """Name of the family that the weights belong to. UnknownDecoderError if there is none."""
    return _find(specs)[0].name


def lower(specs: Mapping[str, TensorSpec], *, hints: Mapping[str, str] | None = None) -> Program:
    """The decoder as a Program whose ops carry the source's own tensor names; reads names, shapes and dtypes only.

    Tensors outside the decoder are ignored, and a checkpoint's usual prefixes are found. `hints` are facts that shapes
    cannot tell, usually a file's metadata: `norm_groups` (32), `tae_latent_channels`, `latent_scale` (TAEHV),
    `config` (LTX-Video); others are ignored.

    Raises:
        UnknownDecoderError: no family knows these names.
        WeightsError: the family is known, but a tensor is missing or has the wrong shape.
    """
    family, keys = _find(specs)
    return family.lower(keys, hints or {})


def _find(specs: Mapping[str, TensorSpec]) -> tuple[Family, Keys]:
    for prefix in PREFIXES:
        keys = Keys(specs, prefix)
        for family in FAMILIES:
            if family.detect(keys):
                return family, keys
    decoder_first = sorted(specs, key=lambda name: "decoder" not in name)  # stable: the source's order within each
    seen, families = tuple(decoder_first[:_KEYS_SHOWN]), tuple(family.name for family in FAMILIES)
    shown = ", ".join(seen) or "no tensors at all"
    raise UnknownDecoderError(
        f"no known decoder has these weights (first seen: {shown}); known families are {', '.join(families)}; "
        "use the blended method, which needs no lowering",
        keys_seen=seen, families=families,
    )  # fmt: skip
