"""What the tests of clip decodes share: a recorder that knows runs, goldens as decoders, decodes as raw clips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halo_vae.optim.decode import Decoder, Engine, open_decoder
from halo_vae.optim.events import OpReport
from halo_vae.optim.program import Op, Program, Value
from halo_vae.optim.store import keep_raw
from halo_vae.optim.video.frames import upsampled_count
from halo_vae.optim.video.ops import ClipConv
from halo_vae.optim.video.plan import ClipPlan
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.goldens import golden
from halo_vae.tests.optim.helpers import Recorder, settings


@dataclass
class HeardRun:
    """One run of an op, as the engine told it."""

    index: int
    name: str
    promised: int
    """Tiles, by `op_started`."""
    tiles: list[tuple[int, int, tuple[int, ...], str]] = field(default_factory=list)
    """(i, n, shape, dtype)."""
    report: OpReport | None = None

    @property
    def frames(self) -> int:
        """Conv frames, out of the shape of a tile."""
        return self.tiles[0][2][0]


@dataclass
class ClipRecorder(Recorder):
    """Also keeps what is told of chunks, boundaries and single runs."""

    chunks: list[tuple[int, int]] = field(default_factory=list)
    boundaries: list[tuple[int, int, float]] = field(default_factory=list)
    runs: list[HeardRun] = field(default_factory=list)

    def chunk_started(self, i: int, n: int) -> None:
        self.chunks.append((i, n))

    def boundary(self, clip: int, frame: int, smoothness: float) -> None:
        self.boundaries.append((clip, frame, smoothness))

    def op_started(self, index: int, n_ops: int, name: str, n_tiles: int) -> None:
        super().op_started(index, n_ops, name, n_tiles)
        self.runs.append(HeardRun(index, name, n_tiles))

    def tile_started(self, i: int, n: int, shape: tuple[int, ...], dtype: str) -> None:
        super().tile_started(i, n, shape, dtype)
        self.runs[-1].tiles.append((i, n, shape, dtype))

    def op_done(self, report: OpReport) -> None:
        super().op_done(report)
        self.runs[-1].report = report

    def runs_of(self, index: int) -> list[HeardRun]:
        """Every run of one op."""
        return [run for run in self.runs if run.index == index]

    @property
    def backends(self) -> set[str]:
        """Names of the kernels that ran."""
        return {report.backend for report in self.ops}


def golden_decoder(name: str, loaded: torch.dtype = torch.float32) -> Decoder:
    """A golden's decoder, opened as its file would be."""
    g = golden(name)
    return open_decoder(MappingWeights(g.weights), hints=g.hints, loaded_dtype=loaded)


def decode_clip(
    engine: Engine, decoder: Decoder, z: Tensor, heard: ClipRecorder | None = None, **given: Any
) -> tuple[Tensor, ClipRecorder]:
    """The raw clips [B, C, frames, H, W] and what happened."""
    heard = heard or ClipRecorder()
    images = engine.decode(decoder, z, settings(**given), observer=heard, finish=keep_raw)
    clips = z.shape[0] if z.ndim == 5 else 1 if decoder.program.family == "svd" else z.shape[0]
    return images.unflatten(0, (clips, -1)).movedim(-1, 1), heard


def clip_plan(engine: Engine, decoder: Decoder, shape: tuple[int, ...], **given: Any) -> ClipPlan:
    """The plan of such a decode."""
    plan = engine.plan(decoder, shape, settings(**given))
    assert isinstance(plan, ClipPlan)
    return plan


def conv_frames(op: ClipConv, n: int) -> int:
    """Conv frames of n source frames."""
    return upsampled_count(op.upsample_time, n)


class ProgramWeights:
    """Weights for a program that was built by hand."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}

    def normal(self, name: str, *shape: int, scale: float = 1.0, shift: float = 0.0) -> str:
        """A new tensor of normal values; its name."""
        self.tensors[name] = torch.randn(shape, generator=self.generator) * scale + shift
        return name


def program_of(ops: list[Op], values: list[Value], family: str = "test") -> Program:
    """A program of these ops."""
    return Program(
        family=family, ops=tuple(ops), values=tuple(values), working_dtypes=("float32", "bfloat16", "float16")
    )


def decoder_of(program: Program, weights: Mapping[str, Tensor], loaded: torch.dtype = torch.float32) -> Decoder:
    """A decoder on the CPU."""
    return Decoder(weights=MappingWeights(weights), program=program, loaded_dtype=loaded)
