"""Advice from records of earlier decodes: what happened more than once and what may be done about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..profiling.parts import DecodeStatus
from ..profiling.record import DecodeRecord
from ..profiling.render.units import format_count

_OFTEN = 2
"""Times that make a habit."""


def advise(records: Sequence[DecodeRecord]) -> tuple[str, ...]:
    """Sentences, most important first; empty where nothing speaks against going on as before."""
    found = (
        _memory(records),
        _not_finite(records),
        _widened(records),
        _unknown(records),
        _needlessly_blended(records),
        _switched_off(records),
        _new_shapes(records),
    )
    return tuple(sentence for sentence in found if sentence)


def _memory(records: Sequence[DecodeRecord]) -> str | None:
    ended = sum(r.status is DecodeStatus.OUT_OF_MEMORY for r in records)
    repaired = sum(any(f.kind == "out_of_memory" for f in r.fallbacks) for r in records)
    if ended:
        return f"{format_count(ended, 'decode')} ran out of memory: choose a smaller tile_size or precision_mode bf16."
    if repaired >= _OFTEN:
        return f"{repaired} decodes had to do with less memory than planned: free some, or choose a smaller tile_size."
    return None


def _not_finite(records: Sequence[DecodeRecord]) -> str | None:
    n = sum(r.status is DecodeStatus.NON_FINITE for r in records)
    if not n:
        return None
    return f"{format_count(n, 'decode')} ended in NaN: turn adaptive_precision on, or choose precision_mode fp32."


def _widened(records: Sequence[DecodeRecord]) -> str | None:
    repaired = [r for r in records if any(f.kind == "non_finite" for f in r.fallbacks)]
    if len(repaired) < _OFTEN:
        return None
    given = Counter(f.given for r in repaired for f in r.fallbacks if f.kind == "non_finite").most_common(1)[0][0]
    return f"{len(repaired)} decodes were repaired where {given} overflowed: a wider precision_mode saves the repair."


def _unknown(records: Sequence[DecodeRecord]) -> str | None:
    names = sorted({r.identity.family for r in records if any(f.kind == "method" for f in r.fallbacks)})
    if not names:
        return None
    return f"no exact decoder is known for {', '.join(names)}: such pictures were blended from tiles."


def _needlessly_blended(records: Sequence[DecodeRecord]) -> str | None:
    exact = {r.identity.vae_hash for r in records if r.plan is not None and r.plan.method == "exact"} - {None}
    blended = [
        r for r in records
        if r.plan is not None and r.plan.approximate and r.request.settings.method != "auto"
        and r.identity.vae_hash in exact
    ]  # fmt: skip
    if not blended:
        return None
    return f"{format_count(len(blended), 'decode')} blended tiles of a VAE that method auto decodes exactly."


def _switched_off(records: Sequence[DecodeRecord]) -> str | None:
    if len(records) < _OFTEN:
        return None
    if any(r.request.settings.advanced_caching for r in records):
        return None
    return "advanced_caching is off in every decode: plans and repacked weights are made anew each time."


def _new_shapes(records: Sequence[DecodeRecord]) -> str | None:
    searched = [r for r in records if r.environment.hip is not None and r.first_of_shape]
    if len(searched) < 2 * _OFTEN or 2 * len(searched) < len(records):
        return None
    return "most decodes asked for convolution shapes that were new to the process: tiles of a fixed size avoid that."
