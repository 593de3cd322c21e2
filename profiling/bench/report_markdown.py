"""A report as Markdown, with nothing in it that text from a file could turn into markup."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .report_escape import one_line
from .report_parts import Cell, Chart, Part, Report, Section, Table

_MARKUP = re.compile(r"([\\`*_\[\]<>|~$&])")
"""Characters that mean something inside a line."""
_LEADING = re.compile(r"^([#+=-]|\d+(?=[.)](?:\s|$)))")
"""What would begin a heading, a rule or a list."""


def render_markdown(report: Report) -> str:
    """Headings, tables with their notes below, and samples in numbers where HTML has charts."""
    parts = [f"# {_text(report.title)}", f"{_text(', '.join(report.facts))}."]
    if report.failures:
        parts.append("\n".join(f"- **{_text(sentence)}**" for sentence in report.failures))
    for section in report.sections:
        parts += _section(section)
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> list[str]:
    parts = [f"## {_text(section.title)}"]
    for part in section.parts:
        parts += _part(part)
    return parts


def _part(part: Part) -> list[str]:
    if isinstance(part, Chart):
        return [f"### {_text(part.title)}", *_table(part.data)]
    if isinstance(part, Table):
        return _table(part)
    return [_text(part.text)]


def _table(table: Table) -> list[str]:
    parts = [_text(table.caption)] if table.caption else []
    if table.rows:
        rules = ["---:" if column.is_number else "---" for column in table.columns]
        lines = [[_text(column.title) for column in table.columns], rules]
        lines += [[_cell(cell) for cell in row] for row in table.rows]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    else:
        parts.append("Nothing was measured.")
    return parts + _notes(table.notes)


def _notes(notes: Sequence[str]) -> list[str]:
    return ["\n".join(f"{i}. {_text(note)}" for i, note in enumerate(notes, 1))] if notes else []


def _cell(cell: Cell) -> str:
    marks = f" ({', '.join(map(str, sorted(set(cell.marks))))})" if cell.marks else ""
    text = _text(cell.text)
    return f"**{text}**{marks}" if cell.tone == "bad" and text else text + marks


def _text(text: str) -> str:
    """One line that reads as `text`, whatever is in it."""
    escaped = _MARKUP.sub(r"\\\1", one_line(text))
    return _LEADING.sub(lambda m: f"{m[1]}\\" if m[1].isdigit() else f"\\{m[1]}", escaped)
