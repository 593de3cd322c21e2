"""The steps of a clip's decode, with the place in memory of every frame that they touch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Page:
    """One frame in memory: of a value, or staged for an op (`owner`)."""

    offset: int
    frame: int
    kept: bool = False
    """True in a slot of history, which belongs to a convolution and is never given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Latent frames [start, stop) enter; chunk `chunk` of `n_chunks`."""

    chunk: int
    n_chunks: int
    start: int
    stop: int
    pages: tuple[Page, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One op makes the conv frames [start, stop) (attention and scaling: frames)."""

    index: int
    start: int
    stop: int
    stage: tuple[tuple[Page, Page], ...]
    """(stored, staged) of source frames to stage; equal where they are staged in place."""
    taps: tuple[tuple[Page | None, ...], ...]
    """For each conv frame, the staged frames under its taps; None for zeros."""
    first_out: int
    """First output frame delivered."""
    outs: tuple[Page, ...]
    """Where the output frames go; empty for the last op."""
    skips: tuple[Page, ...]
    """The frame that each output frame is added to, or made out of."""
    over_skip: tuple[bool, ...]
    """True where an output frame takes its skip's place."""
    work: int
    """Offset of the op's work memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Frames that an op's next run reaches back to move into its history: (from, to)."""

    index: int
    moves: tuple[tuple[Page, Page], ...]


Step = Feed | Run | Keep
