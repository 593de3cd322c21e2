"""A decode and its record in one call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..optim.events import DecodeObserver
from ..optim.packing import dtype_name
from ..optim.program import Program
from ..optim.settings import DecodeSettings
from .append_log import append_or_warn
from .collector import Collector
from .live import watching
from .record import DecodeRecord, Identity, Request
from .run import Run
from .store import HistoryStore

Finish = Callable[[Tensor], Tensor]
OnFrames = Callable[[int, Tensor], None]
"""Told the index of the first of some frames, counted over all clips, and the frames [n, H, W, C] themselves, whose
memory is used again afterwards."""


class PoolLevels(Protocol):
    """What a record asks of an engine's pool."""

    @property
    def held_bytes(self) -> int:
        """Bytes the pool keeps."""

    @property
    def high_water_bytes(self) -> int:
        """Most bytes lent at once in the last decode."""


class DecoderFacts(Protocol):
    """What a record asks of a decoder."""

    @property
    def content_hash(self) -> str:
        """Hash of the weights."""

    @property
    def program(self) -> Program | None:
        """The lowered decoder, or None for an opaque one."""

    @property
    def loaded_dtype(self) -> torch.dtype:
        """The decoder's own dtype."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""


R = TypeVar("R")
D = TypeVar("D", bound=DecoderFacts)
D_contra = TypeVar("D_contra", bound=DecoderFacts, contravariant=True)


class RecordableEngine(Protocol[D_contra]):
    """What a record asks of an engine."""

    @property
    def pool(self) -> PoolLevels:
        """Its memory pool."""

    def decode(
        self,
        decoder: D_contra,
        latent: Tensor,
        settings: DecodeSettings = ...,
        *,
        observer: DecodeObserver = ...,
        finish: Finish = ...,
        out_dtype: torch.dtype = ...,
        out_device: torch.device | str = ...,
    ) -> Tensor:
        """The picture [B, H, W, C]."""


class FrameEngine(Protocol[D_contra]):
    """What a record asks of an engine that hands out frames as they finish."""

    @property
    def pool(self) -> PoolLevels:
        """Its memory pool."""

    def decode_frames(
        self,
        decoder: D_contra,
        latent: Tensor,
        settings: DecodeSettings = ...,
        *,
        observer: DecodeObserver = ...,
        finish: Finish = ...,
        out_dtype: torch.dtype = ...,
        out_device: torch.device | str = ...,
        on_frames: OnFrames,
    ) -> int:
        """Calls `on_frames` in order and returns the number of frames of all clips."""


def identity_of(decoder: DecoderFacts) -> Identity:
    """Who decodes, for a record."""
    return Identity(
        vae_hash=decoder.content_hash,
        family=decoder.program.family if decoder.program is not None else "unknown",
        loaded_dtype=dtype_name(decoder.loaded_dtype),
        device=str(decoder.device),
    )


def record_call(
    call: Callable[[Run], Tensor],
    identity: Identity,
    latent: Tensor,
    settings: DecodeSettings,
    *,
    collector: Collector,
    pool: PoolLevels | None = None,
    forward: DecodeObserver | None = None,
    store: HistoryStore | None = None,
) -> tuple[Tensor, DecodeRecord]:
    """Run any decode that reports to an observer and returns a picture [B, H, W, C]; give both picture and record.

    An exception passes unchanged; its record is then the collector's last. With `store`, the record is appended to
    the history in either case; a history that cannot be written is one warning in the log, never a lost picture.
    While it runs, a decode that reports nothing for ten seconds is named in the log, except at level `off`.
    """

    def deliver(run: Run) -> Tensor:
        image = call(run)
        run.delivered(tuple(image.shape))
        return image

    return _recorded(deliver, identity, latent, settings, collector=collector, pool=pool, forward=forward, store=store)


def _recorded(
    call: Callable[[Run], R],
    identity: Identity,
    latent: Tensor,
    settings: DecodeSettings,
    *,
    collector: Collector,
    pool: PoolLevels | None,
    forward: DecodeObserver | None,
    store: HistoryStore | None,
) -> tuple[R, DecodeRecord]:
    """As `record_call`, for a call that tells the run itself what it delivered."""
    request = Request(settings=settings, latent_shape=tuple(latent.shape), latent_dtype=dtype_name(latent.dtype))
    run: Run | None = None
    watch = contextlib.nullcontext() if collector.level == "off" else watching(collector.live)
    try:
        with watch, collector.recording(identity, request, forward=forward) as run:
            if pool is not None:
                run.pool_at_start(pool.held_bytes)
            try:
                result = call(run)
            finally:
                if pool is not None:
                    run.pool_levels(pool.held_bytes, pool.high_water_bytes)
    finally:
        if store is not None and run is not None and run.record is not None:
            append_or_warn(store, run.record)
    if run.record is None:
        raise RuntimeError("a recording ended without a record; report this with the log")
    return result, run.record


def decode_recorded(
    engine: RecordableEngine[D],
    decoder: D,
    latent: Tensor,
    settings: DecodeSettings | None = None,
    *,
    collector: Collector,
    finish: Finish | None = None,
    out_dtype: torch.dtype = torch.float32,
    out_device: torch.device | str = "cpu",
    forward: DecodeObserver | None = None,
    store: HistoryStore | None = None,
) -> tuple[Tensor, DecodeRecord]:
    """`engine.decode` with a record: the picture [B, H, W, C] and what it cost.

    Args:
        engine: has `decode` and `pool`.
        decoder: what to decode with.
        latent: [B, C, H, W] or [B, C, T, H, W].
        settings: None = the recommended ones.
        collector: keeps the record and the totals.
        finish: raw decoder output [B, C, H, W] to picture range; None = the engine's own.
        out_dtype: dtype of the picture.
        out_device: device of the picture.
        forward: hears every event too; may raise to stop the decode.
        store: history to append the record to.

    Raises:
        Whatever the engine raises, unchanged.
    """
    asked = settings or DecodeSettings()

    def call(run: Run) -> Tensor:
        return _decode(engine, decoder, latent, asked, run, finish, out_dtype, out_device)

    return record_call(
        call, identity_of(decoder), latent, asked, collector=collector, pool=engine.pool, forward=forward, store=store
    )


def decode_frames_recorded(
    engine: FrameEngine[D],
    decoder: D,
    latent: Tensor,
    settings: DecodeSettings | None = None,
    *,
    on_frames: OnFrames,
    collector: Collector,
    finish: Finish | None = None,
    out_dtype: torch.dtype = torch.float32,
    out_device: torch.device | str = "cpu",
    forward: DecodeObserver | None = None,
    store: HistoryStore | None = None,
) -> tuple[int, DecodeRecord]:
    """`engine.decode_frames` with a record: the number of frames of all clips, and what they cost.

    `on_frames` runs in the decode's own time, as phase `other`, and may raise to stop it; so does what the other
    arguments of `decode_recorded` do, which are the same. The record's `image_shape` is [frames, H, W, C].
    """
    asked = settings or DecodeSettings()

    def call(run: Run) -> int:
        sizes: list[tuple[int, ...]] = []

        def hand_on(first: int, frames: Tensor) -> None:
            sizes[:] = [tuple(frames.shape[1:])]
            phase = run.phase
            run.mark("other")
            on_frames(first, frames)
            run.mark(phase)

        given = {} if finish is None else {"finish": finish}
        n = engine.decode_frames(
            decoder, latent, asked, observer=run, out_dtype=out_dtype, out_device=out_device, on_frames=hand_on, **given
        )
        if not sizes:
            raise RuntimeError(f"the engine counts {n} frames and handed out none; report this with the log")
        run.delivered((n, *sizes[0]))
        return n

    return _recorded(
        call, identity_of(decoder), latent, asked, collector=collector, pool=engine.pool, forward=forward, store=store
    )


def open_and_decode_recorded(
    engine: RecordableEngine[D],
    opening: Callable[[DecodeObserver], D],
    device: torch.device | str,
    latent: Tensor,
    settings: DecodeSettings | None = None,
    *,
    collector: Collector,
    finish: Finish | None = None,
    out_dtype: torch.dtype = torch.float32,
    out_device: torch.device | str = "cpu",
    forward: DecodeObserver | None = None,
    store: HistoryStore | None = None,
) -> tuple[Tensor, DecodeRecord, D]:
    """As `decode_recorded`, with the opening of the decoder recorded too: phase `lower` and the program cache.

    `opening(observer)` gives the decoder, on `device`; it comes back as the third value, to be decoded with again.
    """
    asked = settings or DecodeSettings()
    opened: list[D] = []

    def call(run: Run) -> Tensor:
        decoder = opening(run)
        run.identify(identity_of(decoder))
        opened.append(decoder)
        return _decode(engine, decoder, latent, asked, run, finish, out_dtype, out_device)

    unknown = Identity(vae_hash=None, family="unknown", loaded_dtype="unknown", device=str(torch.device(device)))
    image, record = record_call(
        call, unknown, latent, asked, collector=collector, pool=engine.pool, forward=forward, store=store
    )
    return image, record, opened[0]


def _decode(
    engine: RecordableEngine[D],
    decoder: D,
    latent: Tensor,
    settings: DecodeSettings,
    observer: DecodeObserver,
    finish: Finish | None,
    out_dtype: torch.dtype,
    out_device: torch.device | str,
) -> Tensor:
    if finish is None:
        return engine.decode(decoder, latent, settings, observer=observer, out_dtype=out_dtype, out_device=out_device)
    return engine.decode(
        decoder, latent, settings, observer=observer, finish=finish, out_dtype=out_dtype, out_device=out_device
    )
