"""How an op's work is cut into tiles of one shape. Integers only: no tensor, no device."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range [start, stop) of elements along one axis."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Elements in the span."""
        return self.stop - self.start

    def scaled(self, factor: int) -> Span:
        """The same range at a resolution `factor` times higher."""
        return Span(self.start * factor, self.stop * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One call of a kernel: the elements it computes, and those among them that no earlier tile wrote."""

    images: Span
    rows: Span
    """Rows computed, at the resolution the kernel runs at; its halo comes on top."""
    cols: Span
    new_rows: Span
    """Rows to write and to count in statistics: a tile that slid back writes only what is new."""
    new_cols: Span

    @property
    def is_whole_new(self) -> bool:
        """True where everything computed is new."""
        return self.rows == self.new_rows and self.cols == self.new_cols


@dataclass(frozen=True, slots=True, kw_only=True)
class TileGrid:
    """Tiles that cover `height` x `width` of `n_images` pictures; the last ones slide back or shrink."""

    n_images: int
    height: int
    width: int
    images_per_call: int
    rows: int
    cols: int
    slides: bool = True
    """The last tile slides back, so that all have one shape; else it shrinks, and nothing is computed twice."""

    def __post_init__(self) -> None:
        """Check that every call gets the same number of images and that a tile fits. ValueError otherwise."""
        if self.n_images % self.images_per_call:
            raise ValueError(f"{self.images_per_call} images per call do not divide {self.n_images} images evenly")
        if not (1 <= self.rows <= self.height and 1 <= self.cols <= self.width):
            raise ValueError(f"a {self.rows}x{self.cols} tile does not fit a {self.height}x{self.width} map")

    @property
    def is_strips(self) -> bool:
        """True where tiles span the full width, so that halo rows can be carried from one to the next."""
        return self.cols == self.width

    @property
    def is_exact(self) -> bool:
        """True where no element is computed twice."""
        return not self.slides or (self.height % self.rows == 0 and self.width % self.cols == 0)

    @property
    def n_down(self) -> int:
        """Tiles along the height."""
        return math.ceil(self.height / self.rows)

    @property
    def n_across(self) -> int:
        """Tiles along the width."""
        return math.ceil(self.width / self.cols)

    @property
    def n_tiles(self) -> int:
        """Kernel calls in all."""
        return self.n_down * self.n_across * (self.n_images // self.images_per_call)

    @property
    def computed(self) -> int:
        """Elements computed, slid-back tiles counted in full."""
        if not self.slides:
            return self.height * self.width * self.n_images
        return self.n_down * self.rows * self.n_across * self.cols * self.n_images

    def tiles(self) -> tuple[Tile, ...]:
        """Every tile, image by image, top to bottom, left to right."""
        cover = slide_spans if self.slides else shrink_spans
        down, across = cover(self.height, self.rows), cover(self.width, self.cols)
        step = self.images_per_call
        return tuple(
            Tile(images=Span(n, n + step), rows=row, cols=col, new_rows=new_row, new_cols=new_col)
            for n in range(0, self.n_images, step)
            for row, new_row in down
            for col, new_col in across
        )


def slide_spans(extent: int, tile: int) -> tuple[tuple[Span, Span], ...]:
    """(computed, new) spans of length `tile` covering [0, extent); the last slides back, so all have one length."""
    spans, done = [], 0
    while done < extent:
        start = min(done, extent - tile)
        spans.append((Span(start, start + tile), Span(done, start + tile)))
        done = start + tile
    return tuple(spans)


def shrink_spans(extent: int, tile: int) -> tuple[tuple[Span, Span], ...]:
    """(computed, new) spans of length `tile` covering [0, extent); the last may be shorter, so all is new."""
    spans = [Span(start, min(start + tile, extent)) for start in range(0, extent, tile)]
    return tuple((span, span) for span in spans)


def even_strip(extent: int, most: int) -> int:
    """Length of the fewest nearly equal strips of at most `most` that cover `extent`."""
    return math.ceil(extent / math.ceil(extent / max(1, min(most, extent))))


def largest_divisor(n: int, most: int) -> int:
    """Largest divisor of n that is at most `most`, at least 1."""
    return next(d for d in range(max(1, min(n, most)), 0, -1) if n % d == 0)
