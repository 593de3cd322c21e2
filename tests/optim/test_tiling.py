"""Tiles cover every element once, in one shape."""

from __future__ import annotations

import numpy as np
import pytest

from halo_vae.optim.tiling import Span, TileGrid, even_strip, largest_divisor, shrink_spans, slide_spans

EXTENTS = (1, 2, 3, 5, 7, 8, 13, 16, 31, 97)


def test_span_knows_its_size_and_scales() -> None:
    assert Span(2, 5).size == 3
    assert Span(2, 5).scaled(4) == Span(8, 20)


@pytest.mark.parametrize("extent", EXTENTS)
def test_slid_spans_have_one_length_and_write_only_new_elements(extent: int) -> None:
    for tile in range(1, extent + 1):
        spans = slide_spans(extent, tile)
        assert {span.size for span, _ in spans} == {tile}
        assert all(span.start >= 0 and span.stop <= extent for span, _ in spans)
        assert all(span.start <= new.start < new.stop == span.stop for span, new in spans)
        assert [i for _, new in spans for i in range(new.start, new.stop)] == list(range(extent))
        assert len(spans) == -(-extent // tile)


@pytest.mark.parametrize("extent", EXTENTS)
def test_shrunk_spans_compute_nothing_twice(extent: int) -> None:
    for tile in range(1, extent + 3):
        spans = shrink_spans(extent, tile)
        assert all(span == new for span, new in spans)
        assert [i for span, _ in spans for i in range(span.start, span.stop)] == list(range(extent))
        assert {span.size for span, _ in spans[:-1]} <= {tile}


def test_an_example_slides_back() -> None:
    assert slide_spans(10, 4)[-1] == (Span(6, 10), Span(8, 10))
    assert shrink_spans(10, 4)[-1] == (Span(8, 10), Span(8, 10))


@pytest.mark.parametrize("slides", [True, False])
@pytest.mark.parametrize(
    ("n", "height", "width", "per_call", "rows", "cols"),
    [(1, 1, 1, 1, 1, 1), (3, 7, 31, 3, 7, 31), (2, 7, 31, 1, 3, 8), (4, 13, 11, 2, 5, 11), (1, 17, 5, 1, 1, 5)],
)
def test_grid_covers_each_picture_once(
    n: int, height: int, width: int, per_call: int, rows: int, cols: int, slides: bool
) -> None:
    grid = TileGrid(
        n_images=n, height=height, width=width, images_per_call=per_call, rows=rows, cols=cols, slides=slides
    )
    written, computed = np.zeros((n, height, width), int), 0
    for tile in grid.tiles():
        i, r, c = tile.images, tile.new_rows, tile.new_cols
        written[i.start : i.stop, r.start : r.stop, c.start : c.stop] += 1
        computed += i.size * tile.rows.size * tile.cols.size
        assert tile.is_whole_new == (tile.rows == r and tile.cols == c)
        assert i.size == per_call
    assert (written == 1).all()
    assert len(grid.tiles()) == grid.n_tiles
    assert computed == grid.computed
    assert grid.is_exact == (computed == n * height * width)
    assert grid.is_strips == (cols == width)
    assert grid.n_tiles == grid.n_down * grid.n_across * n // per_call
    if slides:
        assert len({(t.images.size, t.rows.size, t.cols.size) for t in grid.tiles()}) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images_per_call": 2}, "2 images per call do not divide 3 images evenly"),
        ({"rows": 9}, "a 9x4 tile does not fit a 8x4 map"),
        ({"cols": 0}, "a 8x0 tile does not fit a 8x4 map"),
    ],
)
def test_grid_refuses_what_does_not_fit(change: dict[str, int], words: str) -> None:
    given = {"n_images": 3, "height": 8, "width": 4, "images_per_call": 1, "rows": 8, "cols": 4} | change
    with pytest.raises(ValueError, match=words):
        TileGrid(**given)


@pytest.mark.parametrize("extent", EXTENTS)
def test_even_strips_are_as_few_as_can_be_and_nearly_equal(extent: int) -> None:
    for most in range(extent + 3):
        length = even_strip(extent, most)
        assert 1 <= length <= max(1, min(most, extent))
        n = -(-extent // length)
        assert n == -(-extent // max(1, min(most, extent)))
        assert length * n - extent < n  # shorter strips would be one more


def test_largest_divisor() -> None:
    for n in range(1, 40):
        for most in range(n + 5):
            d = largest_divisor(n, most)
            assert n % d == 0
            assert d == max(k for k in range(1, n + 1) if n % k == 0 and k <= max(1, most))
