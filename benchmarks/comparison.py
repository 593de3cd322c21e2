"""Runs one comparison of Halo VAE with stock behaviour and holds what it gave."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from halo_vae.benchmarks.engines import DTYPES, HaloSide, StockSide, make_side, random_latent
from halo_vae.benchmarks.peak import PeakCase, PeakResult, measure_peak, weights_on_disk
from halo_vae.benchmarks.plain_kl import random_sd_weights
from halo_vae.benchmarks.shapes import ShapeCount, count_shapes
from halo_vae.benchmarks.timing import TimedCase, best_ns, doubts, load_average, time_in_turn
from halo_vae.profiling.fidelity import Fidelity, measure_fidelity

BATCH = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to compare."""

    size_px: int
    precision: str
    threads: tuple[int, ...]
    runs: int
    engines: tuple[str, ...]
    """Stock sides first, then plans; "plain" is always among them."""
    ch: int
    processes: int
    """Fresh processes per memory figure; 0 leaves memory out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResult:
    """One side. None = not measured."""

    engine: str
    best_ns: float
    """Median at the thread count that suits this engine best."""
    peak: PeakResult | None
    fidelity: Fidelity
    """Distance from the untiled float32 picture, both in 0-1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that was measured, raw, and why to doubt it."""

    request: Request
    times: tuple[TimedCase, ...]
    engines: tuple[EngineResult, ...]
    shapes: tuple[ShapeCount, ...]
    load_before: float | None
    load_after: float | None
    torch_version: str
    cores: int | None
    doubts: tuple[str, ...]

    def of(self, engine: str) -> EngineResult | None:
        """The result of an engine, None if it was not asked for."""
        return next((e for e in self.engines if e.engine == engine), None)


def compare(request: Request) -> Comparison:
    """Measure everything asked for: errors, then times, then memory."""
    load_before, cores = load_average(), os.cpu_count()
    weights = random_sd_weights(0, request.ch)
    latent = random_latent(request.size_px, BATCH)
    sides = _make_sides(request, weights)
    fidelity = _measure_errors(sides, weights, latent, max(request.threads))
    _tell(f"timing {', '.join(sides)}: {request.runs} run(s) at {', '.join(map(str, request.threads))} thread(s)")
    decodes = {name: partial(side.decode, latent) for name, side in sides.items()}
    times = time_in_turn(decodes, request.threads, request.runs)
    load_after = load_average()
    peaks = _measure_peaks(request, weights)
    policy = os.environ.get("OMP_WAIT_POLICY")
    return Comparison(
        request=request, times=times,
        engines=tuple(
            EngineResult(engine=name, best_ns=best_ns(times, name), peak=peaks.get(name), fidelity=fidelity[name])
            for name in sides
        ),
        shapes=tuple(count_shapes(name, ch=request.ch) for name in request.engines if name != "three_pass"),
        load_before=load_before, load_after=load_after, torch_version=torch.__version__, cores=cores,
        doubts=(*_size_doubts(request), *doubts(times, load_before, load_after, cores, policy)),
    )  # fmt: skip


def _make_sides(request: Request, weights: Mapping[str, Tensor]) -> dict[str, StockSide | HaloSide]:
    shared = {name: tensor.to(DTYPES[request.precision]) for name, tensor in weights.items()}
    return {name: make_side(name, shared) for name in request.engines}


def _measure_errors(
    sides: Mapping[str, StockSide | HaloSide], weights: Mapping[str, Tensor], latent: Tensor, threads: int
) -> dict[str, Fidelity]:
    """Errors of each side's first decode, which is its warm-up too."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        reference = make_side("plain", weights).decode(latent)
        found = {}
        for name, side in sides.items():
            _tell(f"decoding once with {name}")
            found[name] = measure_fidelity(side.decode(latent), reference)
        return found
    finally:
        torch.set_num_threads(before)


def _measure_peaks(request: Request, weights: Mapping[str, Tensor]) -> dict[str, PeakResult]:
    if not request.processes:
        return {}
    found = {}
    with weights_on_disk(weights, [request.precision]) as files:
        for name in request.engines:
            _tell(f"measuring the memory of {name} in {request.processes} process(es)")
            case = PeakCase(
                engine=name, precision=request.precision, size_px=request.size_px, batch=BATCH,
                threads=max(request.threads),
            )  # fmt: skip
            found[name] = measure_peak(case, files[request.precision], request.processes)
    return found


def _size_doubts(request: Request) -> list[str]:
    found = []
    if request.ch != 128:
        found.append(f"the widest map has {request.ch} channels, not SD's 128: ratios of real decoders differ")
    if "three_pass" in request.engines and request.size_px <= 256:
        found.append("the picture fits one tile of the three passes' square pass: larger ones have more overlap")
    return found


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
