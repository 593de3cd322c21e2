"""Where frames lie in one slab: a best-fit allocator over offsets, integers only. The same calls give the same."""

from __future__ import annotations

from bisect import bisect_left, insort

from ..arena import align


class FrameArena:
    """Hands out ranges of bytes and takes them back; knows the most it ever spanned."""

    def __init__(self) -> None:
        """Empty."""
        self._free: list[tuple[int, int]] = []
        """(start, stop) of holes, sorted, never touching each other."""
        self._sizes: dict[int, int] = {}
        self._end = 0
        self.live_bytes = 0
        """Bytes handed out now."""
        self.peak_bytes = 0
        """Bytes the slab needs."""

    def take(self, nbytes: int) -> int:
        """Offset of `nbytes`: the smallest hole that holds them, else the end (a hole there is grown)."""
        size = align(max(1, nbytes))
        fitting = [hole for hole in self._free if hole[1] - hole[0] >= size]
        if fitting:
            start, stop = min(fitting, key=lambda hole: (hole[1] - hole[0], hole[0]))
            self._free.remove((start, stop))
            if stop - start > size:
                insort(self._free, (start + size, stop))
        else:
            start = self._free.pop()[0] if self._free and self._free[-1][1] == self._end else self._end
            self._end = start + size
        self._sizes[start] = size
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._end)
        return start

    def give_back(self, start: int) -> None:
        """Free what `take` returned; KeyError for anything else."""
        size = self._sizes.pop(start)
        self.live_bytes -= size
        stop = start + size
        i = bisect_left(self._free, (start, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            start = self._free.pop(i - 1)[0]
        insort(self._free, (start, stop))
