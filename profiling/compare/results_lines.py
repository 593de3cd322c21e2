"""Rounds as lines of results, which hold what doubts are made of and which `halo-vae report` reads."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from ..bench.lines import session_name
from ..bench.results import RunFacts, RunLine, fingerprint
from .records import Comparison, Measured, Round


def line_of_round(comparison: Comparison, one: Round, run_id: str) -> RunLine | None:
    """Each installation is a host of its own. None where it told nothing of itself: a line names its environment."""
    setup = comparison.setup_of(one.installation)
    if setup is None:
        return None
    case = next(case for case in comparison.cases if case.key == one.case)
    environment, measured = setup.environment, one.measured
    on_gpu = one.device == "gpu"
    return RunLine(
        run_id=run_id, session=session_name(datetime.fromisoformat(comparison.started_at)), lane="single",
        case=one.case, configuration=case.way, scenario="hot", host=f"{comparison.host}:{one.installation}",
        arch=(environment.device_arch if on_gpu else None) or environment.machine,
        device="cuda" if on_gpu else "cpu", dtype=case.precision if measured is None else measured.dtype,
        threads=environment.threads if measured is None else measured.threads,
        vae=case.vae if case.vae == "tiny" else f"random:{case.vae}", status=one.status,
        started_at=one.started_at, asked_samples=1, error=one.error, latent_shape=one.latent_shape,
        samples_ns=() if measured is None else (per_decode(one),),
        warm_ups_ns=() if measured is None else (measured.warm_up_ns,),
        served=None if measured is None else "recomputed",
        facts=_facts(comparison, measured), **fingerprint(environment),
    )  # fmt: skip


def _facts(comparison: Comparison, measured: Measured | None) -> RunFacts:
    """Load before a later round is that of the rounds before it: what counts is the load before all of them."""
    return RunFacts() if measured is None else replace(measured.facts, load_before=comparison.load_before)


def per_decode(one: Round) -> int:
    """Time of one decode in a round that was measured, nanoseconds. ValueError for another."""
    if one.measured is None:
        raise ValueError(f"round {one.round} of {one.case} in {one.installation} was not measured")
    return max(1, round(one.measured.ns / one.measured.iterations))
