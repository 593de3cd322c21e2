"""The plan of a clip decode: what the planner decides and the runner obeys. Frozen, holds no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..events import ConvShape, PeakPrediction, PlanSummary
from ..plan import DtypePlan, Layout
from ..program import Program
from .backends import Backends
from .driver import Driver
from .layout import Layouts
from .ops import ClipAttention, ClipConv

ClipShape = tuple[int, int, int, int, int]
"""[B, C, T, H, W] of a latent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipPlan:
    """A whole decode: every clip of a batch by the same steps, one after the other."""

    program: Program
    latent_shape: ClipShape
    layout: Layout
    strategy: Literal["strips", "tiles"]
    dtypes: DtypePlan
    attention: Literal["sdpa", "matmul"]
    layouts: Layouts
    backends: Backends
    chunk_lat: int
    """Latent frames fed at a time."""
    portions: tuple[int, ...]
    """Most conv frames per run of each op."""
    prefetch: bool
    cache_weights: bool
    workers: int
    guard: bool
    pool_bytes: int
    conv_shapes: tuple[ConvShape, ...]
    clip_frames: int
    """Output frames per clip."""
    summary: PlanSummary

    @property
    def predicted(self) -> PeakPrediction:
        """Bytes at the peak."""
        return self.summary.predicted

    def driver(self) -> Driver:
        """A new walk over one clip."""
        return make_driver(
            self.program, self.layouts, self.backends, self.latent_shape[2], self.chunk_lat, self.portions, self.dtypes
        )


def reads_latent(program: Program) -> bool:
    """True where norms in the middle of the program read the latent, so that it must be there from the start."""
    norms = [op.norm for op in program.ops if isinstance(op, (ClipConv, ClipAttention))]
    return any(norm is not None and norm.latent is not None for norm in norms)


def make_driver(
    program: Program,
    layouts: Layouts,
    backends: Backends,
    latent_frames: int,
    chunk_lat: int,
    portions: tuple[int, ...],
    dtypes: DtypePlan,
) -> Driver:
    """The walk that both planning and running follow."""
    from .frames import frame_counts

    counts = dict(enumerate(frame_counts(program, latent_frames)))
    whole = reads_latent(program)
    return Driver(
        program,
        layouts,
        latent_frames,
        latent_frames if whole else chunk_lat,
        portions,
        backends.work_bytes,
        past_bytes=backends.past_bytes(counts),
        # a float16 result may have to be redone, so what it adds must survive it
        over_skips="float16" not in (dtypes.stream, dtypes.compute),
        keep_latent=whole,
    )
