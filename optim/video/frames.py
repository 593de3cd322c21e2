"""Which frames an op makes of which: counts, sources, and how far it can go. Integers only."""

from __future__ import annotations

from collections.abc import Sequence

from ..program import Op, Program
from .ops import ClipConv, TimeUpsample


def upsampled_count(mode: TimeUpsample, n: int) -> int:
    """Frames after nearest upsampling in time of n frames, all there are."""
    if mode == "none" or (n <= 1 and mode == "odd_single"):
        return n
    if mode == "odd_single" and n % 2 == 0:
        return 2 * n
    return 2 * n - 1


def upsampled_source(mode: TimeUpsample, u: int, n: int) -> int:
    """Source frame of upsampled frame u, of n source frames in all."""
    if mode == "none" or (n <= 1 and mode == "odd_single"):
        return u
    if mode == "odd_single" and n % 2 == 0:
        return u // 2
    return (u + 1) // 2


def upsampled_ready(mode: TimeUpsample, have: int, n: int) -> int:
    """Upsampled frames that `have` of n source frames give."""
    if have == n:
        return upsampled_count(mode, n)
    if mode == "none":
        return have
    if mode == "odd_single" and n % 2 == 0:
        return 2 * have
    return max(0, 2 * have - 1)


def raw_count(op: ClipConv, n: int) -> int:
    """Output frames of n source frames before any are dropped."""
    return op.frames_per_conv * upsampled_count(op.upsample_time, n)


def dropped(op: ClipConv, n: int, latent_frames: int) -> int:
    """Raw output frames (t per conv frame) that are not delivered, from the start, of n source frames."""
    if op.last_of_one and latent_frames == 1:
        return raw_count(op, n) - 1
    return (op.frames_per_conv - 1 if op.first_frame != "same" else 0) + op.drop


def out_count(op: Op, n: int, latent_frames: int) -> int:
    """Frames of an op's output for n source frames."""
    if not isinstance(op, ClipConv):
        return n
    return max(0, raw_count(op, n) - dropped(op, n, latent_frames))


def frame_counts(program: Program, latent_frames: int) -> list[int]:
    """Frames of every value for a clip of that many latent frames."""
    counts = [0] * len(program.values)
    counts[0] = latent_frames
    for op in program.ops:
        counts[op.output] = out_count(op, counts[op.inputs[0]], latent_frames)
    return counts


def output_frames(program: Program, latent_frames: int) -> int:
    """Frames of the decoded clip."""
    return frame_counts(program, latent_frames)[program.output]


def conv_taps(op: ClipConv, c: int, n: int) -> tuple[int | None, ...]:
    """Source frames under the kt taps of conv frame c; None where zeros lie there. n source frames in all."""
    n_up = upsampled_count(op.upsample_time, n)
    first = 1 if op.first_frame == "bypass" else 0
    taps: list[int | None] = []
    for k in range(op.kernel[0]):
        u = c + k - op.front
        if not first <= u < n_up:
            if op.time_border == "zero":
                taps.append(None)
                continue
            u = min(max(u, first), n_up - 1)
        taps.append(upsampled_source(op.upsample_time, u, n))
    return tuple(taps)


def scope_of(frame: int, scope: int, offset: int) -> int:
    """Number of the statistics scope a frame belongs to."""
    return 0 if scope == 0 else (frame + offset) // scope


def scopes_ready(have: int, n: int, scope: int, offset: int) -> int:
    """Leading frames whose scope is complete when `have` of n frames are there."""
    if have == n:
        return n
    if scope == 0:
        return 0
    return max(0, (have + offset) // scope * scope - offset)


def boundaries(program: Program, starts: Sequence[int], latent_frames: int) -> tuple[int, ...]:
    """First output frame of each chunk but the first, for chunks that start at these latent frames.

    A chunk's first frame is the one after all that a clip ending before it would have.
    """
    total = output_frames(program, latent_frames)
    at = [output_frames(program, start) for start in starts if start > 0]
    return tuple(frame for frame in at if 0 < frame < total)
