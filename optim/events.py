"""What a running decode tells its observer. The engine imports no profiler: it calls this protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Phase = Literal["lower", "plan", "load", "stage", "compute", "stitch", "transfer", "sync", "other"]
PHASES: tuple[Phase, ...] = ("lower", "plan", "load", "stage", "compute", "stitch", "transfer", "sync", "other")
CacheName = Literal["program", "plan", "packed", "tuning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvShape:
    """One convolution as a backend sees it: what MIOpen keys its search by."""

    input: tuple[int, ...]
    """[B, C, H, W] with padding already in it."""
    weight: tuple[int, ...]
    """[C_out, C_in, kH, kW]."""
    dtype: str
    layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPrediction:
    """Bytes a decode will hold at its peak above the weights, known before it runs."""

    pool: int
    """Pooled buffers: activations and staging."""
    scratch: int
    """Results of one tile's kernels while they are alive."""
    packed: int
    """Re-laid-out, folded or cast copies of weights."""
    output: int
    """The final image tensor."""
    host: int = 0
    """Pooled buffers in the host's memory, of a plan that keeps its widest values there."""

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return self.pool + self.scratch + self.packed + self.output + self.host

    @property
    def working(self) -> int:
        """What lies in the memory of the device that computes, the picture aside."""
        return self.pool + self.scratch + self.packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One decision of the planner and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """The plan a decode runs, for records and panels."""

    method: Literal["exact", "blended", "stock"]
    approximate: bool
    """True where the picture may differ from an untiled decode by more than rounding."""
    strategy: str
    """`strips`, `tiles`; for an opaque decoder also `whole` (one call) and `chunks` (whole frames, parts of a clip)."""
    layout: str
    """`channels_last` or `contiguous`."""
    tile_px: tuple[int, int]
    """Largest tile (height, width) in picture pixels."""
    overlap_px: int
    """Overlap really used; 0 for exact plans."""
    n_tiles: int
    """Tiles of all ops and passes."""
    tile_grid: tuple[int, int]
    """Fewest tiles (down, across) that any convolution with a halo was cut into; (1, 1) without one."""
    images_per_pass: int
    n_passes: int
    macs: int
    """Planned multiply-accumulates of the whole decode."""
    bytes_moved: int
    """Bytes the plan reads and writes in activations and weights."""
    predicted: PeakPrediction
    choices: tuple[Choice, ...]
    chunk_frames: int = 0
    """Output frames per chunk of a video; 0 for pictures."""
    n_chunks: int = 1
    """Chunks of one clip."""
    boundaries: tuple[int, ...] = ()
    """First output frame of each chunk but the first, within one clip."""
    carried_bytes: int = 0
    """State carried from chunk to chunk, a part of the predicted pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpReport:
    """One op, finished."""

    name: str
    kind: str
    """`conv`, `attention`, `pointwise`, `rearrange`, or `decode` for a call into an opaque decoder."""
    n_tiles: int
    macs: int
    """Multiply-accumulates really done, halo and slid-back tiles included."""
    dtype: str
    """Compute dtype of the kept result ("float32", "bfloat16", "float16")."""
    native_dtype: str
    """The decoder's own (loaded) dtype."""
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """Something did not go as planned and was repaired."""

    kind: Literal["non_finite", "out_of_memory", "dtype", "method", "backend"]
    where: str
    """Op name, or tile of an opaque decoder."""
    given: str
    """What failed (a dtype, a tile size, a method)."""
    used: str
    """What was used instead."""
    reason: str


class DecodeObserver(Protocol):
    """Told what happens, in order, from the thread that decodes. Any method may raise to stop the decode."""

    def mark(self, phase: Phase) -> None:
        """From now on the clock runs for this phase."""

    def planned(self, plan: PlanSummary) -> None:
        """A plan is about to run; called again after a replan."""

    def op_started(self, index: int, n_ops: int, name: str, n_tiles: int) -> None:
        """Op `index` of `n_ops` begins."""

    def tile_started(self, i: int, n: int, shape: tuple[int, ...], dtype: str) -> None:
        """Tile `i` (from 0) of `n` begins; raises to cancel. `shape` is the tile handed to the kernel."""

    def progress(self, done: int, total: int) -> None:
        """Work done so far: thousandths of planned MACs (exact) or decoder calls (blended); never falls."""

    def op_done(self, report: OpReport) -> None:
        """An op's result is final."""

    def op_redone(self, name: str, dtype: str, macs: int) -> None:
        """`macs` done in `dtype` were thrown away because the result was not finite."""

    def conv_requested(self, shape: ConvShape) -> None:
        """A convolution of this shape was handed to a backend."""

    def cache_lookup(self, cache: CacheName, hit: bool) -> None:
        """One lookup in a cache."""

    def pool_request(self, nbytes: int, hit: bool) -> None:
        """One buffer was asked of the pool; a hit needed no new memory."""

    def prefetch_asked(self, ready: bool) -> None:
        """A prefetched item was asked for; `ready` if it had finished before."""

    def pass_done(self, images: int, slots: int) -> None:
        """One pass decoded `images` of the `slots` it had room for."""

    def fallback(self, event: Fallback) -> None:
        """Something was repaired."""

    def converted(self, nbytes: int) -> None:
        """Bytes written by dtype or layout conversions that the arithmetic did not need."""

    def chunk_started(self, i: int, n: int) -> None:
        """Chunk `i` (from 0) of `n` of a video begins, counted over all clips; raises to cancel."""

    def boundary(self, clip: int, frame: int, smoothness: float) -> None:
        """Clip `clip` was measured where a chunk begins at its output frame `frame`: 1 is as smooth as around it."""


class SilentObserver:
    """Costs nothing, hears nothing."""

    def mark(self, phase: Phase) -> None:
        """Ignore."""

    def planned(self, plan: PlanSummary) -> None:
        """Ignore."""

    def op_started(self, index: int, n_ops: int, name: str, n_tiles: int) -> None:
        """Ignore."""

    def tile_started(self, i: int, n: int, shape: tuple[int, ...], dtype: str) -> None:
        """Ignore."""

    def progress(self, done: int, total: int) -> None:
        """Ignore."""

    def op_done(self, report: OpReport) -> None:
        """Ignore."""

    def op_redone(self, name: str, dtype: str, macs: int) -> None:
        """Ignore."""

    def conv_requested(self, shape: ConvShape) -> None:
        """Ignore."""

    def cache_lookup(self, cache: CacheName, hit: bool) -> None:
        """Ignore."""

    def pool_request(self, nbytes: int, hit: bool) -> None:
        """Ignore."""

    def prefetch_asked(self, ready: bool) -> None:
        """Ignore."""

    def pass_done(self, images: int, slots: int) -> None:
        """Ignore."""

    def fallback(self, event: Fallback) -> None:
        """Ignore."""

    def converted(self, nbytes: int) -> None:
        """Ignore."""

    def chunk_started(self, i: int, n: int) -> None:
        """Ignore."""

    def boundary(self, clip: int, frame: int, smoothness: float) -> None:
        """Ignore."""


SILENT: DecodeObserver = SilentObserver()
"""The default observer."""
