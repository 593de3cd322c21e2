"""Records and metrics as panels for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ..metrics import Metrics
from ..record import DecodeRecord
from .sections import Row, Section, metrics_sections, record_sections, record_title
from .units import format_bar, format_ns

_BAR = 20


def render_record(record: DecodeRecord) -> str:
    """A decode as a panel of several lines, without colour."""
    return render_sections(f"Halo VAE · {record_title(record)}", record_sections(record))


def render_metrics(metrics: Metrics) -> str:
    """The aggregate as a panel."""
    return render_sections("Halo VAE · since process start", metrics_sections(metrics))


def render_line(record: DecodeRecord) -> str:
    """A decode as one line, for logs and lists."""
    text = f"{record_title(record)} in {format_ns(record.wall_ns)}"
    return text if record.error is None else f"{text}: {record.error}"


def render_sections(title: str, sections: Sequence[Section]) -> str:
    """Titled rows under a heading, columns aligned per section."""
    lines = [title, "─" * min(100, max(40, len(title)))]
    for section in sections:
        lines.append("")
        lines.append(section.title)
        lines += _rows(section.rows)
    return "\n".join(lines) + "\n"


def _rows(rows: Sequence[Row]) -> list[str]:
    label = max(len(r.label) for r in rows)
    value = max((len(r.value) for r in rows if r.note or r.share is not None), default=0)
    bars = any(r.share is not None for r in rows)
    lines = []
    for row in rows:
        bar = f"  {format_bar(row.share or 0.0, _BAR):<{_BAR}}" if bars else ""
        lines.append(f"  {row.label:<{label}}  {row.value:<{value}}{bar}  {row.note}".rstrip())
    return lines
