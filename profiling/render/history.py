"""Rows of the history as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ..rows import HistoryRow
from .units import NA, format_bytes, format_ns, format_shape

SHORT_ID = 8
"""Digits of an id that are shown."""
_HEAD = (
    "id", "started (UTC)", "decoder", "vae", "device", "latent", "picture", "time", "memory", "precision", "outcome",
)  # fmt: skip
_ERROR = 60


def render_rows(rows: Sequence[HistoryRow]) -> str:
    """One line per decode, in the order given; a time that may hold a kernel search is marked."""
    if not rows:
        return "no decode is recorded that fits\n"
    lines = _aligned([_HEAD, *map(_cells, rows)])
    if any(row.first_of_shape for row in rows):
        lines += ["", "* first run of its shapes"]
    return "\n".join(lines) + "\n"


def _cells(row: HistoryRow) -> tuple[str, ...]:
    precision = row.precision if row.precision == row.loaded_dtype else f"{row.precision} of {row.loaded_dtype}"
    return (
        row.record_id[:SHORT_ID] or NA,
        row.started_at[:19].replace("T", " "),
        _plain(row.family),
        (row.vae_hash or NA)[:SHORT_ID],
        row.device,
        format_shape(row.latent_shape),
        format_shape(row.image_shape),
        format_ns(row.wall_ns) + ("*" if row.first_of_shape else ""),
        format_bytes(row.used_bytes),
        precision,
        _outcome(row),
    )


def _outcome(row: HistoryRow) -> str:
    said = row.status.value.replace("_", " ")
    if row.error is None:
        return said if not row.approximate else f"{said}, approximate"
    error = _plain(row.error)
    return f"{said}: {error if len(error) <= _ERROR else error[:_ERROR] + '…'}"


def _plain(text: str) -> str:
    """Text of others without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
