"""The history file: one JSON line per decode, safe with several processes writing at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..optim.errors import HaloError
from ..optim.files import locked, user_dir
from .record import SCHEMA_VERSION, DecodeRecord

MAX_BYTES = 16 << 20
"""Size at which the file is set aside and a new one begun."""
KEEP_FILES = 4
"""Files kept, the current one included."""

Line = dict[str, Any]
Step = Callable[[Line], Line]
UPGRADES: Mapping[int, Step] = {}
"""Step from format n to n + 1, by n; empty while format 1 is the first."""


class StoreError(HaloError):
    """The history cannot be written or found; the decode itself is not affected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What was read: records oldest first, and what could not be read."""

    records: tuple[DecodeRecord, ...]
    skipped: int
    """Lines left out: torn, broken, or of a newer format."""
    problems: tuple[str, ...]
    """One sentence per kind of line left out."""


def data_dir(environ: Mapping[str, str] | None = None, platform: str = sys.platform) -> Path:
    """Folder of the history; creates nothing. StoreError where the user has no home folder."""
    try:
        return user_dir("data", environ, platform)
    except HaloError as error:
        raise StoreError(str(error)) from error


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


class HistoryStore:
    """Appends to `history.jsonl` and reads it back. Creates its folder on the first append."""

    def __init__(self, path: Path | None = None, *, max_bytes: int = MAX_BYTES, keep_files: int = KEEP_FILES) -> None:
        """`path` is the file, by default in `data_dir()`. ValueError for a size or count below 1."""
        if max_bytes < 1 or keep_files < 1:
            raise ValueError(f"max_bytes is {max_bytes} and keep_files {keep_files}; both must be at least 1")
        self.path = path or data_dir() / "history.jsonl"
        self._max_bytes = max_bytes
        self._keep_files = keep_files

    def append(self, record: DecodeRecord) -> None:
        """Add one line. StoreError when the folder or file cannot be written, or another process holds it too long."""
        line = json.dumps(record.to_json(), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.with_name(self.path.name + ".lock")):
                self._rotate(len(line))
                _append_bytes(self.path, line)
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be written ({error.strerror or error}); free space or set HALO_VAE_DATA_DIR"
            ) from error

    def read(self, limit: int | None = None) -> History:
        """The newest `limit` records (all by default), older files included. StoreError if a file cannot be read."""
        records: list[DecodeRecord] = []
        problems: dict[str, None] = {}
        skipped = 0
        for path in self._files():
            found, left_out = _read_file(path)
            records = found + records
            skipped += len(left_out)
            problems.update(dict.fromkeys(left_out))
            if limit is not None and len(records) >= limit:
                break
        kept = records if limit is None else records[max(0, len(records) - limit) :]
        return History(records=tuple(kept), skipped=skipped, problems=tuple(problems))

    def _files(self) -> Iterator[Path]:
        """Existing files, newest first."""
        for n in range(self._keep_files):
            path = self._numbered(n)
            if path.exists():
                yield path

    def _numbered(self, n: int) -> Path:
        return self.path if n == 0 else self.path.with_name(f"{self.path.stem}.{n}{self.path.suffix}")

    def _rotate(self, coming: int) -> None:
        size = self.path.stat().st_size if self.path.exists() else 0
        if size == 0 or size + coming <= self._max_bytes:
            return
        for n in reversed(range(self._keep_files - 1)):
            if self._numbered(n).exists():
                os.replace(self._numbered(n), self._numbered(n + 1))
        if self._keep_files == 1:
            self.path.unlink()


def _append_bytes(path: Path, line: bytes) -> None:
    """One write at the end of the file; a torn line left by a killed process is closed first."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
    try:
        size = os.fstat(fd).st_size
        if size:
            os.lseek(fd, size - 1, os.SEEK_SET)
            if os.read(fd, 1) != b"\n":
                line = b"\n" + line
        written = os.write(fd, line)
        if written != len(line):
            os.ftruncate(fd, size)
            raise OSError(f"only {written} of {len(line)} bytes were written; the disk may be full")
    finally:
        os.close(fd)


def _read_file(path: Path) -> tuple[list[DecodeRecord], list[str]]:
    """Records of one file and, per line left out, why."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror or error}); check its permissions") from error
    records: list[DecodeRecord] = []
    left_out: list[str] = []
    for raw in lines:
        if not raw.strip():
            continue
        try:
            line = json.loads(raw)
            if not isinstance(line, dict):
                raise ValueError("a line is not an object")
            records.append(DecodeRecord.from_json(upgrade(line)))
        except json.JSONDecodeError:
            left_out.append(f"{path.name} has a torn line, left out")
        except ValueError as error:
            left_out.append(f"{path.name}: {error}")
    return records, left_out
