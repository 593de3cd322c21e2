"""A whole comparison: measured, judged, and as JSON."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..codec import encode
from ..parts import DecodeStatus
from .doubts import Doubt, Seen, doubts_of
from .quality import Limits, Quality, Reference, measure_quality
from .run import Failure, Means, Plan, Side, SideRuns, Taken, run_in_turn
from .samples import load_average
from .verdict import Verdict, judge

SCHEMA_VERSION = 1
"""Format of `Comparison.to_json`. History: 1 first version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the runs themselves tell only once they are over."""

    reference: Reference
    limits: Limits
    seen: Seen
    record_id: str | None = None
    """Of our last run's record."""
    environment_id: str | None = None
    ours: str = ""
    """What decoded on our side, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that was measured, raw, and what is made of it."""

    stock: SideRuns
    halo: SideRuns
    reference: Reference
    quality: Quality | None
    """None where a side failed."""
    verdict: Verdict
    doubts: tuple[Doubt, ...]
    seen: Seen
    memory_of: str | None
    """What both peaks are of; None where none was measured."""
    device: str
    latent_shape: tuple[int, ...]
    ours: str
    record_id: str | None
    environment_id: str | None

    @property
    def memory_ratio(self) -> float | None:
        """Our peak ÷ stock's."""
        stock, halo = self.stock.peak_bytes, self.halo.peak_bytes
        return halo / stock if stock and halo is not None else None

    def to_json(self) -> dict[str, Any]:
        """A JSON-safe object: raw times in nanoseconds, and the figures that follow from them."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "comparison",
            **encode(self),
            "figures": {
                "passed": self.verdict.passed,
                "memory_ratio": self.memory_ratio,
                **{f"{name}_{figure}": value for name, side in (("stock", self.stock), ("halo", self.halo))
                   for figure, value in _figures(side).items()},
            },
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A comparison and its pictures."""

    comparison: Comparison
    ours: Tensor | None
    """Pictures of our last run; None where we failed."""
    stock: Tensor | None
    """None where stock failed, or gave inf or nan."""


def compare(
    stock: Side,
    halo: Side,
    plan: Plan,
    means: Means,
    facts: Callable[[], Facts],
    *,
    device: str,
    latent_shape: tuple[int, ...],
    memory_of: str | None = None,
    load: Callable[[], float | None] = load_average,
) -> Compared:
    """Run, measure and judge. `facts` is asked after the last run. Cancels pass, as `run_in_turn` says."""
    load_before = load()
    taken = _only_finite(run_in_turn(stock, halo, plan, means))
    known = facts()
    seen = replace(known.seen, load_before=load_before, cores=os.cpu_count())
    one, other = taken.first, taken.second
    quality: Quality | None = None
    if taken.first_picture is not None and taken.second_picture is not None:
        quality = measure_quality(taken.second_picture, taken.first_picture, known.limits)
    doubts = doubts_of(one, other, seen)
    made = Comparison(
        stock=one, halo=other, reference=known.reference, quality=quality, verdict=judge(one, other, quality, doubts),
        doubts=doubts, seen=seen, memory_of=memory_of if means.counter is not None else None, device=device,
        latent_shape=latent_shape, ours=known.ours, record_id=known.record_id, environment_id=known.environment_id,
    )  # fmt: skip
    return Compared(comparison=made, ours=taken.second_picture, stock=taken.first_picture)


def _only_finite(taken: Taken) -> Taken:
    """With a stock picture that holds inf or nan as a failure of stock: nothing can be compared with it."""
    picture = taken.first_picture
    if picture is None or all(bool(torch.isfinite(p).all()) for p in picture):
        return taken
    failure = Failure(
        status=DecodeStatus.NON_FINITE, sentence="its picture holds inf or nan, so nothing can be compared with it",
        after=taken.first.samples.n,
    )  # fmt: skip
    return replace(taken, first=replace(taken.first, failure=failure), first_picture=None)


def _figures(side: SideRuns) -> dict[str, Any]:
    samples = side.samples
    return {
        "n": samples.n, "median_ns": samples.median_ns, "min_ns": samples.min_ns, "max_ns": samples.max_ns,
        "spread": samples.spread, "peak_bytes": side.peak_bytes,
    }  # fmt: skip
