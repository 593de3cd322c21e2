"""What shapes cannot tell of an LTX-Video decoder: the JSON config of its file, or the published layouts.

Sources: the configs inside Lightricks' published files; HaCohen et al. 2024, arXiv:2501.00103 (the autoencoder).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import WeightsError
from ..video.ops import Border

BlockKind = Literal["res_x", "res_x_y", "compress_all", "compress_space", "compress_time"]
"""`res_x`: res blocks of one width; `res_x_y`: one res block that changes the width; the others double the size."""
_BORDERS: Mapping[str, Border] = {"reflect": "reflect", "zeros": "zero", "replicate": "replicate"}
_VAE_FIELDS = ("decoder_blocks", "blocks", "norm_layer", "latent_channels")
"""A config that has one of these, and no "vae", is that of the decoder itself."""
NOISE_SHARE = 0.025
TIMESTEP = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One of the decoder's blocks."""

    kind: BlockKind
    layers: int = 1
    """Res blocks of a `res_x`."""
    noise: bool = False
    """Its convolutions add noise, scaled per channel."""
    residual: bool = False
    """A doubling adds its own input, rearranged and repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A decoder but for its widths."""

    blocks: tuple[Block, ...]
    """In the order they run, which is that of the names `up_blocks.N` and the reverse of the config's."""
    patch: int = 4
    """Pixels per side that the last convolution's channels hold."""
    border: Border = "reflect"
    causal: bool = False
    timestep: float | None = None
    """Conditions the norms, and the latent is mixed with noise; None: neither."""
    noise_share: float = 0.0


def _res(layers: int, *, noise: bool = False) -> Block:
    return Block(kind="res_x", layers=layers, noise=noise)


_NARROW, _DOUBLE, _DOUBLE_SUM = (
    Block(kind="res_x_y"), Block(kind="compress_all"), Block(kind="compress_all", residual=True),
)  # fmt: skip
PUBLISHED = (
    Layout(
        blocks=(
            _res(4), _res(3), _DOUBLE, _res(3), _NARROW, _DOUBLE, _res(3), _NARROW, _DOUBLE, _res(4),
        ),
    ),
    Layout(
        blocks=(
            _res(8), _DOUBLE_SUM, _res(7, noise=True), _DOUBLE_SUM, _res(6, noise=True), _DOUBLE_SUM,
            _res(5, noise=True),
        ),
        timestep=TIMESTEP, noise_share=NOISE_SHARE,
    ),
    Layout(
        blocks=(_res(5), _DOUBLE_SUM, _res(5), _DOUBLE_SUM, _res(5), _DOUBLE_SUM, _res(5)),
        timestep=TIMESTEP, noise_share=NOISE_SHARE,
    ),
)  # fmt: skip
"""LTX-Video 0.9.0, 0.9.1 and 0.9.5, for files that carry no config."""


def parse_layout(text: str) -> Layout | None:
    """The layout that a config describes, {"vae": {...}} or its inner part alone; None where it says nothing of a VAE.

    WeightsError on broken JSON, a value of the wrong kind, or a decoder of another build than the engine knows.
    """
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise WeightsError(
            f"the hint config is not valid JSON ({error}); pass the file's own config metadata, or none at all"
        ) from None
    if isinstance(config, dict) and "vae" in config:
        config = config["vae"]
        if config is None:
            return None
    elif isinstance(config, dict) and not any(name in config for name in _VAE_FIELDS):
        return None
    if not isinstance(config, dict):
        raise WeightsError(f"the hint config holds {_short(config)} where the VAE's fields are expected")
    return _layout(config)


def _layout(config: Mapping[str, Any]) -> Layout:
    for name, known, default in (("norm_layer", "pixel_norm", "group_norm"), ("dims", 3, 3)):
        if (given := config.get(name, default)) != known:
            raise WeightsError(
                f"the LTX config's {name} is {_short(given)}; only {_short(known)} is known, so use the blended method"
            )
    border = config.get("spatial_padding_mode", "reflect")
    if not isinstance(border, str) or border not in _BORDERS:
        raise WeightsError(
            f"the LTX config's spatial_padding_mode is {_short(border)}; {', '.join(_BORDERS)} are known, so use the "
            "blended method"
        )
    patch = config.get("patch_size", 1)
    if isinstance(patch, bool) or not isinstance(patch, int) or patch < 1:
        raise WeightsError(f"the LTX config's patch_size is {_short(patch)}; a whole number of 1 or more is expected")
    blocks = config.get("decoder_blocks", config.get("blocks"))
    if not isinstance(blocks, list) or not blocks:
        raise WeightsError(f"the LTX config's decoder_blocks are {_short(blocks)}; a list of blocks is expected")
    conditioned = _flag(config, "timestep_conditioning")
    return Layout(
        blocks=tuple(_block(entry) for entry in reversed(blocks)),
        patch=patch, border=_BORDERS[border], causal=_flag(config, "causal_decoder"),
        timestep=_number(config, "decode_timestep", TIMESTEP) if conditioned else None,
        noise_share=_number(config, "decode_noise_scale", NOISE_SHARE) if conditioned else 0.0,
    )  # fmt: skip


def _block(entry: Any) -> Block:
    """One entry: [kind, number of layers] or [kind, {fields}]."""
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], int | dict):
        raise WeightsError(f"the LTX config has the block {_short(entry)}; a name and a number or fields are expected")
    kind, fields = entry
    if kind not in get_args(BlockKind):
        raise WeightsError(
            f"the LTX config has a block {_short(kind)}; {', '.join(get_args(BlockKind))} are known, so use the "
            "blended method"
        )
    if not isinstance(fields, dict):
        fields = {"num_layers": fields}
    layers = fields.get("num_layers") if kind == "res_x" else 1
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise WeightsError(f"the LTX config's {kind} has num_layers {_short(layers)}; 1 or more is expected")
    return Block(
        kind=kind, layers=layers, noise=_flag(fields, "inject_noise"),
        # the other doublings have no such sum, whatever the config says
        residual=kind == "compress_all" and _flag(fields, "residual"),
    )  # fmt: skip


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise WeightsError(f"the LTX config's {name} is {_short(value)}; true or false is expected")
    return value


def _number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WeightsError(f"the LTX config's {name} is {_short(value)}; a number is expected")
    return float(value)


def _short(value: Any) -> str:
    """A value as JSON, cut to what a sentence can hold."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
