"""Which output frames of a causal convolution are computed together, from which source frames, by which products.

Integers only. Along time, a 3-tap filter (g0, g1, g2) serves two neighbouring outputs of frames d0 to d3 by minimal
filtering F(2, 3): four products in place of six.
    out0 = (d0 - d2) g0 + (d1 + d2) (g0 + g1 + g2) / 2 + (d2 - d1) (g0 - g1 + g2) / 2
    out1 = (d3 - d1) g2 + (d1 + d2) (g0 + g1 + g2) / 2 - (d2 - d1) (g0 - g1 + g2) / 2
Source: Lavin & Gray 2016, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Taps = Sequence[int | None]
"""Per tap, first to last, the index of the source frame under it; None where there are zeros."""
Target = Literal["first", "second", "both", "difference"]
"""The output of an item that a product is added to: its first, its second, both, or the first less the second. Products
for both come first."""


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product: `scale` times a source, or times two added up, with one filter."""

    filter: int
    target: Target
    scale: int
    first: int
    """Position of the first source in its item."""
    second: int | None = None
    sign: int = 1
    """Of the second source, next to the first."""


@dataclass(frozen=True, slots=True)
class Group:
    """Items, each one output frame or two, that need the same products."""

    products: tuple[Product, ...]
    pair: bool
    outputs: tuple[int, ...]
    """First output of each item; the second of a pair is the next."""
    loads: tuple[tuple[int, int], ...]
    """(source, slot) to fill before."""
    slots: tuple[tuple[int, ...], ...]
    """Per item, the slot of each position; -1 for zeros."""


def map_count(kt: int) -> int:
    """Filters made of kt taps: with three, the four that serve two outputs."""
    return 4 if kt == 3 else kt


def sum_count(kt: int, n_frames: int) -> int:
    """Outputs per item at most."""
    return 2 if kt == 3 and n_frames > 1 else 1


def slot_count(kt: int, n_items: int, n_frames: int) -> int:
    """Sources held at a time by groups of up to `n_items`."""
    return kt - 1 + n_items * sum_count(kt, n_frames)


def plan_groups(taps: Sequence[Taps], n_items: int) -> list[Group]:
    """All output frames, in order, in groups of up to `n_items`."""
    items = _items(taps)
    n_slots = slot_count(len(taps[0]), n_items, len(taps))
    groups: list[Group] = []
    held: dict[int, int] = {}
    start = 0
    while start < len(items):
        stop, sources = start, set[int]()
        while stop < len(items) and stop - start < n_items and items[stop].products == items[start].products:
            grown = sources | items[stop].used
            if len(grown) > n_slots:
                break
            stop, sources = stop + 1, grown
        later = [item.used for item in items[stop:]]
        loads = _load(held, sources, later, n_slots)
        groups.append(_group(items[start:stop], loads, held))
        start = stop
    return groups


@dataclass(frozen=True, slots=True)
class _Item:
    output: int
    sources: tuple[int | None, ...]
    products: tuple[Product, ...]
    pair: bool

    @property
    def used(self) -> set[int]:
        positions = {p.first for p in self.products} | {p.second for p in self.products if p.second is not None}
        return {source for i in positions if (source := self.sources[i]) is not None}


def _items(taps: Sequence[Taps]) -> list[_Item]:
    """Pairs and single outputs such that the products are as few as can be."""
    best: list[tuple[int, _Item | None]] = [(0, None)] * (len(taps) + 2)
    for f in reversed(range(len(taps))):
        alone = _item(f, tuple(taps[f]), False)
        best[f] = best[f + 1][0] + len(alone.products), alone
        if len(taps[f]) == 3 and f + 1 < len(taps) and tuple(taps[f][1:]) == tuple(taps[f + 1][:-1]):
            both = _item(f, (*taps[f], taps[f + 1][-1]), True)
            cost = best[f + 2][0] + len(both.products)
            if cost <= best[f][0]:
                best[f] = cost, both
    items: list[_Item] = []
    f = 0
    while (item := best[f][1]) is not None:
        items.append(item)
        f += 2 if item.pair else 1
    return items


def _item(output: int, sources: tuple[int | None, ...], pair: bool) -> _Item:
    return _Item(output, sources, _products(sources, len(sources) - pair), pair)


def _products(sources: tuple[int | None, ...], kt: int) -> tuple[Product, ...]:
    """What an item sums up; products with zeros are left out."""
    if kt < 3:
        made = [_product(sources, t, "first", ((t, 1),)) for t in range(kt)]
    elif len(sources) == 3 and sources[1] is None:
        made = [_product(sources, 0, "first", ((0, 1),)), _product(sources, 3, "first", ((2, 1),))]
    else:
        pair = len(sources) == 4
        made = [
            _product(sources, 1, "both" if pair else "first", ((1, 1), (2, 1))),
            _product(sources, 2, "difference" if pair else "first", ((2, 1), (1, -1))),
            _product(sources, 0, "first", ((0, 1), (2, -1))),
        ]
        if pair:
            made.append(_product(sources, 3, "second", ((3, 1), (1, -1))))
    return tuple(product for product in made if product is not None)


def _product(
    sources: tuple[int | None, ...], which: int, target: Target, terms: tuple[tuple[int, int], ...]
) -> Product | None:
    """A filter times a sum of (position, sign), where the same source may come twice and zeros fall away."""
    factors: dict[int, int] = {}
    position: dict[int, int] = {}
    for i, sign in terms:
        source = sources[i]
        if source is not None:
            factors[source] = factors.get(source, 0) + sign
            position.setdefault(source, i)
    left = [(position[source], factor) for source, factor in factors.items() if factor]
    if not left:
        return None
    (first, scale), *rest = left
    if not rest:
        return Product(which, target, scale, first)
    (second, other) = rest[0]
    return Product(which, target, scale, first, second, scale * other)


def _load(
    held: dict[int, int], sources: set[int], later: Sequence[set[int]], n_slots: int
) -> tuple[tuple[int, int], ...]:
    """Make `held` (source -> slot) hold all sources; those that are needed last, or never again, make room."""

    def next_use(source: int) -> int:
        return next((i for i, used in enumerate(later) if source in used), len(later))

    missing = sorted(sources - held.keys())
    spare = sorted((source for source in held if source not in sources), key=next_use)
    free = sorted(set(range(n_slots)) - set(held.values()))
    loads = []
    for source in missing:
        slot = free.pop(0) if free else held.pop(spare.pop())
        held[source] = slot
        loads.append((source, slot))
    return tuple(loads)


def _group(items: Sequence[_Item], loads: tuple[tuple[int, int], ...], held: dict[int, int]) -> Group:
    slots = tuple(tuple(-1 if s is None else held.get(s, -1) for s in item.sources) for item in items)
    first = items[0]
    return Group(first.products, first.pair, tuple(item.output for item in items), loads, slots)
