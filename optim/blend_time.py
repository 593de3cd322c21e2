"""How a clip is cut in time for an opaque decoder: chunks of latent frames of one length, which overlap.

A causal decoder begins every clip with a latent frame that stands for fewer output frames than the later ones, so a
chunk that begins inside the clip takes its first latent frame for such a beginning. That latent frame is only its
lead-in: what it gives is not shown, and the chunk before covers its output frames. Over what both chunks give beyond
the lead-in they are feathered. The last chunk slides back to have the length of the others; what it repeats only
lengthens its lead-in, as the chunk before has seen more of the clip.

A chunk knows nothing of what came before its lead-in. Where a decoder's memory does not fade, the picture differs
from the undivided one up to the end of the clip; a decode in more than one chunk is therefore always approximate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from .blend_weights import overlapped_spans
from .opaque import OpaqueDecoder
from .settings import DecodeSettings
from .tiling import Span

log = logging.getLogger(__name__)

AUTO_FRAMES = 16
"""Output frames per chunk where the whole clip does not fit the memory and the caller leaves it to the plan."""
FLOOR_CHUNK = 2
"""Least latent frames of a chunk: a lead-in and one that is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One part of a clip, and where its output frames go."""

    latents: Span
    """Latent frames decoded."""
    lead_in: int
    """Output frames at its start that are thrown away."""
    frames: Span
    """Output frames of the clip that the rest are."""
    shared: int
    """The first so many of `frames` are given by earlier chunks too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePlan:
    """How every clip of a decode is cut in time."""

    n_latents: int
    """Latent frames of a clip."""
    size: int
    """Latent frames per call at most; n_latents or more = one call."""
    overlap: int
    """Latent frames that neighbouring chunks share, the lead-in among them; at least 1 where there are chunks."""
    frames: Callable[[int], int]
    """Output frames of n latent frames."""
    reason: str
    """Why it is cut as it is."""

    @property
    def n_chunks(self) -> int:
        """Calls in time per clip."""
        return len(self._spans)

    @property
    def call_latents(self) -> int:
        """Latent frames of one call."""
        return min(self.size, self.n_latents)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """First output frame, within the clip, that each chunk but the first has a part in."""
        return tuple(chunk.frames.start for chunk in self.chunks[1:])

    @property
    def most_shared(self) -> int:
        """Most output frames that a chunk shares with those before it."""
        return max(chunk.shared for chunk in self.chunks)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """In order of time; every output frame is in at least one of them."""
        made: list[Chunk] = []
        for span in self._spans:
            own = self.frames(span.size)
            at = self.frames(span.stop) - own  # chunks end where the formula says; that places their first frame
            shared = self.frames(self.overlap) - self._lead_in if made else 0
            kept = Span(made[-1].frames.stop - shared if made else 0, at + own)
            made.append(Chunk(latents=span, lead_in=kept.start - at, frames=kept, shared=shared))
        return tuple(made)

    @property
    def value(self) -> str:
        """The cut in words."""
        if self.n_chunks == 1:
            return "1"
        return f"{self.n_chunks} of {self.size} latent frames, {self.overlap} of them shared"

    def smaller(self) -> TimePlan | None:
        """Shorter chunks, for when memory runs out: what AUTO_FRAMES need, then a quarter; None at the floor."""
        if not _grows_evenly(self.frames, self.n_latents) or self.call_latents <= FLOOR_CHUNK:
            return None
        usual = _usual_size(self.frames)
        size = usual if self.call_latents > usual else max(FLOOR_CHUNK, self.call_latents // 4)
        overlap = _fitting_overlap(self.overlap, size)
        return replace(self, size=size, overlap=overlap, reason="memory ran out with a longer one")

    @property
    def _spans(self) -> tuple[Span, ...]:
        return overlapped_spans(self.n_latents, self.size, self.overlap)

    @property
    def _lead_in(self) -> int:
        """Output frames of a first latent frame that is not like the later ones, else 0."""
        first = self.frames(1)
        return first if first < _frames_per_latent(self.frames) else 0


def whole_clip(opaque: OpaqueDecoder, n_latents: int, settings: DecodeSettings) -> TimePlan:
    """One call in time. Remembers the overlap asked for, should memory run out."""
    asked = settings.chunk_overlap // _frames_per_latent(opaque.frames)
    return TimePlan(
        n_latents=n_latents, size=n_latents, overlap=_fitting_overlap(asked, n_latents), frames=opaque.frames,
        reason="the whole clip in one call, as far as memory allows",
    )  # fmt: skip


def asked_chunks(opaque: OpaqueDecoder, n_latents: int, settings: DecodeSettings) -> TimePlan:
    """Chunks of `chunk_frames` output frames with `chunk_overlap` of overlap, both rounded down to latent frames.

    At least a lead-in of one latent frame is overlapped and at most half a chunk. A decoder whose output frames do not
    grow evenly with its latent frames is left whole, as nobody could say where a chunk's frames belong.
    """
    reason = f"{settings.chunk_frames} frames with an overlap of {settings.chunk_overlap} were asked for"
    return _cut(opaque, n_latents, settings.chunk_frames // _frames_per_latent(opaque.frames), settings, reason)


def usual_chunks(opaque: OpaqueDecoder, n_latents: int, settings: DecodeSettings, reason: str) -> TimePlan:
    """Chunks of about AUTO_FRAMES output frames."""
    return _cut(opaque, n_latents, _usual_size(opaque.frames), settings, reason)


def warn_of_cut_chunk_overlap(plan: TimePlan, settings: DecodeSettings) -> None:
    """One warning where chunks overlap by less than was asked for."""
    per_latent = _frames_per_latent(plan.frames)
    if plan.n_chunks > 1 and plan.overlap < settings.chunk_overlap // per_latent:
        log.warning(
            "an overlap of %d frames is too much for chunks of %d frames; using %d (half a chunk at most)",
            settings.chunk_overlap, plan.size * per_latent, plan.overlap * per_latent,
        )  # fmt: skip


def _cut(opaque: OpaqueDecoder, n_latents: int, size: int, settings: DecodeSettings, reason: str) -> TimePlan:
    whole = whole_clip(opaque, n_latents, settings)
    size = max(FLOOR_CHUNK, size)
    if size >= n_latents:
        return whole
    if not _grows_evenly(opaque.frames, n_latents):
        return replace(whole, reason="its output frames do not grow evenly with the latent's, so it cannot be cut")
    asked = settings.chunk_overlap // _frames_per_latent(opaque.frames)
    return replace(whole, size=size, overlap=_fitting_overlap(asked, size), reason=reason)


def _fitting_overlap(asked: int, size: int) -> int:
    """At least the lead-in, at most half a chunk; 0 only where a chunk is a single latent frame."""
    return min(max(1, asked), size // 2)


def _usual_size(frames: Callable[[int], int]) -> int:
    return max(FLOOR_CHUNK, AUTO_FRAMES // _frames_per_latent(frames))


def _frames_per_latent(frames: Callable[[int], int]) -> int:
    """Output frames of a latent frame that is not the first."""
    return max(1, frames(2) - frames(1))


def _grows_evenly(frames: Callable[[int], int], n_latents: int) -> bool:
    """True where every latent frame after the first gives the same number of output frames, at least one."""
    steps = {frames(n + 1) - frames(n) for n in range(1, n_latents)}
    return len(steps) <= 1 and min(steps, default=1) >= 1
