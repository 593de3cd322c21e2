"""Weights that feather overlapping tiles: linear ramps, divided by their sum so that they add up to one everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .tiling import Span


def overlapped_spans(extent: int, tile: int, overlap: int) -> tuple[Span, ...]:
    """Spans of one length, min(tile, extent), that cover [0, extent) and share at least `overlap` elements.

    The last one slides back instead of shrinking. ValueError unless 0 <= overlap < tile.
    """
    if not 0 <= overlap < tile:
        raise ValueError(f"an overlap of {overlap} does not fit a tile of {tile} elements; give 0 to {tile - 1}")
    if extent <= tile:
        return (Span(0, extent),)
    step = tile - overlap
    starts = [*range(0, extent - tile, step), extent - tile]
    return tuple(Span(start, start + tile) for start in starts)


def feather(spans: Sequence[Span]) -> tuple[Tensor, ...]:
    """One float32 weight [span.size] per span, along one axis; at every element the weights sum to one.

    A ramp spans the whole overlap with a neighbour and is above zero at both its ends, and the outer ends have none:
    so no element is divided by zero. An element that one span alone covers has weight 1 exactly.
    """
    ramps = [_ramp(spans, i) for i in range(len(spans))]
    total = torch.zeros(spans[-1].stop, dtype=torch.float64)
    for span, ramp in zip(spans, ramps, strict=True):
        total[span.start : span.stop] += ramp
    return tuple((r / total[s.start : s.stop]).float() for s, r in zip(spans, ramps, strict=True))


def _ramp(spans: Sequence[Span], i: int) -> Tensor:
    """Rises over the overlap with the span before, falls over the one with the span after."""
    span = spans[i]
    at = torch.arange(span.start, span.stop, dtype=torch.float64) + 0.5  # centres, so that no end is zero
    ramp = torch.ones(span.size, dtype=torch.float64)
    if i > 0 and (shared := spans[i - 1].stop - span.start) > 0:
        ramp = torch.minimum(ramp, (at - span.start) / shared)
    if i + 1 < len(spans) and (shared := span.stop - spans[i + 1].start) > 0:
        ramp = torch.minimum(ramp, (span.stop - at) / shared)
    return ramp
