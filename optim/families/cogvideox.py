"""The CogVideoX decoder (x8 in space; T latent frames become 4 T - 3 frames for an odd T, 4 T for an even one).

Norms are GroupNorms scaled and shifted by 1x1 convolutions of the latent. Three readings of their statistics are in
circulation; this one is ComfyUI's, which runs everything up to the last doubling in time on the whole clip and the
rest on 4 output frames at a time, each with its own statistics. Convolutions see across those fours.

Source: Yang et al. 2024, arXiv:2408.06072, section 2.1 (the decoder); Zheng et al. 2022, arXiv:2209.09002 (the norm).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ..errors import WeightsError
from ..program import Program
from ..video.ops import ClipNorm, LatentModulation
from .builder import hinted_groups
from .clip_builder import ClipBuilder
from .keys import Family, Keys

WORKING_DTYPES = ("bfloat16", "float16", "float32")
NORM_EPS = 1e-6
TIME_DOUBLINGS = 2
"""The first up blocks double the frames too; it cannot be read from the weights."""
SCOPE = 4
"""Output frames that share statistics once no doubling in time is left."""

_NORM = r"(norm_layer|conv_y\.conv|conv_b\.conv)"
_RES = rf"(norm[12]\.{_NORM}|conv[12]\.conv|conv_shortcut)"
_NAMES = re.compile(
    rf"decoder\.(conv_in\.conv|conv_out\.conv|norm_out\.{_NORM}|mid_block\.resnets\.\d+\.{_RES}"
    rf"|up_blocks\.\d+\.(resnets\.\d+\.{_RES}|upsamplers\.0\.conv))\.(weight|bias)"
)
_MID, _UP = "decoder.mid_block.resnets.", "decoder.up_blocks."


def detect(keys: Keys) -> bool:
    """True for a decoder whose norms read the latent and whose convolutions span time, even with tensors missing."""
    names = keys.below("decoder.")
    # ComfyUI runs no convolution before the decoder; a file that has one is another model.
    if keys.has("post_quant_conv.") or not any(".norm_layer." in name for name in names):
        return False
    return all(_NAMES.fullmatch(name) for name in names)


def lower(keys: Keys, hints: Mapping[str, str]) -> Program:
    """A decoder of any width, depth, number of res blocks and latent channels. WeightsError on a missing tensor."""
    latent = keys.shape("decoder.conv_in.conv.weight", 5)[1]
    return _Lowering(ClipBuilder(keys, latent), hinted_groups(hints)).run()


class _Lowering:
    """Walks the decoder's blocks; `scope` is that of the norms at the block being lowered."""

    def __init__(self, build: ClipBuilder, groups: int) -> None:
        self.build = build
        self.groups = groups
        self.scope = 0

    def run(self) -> Program:
        build, keys = self.build, self.build.keys
        h = build.conv("decoder.conv_in.conv", 0, time_border="replicate")
        for block in range(max(1, keys.count(_MID))):
            h = self.res_block(f"{_MID}{block}", h)
        n_levels = self.levels()
        n_blocks = max(1, *(keys.count(f"{_UP}{level}.resnets.") for level in range(n_levels)))
        for level in range(n_levels):
            self.scope = 0 if level < TIME_DOUBLINGS else SCOPE
            for block in range(n_blocks):
                h = self.res_block(f"{_UP}{level}.resnets.{block}", h)
            if level < n_levels - 1:
                h = build.conv(
                    f"{_UP}{level}.upsamplers.0.conv", h, form="conv2d", upsample=2,
                    upsample_time="odd_single" if level < TIME_DOUBLINGS else "none",
                )  # fmt: skip
        norm = self.norm("decoder.norm_out", h)
        build.conv("decoder.conv_out.conv", h, norm=norm, act="silu", time_border="replicate")
        return build.program(FAMILY.name, WORKING_DTYPES)

    def levels(self) -> int:
        """Number of up blocks; the last has no doubling, so a doubling at the end leads to one that is missing."""
        keys = self.build.keys
        found = keys.count(_UP)
        if found and keys.has(f"{_UP}{found - 1}.upsamplers."):
            found += 1
        if found <= TIME_DOUBLINGS:
            raise WeightsError(
                f"the weights hold {found} blocks below {keys.full(_UP)!r}, but more than {TIME_DOUBLINGS} are due; "
                "the file is incomplete, get it whole"
            )
        return found

    def norm(self, name: str, source: int) -> ClipNorm:
        build = self.build
        plain = build.group_norm(f"{name}.norm_layer", source, groups=self.groups, eps=NORM_EPS, scope=self.scope)
        channels, latent = build.channels(source), build.channels(0)
        scale, shift = (build.linear(f"{name}.{part}.conv", channels, latent) for part in ("conv_y", "conv_b"))
        return replace(plain, latent=LatentModulation(scale=scale, shift=shift))

    def res_block(self, name: str, source: int) -> int:
        build = self.build
        norm1 = self.norm(f"{name}.norm1", source)
        hidden = build.conv(f"{name}.conv1.conv", source, norm=norm1, act="silu", time_border="replicate")
        skip = source
        if build.keys.has(f"{name}.conv_shortcut.") or build.channels(source) != build.channels(hidden):
            skip = build.conv(f"{name}.conv_shortcut", source)
        norm2 = self.norm(f"{name}.norm2", hidden)
        return build.conv(
            f"{name}.conv2.conv", hidden, norm=norm2, act="silu", time_border="replicate", residual=skip
        )  # fmt: skip


FAMILY = Family(name="cogvideox", detect=detect, lower=lower)
