"""Where finished frames go: the final image, or a window of frames that is handed on and used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..store import Finish

OnFrames = Callable[[int, Tensor], None]
"""(index of the first frame in the whole batch, frames [n, H, W, C]); the memory is used again afterwards."""


class FrameSink(Protocol):
    """Takes the tiles of a clip's frames in order."""

    def begin(self, first: int, n: int) -> None:
        """Frames [first, first + n) of the batch follow."""

    def write(self, y: Tensor, frame: int, row: int, col: int) -> None:
        """Finish a raw tile [C, h, w] and put it at its place in a frame of the batch."""

    def end(self) -> Tensor:
        """All tiles of the frames begun are there: the frames [n, H, W, C]."""

    def deliver(self) -> None:
        """The frames are known to be good: hand them on."""


class _Finisher:
    """Puts finished tiles into frames [n, H, W, C] that begin at frame `base`."""

    def __init__(self, frames: Tensor, finish: Finish) -> None:
        self._frames, self._finish = frames, finish

    def put(self, y: Tensor, index: int, row: int, col: int) -> None:
        _, h, w = y.shape
        # a copy of its own: `finish` may work in place, and y may be somebody's memory
        done = self._finish(y[None].float() if y.dtype != torch.float32 else y[None].clone())
        self._frames[index, row : row + h, col : col + w].copy_(done[0].permute(1, 2, 0))


class WholeSink:
    """Frames go straight into the image of the whole batch."""

    def __init__(self, image: Tensor, finish: Finish) -> None:
        """`image` [frames of the batch, H, W, C] is on the output device in the output dtype."""
        self._image = image
        self._put = _Finisher(image, finish).put
        self._span = (0, 0)

    def begin(self, first: int, n: int) -> None:
        """See FrameSink."""
        self._span = first, first + n

    def write(self, y: Tensor, frame: int, row: int, col: int) -> None:
        """See FrameSink."""
        self._put(y, frame, row, col)

    def end(self) -> Tensor:
        """See FrameSink."""
        return self._image[self._span[0] : self._span[1]]

    def deliver(self) -> None:
        """Nothing: they are where they belong."""


class StreamSink:
    """A window of frames, handed to a callback as soon as they are done; each frame once, whatever is decoded again."""

    def __init__(
        self,
        size: tuple[int, int, int],
        finish: Finish,
        on_frames: OnFrames,
        out_dtype: torch.dtype,
        out_device: torch.device,
    ) -> None:
        """`size` is (H, W, C) of a frame."""
        self._size, self._finish, self._on_frames = size, finish, on_frames
        self._dtype, self._device = out_dtype, out_device
        self._window: Tensor | None = None
        self._first, self._n = 0, 0
        self.delivered = 0
        """Frames handed on so far."""

    def begin(self, first: int, n: int) -> None:
        """See FrameSink."""
        if self._window is None or self._window.shape[0] < n:
            with torch.inference_mode(False):
                self._window = torch.empty((n, *self._size), dtype=self._dtype, device=self._device)
        self._first, self._n = first, n

    def write(self, y: Tensor, frame: int, row: int, col: int) -> None:
        """See FrameSink."""
        assert self._window is not None
        _Finisher(self._window, self._finish).put(y, frame - self._first, row, col)

    def end(self) -> Tensor:
        """See FrameSink."""
        assert self._window is not None
        return self._window[: self._n]

    def deliver(self) -> None:
        """Hand on what was not handed on before: a decode that began again makes its first frames once more."""
        new = max(self.delivered, self._first)
        stop = self._first + self._n
        if new < stop:
            self._on_frames(new, self.end()[new - self._first :])
            self.delivered = stop
