"""From what child processes told to one line of results."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .cases import BenchCase, Configuration, Scenario
from .configurations import Precision
from .facts import merged
from .protocol import Described, Measured
from .request import BenchRequest
from .results import PageCache, RunLine, RunStatus, ShapeCounts, fingerprint
from .spawn import ChildOutcome
from .vaes import VaeFile

_MOST_SHAPES = 64
"""Names of shapes in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What a run is, before it is known how it goes."""

    run_id: str
    session: str
    request: BenchRequest
    case: BenchCase
    configuration: Configuration
    scenario: Scenario
    vae: VaeFile
    precision: Precision
    latent_shape: tuple[int, ...]
    described: Described
    started_at: str
    notes: tuple[str, ...] = ()
    hidden: Mapping[str, str] | None = None
    """Paths that no published line may hold, and what to say instead."""


def utc_now() -> datetime:
    """For people: nothing is timed by it."""
    return datetime.now(timezone.utc)


def session_name(now: datetime) -> str:
    """20260131T235959Z."""
    return now.strftime("%Y%m%dT%H%M%SZ")


def line_from(
    context: RunContext,
    outcomes: Sequence[ChildOutcome],
    *,
    hot_shapes: frozenset[str] | None = None,
    page_cache: PageCache = "kept",
    cancelled: bool = False,
) -> RunLine:
    """The line of a run of one or more child processes, in order; the last one may have ended badly.

    `hot_shapes` are those of the hot run, for a run that must ask for no others.
    """
    last = outcomes[-1]
    status: RunStatus = "cancelled" if cancelled else last.ending
    found = [o.measured for o in outcomes if o.measured is not None]
    samples = tuple(ns for o in outcomes for ns in o.samples_ns)
    request, described = context.request, context.described
    return RunLine(
        run_id=context.run_id, session=context.session, lane=request.lane, case=context.case.key,
        configuration=context.configuration, scenario=context.scenario, host=request.host, arch=described.arch,
        device=described.device.partition(":")[0], dtype=found[-1].dtype if found else context.precision,
        threads=described.threads, vae=context.vae.label, status=status, started_at=context.started_at,
        samples_ns=() if status == "not_finite" else samples,
        warm_ups_ns=tuple(ns for o in outcomes for ns in o.warm_ups_ns), asked_samples=request.runs,
        error=None if status == "ok" else _without_paths(last.sentence or status, context.hidden or {}),
        seed=request.seed, latent_shape=context.latent_shape,
        decoded_frames=context.case.decoded_frames if context.case.is_video else None,
        note="; ".join(context.notes) or None, page_cache=page_cache,
        served="recomputed" if context.scenario == "hot" else None,
        facts=merged(tuple(m.facts for m in found)), **_figures(found, hot_shapes), **_environment(described),
    )  # fmt: skip


def _environment(described: Described) -> dict[str, Any]:
    return fingerprint(described.environment)


def _figures(found: Sequence[Measured], hot_shapes: frozenset[str] | None) -> dict[str, Any]:
    """Figures of the last process; the worst error and the highest peak of all."""
    if not found:
        return {}
    errors = [m for m in found if m.max_error is not None]
    worst = max(errors, key=lambda m: m.max_error or 0.0, default=None)
    peaks = [m.peak_bytes for m in found if m.peak_bytes is not None]
    charges = [m.charges for m in found if m.charges is not None]
    return {
        "max_error": None if worst is None else worst.max_error,
        "mean_error": None if worst is None else worst.mean_error,
        "psnr_db": None if worst is None else worst.psnr_db,
        "psnr_infinite": worst is not None and worst.psnr_infinite,
        "peak_bytes": max(peaks, default=None),
        "cache_charges": sum(charges) if charges else None,
        "shapes": _shapes(found, hot_shapes),
    }


def _shapes(found: Sequence[Measured], hot_shapes: frozenset[str] | None) -> ShapeCounts | None:
    if all(m.n_new is None for m in found):
        return None
    seen = dict.fromkeys(shape for m in found for shape in m.shapes)
    strange = () if hot_shapes is None else tuple(shape for shape in seen if shape not in hot_shapes)
    if len(strange) > _MOST_SHAPES:
        strange = (*strange[:_MOST_SHAPES], f"and {len(strange) - _MOST_SHAPES} more")
    return ShapeCounts(requested=len(seen), new=max(m.n_new or 0 for m in found), not_in_hot=strange)


def _without_paths(sentence: str, hidden: Mapping[str, str]) -> str:
    """Results are published: where the user's files lie is nobody's business."""
    for path, word in hidden.items():
        if path:
            sentence = sentence.replace(path, word)
    return sentence


def hidden_paths(vae: Path, *folders: Path) -> dict[str, str]:
    """What `RunContext.hidden` is: the longest path first, and the user's home."""
    found = {str(vae): "the VAE's file", **{str(folder): "…" for folder in folders}}
    with contextlib.suppress(RuntimeError):  # a user without a home
        found[str(Path.home())] = "~"
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))
