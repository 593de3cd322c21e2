"""Numbers as words. Everything takes None and gives "n/a" for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

NA = "n/a"
"""Unknown, not measured, or no denominator."""
ByteUnits = Literal["binary", "decimal"]
_PREFIXES: dict[ByteUnits, tuple[int, tuple[str, ...]]] = {
    "binary": (1024, ("B", "KiB", "MiB", "GiB", "TiB")),
    "decimal": (1000, ("B", "kB", "MB", "GB", "TB")),
}
_BYTE_UNITS: ContextVar[ByteUnits] = ContextVar("halo_vae_byte_units", default="binary")


@contextmanager
def byte_units(units: ByteUnits) -> Iterator[None]:
    """Write bytes in these units within the block; binary is the default."""
    token = _BYTE_UNITS.set(units)
    try:
        yield
    finally:
        _BYTE_UNITS.reset(token)


def format_ns(ns: float | None) -> str:
    """A duration with three figures: "850 ns", "12.3 µs", "1.48 s", "2 min 05 s"."""
    if ns is None:
        return NA
    if round(ns / 1e9) >= 60:
        minutes, seconds = divmod(round(ns / 1e9), 60)
        return f"{minutes} min {seconds:02d} s"
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size * 0.9995:
            return f"{_three(ns / size)} {unit}"
    return f"{ns:.0f} ns"


def format_seconds(seconds: float | None) -> str:
    """A duration given in seconds."""
    return format_ns(None if seconds is None else seconds * 1e9)


def format_bytes(n: float | None) -> str:
    """Bytes with three figures: "512 B", "1.50 KiB", "412 MiB"; within `byte_units("decimal")` "1.54 kB", "432 MB"."""
    if n is None:
        return NA
    if n < 0:
        return f"-{format_bytes(-n)}"
    size = float(n)
    base, prefixes = _PREFIXES[_BYTE_UNITS.get()]
    for unit in prefixes:
        if size < 999.5 or unit == prefixes[-1]:
            break
        size /= base
    return f"{n:.0f} B" if unit == "B" else f"{_three(size)} {unit}"


def format_rate(bytes_per_s: float | None) -> str:
    """Bytes per second in decimal units, as memory is sold: "12.4 GB/s"."""
    return NA if bytes_per_s is None else f"{_three(bytes_per_s / 1e9)} GB/s"


def format_share(value: float | None) -> str:
    """A fraction as per cent: "83.1 %"; 100 % only when nothing is missing, 0 % only when there is nothing."""
    if value is None:
        return NA
    percent = value * 100
    if percent in (0, 100):
        return f"{percent:.0f} %"
    text = f"{percent:.1f}"
    if text == "0.0":
        return "< 0.1 %"
    return "> 99.9 %" if text == "100.0" and percent < 100 else f"{text} %"


def format_count(n: int | None, one: str = "", many: str | None = None) -> str:
    """A whole number with thin groups, and its noun: "1 tile", "12 345 tiles"."""
    if n is None:
        return NA
    digits = f"{n:,}".replace(",", " ")
    if not one:
        return digits
    return f"{digits} {one if n == 1 else many or one + 's'}"


def format_macs(n: int | None) -> str:
    """Multiply-accumulates: "1.24 TMAC"."""
    if n is None:
        return NA
    for unit, size in (("TMAC", 1e12), ("GMAC", 1e9), ("MMAC", 1e6)):
        if n >= size * 0.9995:
            return f"{_three(n / size)} {unit}"
    return f"{n} MAC"


def format_ratio(value: float | None) -> str:
    """A ratio: "1.04 ×"."""
    return NA if value is None else f"{_three(value)} ×"


def format_shape(shape: Sequence[int] | None) -> str:
    """A shape: "1×4×64×64"."""
    return NA if shape is None else "×".join(map(str, shape))


def format_bar(share: float, width: int = 24) -> str:
    """A bar of `width` cells for a share of 0 to 1, in eighths of a cell: "██████▌"."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")


def _three(value: float) -> str:
    """Three figures, or all of a larger whole part."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
