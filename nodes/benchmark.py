"""The host's own decode against ours on one latent: what both run on, and what the host hears and says meanwhile."""

from __future__ import annotations

import gc
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..optim.accelerator import gpu_api, is_gpu
from ..optim.errors import HaloError
from ..optim.events import SILENT
from ..optim.heap import give_back
from ..optim.opaque import OpaqueDecoder, check_finite, fit_latent
from ..optim.packing import dtype_name
from ..optim.settings import DecodeSettings
from ..profiling.ab.comparison import Compared, Facts, compare
from ..profiling.ab.doubts import Seen
from ..profiling.ab.heat import heat_map
from ..profiling.ab.quality import Reference, limits_for
from ..profiling.ab.run import Means, Plan, Side
from ..profiling.clock import SystemClock, timer_for
from ..profiling.collector import CANCEL_TYPES, Collector
from ..profiling.memory import counters_for
from ..profiling.record import DecodeRecord
from ..profiling.render.ab import render_comparison
from ..profiling.render.units import byte_units
from .host import ShowProgress
from .latents import latent_of
from .session import Session
from .stock import TiledOptions, decode_stock
from .vae import describe_vae

STEPS = 100
"""Steps of the progress bar per decode."""
MOST_SAID = 3
"""Warnings of the host that are told; they are the same in every run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmarked:
    """What the node gives. None is unknown: what hangs on it does not run."""

    images: Tensor | None
    """Pictures of our last run, [B * frames, H, W, C]."""
    difference: Tensor | None
    """The heat map of the difference, [B * frames, H, W, 3]."""
    report: str
    figures: str
    """The comparison as JSON."""
    speedup: float | None
    max_error: float | None
    record: DecodeRecord | None
    """Of our last run."""


def run_benchmark(
    session: Session,
    samples: Mapping[str, Any],
    vae: Any,
    settings: DecodeSettings,
    plan: Plan,
    tiled: TiledOptions | None = None,
) -> Benchmarked:
    """Compare. VaeError and LatentError as for a decode; HaloError where both sides fail.

    None of its decodes is in the history, the totals or a panel: warm-ups and repeats of one latent would drown what
    the user decoded. The record of our last run is given out instead.
    """
    opaque = describe_vae(vae)
    latent = fit_latent(opaque, latent_of(samples))
    check_finite(latent)
    session.host.check_interrupt()
    benchmark = _Benchmark(session, samples, vae, settings, opaque, latent, tiled)
    with torch.no_grad():
        made = benchmark.compare(plan)
    result = made.comparison
    if result.stock.failure is not None and result.halo.failure is not None:
        ours, theirs = result.halo.failure, result.stock.failure
        raise HaloError(f"both decodes failed. Halo: {ours.sentence}. Stock: {theirs.sentence}")
    with byte_units(session.settings.read().units):
        report = render_comparison(result)
    return Benchmarked(
        images=made.ours,
        difference=_difference(made),
        report=report,
        figures=json.dumps(result.to_json(), allow_nan=False),
        speedup=None if result.verdict.speedup is None else result.verdict.speedup.ratio,
        max_error=None if result.quality is None else result.quality.max_error,
        record=benchmark.last_record,
    )  # fmt: skip


def _difference(made: Compared) -> Tensor | None:
    if made.ours is None or made.stock is None or made.ours.shape != made.stock.shape:
        return None
    return heat_map(made.ours, made.stock)


class _Benchmark:
    """Both sides of one comparison."""

    def __init__(
        self,
        session: Session,
        samples: Mapping[str, Any],
        vae: Any,
        settings: DecodeSettings,
        opaque: OpaqueDecoder,
        latent: Tensor,
        tiled: TiledOptions | None,
    ) -> None:
        self._session, self._host = session, session.host
        self._samples, self._vae, self._settings = samples, vae, settings
        self._opaque, self._latent, self._tiled = opaque, latent, tiled
        cancels = (*CANCEL_TYPES, *self._host.cancel_types)
        self._collector = Collector("summary", cancel_types=cancels)
        self._cancels = cancels
        self._noise = _SameNoise(opaque.device)
        self._bar = _Bar(self._host.progress_bar)
        self._said: list[str] = []
        self._held = 0
        self._emptied = 0

    @property
    def last_record(self) -> DecodeRecord | None:
        """Of our last run, failed ones included."""
        return next(reversed(self._collector.records()), None)

    def compare(self, plan: Plan) -> Compared:
        """Run both sides in turn and judge."""
        device = str(self._opaque.device)
        counters = counters_for(device)
        means = Means(
            clock=SystemClock(), timer=timer_for(device), counter=counters.allocated or counters.process,
            cancel_types=self._cancels, before_each=self._before_each, before_memory=self._before_memory,
            report=self._bar.report,
        )  # fmt: skip
        return compare(
            Side(name="stock", decode=self._stock), Side(name="Halo", decode=self._halo), plan, means,
            lambda: self._facts(plan), device=device, latent_shape=tuple(self._latent.shape),
            memory_of=_memory_of(device, on_device=counters.allocated is not None),
        )  # fmt: skip

    def _stock(self) -> Tensor:
        """The host's own decode and nothing beside it, as its own node calls it."""
        with heard(self._said):
            return decode_stock(self._vae, self._opaque, self._latent, SILENT, self._tiled)

    def _halo(self) -> Tensor:
        """The whole way of our node, its recording included."""
        if self._held and not self._session.held_bytes():
            self._emptied += 1
        images, _ = self._session.decode_apart(
            self._samples, self._vae, self._settings, collector=self._collector, bar=self._bar.within
        )
        self._held = self._session.held_bytes()
        return images

    def _before_each(self) -> None:
        self._host.check_interrupt()
        self._noise.rewind()

    def _before_memory(self) -> None:
        """Both sides begin with nothing kept; torch's and the heap's freed memory would serve the decode unseen."""
        self._session.release()
        self._held = 0
        gc.collect()
        give_back(self._opaque.device)

    def _facts(self, plan: Plan) -> Facts:
        record, stock_dtype = self.last_record, dtype_name(self._opaque.dtype)
        said = tuple(dict.fromkeys(self._said))
        had_to_tile = any("tile" in text.lower() for text in said)
        untiled = False if self._tiled is not None else None if had_to_tile else True
        reference = Reference(dtype=stock_dtype, untiled=untiled)
        timed = self._collector.records()[-plan.runs :]
        repairs = () if record is None else record.fallbacks
        ours_blends = record is not None and record.plan is not None and record.plan.approximate
        return Facts(
            reference=reference,
            limits=limits_for({stock_dtype, *_dtypes(record)}, approximate=ours_blends or not untiled),
            seen=Seen(
                first_of_shape_runs=sum(r.first_of_shape is True for r in timed),
                emptied=self._emptied,
                fallbacks=tuple(f"{f.given} → {f.used}: {f.reason}" for f in repairs),
                said=said[:MOST_SAID],
            ),
            record_id=None if record is None else record.record_id,
            environment_id=None if record is None else record.environment_id,
            ours=_in_words(record),
        )


class _Bar:
    """One progress bar over all decodes of both sides."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._show: ShowProgress | None = None
        self._done = self._total = 0

    def report(self, done: int, total: int) -> None:
        """A decode has ended."""
        self._done, self._total = done * STEPS, total * STEPS
        if self._show is None:
            self._show = self._make(self._total)
        self._show(self._done, self._total)

    def within(self, done: int, total: int) -> None:
        """A decode of ours is under way."""
        if self._show is not None:
            self._show(self._done + STEPS * done // max(1, total), self._total)


class _SameNoise:
    """Some decoders draw noise: every run draws the same, or no two pictures would be alike."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.get_rng_state()
        self._gpu = gpu_api().get_rng_state(device) if is_gpu(device) else None

    def rewind(self) -> None:
        """Torch's own generators as they were at first."""
        torch.set_rng_state(self._host)
        if self._gpu is not None:
            gpu_api().set_rng_state(self._gpu, self._device)


class _Heard(logging.Handler):
    """Keeps the first line of warnings of one thread."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self._said.append(record.getMessage().strip().partition("\n")[0][:200])


@contextmanager
def heard(said: list[str]) -> Iterator[None]:
    """Add to `said` what is logged as a warning within the block: a host that has to tile its decode says so there."""
    handler = _Heard(said)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _dtypes(record: DecodeRecord | None) -> set[str]:
    if record is None:
        return set()
    kept = record.precision.kept if record.precision is not None else ()
    return {d.dtype for d in kept} or {record.identity.loaded_dtype}


def _in_words(record: DecodeRecord | None) -> str:
    if record is None:
        return ""
    plan = record.plan
    if plan is None:
        return f"{record.identity.family}, ended before its plan"
    equal = "approximate" if plan.approximate else "equal to an untiled decode"
    return f"{record.identity.family}, {plan.method} ({equal}), {' and '.join(sorted(_dtypes(record)))}"


def _memory_of(device: str, *, on_device: bool) -> str:
    """What the figures are of, in words."""
    what = f"allocated by torch on {device}" if on_device else "resident set of the process"
    return f"{what}, above the start of one run of each, with nothing kept from earlier ones"
