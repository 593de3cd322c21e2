"""What a report is made of, before it is Markdown or HTML: text only, escaped by whoever writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .doubts import Doubt

Tone = Literal["plain", "good", "bad", "quiet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell of a table."""

    text: str
    marks: tuple[int, ...] = ()
    """Numbers of the table's notes that touch it."""
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Head of a column."""

    title: str
    is_number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under a head, and the notes that its cells refer to, numbered from 1."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing for HTML and the same as a table for everything else."""

    title: str
    svg: str
    """Whole and safe: its maker has escaped the text in it."""
    data: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A paragraph."""

    text: str


Part: TypeAlias = Table | Chart | Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Parts under a heading."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole report of one lane."""

    title: str
    facts: tuple[str, ...]
    """What it is of, in a few words each."""
    sections: tuple[Section, ...]
    failures: tuple[str, ...] = ()
    """One sentence per figure whose pictures are wrong. With any, the report is a failure."""


@dataclass(slots=True)
class Notes:
    """Notes of a table that is being made: each sentence has one number."""

    sentences: list[str] = field(default_factory=list)

    def mark(self, *sentences: str) -> tuple[int, ...]:
        """Numbers of sentences, in the order given, new ones added."""
        for sentence in sentences:
            if sentence not in self.sentences:
                self.sentences.append(sentence)
        return tuple(sorted({self.sentences.index(sentence) + 1 for sentence in sentences}))

    def doubt(self, doubts: Sequence[Doubt]) -> tuple[int, ...]:
        """Numbers of doubts."""
        return self.mark(*(doubt.sentence for doubt in doubts))


def without_constant(table: Table, titles: Sequence[str]) -> Table:
    """The table without those of these columns in which every row says the same; its caption tells it instead."""
    told: list[str] = []
    keep: list[int] = []
    for i, column in enumerate(table.columns):
        values = {row[i].text for row in table.rows}
        if column.title in titles and len(values) == 1 and not any(row[i].marks for row in table.rows):
            told.append(f"{column.title} {values.pop()}")
        else:
            keep.append(i)
    caption = f"{table.caption} All rows: {', '.join(told)}." if told else table.caption
    return Table(
        columns=tuple(table.columns[i] for i in keep),
        rows=tuple(tuple(row[i] for i in keep) for row in table.rows),
        notes=table.notes,
        caption=caption.strip(),
    )
