"""Writing the history: one line at the end, files set aside by size, all of them dropped."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from .tail import BLOCK_BYTES


def append_bytes(path: Path, line: bytes, *, sync: bool = False) -> None:
    """One write at the end of the file; a torn line left by a killed process is closed first. OSError.

    With `sync` the line is on the disk when this returns.
    """
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
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were written; the disk may be full")
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def rotate(files: Sequence[Path], coming: int, max_bytes: int) -> None:
    """Set the first file aside where `coming` bytes would make it too large: each takes the next one's name. OSError.

    `files` are all names, the current one first; what had the last name is dropped.
    """
    current = files[0]
    size = current.stat().st_size if current.exists() else 0
    if size == 0 or size + coming <= max_bytes:
        return
    for older, newer in zip(reversed(files[1:]), reversed(files[:-1]), strict=True):
        if newer.exists():
            try:
                os.replace(newer, older)
            except PermissionError:
                return  # somebody reads it, on Windows: a file that grows a little too long is better than a lost line
    if len(files) == 1:
        current.unlink()


def drop(files: Sequence[Path]) -> int:
    """Remove the files, the last first; the number of lines in them. OSError."""
    lines = 0
    for path in reversed(files):
        found = count_lines(path)
        path.unlink()
        lines += found
    return lines


def count_lines(path: Path) -> int:
    """Lines that hold anything. OSError."""
    lines, held = 0, False
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            first, *rest = block.split(b"\n")
            held = held or bool(first.strip())
            for piece in rest:
                lines += held
                held = bool(piece.strip())
    return lines + held
