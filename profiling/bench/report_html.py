"""A report as one HTML page that needs no network and no script, light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Sequence

from .report_escape import html_text as text
from .report_parts import Cell, Chart, Part, Report, Section, Table

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Content security policy of the page: its own style, and nothing else."""

FOOTER = "Medians decide; warm-ups are apart; a number in a cell points to a note below its table."

STYLE = """
:root { color-scheme: light dark;
  --ground: #fbfbfa; --card: #ffffff; --text: #1c1e21; --quiet: #646b74; --line: #e2e4e7; --head: #f3f4f5;
  --mark: #b9bec5;
  --accent: #1b5fc1; --good: #10713f; --bad: #b3261e; --bad-ground: #fdecea;
  --baseline: #6b7280; --phase1: #1b6fd0; --phase2: #0b8577; --phase3: #8044c8; --stock: #c2610c; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #15171a; --card: #1c1f23; --text: #e4e6e9; --quiet: #9aa2ad; --line: #31363d; --head: #23272c;
  --mark: #555d67;
  --accent: #7fb2ff; --good: #5ccb8d; --bad: #ff8f87; --bad-ground: #3a1f1d;
  --baseline: #9aa3af; --phase1: #64a8ff; --phase2: #3ccbb8; --phase3: #bd94f5; --stock: #f3a35c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text); font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main, header.page { max-width: 1440px; margin: 0 auto; padding: 0 24px; }
header.page { padding-top: 36px; }
h1 { margin: 0 0 6px; font-size: 28px; letter-spacing: -0.01em; }
h2 { margin: 44px 0 12px; font-size: 19px; overflow-wrap: anywhere; }
h3 { margin: 26px 0 8px; font-size: 15px; overflow-wrap: anywhere; }
p { margin: 8px 0; max-width: 78ch; overflow-wrap: anywhere; }
a { color: var(--accent); }
.facts { display: flex; flex-wrap: wrap; gap: 6px 8px; margin: 12px 0 0; padding: 0; list-style: none; }
.facts li { padding: 2px 10px; border: 1px solid var(--line); border-radius: 99px; color: var(--quiet); font-size: 13px;
  background: var(--card); }
.contents { margin: 18px 0 0; font-size: 14px; columns: 2 320px; padding-left: 20px; }
.failures { margin: 20px 0 0; padding: 12px 16px 12px 34px; border-radius: 8px; background: var(--bad-ground);
  color: var(--bad); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { background: var(--head); color: var(--quiet); font-weight: 600; font-size: 12.5px; }
td.wrap { white-space: normal; min-width: 22ch; overflow-wrap: anywhere; }
.number { text-align: right; }
tbody tr:last-child td { border-bottom: 0; }
tbody tr:hover td { background: var(--head); }
td.again { color: transparent; user-select: none; }
tbody tr:hover td.again { color: var(--quiet); }
tbody tr.first td { border-top: 2px solid var(--mark); }
tr.wrong td { background: var(--bad-ground); }
.small { width: fit-content; max-width: 100%; }
.small table { width: auto; }
.caption, .quiet { color: var(--quiet); }
.caption { font-size: 13.5px; }
.good { color: var(--good); }
.bad { color: var(--bad); font-weight: 600; }
sup { color: var(--accent); font-size: 10.5px; font-weight: 600; margin-left: 2px; line-height: 0; }
.notes { margin: 0; padding: 10px 16px 12px 36px; border-top: 1px solid var(--line); color: var(--quiet);
  font-size: 13px; }
.notes li { overflow-wrap: anywhere; }
.notes li::marker { color: var(--accent); font-weight: 600; }
details { border-top: 1px solid var(--line); font-size: 13.5px; }
summary { padding: 8px 16px; cursor: pointer; color: var(--quiet); }
.chart { padding: 12px 8px 0; overflow-x: auto; }
svg { display: block; width: 100%; max-width: 1160px; height: auto; min-width: 640px;
  font: 12px system-ui, "Segoe UI", sans-serif; }
svg .label { fill: var(--text); } svg .tick { fill: var(--quiet); font-size: 11px; }
svg .grid { stroke: var(--line); } svg .median { stroke-width: 2.5; } svg .iqr { opacity: 0.2; }
svg .dot { stroke: var(--card); stroke-width: 0.8; opacity: 0.85; }
svg .line { fill: none; stroke: var(--phase1); stroke-width: 1.6; } svg .dot.line { fill: var(--phase1); }
""" + "".join(
    f"svg .{c} {{ fill: var(--{c}); }} svg .median.{c}, svg .hollow.{c} {{ stroke: var(--{c}); }}\n"
    for c in ("baseline", "phase1", "phase2", "phase3", "stock")
) + """svg .dot.hollow { fill: var(--card); stroke-width: 1.6; }
footer { max-width: 1440px; margin: 48px auto 36px; padding: 0 24px; color: var(--quiet); font-size: 13px; }
@media print { body { background: none; } .card { break-inside: avoid; } }
"""  # fmt: skip


def render_html(report: Report, *, links: str = "") -> str:
    """The whole page. `links` is HTML that is put below the title, safe already."""
    parts = [_header(report, links), "<main>"]
    for i, section in enumerate(report.sections, 1):
        parts += _section(section, i)
    parts.append("</main>")
    parts.append(f"<footer>{FOOTER}</footer>")
    return page(report.title, "\n".join(parts))


def page(title: str, body: str) -> str:
    """A whole page around a body that is safe already."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _header(report: Report, links: str) -> str:
    facts = "".join(f"<li>{text(fact)}</li>" for fact in report.facts)
    titles = "".join(
        f'<li><a href="#s{i}">{text(section.title)}</a></li>' for i, section in enumerate(report.sections, 1)
    )
    wrong = "".join(f"<li>{text(sentence)}</li>" for sentence in report.failures)
    wrong = f'<ul class="failures">{wrong}</ul>' if wrong else ""
    return (
        f'<header class="page"><h1>{text(report.title)}</h1>{links}<ul class="facts">{facts}</ul>{wrong}'
        f'<ol class="contents">{titles}</ol></header>'
    )


def _section(section: Section, number: int) -> list[str]:
    return [f'<section id="s{number}"><h2>{text(section.title)}</h2>', *map(_part, section.parts), "</section>"]


def _part(part: Part) -> str:
    if isinstance(part, Chart):
        return (
            f'<h3>{text(part.title)}</h3>\n<div class="card"><div class="chart">{part.svg}</div>'
            f"<details><summary>in numbers</summary>{_table(part.data)}</details>{_notes(part.data.notes)}</div>"
        )
    if isinstance(part, Table):
        caption = f'<p class="caption">{text(part.caption)}</p>' if part.caption else ""
        small = " small" if len(part.columns) < 7 else ""
        return f'{caption}<div class="card{small}">{_table(part)}{_notes(part.notes)}</div>'
    return f"<p>{text(part.text)}</p>"


def _table(table: Table) -> str:
    if not table.rows:
        return '<p class="notes">Nothing was measured.</p>'
    numbers = [column.is_number for column in table.columns]
    head = "".join(
        f'<th scope="col"{_classes("number" if n else "")}>{text(column.title)}</th>'
        for column, n in zip(table.columns, numbers, strict=True)
    )
    before = (None, *(row[0].text for row in table.rows))
    rows = "\n".join(_row(row, numbers, above) for row, above in zip(table.rows, before, strict=False))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>'


def _row(row: Sequence[Cell], numbers: Sequence[bool], above: str | None) -> str:
    """A row; its first cell is faint where it repeats the one above."""
    again = row[0].text == above
    wrong = any(cell.tone == "bad" and cell.text.startswith("FAIL") for cell in row)
    kind = _classes("wrong" if wrong else "", "first" if above is not None and not again else "")
    kinds = ("again" if again else "", *[""] * (len(row) - 1))
    cells = "".join(map(_cell, row, numbers, kinds))
    return f"<tr{kind}>{cells}</tr>"


def _cell(cell: Cell, is_number: bool, kind: str) -> str:
    marks = f"<sup>{' '.join(map(str, sorted(set(cell.marks))))}</sup>" if cell.marks else ""
    tone = "" if cell.tone == "plain" else cell.tone
    long = "wrap" if len(cell.text) > 60 else ""
    return f"<td{_classes('number' if is_number else '', tone, long, kind)}>{text(cell.text)}{marks}</td>"


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{text(note)}</li>" for note in notes)
    return f'<ol class="notes">{items}</ol>' if items else ""


def _classes(*names: str) -> str:
    used = " ".join(filter(None, names))
    return f' class="{used}"' if used else ""
