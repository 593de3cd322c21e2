from __future__ import annotations

from typing import Any

import pytest

from halo_vae.profiling.render import units


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        ("format_ns", 0, "0 ns"),
        ("format_ns", 999, "999 ns"),
        ("format_ns", 999_950, "1.00 ms"),  # never "1000 µs"
        ("format_ns", 12_345, "12.3 µs"),
        ("format_ns", 123_456_789, "123 ms"),
        ("format_ns", 999_600_000, "1.00 s"),
        ("format_ns", 1_480_000_000, "1.48 s"),
        ("format_ns", 59_400_000_000, "59.4 s"),
        ("format_ns", 59_600_000_000, "1 min 00 s"),  # never "59.6 s" beside "1 min"
        ("format_ns", 125_000_000_000, "2 min 05 s"),
        ("format_seconds", 1.48, "1.48 s"),
        ("format_bytes", 0, "0 B"),
        ("format_bytes", 999, "999 B"),
        ("format_bytes", 1000, "0.98 KiB"),  # three figures at most
        ("format_bytes", 1536, "1.50 KiB"),
        ("format_bytes", 412 << 20, "412 MiB"),
        ("format_bytes", 3 << 40, "3.00 TiB"),
        ("format_bytes", 5 << 50, "5120 TiB"),
        ("format_bytes", -1536, "-1.50 KiB"),
        ("format_rate", 12_400_000_000, "12.4 GB/s"),
        ("format_share", 0.0, "0 %"),
        ("format_share", 1.0, "100 %"),
        ("format_share", 0.831, "83.1 %"),
        ("format_share", 0.9999, "> 99.9 %"),  # not all of it
        ("format_share", 0.0001, "< 0.1 %"),  # not nothing
        ("format_share", 1.25, "125.0 %"),
        ("format_count", 0, "0"),
        ("format_count", 1234567, "1 234 567"),
        ("format_macs", 1_240_000_000_000, "1.24 TMAC"),
        ("format_macs", 5_000_000_000, "5.00 GMAC"),
        ("format_macs", 12, "12 MAC"),
        ("format_ratio", 1.04, "1.04 ×"),
        ("format_shape", (1, 4, 64, 64), "1×4×64×64"),
    ],
)
def test_words(function: str, value: Any, text: str) -> None:
    assert getattr(units, function)(value) == text


@pytest.mark.parametrize(
    "function",
    ["format_ns", "format_seconds", "format_bytes", "format_rate", "format_share", "format_count", "format_macs",
     "format_ratio", "format_shape"],
)  # fmt: skip
def test_unknown_is_said(function: str) -> None:
    assert getattr(units, function)(None) == "n/a"


def test_counts_take_a_noun() -> None:
    assert units.format_count(1, "tile") == "1 tile"
    assert units.format_count(0, "tile") == "0 tiles"
    assert units.format_count(2, "pass", "passes") == "2 passes"


@pytest.mark.parametrize(
    ("share", "bar"), [(0.0, ""), (1.0, "████"), (0.5, "██"), (0.53125, "██▏"), (7.0, "████"), (-1.0, "")]
)
def test_bars(share: float, bar: str) -> None:
    assert units.format_bar(share, 4) == bar


def test_bytes_in_decimal_units_within_a_block_only() -> None:
    with units.byte_units("decimal"):
        shown = [units.format_bytes(n) for n in (0, 999, 1000, 1536, 432_000_000, 5 * 10**15, None)]
    assert shown == ["0 B", "999 B", "1.00 kB", "1.54 kB", "432 MB", "5000 TB", units.NA]
    assert units.format_bytes(1536) == "1.50 KiB"
