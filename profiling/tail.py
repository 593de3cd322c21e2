"""Lines of a file from its end to its start, read in blocks: the newest lines cost what they are long, not the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 64 << 10
"""Read at a time."""
ReadAt = Callable[[int, int], bytes]
"""(offset, size) to bytes; fewer than asked only at the end of the file."""


def open_plain(path: Path) -> BinaryIO:
    """A file to read at any place, without a buffer that reads ahead. OSError."""
    return open(path, "rb", buffering=0)  # the caller closes it


def identity(file: BinaryIO) -> tuple[int, int]:
    """Equal for a file opened twice, under whatever names. OSError."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino


def read_at(file: BinaryIO, offset: int, size: int) -> bytes:
    """`size` bytes from `offset` on, fewer only at the end of the file. OSError."""
    file.seek(offset)
    parts: list[bytes] = []
    while size > 0:
        part = file.read(size)
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def lines_backwards(read: ReadAt, end: int, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, bytes]]:
    """(offset, line without its line feed) of every line before offset `end`, the last one first.

    What follows the last line feed is a line too, also when it is empty. Nothing is read before it is asked for.
    """
    held: list[bytes] = []  # the end of a line whose start has not been reached, later parts first
    at = end
    while at > 0:
        size = min(block_bytes, at)
        at -= size
        pieces = read(at, size).split(b"\n")
        stop = at + size
        for piece in reversed(pieces[1:]):
            start = stop - len(piece)
            yield start, b"".join((piece, *reversed(held)))
            held.clear()
            stop = start - 1
        held.append(pieces[0])
    if end > 0:
        yield 0, b"".join(reversed(held))
