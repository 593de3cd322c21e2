"""Texts and lists of a record cut to a length, so that a record at level `summary` is never above 64 KiB of JSON."""

from __future__ import annotations

import json
from dataclasses import replace

from ..optim.events import Choice, Fallback, PlanSummary
from .parts import Identity

MAX_RECORD_BYTES = 64 << 10
"""A line of the history at level `summary` is no longer; at `per_op` ops and events have their own bounds."""
KEEP_CHOICES = 20
KEEP_PLAN_BOUNDARIES = 128
ERROR_BYTES = 1200
_FIRST = 6
"""Fallbacks that are told in full; of more, the later ones are told in fewer words."""


def cut(text: str, n_bytes: int) -> str:
    """The text, or as much of its start as fits `n_bytes` of JSON (UTF-8), with "…" for the rest."""
    if _size(text) <= n_bytes:
        return text
    left = n_bytes - len("…".encode())
    for i, character in enumerate(text):
        left -= _size(character)
        if left < 0:
            return f"{text[:i]}…"
    return text


def bounded_fallback(event: Fallback, number: int) -> Fallback:
    """Fallback `number` (from 0) of a decode, with texts of bounded length."""
    where, used, reason = (80, 80, 320) if number < _FIRST else (48, 32, 40)
    return replace(
        event,
        where=cut(event.where, where),
        given=cut(event.given, used),
        used=cut(event.used, used),
        reason=cut(event.reason, reason),
    )


def bounded_plan(plan: PlanSummary, keep_boundaries: int = KEEP_PLAN_BOUNDARIES) -> PlanSummary:
    """A plan's summary with texts of bounded length, the first 20 choices and the first chunk boundaries."""
    return replace(
        plan,
        strategy=cut(plan.strategy, 40),
        layout=cut(plan.layout, 40),
        choices=tuple(_bounded_choice(c) for c in plan.choices[:KEEP_CHOICES]),
        boundaries=plan.boundaries[:keep_boundaries],
    )


def bounded_identity(identity: Identity) -> Identity:
    """An identity with texts of bounded length: an opaque decoder's name is its owner's."""
    return replace(
        identity,
        vae_hash=None if identity.vae_hash is None else cut(identity.vae_hash, 128),
        family=cut(identity.family, 128),
        loaded_dtype=cut(identity.loaded_dtype, 40),
        device=cut(identity.device, 40),
    )


def _bounded_choice(choice: Choice) -> Choice:
    return Choice(name=cut(choice.name, 40), value=cut(choice.value, 80), reason=cut(choice.reason, 160))


def _size(text: str) -> int:
    """Bytes of a text within JSON as the history writes it, its quotes left out."""
    return len(json.dumps(text, ensure_ascii=False).encode("utf-8", "backslashreplace")) - 2
