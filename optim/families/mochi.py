"""Mochi 1's decoder, in a file of its own (`blocks.…`) or below `decoder.`.

Source: https://github.com/genmoai/mochi (AsymmVAE).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import WeightsError
from ..program import Program
from ..video.ops import Unpack
from .builder import hinted_groups
from .clip_builder import ClipBuilder
from .keys import Family, Keys

WORKING_DTYPES = ("float16", "float32")
NORM_EPS = 1e-5
UPSAMPLE = 2
"""Pixels per side that every projection makes of one; frames follow from the widths."""
_RES_BLOCK = re.compile(r"blocks\.\d+\.(blocks\.)?\d+\.stack\.[0235]\.(weight|bias)")


def _scope(keys: Keys) -> str | None:
    """What precedes `blocks.`; None: no such decoder."""
    for scope in ("decoder.", ""):
        if any(_RES_BLOCK.fullmatch(name.removeprefix(scope)) for name in keys.below(f"{scope}blocks.")):
            return scope
    return None


def detect(keys: Keys) -> bool:
    """True for Mochi's res blocks, even with tensors missing."""
    return _scope(keys) is not None


def lower(keys: Keys, hints: Mapping[str, str]) -> Program:
    """A Mochi decoder of any width and depth; 6 T - 5 frames as published. WeightsError on a missing tensor."""
    scope = _scope(keys)
    if scope is None:
        raise WeightsError("the weights are not those of a Mochi decoder; call detect() first")
    if keys.has(f"{scope}output_norm."):
        raise WeightsError("the Mochi decoder has an output norm, which is not known; use the blended method")
    first = f"{scope}blocks.0"
    build = ClipBuilder(keys, keys.shape(f"{first}.0.weight", 5)[1])
    res = _ResBlocks(build=build, groups=hinted_groups(hints))
    last = keys.count(f"{scope}blocks.") - 1
    if last < 1 or keys.has(f"{scope}blocks.{last}.blocks.") or keys.has(f"{scope}blocks.{last}.proj."):
        last += 1  # an upsampling leads to blocks that are missing as a whole
    h = build.conv(f"{first}.0", 0)
    for number in range(1, max(2, keys.count(f"{first}."))):
        h = res.add(f"{first}.{number}", h)
    for number in range(1, last):
        name, after = f"{scope}blocks.{number}", f"{scope}blocks.{number + 1}"
        for block in range(max(1, keys.count(f"{name}.blocks."))):
            h = res.add(f"{name}.blocks.{block}", h)
        h = _grow(build, f"{name}.proj", h, after=f"{after}.0" if number + 1 == last else f"{after}.blocks.0")
    for number in range(max(1, keys.count(f"{scope}blocks.{last}."))):
        h = res.add(f"{scope}blocks.{last}.{number}", h)
    build.conv(f"{scope}output_proj", h, form="linear", act="silu")
    return build.program(FAMILY.name, WORKING_DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResBlocks:
    """Two causal convolutions behind per-frame norms, and the input."""

    build: ClipBuilder
    groups: int

    def add(self, name: str, source: int) -> int:
        if self.build.keys.has(f"{name}.attn_block."):
            full = self.build.keys.full(name)
            raise WeightsError(
                f"{full!r} has attention, which no Mochi decoder is known to have; use the blended method"
            )
        y = self._conv(name, 0, source)
        return self._conv(name, 3, y, residual=source)

    def _conv(self, name: str, number: int, source: int, residual: int | None = None) -> int:
        """`stack` holds norm, activation and convolution, twice."""
        norm = self.build.group_norm(f"{name}.stack.{number}", source, groups=self.groups, eps=NORM_EPS, scope=1)
        return self.build.conv(
            f"{name}.stack.{number + 2}", source, norm=norm, act="silu", time_border="replicate", border="replicate",
            residual=residual,
        )  # fmt: skip


def _grow(build: ClipBuilder, name: str, source: int, *, after: str) -> int:
    """A projection per pixel whose channels become frames and pixels, as many frames as the next width leaves."""
    out, width = build.keys.shape(f"{name}.weight", 2)[0], build.keys.shape(f"{after}.stack.0.weight", 1)[0]
    t, rest = divmod(out, width * UPSAMPLE**2)
    if rest or t < 1:
        raise WeightsError(
            f"{build.keys.full(name + '.weight')!r} gives {out} channels, of which no whole number of frames with "
            f"{UPSAMPLE} x {UPSAMPLE} pixels of {width} channels can be made; the file is damaged"
        )
    return build.conv(
        name, source, form="linear", unpack=Unpack(t=t, s=UPSAMPLE), first_frame="drop" if t > 1 else "same"
    )


FAMILY = Family(name="mochi", detect=detect, lower=lower)
