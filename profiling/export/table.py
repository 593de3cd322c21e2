"""Rows as CSV, safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import enum
import io
from collections.abc import Iterable
from dataclasses import fields

from ..rows import HistoryRow

COLUMNS = tuple(f.name for f in fields(HistoryRow))
"""Column names, in order."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""What makes a spreadsheet take a cell for a formula. Source: OWASP, "CSV Injection"."""


def csv_of(rows: Iterable[HistoryRow]) -> str:
    """A head of `COLUMNS` and a line per row, as RFC 4180 has it: commas, quotes doubled, CR LF.

    Unknown is an empty cell, yes and no are `true` and `false`, a shape is `1x4x64x64`. Text that a spreadsheet would
    take for a formula gets an apostrophe in front; numbers never do.
    """
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\r\n", quoting=csv.QUOTE_MINIMAL)
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([cell(getattr(row, name)) for name in COLUMNS])
    return out.getvalue()


def cell(value: object) -> str:
    """One value as text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    text = str(value.value if isinstance(value, enum.Enum) else value)
    text = text.encode("utf-8", "replace").decode().replace("\x00", "")
    return f"'{text}" if text.startswith(_FORMULA) else text
