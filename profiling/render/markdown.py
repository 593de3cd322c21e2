"""Records and metrics as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

from ..metrics import Metrics
from ..record import DecodeRecord
from .sections import Section, metrics_sections, record_sections, record_title
from .units import format_bytes, format_ns, format_shape


def render_record(record: DecodeRecord) -> str:
    """A decode as a heading and one table per section."""
    return render_sections(record_title(record), record_sections(record))


def render_metrics(metrics: Metrics) -> str:
    """The aggregate as tables."""
    return render_sections("Since process start", metrics_sections(metrics))


def render_history(records: Sequence[DecodeRecord]) -> str:
    """One row per decode, in the order given."""
    head = ("started (UTC)", "decoder", "device", "latent", "picture", "time", "peak above start", "outcome")
    rows = [
        (
            r.started_at,
            r.identity.family,
            r.identity.device,
            format_shape(r.request.latent_shape),
            format_shape(r.image_shape),
            format_ns(r.wall_ns),
            format_bytes(r.memory.measured_bytes if r.memory else None),
            r.status.value if r.error is None else f"{r.status.value}: {r.error}",
        )
        for r in records
    ]
    return render_table(head, rows)


def render_sections(title: str, sections: Sequence[Section]) -> str:
    """Sections under a level-2 heading; a column of notes only where there are any."""
    parts = [f"## {_cell(title)}\n"]
    for section in sections:
        noted = any(r.note for r in section.rows)
        head = (section.title, "", "") if noted else (section.title, "")
        rows = [(r.label, r.value, r.note)[: len(head)] for r in section.rows]
        parts.append(render_table(head, rows))
    return "\n".join(parts)


def render_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells are text: pipes and line breaks in them do no harm."""
    lines = [_line(head), _line(["---"] * len(head))]
    lines += [_line([_cell(c) for c in row]) for row in rows]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
