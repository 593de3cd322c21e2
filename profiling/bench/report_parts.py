"""What a report is made of, before it is Markdown or HTML: text only, escaped by whoever writes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..ab.doubts import Doubt

Tone = Literal["plain", "good", "bad", "quiet"]
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_MOST_NUMBERS = 3


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


class Notes:
    """Notes of a table that is being made. Doubts that differ in a number or two only are one note, with its range."""

    def __init__(self) -> None:
        """None yet."""
        self._kept: dict[str, list[str]] = {}

    @property
    def sentences(self) -> tuple[str, ...]:
        """The notes, in the order of their numbers."""
        return tuple(map(_with_ranges, self._kept.values()))

    def mark(self, *sentences: str) -> tuple[int, ...]:
        """Numbers of sentences, in rising order, new ones added."""
        return self._numbers((sentence, sentence) for sentence in sentences)

    def doubt(self, doubts: Sequence[Doubt]) -> tuple[int, ...]:
        """Numbers of doubts."""
        return self._numbers((_kind(doubt), doubt.sentence) for doubt in doubts)

    def _numbers(self, found: Iterable[tuple[str, str]]) -> tuple[int, ...]:
        kinds = []
        for kind, sentence in found:
            self._kept.setdefault(kind, []).append(sentence)
            kinds.append(kind)
        places = {kind: n for n, kind in enumerate(self._kept, 1)}
        return tuple(sorted({places[kind] for kind in kinds}))


def _kind(doubt: Doubt) -> str:
    """The sentence without its numbers; with them where they are names, as in shapes."""
    few = len(_NUMBER.findall(doubt.sentence)) <= _MOST_NUMBERS and doubt.short != "note"
    return _NUMBER.sub("#", doubt.sentence) if few else doubt.sentence


def _with_ranges(sentences: Sequence[str]) -> str:
    """Sentences that differ in numbers only as one: "slowest and fastest sample are 11–48% of the median apart"."""
    first, *others = dict.fromkeys(sentences)
    if not others:
        return first
    columns = iter(zip(*(_NUMBER.findall(sentence) for sentence in (first, *others)), strict=True))

    def span(_: re.Match[str]) -> str:
        numbers = sorted(set(next(columns)), key=float)
        return numbers[0] if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"

    return _NUMBER.sub(span, first)


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
