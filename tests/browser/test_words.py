"""The page writes numbers as the server's own texts do."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from halo_vae.profiling.render import units

if TYPE_CHECKING:
    from halo_vae.tests.browser.conftest import Open

_EDGES = (0, 1, 9, 499, 500, 999, 999.4, 999.5, 1000, 1023, 1024, 10_496, 99_949, 99_950, 999_499, 999_500)
_RANDOM = random.Random(0)
_NUMBERS = [
    None,
    *(edge * scale for edge in _EDGES for scale in (1, 1e3, 1e6, 1e9)),
    *(math.floor(10 ** _RANDOM.uniform(0, 15)) for _ in range(400)),
]
_SHARES = [
    None,
    0,
    1,
    1e-6,
    0.0004,
    0.0005,
    0.125,
    0.0625,
    0.99949,
    0.9996,
    1.5,
    *(_RANDOM.random() for _ in range(200)),
]
_WHOLE = [None if n is None else int(n) for n in _NUMBERS]
_CALL = """async ([name, values, units]) => {
  const format = await import("/extensions/halo_vae/view/format.js");
  format.setByteUnits(units);
  const texts = values.map((value) => format[name](value));
  format.setByteUnits("binary");
  return texts;
}"""

CASES: list[tuple[str, Callable[[Any], str], list[Any]]] = [
    ("formatNs", units.format_ns, _NUMBERS),
    ("formatSeconds", units.format_seconds, [None, 0, 0.5, 1.402, 59.4, 59.5, 125]),
    ("formatBytes", units.format_bytes, [*_WHOLE, -1536]),
    ("formatRate", units.format_rate, _NUMBERS),
    ("formatShare", units.format_share, _SHARES),
    ("formatCount", units.format_count, _WHOLE),
    ("formatMacs", units.format_macs, _WHOLE),
    ("formatRatio", units.format_ratio, [None, 0, 0.125, 1.0, 1.03, 9.996, 99.95, 1234.5]),
    ("formatShape", units.format_shape, [None, [], [1, 4, 64, 64]]),
]


@pytest.mark.parametrize(("name", "format_", "values"), CASES, ids=[name for name, *_ in CASES])
def test_texts_equal_the_servers(name: str, format_: Callable[[Any], str], values: list[Any], open_page: Open) -> None:
    page = open_page(nodes=())
    assert page.evaluate(_CALL, [name, values, "binary"]) == [format_(value) for value in values]


def test_bytes_in_decimal_units(open_page: Open) -> None:
    page = open_page(nodes=())
    with units.byte_units("decimal"):
        assert page.evaluate(_CALL, ["formatBytes", _WHOLE, "decimal"]) == [units.format_bytes(n) for n in _WHOLE]
