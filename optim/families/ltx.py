"""LTX-Video's decoder: 0.9.0 (plain), 0.9.1 and 0.9.5+ (conditioned on a timestep), and LTX-2's.

Sources: HaCohen et al. 2024, arXiv:2501.00103; https://github.com/Lightricks/LTX-Video.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import WeightsError
from ..program import Program
from ..video.ops import ClipNorm, Modulation, Skip, Unpack
from .clip_builder import ClipBuilder
from .keys import Family, Keys
from .ltx_config import PUBLISHED, Block, BlockKind, Layout, parse_layout

WORKING_DTYPES = ("bfloat16", "float32")
PIXEL_NORM_EPS = 1e-8
LAYER_NORM_EPS = 1e-6
EMBEDDING_WIDTH = 256
"""Sinusoids of a timestep."""
_BLOCKS = "decoder.up_blocks."
_FIRST = f"{_BLOCKS}0.res_blocks.0.conv1.conv.weight"
_WIDE = 1024
"""Width of the first block in 0.9.1 and later; 512 before."""
_NEW_ENCODER = "encoder.down_blocks.1.conv.conv.bias"
"""Only 0.9.5 and later files have it."""
_STEPS: Mapping[BlockKind, tuple[int, int]] = {
    "compress_all": (2, 2), "compress_space": (1, 2), "compress_time": (2, 1),
}  # fmt: skip
"""Frames and pixels per side that a doubling makes of one."""
_STATISTICS = "per_channel_statistics"


def detect(keys: Keys) -> bool:
    """True for the names of LTX-Video's decoder, even with tensors missing."""
    return any(".res_blocks." in name and ".conv.weight" in name for name in keys.below(_BLOCKS))


def lower(keys: Keys, hints: Mapping[str, str]) -> Program:
    """An LTX-Video decoder of any width and depth. WeightsError on a missing tensor or a config of another build.

    The hint `config` is the JSON of the file's metadata, {"vae": {...}} or the inner part alone. Without it the layout
    is a published one, told by the width of the first block and by the encoder's names. A conditioned decoder mixes
    the latent with noise, drawn per decode.
    """
    layout = parse_layout(hints["config"]) if hints.get("config") else None
    if layout is not None:
        return _lower(keys, layout)
    version = _version(keys)
    try:
        return _lower(keys, PUBLISHED[version])
    except WeightsError as error:
        label = ("0.9.0", "0.9.1", "0.9.5")[version]
        raise WeightsError(
            f"{error} (without the hint config the layout of LTX-Video {label} is taken; pass the file's own config "
            "if it is another)"
        ) from None


def _version(keys: Keys) -> int:
    if _FIRST not in keys or keys.shape(_FIRST)[0] != _WIDE:
        return 0
    return 2 if _NEW_ENCODER in keys else 1


def _lower(keys: Keys, layout: Layout) -> Program:
    held, listed = keys.count(_BLOCKS), len(layout.blocks)
    if held > listed:
        raise WeightsError(
            f"the weights hold {held} blocks {keys.full(_BLOCKS)}N, but the layout lists {listed}; it is that of "
            "another file"
        )
    build = _LtxBuilder(keys, layout)
    h = build.denormalize()
    h = build.conv3("decoder.conv_in.conv", h)
    for number, block in enumerate(layout.blocks):
        h = build.block(f"{_BLOCKS}{number}", block, h)
    channels = build.channels(h)
    norm = build.pixel_norm("decoder.last_time_embedder", "decoder.last_scale_shift_table", channels, rows=2)
    unpack = Unpack(s=layout.patch, order="ctwh") if layout.patch > 1 else None
    build.conv3("decoder.conv_out.conv", h, norm=norm, act="silu", unpack=unpack)
    return build.program(FAMILY.name, WORKING_DTYPES)


class _LtxBuilder(ClipBuilder):
    """Adds the parts that LTX-Video's layouts are made of."""

    def __init__(self, keys: Keys, layout: Layout) -> None:
        super().__init__(keys, keys.shape("decoder.conv_in.conv.weight", 5)[1])
        self._layout = layout

    def denormalize(self) -> int:
        """The latent with its share of noise, then its channels' own spread and mean."""
        names = {"scale": f"{_STATISTICS}.std-of-means", "shift": f"{_STATISTICS}.mean-of-means"}
        for name in names.values():
            self.expect(name, (self.channels(0),))
        return self.scale(_STATISTICS, 0, noise_share=self._layout.noise_share, **names)

    def conv3(self, name: str, source: int, **fields: Any) -> int:
        """A convolution with the layout's borders."""
        layout = self._layout
        return self.conv(
            name, source, causal=layout.causal, time_border="replicate", border=layout.border, **fields
        )  # fmt: skip

    def pixel_norm(self, embedder: str, table: str, channels: int, *, rows: int, shift_row: int = 0) -> ClipNorm:
        """A pixel norm, its result shifted and scaled where the layout is conditioned."""
        modulation = None
        if self._layout.timestep is not None:
            multiplier, scope = "decoder.timestep_scale_multiplier", f"{embedder}.timestep_embedder"
            self.expect(multiplier, ())
            self.expect(table, (rows, channels))
            hidden = self.keys.shape(f"{scope}.linear_1.weight", 2)[0]
            modulation = Modulation(
                table=self.keys.full(table), shift_row=shift_row, scale_row=shift_row + 1,
                first=self.linear(f"{scope}.linear_1", hidden, EMBEDDING_WIDTH),
                second=self.linear(f"{scope}.linear_2", rows * channels, hidden),
                timestep=self._layout.timestep, multiplier=self.keys.full(multiplier),
            )  # fmt: skip
        return ClipNorm(kind="pixel", eps=PIXEL_NORM_EPS, modulation=modulation)

    def block(self, name: str, block: Block, source: int) -> int:
        """One block of the layout."""
        if block.kind in _STEPS:
            return self._double(f"{name}.conv.conv", block, source)
        if block.kind == "res_x_y":
            return self._res_block(name, source, embedder=None, noise=block.noise)
        held = self.keys.count(f"{name}.res_blocks.")
        if held > block.layers:
            raise WeightsError(
                f"the weights hold {held} of {self.keys.full(name)}.res_blocks.N, but the layout lists {block.layers}; "
                "it is that of another file"
            )
        for number in range(block.layers):
            source = self._res_block(
                f"{name}.res_blocks.{number}", source, embedder=f"{name}.time_embedder", noise=block.noise
            )
        return source

    def _res_block(self, name: str, source: int, *, embedder: str | None, noise: bool) -> int:
        """Two convolutions behind norms, and the input, which a norm and a 1x1 convolution bring to a new width."""
        y = self._normed_conv(name, 1, source, embedder, noise)
        skip = source
        if self.channels(y) != self.channels(source):
            skip = self.conv(f"{name}.conv_shortcut", source, norm=self._layer_norm(f"{name}.norm3.norm", source))
        return self._normed_conv(name, 2, y, embedder, noise, residual=skip)

    def _normed_conv(
        self, name: str, number: int, source: int, embedder: str | None, noise: bool, residual: int | None = None
    ) -> int:
        norm = ClipNorm(kind="pixel", eps=PIXEL_NORM_EPS)
        if embedder is not None:
            table, row = f"{name}.scale_shift_table", 2 * (number - 1)
            norm = self.pixel_norm(embedder, table, self.channels(source), rows=4, shift_row=row)
        conv, scale = f"{name}.conv{number}.conv", f"{name}.per_channel_scale{number}"
        if noise:
            self.expect(scale, (self.keys.shape(f"{conv}.weight", 5)[0], 1, 1))
        return self.conv3(conv, source, norm=norm, act="silu", noise=scale if noise else None, residual=residual)

    def _layer_norm(self, name: str, source: int) -> ClipNorm:
        weight, bias = f"{name}.weight", f"{name}.bias"
        for tensor in (weight, bias):
            self.expect(tensor, (self.channels(source),))
        return ClipNorm(
            kind="layer", weight=self.keys.full(weight), bias=self.keys.full(bias), eps=LAYER_NORM_EPS
        )  # fmt: skip

    def _double(self, name: str, block: Block, source: int) -> int:
        """A convolution whose channels become frames and pixels; the first frame is not doubled."""
        t, s = _STEPS[block.kind]
        unpack, skip = Unpack(t=t, s=s), None
        if block.residual:
            out, have = self.keys.shape(f"{name}.weight", 5)[0], self.channels(source)
            if out % have or have % (t * s * s):
                raise WeightsError(
                    f"{self.keys.full(name)}.weight gives {out} channels, to which the {have} it reads cannot be "
                    "added; the file is damaged"
                )
            skip = Skip(repeat=out // have, tile=True, unpack=unpack)
        return self.conv3(
            name, source, unpack=unpack, first_frame="drop" if t > 1 else "same",
            residual=source if block.residual else None, skip=skip,
        )  # fmt: skip


FAMILY = Family(name="ltx", detect=detect, lower=lower)
