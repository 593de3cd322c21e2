"""Lines of the history: their formats, and the places in it that a page may begin at."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..optim.errors import HaloError
from .record import SCHEMA_VERSION, DecodeRecord

TAG_BYTES = 1024
"""Bytes at a file's start that tell it from others: they never change, and hold the time of its first record."""
Line = dict[str, Any]
Step = Callable[[Line], Line]
UPGRADES: Mapping[int, Step] = {}
"""Step from format n to n + 1, by n; empty while format 1 is the first."""
_CURSOR = re.compile(r"([0-9a-f]{16})-([0-9a-f]{1,12})")


class StoreError(HaloError):
    """The history cannot be written or found; the decode itself is not affected."""


class CursorError(StoreError, ValueError):
    """A page was asked for that begins nowhere in the history: the cursor is not one, or its file is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The place before which the next page ends."""

    tag: str
    """Which file, by its beginning: it keeps it when it is set aside under another name."""
    offset: int
    """Start of a line in that file."""

    def text(self) -> str:
        """As handed out: letters, digits and a hyphen, at most 29 of them."""
        return f"{self.tag}-{self.offset:x}"


def parse_cursor(text: str) -> Cursor:
    """The cursor that `Cursor.text` gave. CursorError for anything else."""
    found = _CURSOR.fullmatch(text)
    if found is None:
        shown = text if len(text) <= 40 else f"{text[:40]}…"
        raise CursorError(f"{shown!r} is no cursor of this history; pass on `next` of a page, or begin without one")
    return Cursor(tag=found[1], offset=int(found[2], 16))


def tag_of(head: bytes) -> str:
    """The tag of a file that begins with these bytes; only its first line counts."""
    return hashlib.sha256(head[:TAG_BYTES].split(b"\n", 1)[0]).hexdigest()[:16]


def line_of(record: DecodeRecord) -> bytes:
    """A record as its line, line feed included. Text that is no Unicode (lone surrogates) becomes JSON escapes."""
    text = json.dumps(record.to_json(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def record_of(raw: bytes) -> DecodeRecord:
    """The record of a line. ValueError with the reason where it cannot be read."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested without end
        raise ValueError("a torn line, left out") from None
    if not isinstance(line, dict):
        raise ValueError("a line is not an object")
    return DecodeRecord.from_json(upgrade(line))


def upgrade(line: Line, upgrades: Mapping[int, Step] = UPGRADES, version: int = SCHEMA_VERSION) -> Line:
    """A line of any earlier format, one step at a time, as format `version`. ValueError if that cannot be done."""
    found = line.get("schema_version")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(f"schema_version is {found!r}; a whole number from 1 is needed")
    if found > version:
        raise ValueError(f"a record has format {found}; this version reads up to {version}, so update halo_vae")
    for step in range(found, version):
        if step not in upgrades:
            raise ValueError(f"there is no upgrade from format {step}; the record is too old to read")
        line = {**upgrades[step](line), "schema_version": step + 1}
    return line
