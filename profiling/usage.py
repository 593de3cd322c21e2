"""What the history says of decoders in use: how much time each takes, and which is worth tuning next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..optim.events import Choice
from .parts import DecodeStatus, share
from .record import DecodeRecord
from .render.units import format_count, format_ns, format_share

OFTEN = 2
"""Decodes from which tuning may pay: a decoder that was used once may not be used again."""
FIRST_SHARE = 0.2
"""Share of the time in first decodes of a shape from which it is a reason by itself."""
_SHAPES = 3
ORIGINS = ("tuned", "asked", "rule", "default")
"""What may have made a choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """All exact decodes of one decoder in one dtype on one device that ended well."""

    vae_hash: str | None
    family: str
    device: str
    """What the driver calls it ("cpu" for a CPU)."""
    dtype: str
    """The decoder's own dtype."""
    decodes: int
    total_ns: int
    first_ns: int
    """Of the total, in decodes that met a convolution shape new to their process."""
    shapes: tuple[tuple[int, ...], ...]
    """The most frequent latent shapes, at most three."""
    tuned: bool
    """Whether the last decode used what was tuned for it."""
    was_tuned: bool
    """Whether an earlier one did."""
    searches: bool
    """True on devices where a new shape may be searched a kernel for (HIP)."""

    @property
    def first_share(self) -> float | None:
        """Share of the time in first decodes of a shape."""
        return share(self.first_ns, self.total_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A decoder worth tuning, and why."""

    usage: Usage
    reason: str


def usage_of(records: Iterable[DecodeRecord]) -> tuple[Usage, ...]:
    """Decoders by the time they took, most first. Decodes that tuning cannot change are left out."""
    groups: dict[tuple[str | None, str, str, str], list[DecodeRecord]] = {}
    for r in records:
        if r.status is DecodeStatus.OK and r.plan is not None and r.plan.method == "exact":
            key = r.identity.vae_hash, r.identity.family, r.environment.device, r.identity.loaded_dtype
            groups.setdefault(key, []).append(r)
    found = [_usage(key, group) for key, group in groups.items()]
    return tuple(sorted(found, key=lambda u: -u.total_ns))


def suggest(usages: Sequence[Usage]) -> tuple[Suggestion, ...]:
    """What to tune next, in the order of `usages`: what is used often and not tuned."""
    return tuple(Suggestion(usage=u, reason=_reason(u)) for u in usages if not u.tuned and u.decodes >= OFTEN)


def is_tuned(record: DecodeRecord) -> bool:
    """True where a decode ran with what was tuned for its decoder, be it the rules' own choice."""
    looked_up = any(c.name == "tuning" and c.hits for c in record.caches or ())
    return looked_up or any(origin_of(c) == "tuned" for c in (record.plan.choices if record.plan else ()))


def origin_of(choice: Choice) -> str:
    """One of `ORIGINS`, by how the reason begins; a reason that says nothing of it is the planner's rule."""
    word = choice.reason.partition(":")[0]
    if word in ("tuned", "default"):
        return word
    return "asked" if choice.reason.startswith(("asked", "as asked")) else "rule"


def origins_of(choices: Sequence[Choice]) -> dict[str, tuple[str, ...]]:
    """Names of choices by what made them, in the order of `ORIGINS`; empty ones are left out."""
    found = {origin: tuple(c.name for c in choices if origin_of(c) == origin) for origin in ORIGINS}
    return {origin: names for origin, names in found.items() if names}


def _usage(key: tuple[str | None, str, str, str], group: Sequence[DecodeRecord]) -> Usage:
    vae_hash, family, device, dtype = key
    shapes = Counter(r.request.latent_shape for r in group).most_common(_SHAPES)
    return Usage(
        vae_hash=vae_hash, family=family, device=device, dtype=dtype, decodes=len(group),
        total_ns=sum(r.wall_ns for r in group), first_ns=sum(r.wall_ns for r in group if r.first_of_shape),
        shapes=tuple(shape for shape, _ in shapes), tuned=is_tuned(group[-1]),
        was_tuned=any(map(is_tuned, group[:-1])), searches=group[-1].environment.hip is not None,
    )  # fmt: skip


def _reason(usage: Usage) -> str:
    said = [f"{format_count(usage.decodes, 'decode')} took {format_ns(usage.total_ns)}"]
    first = usage.first_share
    if first is not None and first >= FIRST_SHARE:
        why = ", where kernels are searched for" if usage.searches else ""
        said.append(f"{format_share(first)} of it in first decodes of a shape{why}")
    said.append("was tuned, but not for the versions it ran with last" if usage.was_tuned else "not tuned")
    return "; ".join(said)
