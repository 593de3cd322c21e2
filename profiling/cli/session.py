"""One decoder opened for the length of a command: plan with it, decode with it, keep records."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...optim.blend_plan import choose_dtype, plan_blend, summarise
from ...optim.blended import decode_blended
from ...optim.decode import Decoder, Engine, open_decoder
from ...optim.errors import HaloError, LatentError, UnknownDecoderError
from ...optim.events import ConvShape, DecodeObserver, PlanSummary
from ...optim.latents import check_latent_shape, check_values
from ...optim.program import Program
from ...optim.settings import DecodeSettings
from ...optim.store import finish_of
from ...optim.tuning import TuningStore
from ...optim.video.engine import check_clip_shape
from ...optim.video.frames import output_frames
from ...optim.video.latents import as_clips
from ...optim.video.ops import is_video
from ...optim.weights import FileWeights
from ..bandwidth import PROCESS_RATES
from ..collector import Collector
from ..record import DecodeRecord
from ..recorded import OnFrames, decode_frames_recorded, decode_recorded, identity_of, record_call
from ..store import HistoryStore, StoreError
from .blended import opaque_of, plan_tile
from .command import CommandError
from .extras import level_of
from .inputs import read_latent
from .options import apply_threads, choose_device, settings_from
from .plan_ops import PlannedOp, planned_ops
from .progress import ProgressBar

log = logging.getLogger("halo_vae")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDecode:
    """What a decode would do."""

    summary: PlanSummary
    ops: tuple[PlannedOp, ...]
    """Ops of the largest pass, or of one clip; of one tile's decode where the method is blended."""
    conv_shapes: tuple[ConvShape, ...]
    """Every convolution shape that a backend would be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A decoder, what to do with it, and where records go."""

    engine: Engine
    decoder: Decoder
    settings: DecodeSettings
    collector: Collector
    store: HistoryStore | None
    """None where there is no place for a history."""

    def last_record(self) -> DecodeRecord | None:
        """The record of the last decode, a failed one included."""
        return next(reversed(self.collector.records()), None)

    @property
    def is_video(self) -> bool:
        """True where clips are decoded."""
        return is_video(self.decoder.program)

    def frames_of(self, latent: Tensor) -> int:
        """Frames that each clip of a latent [B, C, T, H, W] becomes."""
        return output_frames(self.decoder.program, latent.shape[2])

    def read(self, path: Path) -> Tensor:
        """A latent [B, C, H, W], or clips [B, C, T, H, W], that the decoder takes; LatentError names the file."""
        latent = read_latent(path)
        if not self.is_video and latent.ndim == 5 and latent.shape[2] == 1:
            latent = latent.squeeze(2)  # a clip of one frame is a picture
        try:
            check_shape(tuple(latent.shape), self.decoder.program)
            check_values(latent)
        except LatentError as e:
            raise LatentError(f"{path}: {e}") from e
        return as_clips(self.decoder.program, latent) if self.is_video else latent

    def plan(self, shape: tuple[int, ...]) -> PlannedDecode:
        """The plan for latents of this shape. LatentError, PlanError."""
        check_shape(shape, self.decoder.program)
        if self.settings.method != "blended":
            plan = self.engine.plan(self.decoder, shape, self.settings)
            return PlannedDecode(summary=plan.summary, ops=planned_ops(plan), conv_shapes=plan.conv_shapes)
        opaque = opaque_of(self.engine, self.decoder)
        cut = plan_blend(opaque, shape, self.settings, self.engine.profile_for(self.decoder))
        choice = choose_dtype(opaque, self.settings)
        inner = plan_tile(self.engine, self.decoder, cut.tile_shape, choice.dtype)
        summary = summarise(cut, opaque, choice)
        return PlannedDecode(summary=summary, ops=planned_ops(inner), conv_shapes=inner.conv_shapes)

    def decode(self, latent: Tensor, *, label: str) -> tuple[Tensor, DecodeRecord]:
        """Pictures [B, H, W, C], float32 in 0-1 on the CPU, and their record, which is also added to the history."""
        with ProgressBar(label) as bar:
            if self.settings.method == "blended":
                return self._decode_blended(latent, bar)
            return decode_recorded(
                self.engine, self.decoder, latent, self.settings,
                collector=self.collector, forward=bar, store=self.store,
            )  # fmt: skip

    def decode_frames(self, latent: Tensor, on_frames: OnFrames, *, label: str) -> DecodeRecord:
        """Decode clips [B, C, T, H, W] and hand out frames [n, H, W, C], float32 in 0-1 on the CPU, as they finish.

        Gives the record, which is also added to the history. Blended frames are all handed out at the end.
        """
        with ProgressBar(label) as bar:
            if self.settings.method == "blended":
                images, record = self._decode_blended(latent, bar)
                on_frames(0, images)
                return record
            _, record = decode_frames_recorded(
                self.engine, self.decoder, latent, self.settings, on_frames=on_frames,
                collector=self.collector, forward=bar, store=self.store,
            )  # fmt: skip
            return record

    def _decode_blended(self, latent: Tensor, bar: ProgressBar) -> tuple[Tensor, DecodeRecord]:
        opaque = opaque_of(self.engine, self.decoder)

        def call(observer: DecodeObserver) -> Tensor:
            profile = self.engine.profile_for(self.decoder)
            finish = finish_of(self.decoder.program)
            return decode_blended(opaque, latent, self.settings, finish=finish, observer=observer, profile=profile)

        return record_call(
            call, identity_of(self.decoder), latent, self.settings,
            collector=self.collector, pool=self.engine.pool, forward=bar, store=self.store,
        )  # fmt: skip


def check_shape(shape: tuple[int, ...], program: Program) -> None:
    """LatentError where the decoder takes no latents of this shape."""
    if is_video(program):
        check_clip_shape(shape, program)
    else:
        check_latent_shape(shape, program)


def open_session(args: argparse.Namespace, vae: Path) -> Session:
    """Check the flags and open the decoder. SettingsError, WeightsError, CommandError."""
    settings, level = settings_from(args), level_of(args)
    apply_threads(args)
    decoder = open_vae(vae, choose_device(args))
    engine, store, collector = Engine(tuning=_open_tuning()), _open_history(), Collector(level)
    if level == "per_op":  # whoever asks for more is told how far the decode is from a plain copy's speed
        PROCESS_RATES.measure(str(decoder.device))
    return Session(engine=engine, decoder=decoder, settings=settings, collector=collector, store=store)


def open_vae(vae: Path, device: str) -> Decoder:
    """The decoder in a VAE file. WeightsError, CommandError where it is of no known family."""
    try:
        return open_decoder(FileWeights(vae), device=device)
    except UnknownDecoderError as e:
        seen, known = ", ".join(e.keys_seen[:3]) or "none", ", ".join(e.families)
        raise CommandError(
            f"{vae} is not a VAE known here (its first tensors: {seen}); give the VAE file of one of: {known}"
        ) from e


def _open_tuning() -> TuningStore | None:
    try:
        return TuningStore()
    except HaloError as e:
        log.warning("nothing that was tuned is used: %s", e)
        return None


def _open_history() -> HistoryStore | None:
    try:
        return HistoryStore()
    except StoreError as e:
        log.warning("decodes will not be added to the history: %s", e)
        return None


def emit_json(line: Mapping[str, Any]) -> None:
    """One object on one line of stdout, there at once for whoever reads along."""
    sys.stdout.write(json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n")
    sys.stdout.flush()
