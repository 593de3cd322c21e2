"""One attempt at a decode of pictures: pass by pass out of leased memory, straight into the image."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .arena import align
from .blended import decode_blended
from .device import DeviceProfile
from .events import DecodeObserver, Fallback
from .executor import PassRunner, Progress, RunContext
from .ladder import BLENDED, Last
from .latents import LatentShape
from .opaque import OpaqueDecoder
from .packing import DTYPES
from .places import Places
from .plan import Plan
from .planner import latent_buffer_bytes
from .pool import Slab
from .prefetch import LatentFeeder
from .settings import DecodeSettings
from .store import Finish, ImageSink

if TYPE_CHECKING:
    from .decoder import Decoder

BLENDED_PX = 256
"""Edge of a tile where exact decoding did not fit: few attempts are left to find a smaller one."""
AsOpaque = Callable[[], OpaqueDecoder]
"""Gives the same decoder as one of which only the call is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureRequest:
    """What a decode of pictures was asked."""

    decoder: Decoder
    latent: Tensor
    """[B, C, H, W], finite."""
    shape: LatentShape
    settings: DecodeSettings
    observer: DecodeObserver
    finish: Finish
    out_dtype: torch.dtype
    out_device: torch.device
    as_opaque: AsOpaque | None = None
    """The way to blended tiles where memory does not suffice for an exact decode; None where there is none."""


def run_pictures(
    request: PictureRequest,
    plan: Plan,
    places: Places,
    progress: Progress,
    *,
    careful: bool,
    on_widened: Callable[[str], None],
) -> Tensor:
    """The image [B, H, W, C] by one attempt. RestartDecode, NonFiniteError, or what allocators and the observer raise.

    `careful` looks at each op's finiteness at once, which on a GPU costs a synchronisation each.
    """
    decoder, observer, device = request.decoder, request.observer, request.decoder.device
    image = _new_image(request, plan)
    sink = ImageSink(image, request.finish)
    context = RunContext(
        plan=plan, device=device, packed=decoder.packed, observer=observer, progress=progress,
        check_each_op=careful or device.type == "cpu", on_widened=on_widened,
    )  # fmt: skip
    keep = request.settings.keep_bytes
    with ExitStack() as leases:
        slab = leases.enter_context(places.pool.lease(plan.pool_bytes, device, keep))
        host = None
        if plan.host_bytes:
            host = leases.enter_context(places.pool.lease(plan.host_bytes, places.host, keep, beside=device))
        feeder = LatentFeeder(request.latent, _parts(plan), _latent_buffers(plan, slab, observer), observer)
        try:
            first = 0
            for i, a_pass in enumerate(plan.passes):
                observer.mark("transfer")
                ready = feeder.get(i)
                PassRunner(context, a_pass, slab, ready, sink, first, host).run()
                first += a_pass.n_images
                observer.pass_done(a_pass.n_images, plan.passes[0].n_images)
        finally:
            feeder.close()
    progress.finish()
    return image


def blend_pictures(request: PictureRequest, profile: DeviceProfile, last: Last) -> Tensor:
    """The image [B, H, W, C] out of blended tiles of the opaque decoder, which need not hold the whole picture."""
    assert request.as_opaque is not None
    request.observer.fallback(
        Fallback(
            kind="out_of_memory", where="decode", given="exact", used=f"{BLENDED.words} of {BLENDED_PX} px",
            reason=str(last.shortage),
        )
    )  # fmt: skip
    size = min(request.settings.tile_size or BLENDED_PX, BLENDED_PX)
    settings = replace(request.settings, method="blended", tile_size=size)
    images = decode_blended(
        request.as_opaque(), request.latent, settings, observer=request.observer, finish=request.finish,
        out_device=request.out_device, profile=profile, attempts=last.attempts,
    )  # fmt: skip
    return images.to(request.out_dtype)


def _new_image(request: PictureRequest, plan: Plan) -> Tensor:
    program = plan.program
    b, _, h, w = plan.latent_shape
    size = b, h * program.scale[1], w * program.scale[2], program.out_channels
    with torch.inference_mode(False):
        return torch.empty(size, dtype=request.out_dtype, device=request.out_device)


def _parts(plan: Plan) -> list[tuple[int, int]]:
    parts, start = [], 0
    for a_pass in plan.passes:
        parts.append((start, start + a_pass.n_images))
        start += a_pass.n_images
    return parts


def _latent_buffers(plan: Plan, slab: Slab, observer: DecodeObserver) -> list[Tensor]:
    """One or two pooled destinations [n, C, H, W] for latents, behind the arena."""
    _, c, h, w = plan.latent_shape
    n, dtype = plan.passes[0].n_images, DTYPES[plan.dtypes.stream]
    nbytes = latent_buffer_bytes(plan.program, n, (1, h, w), plan.dtypes.stream)
    start = max(p.arena.nbytes for p in plan.passes)
    buffers = []
    for i in range(2 if plan.prefetch else 1):
        flat, hit = slab.take(align(start) + i * nbytes, nbytes)
        observer.pool_request(nbytes, hit)
        typed = flat[: n * c * h * w * dtype.itemsize].view(dtype)
        buffers.append(
            typed.view(n, h, w, c).permute(0, 3, 1, 2) if plan.layout == "channels_last" else typed.view(n, c, h, w)
        )
    return buffers
