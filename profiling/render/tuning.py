"""Tuning as text: what was measured and found, what is kept, and what is worth tuning next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...optim.rocm_env import FIND_MODE, lines_to_export
from ...optim.tuning import Measured, TunedEntry
from ..usage import Suggestion
from .sections import Row, Section
from .units import NA, format_count, format_ns, format_shape, format_share

_HEAD = ("candidate", "probe", "time", "change", "max error", "outcome")


def render_entry(entry: TunedEntry) -> str:
    """What was measured as a table, and the best of it."""
    key = entry.key
    lines = [
        f"Halo VAE · tuning on {key.device}, {key.dtype}, decoder {key.structure}", "─" * 60, "",
        *_table([_HEAD, *map(_cells, entry.measured)]), "",
        f"best: {entry.best.text}, {best_text(entry)}",
    ]  # fmt: skip
    if not entry.complete:
        lines.append("the time ran out before every candidate was tried; a larger budget tries the rest")
    if entry.bad:
        lines.append(f"never tried again on this key: {'; '.join(sorted(o.text for o in entry.bad))}")
    return "\n".join(lines) + "\n"


def best_text(entry: TunedEntry) -> str:
    """What the best gains."""
    took = f"{format_ns(entry.best_ns)} on the largest probe"
    if entry.gain <= 0:
        return f"{took}: nothing tried was faster"
    error = "" if entry.max_error is None else f", at most {entry.max_error:.1e} from float32"
    return f"{took}, the rules {format_ns(entry.rule_ns)}: {format_share(entry.gain)} less{error}"


def render_entries(entries: Sequence[TunedEntry]) -> str:
    """All that is kept, newest last."""
    if not entries:
        return "nothing is tuned yet\n"
    head = ("measured", "decoder", "dtype", "device", "best", "gain", "tried", "versions")
    rows = [
        (e.created[:10], e.key.structure, e.key.dtype, e.key.device, e.best.text, format_share(e.gain),
         f"{len({m.overrides for m in e.measured})}{'' if e.complete else ', cut short'}", e.key.versions)
        for e in entries
    ]  # fmt: skip
    return "\n".join(_table([head, *rows])) + "\n"


def render_suggestions(suggestions: Sequence[Suggestion]) -> str:
    """Decoders worth tuning, most first."""
    if not suggestions:
        return "the history has no decoder that is used often and not tuned\n"
    head = ("decoder", "weights", "dtype", "device", "latents", "why")
    rows = [
        (s.usage.family, (s.usage.vae_hash or NA)[:16], s.usage.dtype, s.usage.device,
         ", ".join(map(format_shape, s.usage.shapes)), s.reason)
        for s in suggestions
    ]  # fmt: skip
    return "\n".join(_table([head, *rows])) + "\n"


def tuning_section(tuned: int | None, suggestions: Sequence[Suggestion]) -> Section:
    """One line on what is tuned, and one on what is worth tuning next."""
    rows = [Row(label="tuned", value=NA if tuned is None else format_count(tuned, "entry", "entries"))]
    if suggestions:
        first = suggestions[0]
        value = f"{first.usage.family} in {first.usage.dtype} on {first.usage.device}"
        rows.append(Row(label="tune next", value=value, note=first.reason))
    return Section(title="Tuning", rows=tuple(rows))


def miopen_advice(environ: Mapping[str, str], hip: str | None, system: str) -> tuple[str, ...]:
    """What to set for tuning itself, and afterwards; empty away from ROCm and where the user has chosen."""
    after = lines_to_export(environ, hip, system)
    if not after:
        return ()
    keyword = "set" if system == "Windows" else "export"
    return (
        f"to let MIOpen search once for the best kernels, tune after: {keyword} {FIND_MODE}=NORMAL",
        *(f"to use what was found without searching, decode after: {line.line}" for line in after),
    )


def _cells(m: Measured) -> tuple[str, ...]:
    edges = "" if not m.probe else "×".join(map(str, m.probe * (2 if len(m.probe) == 1 else 1)))
    change = "" if m.change is None else f"{m.change:+.1%}".replace("%", " %")
    error = "" if m.max_error is None else f"{m.max_error:.1e}"
    outcome = m.outcome + (f" ({m.note})" if m.note else "")
    return m.overrides.text, edges, "" if m.ns is None else format_ns(m.ns), change, error, outcome


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
