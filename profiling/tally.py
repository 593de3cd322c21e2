"""Counters that a running decode adds to; each turns into one part of the record."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Hashable

from ..optim.events import CacheName, ConvShape, OpReport
from .parts import CacheUse, ChunkBoundary, ConvUse, DtypeMacs, PrecisionUse, TileShape, TileUse

KEEP_SHAPES = 64
"""Most shapes a record lists; the counts beside them are complete."""
KEEP_BOUNDARIES = 256
"""Most chunk boundaries a record lists, the least smooth of them."""
CACHES: tuple[CacheName, ...] = ("program", "plan", "packed", "tuning")
DTYPE_BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8}


class SeenShapes:
    """Shapes requested since the process began: a backend searches its kernels once for each."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self._keys: set[Hashable] = set()
        self._lock = threading.Lock()

    def add(self, key: Hashable) -> bool:
        """Remember a key; True when it is new."""
        with self._lock:
            new = key not in self._keys
            self._keys.add(key)
            return new


PROCESS_SHAPES = SeenShapes()
"""The set that decodes of this process share."""


class ConvTally:
    """Convolution shapes of one decode."""

    def __init__(self, device: str, seen: SeenShapes) -> None:
        """Shapes on another device are other shapes: each device has its own kernels."""
        self._device = device
        self._seen = seen
        self._new: dict[ConvShape, bool] = {}
        self.requests = 0

    def add(self, shape: ConvShape) -> None:
        """One convolution was requested."""
        self.requests += 1
        if shape not in self._new:
            self._new[shape] = self._seen.add((self._device, shape))

    def part(self) -> ConvUse:
        """The record's part."""
        shapes = tuple(self._new)[:KEEP_SHAPES]
        return ConvUse(requests=self.requests, distinct=len(self._new), new=sum(self._new.values()), shapes=shapes)


class TileTally:
    """Tiles of one decode, by shape and dtype."""

    def __init__(self) -> None:
        """No tile yet."""
        self._counts: dict[tuple[tuple[int, ...], str], int] = {}

    def add(self, shape: tuple[int, ...], dtype: str) -> None:
        """One tile began."""
        key = (shape, dtype)
        self._counts[key] = self._counts.get(key, 0) + 1

    def keys(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Distinct (shape, dtype), in order of appearance."""
        return tuple(self._counts)

    def part(self, grid: tuple[int, int] | None) -> TileUse:
        """The record's part."""
        listed = [TileShape(shape=s, dtype=d, count=n) for (s, d), n in self._counts.items()][:KEEP_SHAPES]
        total = sum(self._counts.values())
        return TileUse(count=total, distinct_shapes=len(self._counts), shapes=tuple(listed), grid=grid)


class BoundaryTally:
    """Chunk boundaries of one decode, least smooth first to stay."""

    def __init__(self) -> None:
        """No boundary yet."""
        self.count = 0
        self._worst: list[tuple[float, int, int]] = []  # a heap whose top is the smoothest kept, latest first

    def add(self, boundary: ChunkBoundary) -> None:
        """One boundary was measured."""
        self.count += 1
        item = (-boundary.smoothness, -boundary.clip, -boundary.frame)
        if len(self._worst) < KEEP_BOUNDARIES:
            heapq.heappush(self._worst, item)
        else:
            heapq.heappushpop(self._worst, item)

    def part(self) -> tuple[ChunkBoundary, ...]:
        """The record's part, in the order of the frames."""
        kept = (ChunkBoundary(clip=-c, frame=-f, smoothness=-s) for s, c, f in self._worst)
        return tuple(sorted(kept, key=lambda b: (b.clip, b.frame)))


class PrecisionTally:
    """Multiply-accumulates by dtype, kept and thrown away."""

    def __init__(self) -> None:
        """No work yet."""
        self._kept: dict[str, int] = {}
        self._redone: dict[str, int] = {}
        self._below = 0
        self.converted_bytes = 0

    def add(self, report: OpReport) -> None:
        """An op's result is final."""
        self._kept[report.dtype] = self._kept.get(report.dtype, 0) + report.macs
        self._below += is_narrower(report.dtype, report.native_dtype)

    def redo(self, dtype: str, macs: int) -> None:
        """Work was thrown away."""
        self._redone[dtype] = self._redone.get(dtype, 0) + macs

    def give_up(self) -> None:
        """Nothing done so far is in the picture: the decode begins again, or has failed."""
        for dtype, macs in self._kept.items():
            self.redo(dtype, macs)
        self._kept, self._below = {}, 0

    def part(self) -> PrecisionUse:
        """The record's part."""
        return PrecisionUse(
            kept=_by_macs(self._kept),
            redone=_by_macs(self._redone),
            ops_below_native=self._below,
            converted_bytes=self.converted_bytes,
        )


class CacheTally:
    """Lookups and hits per cache."""

    def __init__(self) -> None:
        """No lookup yet."""
        self._counts = {name: [0, 0] for name in CACHES}

    def add(self, cache: CacheName, hit: bool) -> None:
        """One lookup."""
        counts = self._counts[cache]
        counts[0] += 1
        counts[1] += hit

    def part(self) -> tuple[CacheUse, ...]:
        """The record's part."""
        return tuple(CacheUse(name=name, lookups=n, hits=hits) for name, (n, hits) in self._counts.items())


def is_narrower(dtype: str, than: str) -> bool:
    """True when `dtype` has fewer bits than `than`; False for a dtype it does not know."""
    return DTYPE_BITS.get(dtype, 0) < DTYPE_BITS.get(than, 0) and dtype in DTYPE_BITS


def _by_macs(counts: dict[str, int]) -> tuple[DtypeMacs, ...]:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(DtypeMacs(dtype=dtype, macs=macs) for dtype, macs in ordered)
