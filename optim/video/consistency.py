"""How smooth a clip is where its chunks meet, measured while its frames are delivered."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

NEIGHBOURS = 4
"""Steps on each side that a boundary's step is compared with."""
FLOOR = 1.0 / 255.0
"""The least step that an 8-bit picture shows; smaller ones count as none."""


class ConsistencyMeter:
    """Mean change from frame to frame of one clip; holds one frame, however long the clip is.

    Example:
        meter = ConsistencyMeter()
        meter.feed(frames)  # [n, H, W, C] in 0-1, in order, as often as frames are ready
        for frame, smoothness in meter.scores(plan.boundaries):
            observer.boundary(clip, frame, smoothness)
    """

    def __init__(self) -> None:
        """No frame yet."""
        self._last: Tensor | None = None
        self._sums: list[Tensor] = []
        self._size = 0

    def feed(self, frames: Tensor) -> None:
        """The clip's next frames, [n, H, W, C] in 0-1, whose memory may be reused afterwards.

        ValueError for frames of another size than those before. Does not wait for a GPU.
        """
        if frames.ndim != 4 or (self._last is not None and frames.shape[1:] != self._last.shape):
            before = "" if self._last is None else f" after frames of {list(self._last.shape)}"
            raise ValueError(f"frames have shape {list(frames.shape)}{before}; give [n, H, W, C] of one size")
        for frame in frames:
            if self._last is None:
                # `clone` also of a float32 frame: the caller keeps no promise about its memory
                self._last = frame.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
                self._size = frame.numel()
                continue
            # in the last frame's memory, so that nothing else of a frame's size is held
            self._sums.append(self._last.sub_(frame).abs_().sum(dtype=torch.float64))
            self._last.copy_(frame)

    def start_clip(self) -> None:
        """Forget the frames so far: the next one is the first of another clip."""
        self._last, self._sums, self._size = None, [], 0

    def steps(self) -> tuple[float, ...]:
        """d_1, d_2, …: mean |x_i - x_(i-1)| over all pixels and channels."""
        if not self._sums:
            return ()
        sums: list[float] = torch.stack(self._sums).tolist()
        return tuple(total / self._size for total in sums)

    def scores(self, boundaries: Sequence[int]) -> tuple[tuple[int, float], ...]:
        """(frame, smoothness) for each boundary; see `boundary_scores`."""
        return boundary_scores(self.steps(), boundaries)


def boundary_scores(steps: Sequence[float], boundaries: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """(frame, smoothness) for each boundary, given the steps d_1, d_2, … of a clip.

    A boundary is the first frame of a chunk. It scores min(1, (m + 1/255) / (d_b + 1/255)), m being the median of the
    nearest steps that are no boundaries, at most four on each side: fewer where the clip ends, and further away where
    other boundaries lie between. A boundary without any such step has no score and is left out.
    ValueError for a boundary that is no frame of the clip but its first.
    """
    n_frames, at = len(steps) + 1, set(boundaries)
    if wrong := sorted(b for b in at if not 0 < b < n_frames):
        raise ValueError(f"boundary {wrong[0]} is not between frames of a clip of {n_frames}; give 1 to {n_frames - 1}")
    found = []
    for b in boundaries:
        around = [
            *_nearest(steps, range(b - 1, 0, -1), at),
            *_nearest(steps, range(b + 1, n_frames), at),
        ]
        if around:
            found.append((b, min(1.0, (statistics.median(around) + FLOOR) / (steps[b - 1] + FLOOR))))
    return tuple(found)


def clip_score(scores: Sequence[tuple[int, float]]) -> float | None:
    """The least smooth boundary of a clip; None without boundaries."""
    return min((smoothness for _, smoothness in scores), default=None)


def _nearest(steps: Sequence[float], frames: Iterable[int], boundaries: Collection[int]) -> list[float]:
    taken: list[float] = []
    for frame in frames:
        if len(taken) == NEIGHBOURS:
            break
        if frame not in boundaries:
            taken.append(steps[frame - 1])
    return taken
