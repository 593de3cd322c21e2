"""The plan of a decode: what the planner decides and the executor obeys. Frozen, holds no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .arena import Arena
from .events import ConvShape, PeakPrediction, PlanSummary
from .program import Attention, Conv, Op, Program, Size
from .tiling import TileGrid

Layout = Literal["channels_last", "contiguous"]
Backend = Literal["torch", "winograd", "shifted_gemm", "kitchen"]
"""`torch`: the framework's own convolution; `winograd`: sums and matrix products (kernels/winograd.py, upsample.py);
`shifted_gemm`: one matrix product per tap (kernels/shifted_gemm.py); `kitchen`: an optional package's kernels
(kernels/kitchen.py). What each takes: kernels/backends.py."""
InPlace = Literal["no", "residual", "narrow", "pixel", "tail"]
"""How an op's output shares memory with an input that dies there: added into its `residual`; `narrow`: two outputs over
the rows of one wider input; `pixel`: over the very pixels it reads; `tail`: the input lies at the end of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypePlan:
    """Dtypes by name ("float32", "bfloat16", "float16")."""

    native: str
    """What the decoder was loaded in."""
    stream: str
    """What activation maps are stored in."""
    compute: str
    """What convolutions and attention multiply in."""
    widened: frozenset[str] = frozenset()
    """Names of ops that are computed in float32 because they were not finite otherwise."""

    def of(self, op_name: str) -> str:
        """Compute dtype of an op."""
        return "float32" if op_name in self.widened else self.compute


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlan:
    """How one step runs. A step is one op, or a convolution and the 1x1 shortcut that reads the same input."""

    index: int
    op: Op
    partner: Conv | None
    """The shortcut computed in the same sweep when both overwrite their input (`narrow`)."""
    kind: Literal["conv", "attention", "pointwise", "rearrange"]
    grid: TileGrid
    """Tiles at the resolution the kernel runs at; for attention, query rows of a flattened picture."""
    fold: bool
    """Nearest-2x + 3x3 runs at the source's resolution: one 2x2 convolution with four times the outputs."""
    backend: Backend
    dtype: str
    """Compute dtype."""
    in_place: InPlace
    buffers: tuple[str, ...]
    """Arena keys this step uses besides values: staging, temporaries, keys and values."""
    macs: int
    """Multiply-accumulates really done."""
    refusals: tuple[str, ...] = ()
    """Why the backend that was asked for was not taken; empty where none was asked for."""
    staging: Literal["torch", "kitchen"] = "torch"
    """Who normalises, activates and pads."""
    adds_residual: bool = False
    """The kernel adds the residual itself."""
    writes_home: bool = False
    """The kernel writes into the value's home, and there is no result to copy."""

    @property
    def name(self) -> str:
        """Name of the op."""
        return self.op.name

    @property
    def n_tiles(self) -> int:
        """Kernel sweeps."""
        return self.grid.n_tiles

    @property
    def tile(self) -> tuple[int, int]:
        """(rows, columns) of a tile."""
        return self.grid.rows, self.grid.cols

    @property
    def folded(self) -> bool:
        """True where the convolution's weight is folded and its result holds four phases side by side."""
        return self.fold and self.backend in ("torch", "kitchen")

    @property
    def folds_weight(self) -> bool:
        """True where the kernel takes its weight folded."""
        return self.fold and self.backend != "winograd"

    def in_float32(self) -> OpPlan:
        """The step as it is redone where its result was not finite; no buffer is planned for it."""
        return replace(
            self, dtype="float32", backend="torch", staging="torch", adds_residual=False, writes_home=False, buffers=()
        )

    @property
    def halo(self) -> int:
        """Elements of context a tile reads on each side."""
        return self.op.halo if isinstance(self.op, Conv) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Where a value lives: some channels of a home buffer."""

    home: str
    channels: int
    offset: int
    """First channel inside the home."""
    home_channels: int

    @property
    def is_whole(self) -> bool:
        """True where no other value shares the home, so that the map lies dense."""
        return self.channels == self.home_channels


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Homes of values that live in the host's memory, from where tiles are fetched and whereto they are stored."""

    homes: frozenset[str] = frozenset()
    host: Arena = field(default_factory=lambda: Arena(offsets={}, nbytes=0))
    """Where they lie there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """One pass over `n_images` pictures."""

    n_images: int
    latent: Size
    steps: tuple[OpPlan, ...]
    slices: Mapping[int, Slice]
    """Home of every value but the picture, which goes straight to the output."""
    buffer_bytes: Mapping[str, int]
    arena: Arena
    scratch_bytes: int
    packed_bytes: int
    macs: int
    bytes_moved: int
    offload: Offload = field(default_factory=Offload)
    """What of it lives in the host's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole decode: passes over a batch, and what they will cost."""

    program: Program
    latent_shape: tuple[int, int, int, int]
    layout: Layout
    strategy: Literal["strips", "tiles"]
    dtypes: DtypePlan
    attention: Literal["sdpa", "matmul"]
    passes: tuple[PassPlan, ...]
    """One per pass; equal passes are the same object."""
    prefetch: bool
    """The next pass's latent is prepared while one runs."""
    cache_weights: bool
    workers: int
    """Threads that share the blocks of Winograd kernels."""
    guard: bool
    """Non-finite ops are redone wider."""
    pool_bytes: int
    conv_shapes: tuple[ConvShape, ...]
    summary: PlanSummary
    host_bytes: int = 0
    """Of the pool's memory on the host, where the widest values live there."""

    @property
    def ops(self) -> tuple[OpPlan, ...]:
        """Steps of the largest pass."""
        return self.passes[0].steps

    @property
    def predicted(self) -> PeakPrediction:
        """Bytes at the peak."""
        return self.summary.predicted


def is_conv3(op: Op) -> bool:
    """True for a convolution that reads neighbours."""
    return isinstance(op, Conv) and op.halo > 0


def kind_of(op: Op) -> Literal["conv", "attention", "pointwise", "rearrange"]:
    """The word for an op in records."""
    from .program import Pointwise

    if isinstance(op, Conv):
        return "conv"
    if isinstance(op, Attention):
        return "attention"
    return "pointwise" if isinstance(op, Pointwise) else "rearrange"
