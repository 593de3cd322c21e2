"""What each node does, without the host's classes: widget values in, pictures, records and panel text out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

from ..optim.errors import SettingsError
from ..optim.settings import DecodeSettings, Method, PrecisionMode
from ..optim.tune import TuneOptions
from ..profiling.ab.run import Plan
from ..profiling.record import DecodeRecord
from ..profiling.render.text import render_record
from ..profiling.render.units import byte_units
from .benchmark import Benchmarked, run_benchmark
from .monitor import render_monitor
from .session import Decoded, Session
from .stock import TiledOptions
from .tuning import tune_vae

STOCK_TILED = TiledOptions(tile_size=512, overlap=64, temporal_size=64, temporal_overlap=8)
"""The host's VAE Decode (Tiled) as it comes."""


class Decodes(Protocol):
    """A session, or one as a node uses it."""

    def decode(
        self, samples: Mapping[str, Any], vae: Any, settings: DecodeSettings, tiled: TiledOptions | None = None
    ) -> Decoded:
        """See Session.decode."""


def decode(
    session: Decodes,
    samples: Mapping[str, Any],
    vae: Any,
    method: str = "auto",
    precision_mode: str = "auto",
    tile_size: int = 768,
    overlap: int = 96,
    batch_optimization: bool = True,
    memory_prefetching: bool = True,
    adaptive_precision: bool = True,
    tensor_layout_optimization: bool = True,
    advanced_caching: bool = True,
) -> Decoded:
    """The node HaloVAEDecode. SettingsError for a value that no widget offers."""
    settings = DecodeSettings(
        method=cast(Method, method), precision_mode=cast(PrecisionMode, precision_mode),
        tile_size=tile_size, overlap=overlap,
        batch_optimization=batch_optimization, memory_prefetching=memory_prefetching,
        adaptive_precision=adaptive_precision, tensor_layout_optimization=tensor_layout_optimization,
        advanced_caching=advanced_caching,
    )  # fmt: skip
    return session.decode(samples, vae, settings)


def decode_tiled(
    session: Decodes,
    samples: Mapping[str, Any],
    vae: Any,
    tile_size: int = 512,
    overlap: int = 64,
    temporal_size: int = 64,
    temporal_overlap: int = 8,
    method: str = "auto",
    precision_mode: str = "auto",
    batch_optimization: bool = True,
    memory_prefetching: bool = True,
    adaptive_precision: bool = True,
    tensor_layout_optimization: bool = True,
    advanced_caching: bool = True,
) -> Decoded:
    """The node HaloVAEDecodeTiled; its stock method is the host's tiled decode."""
    settings = DecodeSettings(
        method=cast(Method, method), precision_mode=cast(PrecisionMode, precision_mode),
        tile_size=tile_size, overlap=overlap, chunk_frames=temporal_size, chunk_overlap=temporal_overlap,
        batch_optimization=batch_optimization, memory_prefetching=memory_prefetching,
        adaptive_precision=adaptive_precision, tensor_layout_optimization=tensor_layout_optimization,
        advanced_caching=advanced_caching,
    )  # fmt: skip
    tiled = TiledOptions(
        tile_size=tile_size, overlap=overlap, temporal_size=temporal_size, temporal_overlap=temporal_overlap
    )
    return session.decode(samples, vae, settings, tiled)


def decode_video(
    session: Decodes,
    samples: Mapping[str, Any],
    vae: Any,
    method: str = "auto",
    precision_mode: str = "auto",
    tile_size: int = 0,
    overlap: int = 96,
    chunk_frames: int = 0,
    chunk_overlap: int = 8,
    noise_seed: int = -1,
    batch_optimization: bool = True,
    memory_prefetching: bool = True,
    adaptive_precision: bool = True,
    tensor_layout_optimization: bool = True,
    advanced_caching: bool = True,
) -> Decoded:
    """The node HaloVAEDecodeVideo. SettingsError for a value that no widget offers."""
    settings = DecodeSettings(
        method=cast(Method, method), precision_mode=cast(PrecisionMode, precision_mode),
        tile_size=tile_size, overlap=overlap, chunk_frames=chunk_frames, chunk_overlap=chunk_overlap, seed=noise_seed,
        batch_optimization=batch_optimization, memory_prefetching=memory_prefetching,
        adaptive_precision=adaptive_precision, tensor_layout_optimization=tensor_layout_optimization,
        advanced_caching=advanced_caching,
    )  # fmt: skip
    return session.decode(samples, vae, settings)


def show_stats(session: Session, stats: DecodeRecord) -> str:
    """The node HaloVAEStats. ValueError for a value that is no record."""
    if not isinstance(stats, DecodeRecord):
        raise ValueError(f"stats is a {type(stats).__name__}; connect the STATS output of a Halo VAE decode node")
    with byte_units(session.settings.read().units):
        return render_record(stats)


def monitor(session: Session, vae: Any = None, samples: Mapping[str, Any] | None = None) -> str:
    """The node HaloVAEMonitor."""
    with byte_units(session.settings.read().units):
        return render_monitor(session, vae, samples)


def tune(
    session: Session,
    vae: Any,
    budget_seconds: int = 60,
    try_precisions: bool = False,
    fp16_accumulation: bool = False,
) -> str:
    """The node HaloVAETune. UnknownDecoderError for a VAE that is not decoded exactly."""
    options = TuneOptions(budget_s=budget_seconds, precisions=try_precisions, fp16_accumulation=fp16_accumulation)
    return tune_vae(session, vae, options)


def benchmark(
    session: Session,
    samples: Mapping[str, Any],
    vae: Any,
    warm_ups: int = 1,
    runs: int = 5,
    method: str = "auto",
    precision_mode: str = "auto",
    tile_size: int = 768,
    overlap: int = 96,
    chunk_frames: int = 0,
    stock: str = "plain",
) -> Benchmarked:
    """The node HaloVAEBenchmark. SettingsError for a value that no widget offers, and the errors of a decode."""
    if stock not in ("plain", "tiled"):
        raise SettingsError(f"stock is {stock!r}; choose one of plain, tiled")
    if warm_ups < 0 or runs < 1:
        raise SettingsError(f"warm_ups is {warm_ups} and runs is {runs}; they may be 0 and 1 or more")
    settings = DecodeSettings(
        method=cast(Method, method), precision_mode=cast(PrecisionMode, precision_mode),
        tile_size=tile_size, overlap=overlap, chunk_frames=chunk_frames,
    )  # fmt: skip
    plan = Plan(warm_ups=warm_ups, runs=runs)
    return run_benchmark(session, samples, vae, settings, plan, STOCK_TILED if stock == "tiled" else None)
