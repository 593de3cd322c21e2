"""The history file: one JSON line per decode, safe with several processes writing at once."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ..optim.errors import HaloError
from ..optim.files import locked, user_dir
from . import tail
from .record import DecodeRecord
from .store_format import (
    TAG_BYTES,
    Cursor,
    CursorError,
    StoreError,
    line_of,
    parse_cursor,
    record_of,
    tag_of,
    upgrade,
)
from .store_write import append_bytes, drop, rotate

__all__ = [
    "CursorError",
    "History",
    "HistoryPage",
    "HistoryStore",
    "StoreError",
    "data_dir",
    "upgrade",
]

MAX_BYTES = 16 << 20
"""Size at which the file is set aside and a new one begun."""
KEEP_FILES = 4
"""Files kept, the current one included."""
MAX_LIMIT = 1000
"""Most records of a page."""
MAX_SKIPPED = 1000
"""Unreadable lines after which a page ends early, so that a broken file cannot make it long."""
MIN_PREFIX = 4
"""Fewest digits that an id may be shortened to."""
_ID = re.compile(r"[0-9a-f]{32}")
_PREFIX = re.compile(rf"[0-9a-f]{{{MIN_PREFIX},32}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What was read: records oldest first, and what could not be read."""

    records: tuple[DecodeRecord, ...]
    skipped: int
    """Lines left out among those read: torn, broken, or of a newer format."""
    problems: tuple[str, ...]
    """One sentence per kind of line left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPage:
    """A part of the history, newest first."""

    records: tuple[DecodeRecord, ...]
    next: str | None
    """Cursor of the page of older records; None where there are none."""
    skipped: int
    """Lines left out on this page: torn, broken, or of a newer format."""
    problems: tuple[str, ...]
    """One sentence per kind of line left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One line with something in it, and where it begins."""

    file: BinaryIO
    path: Path
    offset: int
    raw: bytes


@dataclass(slots=True)
class _Reading:
    """Records gathered from lines, newest first, and what was left out."""

    records: list[DecodeRecord] = field(default_factory=list)
    problems: dict[str, None] = field(default_factory=dict)
    skipped: int = 0

    def take(self, line: _Line) -> None:
        try:
            self.records.append(record_of(line.raw))
        except ValueError as error:
            self.skipped += 1
            torn = str(error).startswith("a torn line")
            self.problems.setdefault(f"{line.path.name} has {error}" if torn else f"{line.path.name}: {error}")


def data_dir(environ: Mapping[str, str] | None = None, platform: str = sys.platform) -> Path:
    """Folder of the history; creates nothing. StoreError where the user has no home folder."""
    try:
        return user_dir("data", environ, platform)
    except HaloError as error:
        raise StoreError(str(error)) from error


class HistoryStore:
    """Appends to `history.jsonl` and reads it back, from its end. Creates its folder on the first append."""

    def __init__(self, path: Path | None = None, *, max_bytes: int = MAX_BYTES, keep_files: int = KEEP_FILES) -> None:
        """`path` is the file, by default in `data_dir()`. ValueError for a size or count below 1."""
        if max_bytes < 1 or keep_files < 1:
            raise ValueError(f"max_bytes is {max_bytes} and keep_files {keep_files}; both must be at least 1")
        self.path = path or data_dir() / "history.jsonl"
        self._max_bytes = max_bytes
        self._names = (self.path, *(self._numbered(n) for n in range(1, keep_files)))

    def append(self, record: DecodeRecord) -> None:
        """Add one line. StoreError when the folder or file cannot be written, or another process holds it too long."""
        line = line_of(record)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self._lock_path):
                rotate(self._names, len(line), self._max_bytes)
                append_bytes(self.path, line)
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be written ({error.strerror or error}); free space or set HALO_VAE_DATA_DIR"
            ) from error

    def read(self, limit: int | None = None) -> History:
        """The newest `limit` records (all by default), read from the end. StoreError if a file cannot be read."""
        found = _Reading()
        with ExitStack() as opened:
            for line in self._lines(opened) if limit is None or limit > 0 else ():
                found.take(line)
                if limit is not None and len(found.records) >= limit:
                    break
        return History(
            records=tuple(reversed(found.records)), skipped=found.skipped, problems=tuple(reversed(found.problems))
        )

    def page(self, limit: int = 100, before: str | None = None) -> HistoryPage:
        """The newest `limit` records, or with `before`, a page's `next`, those that come after that page's.

        Reads the end of the file, and older files only where it has too few records. ValueError for a limit outside
        1 to 1000, CursorError for a cursor that is none or whose file is gone, StoreError if a file cannot be read.
        """
        if isinstance(limit, bool) or not 1 <= limit <= MAX_LIMIT:
            raise ValueError(f"limit is {limit}; a page has 1 to {MAX_LIMIT} records")
        cursor = None if before is None else parse_cursor(before)
        found = _Reading()
        following: str | None = None
        with ExitStack() as opened:
            for line in self._lines(opened, cursor):
                found.take(line)
                if len(found.records) >= limit or found.skipped >= MAX_SKIPPED:
                    following = self._cursor_after(line)
                    break
        return HistoryPage(
            records=tuple(found.records), next=following, skipped=found.skipped, problems=tuple(found.problems)
        )

    def find(self, record_id: str) -> DecodeRecord | None:
        """The record with this id of 32 hex digits, or None. Reads from the end to it, at most all files once."""
        found = self.matching(record_id, 1) if _ID.fullmatch(record_id) else ()
        return found[0] if found else None

    def matching(self, prefix: str, limit: int = 2) -> tuple[DecodeRecord, ...]:
        """The newest `limit` records whose id begins with 4 or more hex digits, newest first.

        ValueError for a prefix that is shorter or has other characters; StoreError if a file cannot be read.
        """
        if _PREFIX.fullmatch(prefix) is None:
            raise ValueError(f"{prefix!r} begins no id; give {MIN_PREFIX} to 32 of its digits, 0-9 and a-f")
        found: list[DecodeRecord] = []
        needle = f'"{prefix}'.encode()
        with ExitStack() as opened:
            for line in self._lines(opened):
                if needle not in line.raw:  # most lines need not be read as JSON
                    continue
                reading = _Reading()
                reading.take(line)
                found += [r for r in reading.records if r.record_id.startswith(prefix)]
                if len(found) >= limit:
                    break
        return tuple(found)

    def clear(self) -> int:
        """Remove every record; their number, unreadable lines included.

        StoreError when a file cannot be removed, or another process holds the history too long.
        """
        if not any(path.exists() for path in self._names):
            return 0
        try:
            with locked(self._lock_path):
                return drop([path for path in self._names if path.exists()])
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be cleared ({error.strerror or error}); check the folder's permissions"
            ) from error

    @property
    def _lock_path(self) -> Path:
        return self.path.with_name(self.path.name + ".lock")

    def _numbered(self, n: int) -> Path:
        return self.path.with_name(f"{self.path.stem}.{n}{self.path.suffix}")

    def _lines(self, opened: ExitStack, before: Cursor | None = None) -> Iterator[_Line]:
        """Lines with something in them, newest first; files are opened as they are needed and closed by `opened`."""
        seen: set[tuple[int, int]] = set()
        begun = before is None
        for path in self._names:
            try:
                file = self._open(path, opened, seen)
                if file is None:
                    continue
                end = file.seek(0, 2)
                if before is not None and not begun:
                    if tag_of(tail.read_at(file, 0, TAG_BYTES)) != before.tag:
                        continue
                    begun, end = True, _checked_end(file, before, end)
                for offset, raw in tail.lines_backwards(partial(tail.read_at, file), end):
                    if raw.strip():
                        yield _Line(file=file, path=path, offset=offset, raw=raw)
            except OSError as error:
                raise StoreError(f"{path} cannot be read ({error.strerror or error}); check its permissions") from error
        if not begun:
            raise CursorError("that part of the history is gone, dropped for newer records or cleared; begin again")

    def _open(self, path: Path, opened: ExitStack, seen: set[tuple[int, int]]) -> BinaryIO | None:
        """A file of the history; None where there is none, or where it was read under its earlier name just now."""
        try:
            file = opened.enter_context(tail.open_plain(path))
        except FileNotFoundError:
            return None
        key = tail.identity(file)
        if key in seen:
            return None
        seen.add(key)
        return file

    def _cursor_after(self, line: _Line) -> str | None:
        """The cursor of what is older than a line; None where nothing is. Opens no further file."""
        older = self._names[self._names.index(line.path) + 1 :]
        if line.offset == 0 and not any(path.exists() for path in older):
            return None
        return Cursor(tag=tag_of(tail.read_at(line.file, 0, TAG_BYTES)), offset=line.offset).text()


def _checked_end(file: BinaryIO, cursor: Cursor, size: int) -> int:
    """The offset that a cursor names. CursorError where no line begins there."""
    offset = cursor.offset
    if offset > size or (offset and tail.read_at(file, offset - 1, 1) != b"\n"):
        raise CursorError(f"no record begins at {offset} bytes; pass on `next` of a page, or begin without one")
    return offset
