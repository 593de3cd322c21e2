"""The blended method: overlapping tiles of an opaque decoder, and chunks of clips, feathered into one picture.

It repairs what it can: a non-finite tile is decoded again in float32, a shortage of memory starts the decode again
with smaller tiles or shorter chunks. They lack the neighbours that a decoder's convolutions and norms would see, so the
picture is approximate unless one call holds it all.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import Tensor

from .blend_canvas import Canvas, Spot
from .blend_plan import BlendPlan, DtypeChoice, choose_dtype, plan_blend, summarise, warn_of_cut_overlap, wider_dtype
from .blend_time import Chunk
from .blend_weights import feather
from .device import DeviceProfile, describe_device
from .errors import HaloError, NonFiniteError
from .errors_oom import is_out_of_memory
from .events import SILENT, DecodeObserver, Fallback, OpReport
from .opaque import Decode, OpaqueDecoder, check_finite, fit_latent, is_finite
from .packing import dtype_name
from .rng import RandomScope
from .scope import backend_scope, flags_for, telling
from .settings import DecodeSettings
from .store import Finish, to_unit_range
from .tiling import Span
from .video.consistency import ConsistencyMeter

log = logging.getLogger(__name__)

Weights = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Of each span of rows, and of each span of columns."""

MAX_ATTEMPTS = 8
"""Most times a decode begins, the first included."""
OP_NAME = "decode"


def decode_blended(
    opaque: OpaqueDecoder,
    latent: Tensor,
    settings: DecodeSettings = DecodeSettings(),  # noqa: B008 (frozen)
    *,
    observer: DecodeObserver = SILENT,
    finish: Finish = to_unit_range,
    out_device: torch.device | str = "cpu",
    profile: DeviceProfile | None = None,
    attempts: int = MAX_ATTEMPTS,
) -> Tensor:
    """Decode a latent [B, C, H, W] or [B, C, T, H, W] to pictures [B * frames, H, W, C], float32, on `out_device`.

    One tile that holds the whole latent is one call per pass, bit-equal to the untiled decode. Clips are decoded one by
    one, in chunks of `chunk_frames` that share `chunk_overlap` where they do not fit at once. The latent is read only;
    the global random state is as it was before, also after an error; gradients are never recorded. `profile` is the
    device's own unless given; `attempts` bounds how often the decode begins. LatentError on a latent that does not fit
    or is not finite; NonFiniteError where no allowed dtype gives a finite tile; torch's out-of-memory error where no
    smaller tile helps. Whatever the observer or the decoder raises besides leaves as it is.
    """
    observer.mark("plan")
    fitted = fit_latent(opaque, latent)
    check_finite(fitted)
    choice = choose_dtype(opaque, settings)
    profile = profile or describe_device(opaque.device)
    plan = plan_blend(opaque, tuple(fitted.shape), settings, profile)
    warn_of_cut_overlap(plan, settings)
    flags = flags_for(profile, settings, opaque=True)
    with RandomScope(opaque.device, settings.seed) as rng, torch.inference_mode(), backend_scope(flags) as in_force:
        heard = telling(observer, in_force)
        run = _Run(opaque, fitted, settings, choice, finish, heard, torch.device(out_device), rng)
        return run.to_end(plan, attempts)


class _Run:
    """One decode: its accumulator, its dtype and what went wrong so far."""

    def __init__(
        self,
        opaque: OpaqueDecoder,
        latent: Tensor,
        settings: DecodeSettings,
        choice: DtypeChoice,
        finish: Finish,
        observer: DecodeObserver,
        out_device: torch.device,
        rng: RandomScope,
    ) -> None:
        self.opaque, self.latent, self.settings, self.choice = opaque, latent, settings, choice
        self.finish, self.observer, self.out_device, self.rng = finish, observer, out_device, rng
        n_frames = opaque.frames(latent.shape[2]) if latent.ndim == 5 else None
        self.canvas = Canvas(opaque.name, tuple(latent.shape), opaque.scale, n_frames, out_device)
        self.tried: Counter[torch.dtype] = Counter()
        self.failed: Counter[torch.dtype] = Counter()
        self.kept: Counter[torch.dtype] = Counter()
        self.n_done = 0
        self.share_done = 0.0

    def to_end(self, plan: BlendPlan, attempts: int) -> Tensor:
        """Attempts with ever smaller tiles, each from scratch, until one goes through."""
        if self.choice.fallback is not None:
            self.observer.fallback(self.choice.fallback)
        for attempt in range(1, attempts + 1):
            self.observer.planned(summarise(plan, self.opaque, self.choice))
            smaller = plan.smaller() if attempt < attempts else None
            shortage = self._attempt(plan, may_retry=smaller is not None)
            if shortage is None or smaller is None:  # without a smaller plan the shortage was raised
                break
            self._report_shortage(plan, smaller, shortage)  # outside the except block: its traceback is gone
            plan = smaller
        self.observer.mark("stitch")
        images = self.canvas.finished(self.finish)
        self._report_boundaries(plan, images)
        return images

    def _attempt(self, plan: BlendPlan, *, may_retry: bool) -> str | None:
        """Run a plan; the message of the out-of-memory error if it ended so and may be tried again."""
        try:
            self._decode_all(plan)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            if not may_retry:
                raise _out_of_memory(plan) from e
            return str(e).split("\n")[0]
        return None

    def _report_shortage(self, plan: BlendPlan, smaller: BlendPlan, shortage: str) -> None:
        given, used = _size_text(plan), _size_text(smaller)
        log.warning("out of memory with %s; starting again with %s", given, used)
        event = Fallback(kind="out_of_memory", where=OP_NAME, given=given, used=used, reason=shortage)
        self.observer.fallback(event)

    def _decode_all(self, plan: BlendPlan) -> None:
        """Every call of a plan, into a clean accumulator."""
        self.canvas.clear()
        self.n_done = 0
        self.rng.rewind()
        calls = _Calls(self.opaque)
        weights = None if plan.is_untiled else (self._weights(plan.rows), self._weights(plan.cols))
        for n, images in enumerate(plan.passes):
            self.kept.clear()
            self.observer.op_started(0, 1, OP_NAME, plan.calls_per_pass)
            self._decode_pass(plan, calls, n, weights)
            self._report_pass()
            self.observer.pass_done(images.size, plan.images_per_pass)
        for dtype, n_failed in self.failed.items():
            self.opaque.memory.record(dtype, n_calls=self.tried[dtype], n_failed=n_failed)

    def _decode_pass(self, plan: BlendPlan, calls: _Calls, n: int, weights: Weights | None) -> None:
        """Some of the pictures, or a clip chunk by chunk."""
        images = plan.passes[n]
        if plan.time is None:
            self._decode_tiles(plan, calls, images, None, 0, weights)
            return
        for i, chunk in enumerate(plan.time.chunks):
            self.observer.chunk_started(n * plan.n_chunks + i, len(plan.passes) * plan.n_chunks)
            if plan.n_chunks == 1:
                self._decode_tiles(plan, calls, images, None, 0, weights)
            else:
                self._decode_tiles(plan, calls, images, chunk, i, weights)
                self.canvas.close_chunk(images, chunk)

    def _decode_tiles(
        self, plan: BlendPlan, calls: _Calls, images: Span, chunk: Chunk | None, i_chunk: int, weights: Weights | None
    ) -> None:
        """Every tile of some pictures, or of a chunk (None: all frames) of a clip."""
        latent = self.latent[images.start : images.stop]
        if chunk is not None:
            latent = latent[:, :, chunk.latents.start : chunk.latents.stop]
        tiles = [(i, j) for i in range(len(plan.rows)) for j in range(len(plan.cols))]
        rows, cols = plan.rows, plan.cols
        for n, (i, j) in enumerate(tiles, i_chunk * len(tiles)):
            row, col = rows[i], cols[j]
            raw = self._decode_tile(
                calls, latent[..., row.start : row.stop, col.start : col.stop], n, plan.calls_per_pass
            )
            self.observer.mark("stitch")
            spot = Spot(images=images, row=row, col=col, chunk=chunk)
            self._place(raw, spot, None if weights is None else weights[0][i][:, None] * weights[1][j])
            del raw
            self._progress(plan.n_calls)

    def _decode_tile(self, calls: _Calls, part: Tensor, i: int, n: int) -> Tensor:
        """One finite raw tile; a non-finite one is decoded again in a wider dtype, with the same noise."""
        dtype = self._start_dtype()
        while True:
            noise = self.rng.state()
            raw = self._call(calls, part, dtype, i, n)
            self.tried[dtype] += 1
            if is_finite(raw):
                self.kept[dtype] += 1
                return raw
            del raw
            self.failed[dtype] += 1
            dtype = self._widened(dtype, i)
            self.rng.restore(noise)

    def _start_dtype(self) -> torch.dtype:
        """The chosen dtype, unless most tiles so far (and more than one) failed in it."""
        dtype = self.choice.dtype
        n_failed = self.failed[dtype]
        if self.settings.adaptive_precision and n_failed > 1 and 2 * n_failed > self.tried[dtype]:
            return wider_dtype(self.opaque, dtype) or dtype
        return dtype

    def _widened(self, dtype: torch.dtype, i: int) -> torch.dtype:
        """The dtype to repair tile `i` in. NonFiniteError where there is none or repairs are off."""
        failed, wider = dtype_name(dtype), wider_dtype(self.opaque, dtype)
        if wider is None or not self.settings.adaptive_precision:
            advice = "turn adaptive_precision on" if wider is not None else "check that the VAE belongs to the latent"
            raise NonFiniteError(
                f"{self.opaque.name} gave NaN or inf in tile {i} in {failed}, and no wider dtype is allowed; {advice}",
                op=OP_NAME, dtype=failed,
            )  # fmt: skip
        if sum(self.failed.values()) == 1:
            log.warning("tile %d is not finite in %s; decoding it again in %s", i, failed, dtype_name(wider))
        self.observer.op_redone(OP_NAME, failed, 0)
        self.observer.fallback(
            Fallback(
                kind="non_finite", where=f"tile {i}", given=failed, used=dtype_name(wider),
                reason="the decoder gave NaN or inf",
            )
        )  # fmt: skip
        return wider

    def _call(self, calls: _Calls, part: Tensor, dtype: torch.dtype, i: int, n: int) -> Tensor:
        """One call of the decoder, on a copy: it may write into what it is given."""
        self.observer.tile_started(i, n, tuple(part.shape), dtype_name(dtype))
        self.observer.mark("stage")
        tile = part.to(device=self.opaque.device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)
        decode = calls.in_dtype(dtype)
        self.observer.mark("compute")
        raw = decode(tile)
        _check_shape(self.opaque, tuple(part.shape), raw)
        return raw

    def _place(self, raw: Tensor, spot: Spot, weight: Tensor | None) -> None:
        """Bring a raw tile to where the picture is, and put it in."""
        frames = raw.movedim(2, 1).flatten(0, 1) if raw.ndim == 5 else raw
        if frames.device != self.out_device:
            self.observer.mark("transfer")
            frames = frames.to(self.out_device)
            self.observer.mark("stitch")
        self.canvas.add(frames, spot, weight)

    def _weights(self, spans: tuple[Span, ...]) -> tuple[Tensor, ...]:
        """Weights per picture pixel of each span, along one axis."""
        scaled = tuple(span.scaled(self.opaque.scale) for span in spans)
        return tuple(weight.to(self.out_device) for weight in feather(scaled))

    def _progress(self, n_calls: int) -> None:
        """One more call is done; tell the share, unless an attempt that failed had come further."""
        self.n_done += 1
        if self.n_done / n_calls >= self.share_done:
            self.share_done = self.n_done / n_calls
            self.observer.progress(self.n_done, n_calls)

    def _report_pass(self) -> None:
        """One report per dtype that tiles were kept in."""
        own = dtype_name(self.opaque.dtype)
        for dtype, n_tiles in self.kept.items():
            self.observer.op_done(
                OpReport(
                    name=OP_NAME, kind="decode", n_tiles=n_tiles, macs=0, dtype=dtype_name(dtype), native_dtype=own,
                    backend="opaque",
                )
            )  # fmt: skip

    def _report_boundaries(self, plan: BlendPlan, images: Tensor) -> None:
        """Tell how smooth each clip is where its chunks meet."""
        if plan.time is None or plan.n_chunks == 1:
            return
        meter, boundaries = ConsistencyMeter(), plan.time.boundaries
        for clip, frames in enumerate(images.chunk(self.latent.shape[0])):
            meter.start_clip()
            meter.feed(frames)
            for frame, smoothness in meter.scores(boundaries):
                self.observer.boundary(clip, frame, smoothness)


class _Calls:
    """The decoder by dtype, so that weights are widened once per attempt and dropped with it."""

    def __init__(self, opaque: OpaqueDecoder) -> None:
        self._opaque = opaque
        self._made: dict[torch.dtype, Decode] = {}

    def in_dtype(self, dtype: torch.dtype) -> Decode:
        if dtype not in self._made:
            self._made[dtype] = self._opaque.call_in(dtype)
        return self._made[dtype]


def _size_text(plan: BlendPlan) -> str:
    height, width = plan.tile_px
    in_time = "" if plan.time is None else f" of {plan.time.call_latents} latent frames"
    return f"{height}x{width} px, {plan.images_per_pass} per call{in_time}"


def _out_of_memory(plan: BlendPlan) -> Exception:
    """Torch's own error type, so that hosts which know it go on knowing it."""
    return torch.OutOfMemoryError(
        f"out of memory even with tiles of {_size_text(plan)}; free memory by unloading other models, "
        "or decode on the CPU"
    )


def _check_shape(opaque: OpaqueDecoder, given: tuple[int, ...], raw: Tensor) -> None:
    """HaloError where a raw tile has not the batch, rank and size that the decoder's scale promises."""
    size = given[-2] * opaque.scale, given[-1] * opaque.scale
    if raw.ndim != len(given) or raw.shape[0] != given[0] or tuple(raw.shape[-2:]) != size:
        raise HaloError(
            f"{opaque.name} gave {tuple(raw.shape)} for a latent tile {given}; at {opaque.scale} pixels per latent "
            f"element its last two dimensions must be {size}"
        )
