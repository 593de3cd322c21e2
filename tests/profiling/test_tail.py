from __future__ import annotations

import random
from pathlib import Path

import pytest

from halo_vae.profiling import tail


def walk(data: bytes, end: int, block: int) -> list[tuple[int, bytes]]:
    return list(tail.lines_backwards(lambda offset, size: data[offset : offset + size], end, block))


def expected(data: bytes) -> list[tuple[int, bytes]]:
    """Lines by the plain way: from the start."""
    found, at = [], 0
    for line in data.split(b"\n"):
        found.append((at, line))
        at += len(line) + 1
    return found[::-1]


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64, 4096])
@pytest.mark.parametrize("data", [b"a", b"\n", b"ab\ncd\n", b"ab\ncd", b"\n\nlong line here\n\nx\n", b"no end at all"])
def test_lines_from_the_end_are_the_lines(data: bytes, block: int) -> None:
    assert walk(data, len(data), block) == expected(data)


def test_lines_of_many_lengths_against_every_block_size() -> None:
    rng = random.Random(4)
    data = b"\n".join(bytes(rng.choices(b"abc", k=rng.randrange(0, 40))) for _ in range(60))
    for block in range(1, 80):
        assert walk(data, len(data), block) == expected(data)


def test_an_empty_file_has_no_line() -> None:
    assert walk(b"", 0, 16) == []


def test_lines_before_an_offset() -> None:
    assert walk(b"ab\ncd\nef\n", 6, 4) == [(6, b""), (3, b"cd"), (0, b"ab")]
    assert walk(b"ab\ncd\nef\n", 0, 4) == []


def test_nothing_is_read_before_it_is_asked_for() -> None:
    data, asked = b"x" * 100 + b"\nlast", []

    def read(offset: int, size: int) -> bytes:
        asked.append((offset, size))
        return data[offset : offset + size]

    lines = tail.lines_backwards(read, len(data), 10)
    assert asked == []
    assert next(lines) == (101, b"last")
    assert asked == [(95, 10)]


def test_read_at_goes_on_after_a_short_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))

    class Short:
        """A file that gives three bytes at a time."""

        def __init__(self) -> None:
            self.inner = tail.open_plain(tmp_path / "file")

        def seek(self, offset: int) -> int:
            return self.inner.seek(offset)

        def read(self, size: int) -> bytes:
            return self.inner.read(min(3, size))

    file = Short()
    assert tail.read_at(file, 10, 20) == bytes(range(10, 30))  # type: ignore[arg-type]
    assert tail.read_at(file, 95, 20) == bytes(range(95, 100))  # type: ignore[arg-type]
    file.inner.close()
