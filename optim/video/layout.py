"""How each stream is kept and how each op reads it: which frames are padded, normalised in place, or copied."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..costs import ITEMSIZE
from ..plan import DtypePlan
from ..program import Op, Program
from .ops import Border, ClipAttention, ClipConv, ClipNorm

ReadMode = Literal["frames", "in_place", "copies", "tiles"]
"""How a convolution gets its staged source. `frames`: the stored frames are what it reads. `in_place`: it alone reads
the stream, whose frames are normalised where they lie. `copies`: staged frames of its own, kept while taps reach them.
`tiles`: it reads one pixel at a time, and stages tile by tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameShape:
    """A frame as it lies in memory: [H + 2 halo, W + 2 halo, C], or [C, ...] in the contiguous layout."""

    channels: int
    height: int
    width: int
    halo: int
    dtype: str

    @property
    def elements(self) -> int:
        """Elements, border included."""
        return self.channels * (self.height + 2 * self.halo) * (self.width + 2 * self.halo)

    @property
    def nbytes(self) -> int:
        """Bytes, border included."""
        return self.elements * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """The whole program's."""

    frames: tuple[FrameShape, ...]
    """Of every value."""
    modes: Mapping[int, ReadMode]
    """Of every convolution, by op index."""
    staged: Mapping[int, FrameShape]
    """Frames of the convolutions that keep copies."""
    borders: Mapping[int, Border]
    """What lies around a value's stored frames, where they have a halo."""


def readers_of(program: Program) -> dict[int, list[int]]:
    """Indices of the ops that read each value, once for each reading."""
    readers: dict[int, list[int]] = {v: [] for v in range(len(program.values))}
    for i, op in enumerate(program.ops):
        for v in op.inputs:
            readers[v].append(i)
    return readers


def norm_of(op: Op) -> ClipNorm | None:
    """The normalisation in front of an op, if it has one."""
    return op.norm if isinstance(op, (ClipConv, ClipAttention)) else None


def is_identity(op: ClipConv) -> bool:
    """True where staging changes no value."""
    return op.norm is None and op.act == "none"


def reads_neighbours(op: ClipConv) -> bool:
    """True where an output pixel depends on other pixels or frames."""
    return op.halo > 0 or op.kernel[0] > 1


def stored_border(op: ClipConv) -> Border:
    """What lies around the source's frames: beyond an upsampled edge, the reflection of one pixel repeats it."""
    return "replicate" if op.border == "reflect" and op.upsample == 2 else op.border


def make_layouts(program: Program, latent: tuple[int, int], dtypes: DtypePlan) -> Layouts:
    """Layouts for latents of that height and width."""
    readers = readers_of(program)
    stored = [_stored_dtype(program, v, dtypes) for v in range(len(program.values))]
    modes: dict[int, ReadMode] = {}
    borders: dict[int, Border] = {}
    halos = [0] * len(program.values)
    for i, op in enumerate(program.ops):
        if not isinstance(op, ClipConv):
            continue
        v = op.inputs[0]
        modes[i] = _mode(op, len(readers[v]), stored[v] == dtypes.of(op.name))
        if modes[i] in ("frames", "in_place") and op.halo:
            if borders.setdefault(v, stored_border(op)) != stored_border(op):
                modes[i] = "copies"
            else:
                halos[v] = max(halos[v], op.halo)
    stored[program.output] = "float32"
    shapes = tuple(_frame(program, v, latent, halos[v], stored[v]) for v in range(len(program.values)))
    staged = {
        i: _frame(program, program.ops[i].inputs[0], latent, _halo(program.ops[i]), dtypes.of(program.ops[i].name))
        for i, mode in modes.items()
        if mode == "copies"
    }
    return Layouts(frames=shapes, modes=modes, staged=staged, borders=borders)


def _halo(op: Op) -> int:
    return op.halo if isinstance(op, ClipConv) else 0


def _mode(op: ClipConv, n_readers: int, same_dtype: bool) -> ReadMode:
    if not reads_neighbours(op):
        return "tiles"
    if same_dtype and is_identity(op):
        return "frames"
    # the untouched first frame is handed on as it is stored
    return "in_place" if same_dtype and n_readers == 1 and op.first_frame != "bypass" else "copies"


def _stored_dtype(program: Program, value: int, dtypes: DtypePlan) -> str:
    """The stream's dtype; a value that float16 could not hold is kept as bfloat16 in the same bytes."""
    made = next((op for op in program.ops if op.output == value), None)
    wide = made is not None and made.name in dtypes.widened
    return "bfloat16" if wide and dtypes.stream == "float16" else dtypes.stream


def _frame(program: Program, value: int, latent: tuple[int, int], halo: int, dtype: str) -> FrameShape:
    scale = program.values[value].scale
    return FrameShape(
        channels=program.values[value].channels,
        height=latent[0] * scale[1],
        width=latent[1] * scale[2],
        halo=halo,
        dtype=dtype,
    )


def pixels(shape: FrameShape) -> int:
    """Pixels of a frame without its border."""
    return math.prod((shape.height, shape.width))
