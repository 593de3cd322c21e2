"""The picture that blended tiles are put together in: weighted tiles in space, faded chunks in time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .blend_time import Chunk
from .errors import HaloError
from .store import Finish
from .tiling import Span

_FINISH_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where a raw tile belongs."""

    images: Span
    """Pictures, or clips, of the batch."""
    row: Span
    """Latent rows."""
    col: Span
    """Latent columns."""
    chunk: Chunk | None = None
    """Part of the clip; None where the tile holds all frames of it. A chunk is of one clip."""


class Canvas:
    """The finished picture in the making, [B * frames, H, W, C]; made at the first tile, which tells its channels.

    Frames go straight to their place. Only the frames that a chunk shares with those before it are gathered apart, as
    long as its tiles arrive, and then faded in: so a frame on which both chunks agree keeps its bits.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], scale: int, n_frames: int | None, device: torch.device
    ) -> None:
        """For a latent of `shape`; `n_frames` per clip where clips come in chunks, else None: the first tile tells."""
        self._name, self._shape, self._scale, self._n_frames, self._device = name, shape, scale, n_frames, device
        self._out: Tensor | None = None
        self._faded: Tensor | None = None
        """Shared frames of the chunk under way."""

    def clear(self) -> None:
        """Begin again with an empty picture, in the same memory."""
        self._faded = None
        if self._out is not None:
            self._out.zero_()

    def add(self, frames: Tensor, spot: Spot, weight: Tensor | None) -> None:
        """Put down the frames of a raw tile, [n, C, h, w], weighted; without a weight they are whole pictures.

        HaloError where they do not fit what earlier tiles told.
        """
        rows, cols = spot.row.scaled(self._scale), spot.col.scaled(self._scale)
        chunk = spot.chunk
        if chunk is None:
            per_item = frames.shape[0] // spot.images.size
            part = spot.images.scaled(per_item)
            target = self._made(per_item, frames.shape[1])[part.start : part.stop]
            _lay(target[:, rows.start : rows.stop, cols.start : cols.stop], frames, weight)
            return
        if frames.shape[0] != chunk.lead_in + chunk.frames.size:
            raise HaloError(
                f"{self._name} gave {frames.shape[0]} frames for {chunk.latents.size} latent frames, where "
                f"{chunk.lead_in + chunk.frames.size} were promised; decode the clip in one call (chunk_frames 4096)"
            )
        given = frames[chunk.lead_in :]
        target = self._frames_of(spot.images, chunk, frames.shape[1])
        fresh = target[chunk.shared :, rows.start : rows.stop, cols.start : cols.stop]
        _lay(fresh, given[chunk.shared :], weight)
        if not chunk.shared:
            return
        if weight is None:
            _fade(target[: chunk.shared], given[: chunk.shared].movedim(1, -1))
            return
        if self._faded is None:
            self._faded = torch.zeros((chunk.shared, *target.shape[1:]), dtype=torch.float32, device=self._device)
        _lay(self._faded[:, rows.start : rows.stop, cols.start : cols.stop], given[: chunk.shared], weight)

    def close_chunk(self, images: Span, chunk: Chunk) -> None:
        """Every tile of a chunk was added."""
        if self._faded is not None:
            target = self._frames_of(images, chunk, self._faded.shape[-1])
            _fade(target[: chunk.shared], self._faded)
            self._faded = None

    def finished(self, finish: Finish) -> Tensor:
        """The picture, brought into its range in bands of rows, so that no second picture is held.

        HaloError where nothing was added.
        """
        if self._out is None:
            raise HaloError(f"{self._name} was never called; this is a fault of the blended method")
        for picture in self._out:
            for top in range(0, picture.shape[0], _FINISH_ROWS):
                band = picture[top : top + _FINISH_ROWS].movedim(-1, 0).unsqueeze(0)
                band.copy_(finish(band))
        return self._out

    def _frames_of(self, images: Span, chunk: Chunk, channels: int) -> Tensor:
        """Frames [n, H, W, C] that a chunk has a part in."""
        n_frames = self._n_frames or 0
        start = images.start * n_frames
        return self._made(n_frames, channels)[start + chunk.frames.start : start + chunk.frames.stop]

    def _made(self, per_item: int, channels: int) -> Tensor:
        h, w = (side * self._scale for side in self._shape[-2:])
        shape = (self._shape[0] * per_item, h, w, channels)
        if self._out is None:
            with torch.inference_mode(mode=False):  # a normal tensor: the caller may write into it
                self._out = torch.zeros(shape, dtype=torch.float32, device=self._device)
        elif tuple(self._out.shape) != shape:
            raise HaloError(
                f"{self._name} gave tiles of different kinds: for {shape} now, for {tuple(self._out.shape)} before"
            )
        return self._out


def _lay(target: Tensor, frames: Tensor, weight: Tensor | None) -> None:
    """Add weighted frames [n, C, h, w] to [n, h, w, C]; without a weight they take its place."""
    if weight is None:
        target.movedim(-1, 1).copy_(frames)
    else:
        target.movedim(-1, 1).addcmul_(frames.float(), weight)


def _fade(before: Tensor, after: Tensor) -> None:
    """Turn the frames `before` [n, H, W, C] into a linear cross-fade to `after`; neither is left out of any frame."""
    n = before.shape[0]
    share = (torch.arange(n, dtype=torch.float32, device=before.device) + 0.5) / n
    before.lerp_(after.float(), share[:, None, None, None])
