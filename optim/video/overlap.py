"""When a norm or an attention spans more of a clip than fits in memory: overlapping chunks, blended, and said so.

Each chunk is decoded exactly as a clip of its own; what it lacks is the rest of the clip in its statistics, so the
result is approximate. It is taken only where the exact plan does not fit and the method is `auto`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ..blended import decode_blended
from ..device import DeviceProfile
from ..errors import PlanError
from ..events import ConvShape, DecodeObserver, Fallback, Phase, SilentObserver
from ..ladder import BLENDED, Last
from ..opaque import OpaqueDecoder
from ..program import Program
from ..store import keep_raw
from .frames import output_frames
from .plan import ClipPlan, ClipShape
from .planner import spans_clip
from .request import ClipRequest

LEAST_LATENTS = 2
"""A chunk has a lead-in and one latent frame that is shown."""
WHOLE_PX = 16384
"""Chunks are not cut in space: that is the exact plan's work."""
PlanFor = Callable[[ClipShape], ClipPlan]
DecodeWhole = Callable[[ClipRequest], Tensor | None]


def may_overlap(request: ClipRequest) -> bool:
    """True where a decode that does not fit may be cut in time, which is never silently done."""
    program = request.decoder.program
    spans = any(spans_clip(op) for op in program.ops)
    longer = request.latent.shape[2] > LEAST_LATENTS
    return spans and longer and request.settings.method == "auto" and _frames_per_latent(program) is not None


def _frames_per_latent(program: Program) -> int | None:
    """Output frames that each latent frame beyond the second adds; None where they do not grow evenly."""
    counts = [output_frames(program, n) for n in range(LEAST_LATENTS, LEAST_LATENTS + 4)]
    steps = {b - a for a, b in pairwise(counts)}
    return steps.pop() if len(steps) == 1 else None


def decode_overlapped(
    request: ClipRequest, plan_for: PlanFor, decode: DecodeWhole, profile: DeviceProfile, last: Last, skip: int = 0
) -> Tensor:
    """The image [B * frames, H, W, C] out of the longest chunks whose exact plan fits.

    Where memory ran out in a running decode, of half the clip at most. The first `skip` frames were handed on before.
    The shortage is raised if no chunk fits.
    """
    latents = _longest_that_fits(request, plan_for, last)
    program = request.decoder.program
    rate = _frames_per_latent(program) or 1
    settings = replace(
        request.settings, method="blended", precision_mode="auto", tile_size=WHOLE_PX, chunk_lat=0,
        chunk_frames=latents * rate,
    )  # fmt: skip
    request.observer.fallback(
        Fallback(
            kind="out_of_memory", where="decode", given="exact over the whole clip",
            used=f"{BLENDED.words}: chunks of {latents} latent frames", reason=str(last.shortage),
        )
    )  # fmt: skip
    images = decode_blended(
        _as_opaque(request, program, decode), request.latent, settings, observer=request.observer,
        finish=request.finish, out_device=request.out_device, profile=replace(profile, budget_bytes=None),
        attempts=last.attempts,
    )  # fmt: skip
    images = images.to(request.out_dtype)
    if request.on_frames is not None:
        for i in range(skip, images.shape[0], rate):
            request.on_frames(i, images[i : i + rate])
    return images


def _longest_that_fits(request: ClipRequest, plan_for: PlanFor, last: Last) -> int:
    _, c, t, h, w = request.latent.shape
    longest = max(LEAST_LATENTS, t // 2) if last.ran else t - 1
    for latents in range(longest, LEAST_LATENTS - 1, -1):
        try:
            plan_for((1, c, latents, h, w))
        except PlanError:
            continue
        return latents
    raise last.shortage


def _as_opaque(request: ClipRequest, program: Program, decode: DecodeWhole) -> OpaqueDecoder:
    """The exact decoder as one of which only the call is known."""
    observer = _Inner(request.observer)

    def call(tile: Tensor) -> Tensor:
        inner = replace(
            request, latent=tile, observer=observer, finish=keep_raw, out_dtype=torch.float32,
            out_device=request.decoder.device, on_frames=None,
        )  # fmt: skip
        frames = decode(inner)
        assert frames is not None
        n = output_frames(program, tile.shape[2])
        return frames.view(tile.shape[0], n, *frames.shape[1:]).permute(0, 4, 1, 2, 3)

    dtype, rate = request.decoder.loaded_dtype, _frames_per_latent(program) or 1
    base = output_frames(program, LEAST_LATENTS) - LEAST_LATENTS * rate
    return OpaqueDecoder(
        name=f"{program.family} in chunks",
        decode=call,
        latent_dim=3,
        latent_channels=program.latent_channels,
        output_channels=program.out_channels,
        scale=program.scale[1],
        time_ratio=rate,
        frames=lambda n: base + n * rate,  # chunks have two latent frames or more, where the count grows evenly
        dtype=dtype,
        working_dtypes=(dtype,),
        device=request.decoder.device,
        content_hash=request.decoder.content_hash,
    )


class _Inner(SilentObserver):
    """Hands on what the exact decode of a chunk really does, and where it may be cancelled; plans are the outer's."""

    def __init__(self, outer: DecodeObserver) -> None:
        """Speak to `outer`."""
        self._outer = outer
        self._told: set[Fallback] = set()

    def mark(self, phase: Phase) -> None:
        """Hand on."""
        self._outer.mark(phase)

    def tile_started(self, i: int, n: int, shape: tuple[int, ...], dtype: str) -> None:
        """Hand on; may raise to cancel."""
        self._outer.tile_started(i, n, shape, dtype)

    def conv_requested(self, shape: ConvShape) -> None:
        """Hand on."""
        self._outer.conv_requested(shape)

    def op_redone(self, name: str, dtype: str, macs: int) -> None:
        """Hand on."""
        self._outer.op_redone(name, dtype, macs)

    def fallback(self, event: Fallback) -> None:
        """Hand on what no earlier chunk came to."""
        if event not in self._told:
            self._told.add(event)
            self._outer.fallback(event)

    def pool_request(self, nbytes: int, hit: bool) -> None:
        """Hand on."""
        self._outer.pool_request(nbytes, hit)

    def converted(self, nbytes: int) -> None:
        """Hand on."""
        self._outer.converted(nbytes)
