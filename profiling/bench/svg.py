"""Charts as SVG that lies inside an HTML page and takes the page's colours, light or dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..render.units import format_ns
from .report_escape import html_text

WIDTH = 920
_LEFT, _RIGHT, _TOP, _ROW, _AXIS = 250, 24, 8, 30, 34
_LOG_FROM = 12.0
"""Slowest ÷ fastest from which the time axis is logarithmic."""
_TICKS = 6
_MOST_POINTS = 1200
"""Points of a line; more are drawn as the lowest and highest of each span."""
_SERIES_HEIGHT = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """One row of a scatter: every sample of a figure."""

    label: str
    colour: str
    """Class of the page's style: "baseline", "phase1", …"""
    samples_ns: tuple[int, ...]
    median_ns: float
    q1_ns: float
    q3_ns: float
    is_hollow: bool = False
    """For a figure that is in no ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    low: float
    high: float
    start: float
    stop: float
    is_log: bool = False

    def at(self, value: float) -> float:
        low, high, v = (math.log(x) for x in (self.low, self.high, value)) if self.is_log else (
            self.low, self.high, value
        )  # fmt: skip
        return self.start + (self.stop - self.start) * ((v - low) / (high - low) if high > low else 0.5)


def scatter(strips: Sequence[Strip], title: str) -> str:
    """Every sample as a point, a row per figure, in order from a row's top to its bottom; a tick at the median.

    The bar behind is the middle half. ValueError without a sample.
    """
    times = [ns for strip in strips for ns in strip.samples_ns]
    if not times or min(times) < 1:
        raise ValueError("a scatter needs at least one time of 1 ns or more")
    scale = _time_scale(min(times), max(times))
    height = _TOP + _ROW * len(strips) + _AXIS
    parts = [*_time_axis(scale, _TOP + _ROW * len(strips))]
    for i, strip in enumerate(strips):
        parts += _strip(strip, scale, _TOP + _ROW * i)
    return _svg(parts, WIDTH, height, title)


def _time_scale(low: int, high: int) -> _Scale:
    is_log = high / low >= _LOG_FROM
    pad = (high / low) ** 0.04 if is_log else max(high - low, high * 0.02) * 0.06
    first, last = (low / pad, high * pad) if is_log else (max(0.0, low - pad), high + pad)
    return _Scale(low=first, high=last, start=_LEFT, stop=WIDTH - _RIGHT, is_log=is_log)


def _time_axis(scale: _Scale, bottom: float) -> list[str]:
    parts = []
    values = _log_ticks(scale) if scale.is_log else _linear_ticks(scale.low, scale.high)
    for value, words in zip(values, _tick_words(values), strict=True):
        x = _f(scale.at(value))
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_f(bottom)}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{_f(bottom + 18)}" text-anchor="middle">{words}</text>')
    return parts


def _tick_words(values: Sequence[float]) -> list[str]:
    """Ticks in one unit with as many decimals as tell them apart; each in its own unit where they span many."""
    words = [format_ns(value) for value in values]
    if len(set(words)) == len(words) or len(values) < 2:
        return words
    unit, size = next((u, s) for u, s in (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0)) if values[-1] >= s)
    decimals = max(0, -math.floor(math.log10((values[1] - values[0]) / size)))
    return [f"{value / size:.{decimals}f} {unit}" for value in values]


def _strip(strip: Strip, scale: _Scale, top: float) -> list[str]:
    middle, colour = top + _ROW / 2, html_text(strip.colour)
    n = len(strip.samples_ns)
    parts = [
        f'<text class="label" x="{_LEFT - 14}" y="{_f(middle + 4)}" text-anchor="end">{html_text(strip.label)}</text>',
        f'<rect class="iqr {colour}" x="{_f(scale.at(strip.q1_ns))}" y="{_f(top + 6)}" height="{_ROW - 12}" '
        f'width="{_f(max(1.5, scale.at(strip.q3_ns) - scale.at(strip.q1_ns)))}" rx="2"/>',
        f'<line class="median {colour}" x1="{_f(scale.at(strip.median_ns))}" x2="{_f(scale.at(strip.median_ns))}" '
        f'y1="{_f(top + 4)}" y2="{_f(top + _ROW - 4)}"/>',
    ]
    for i, ns in enumerate(strip.samples_ns):
        y = top + 8 + (_ROW - 16) * ((i + 0.5) / n)
        kind = f"dot {colour}{' hollow' if strip.is_hollow else ''}"
        tip = f"<title>{html_text(strip.label)}, sample {i + 1} of {n}: {format_ns(ns)}</title>"
        parts.append(f'<circle class="{kind}" cx="{_f(scale.at(ns))}" cy="{_f(y)}" r="3.4">{tip}</circle>')
    return parts


def line_chart(at_ns: Sequence[int], values: Sequence[float | None], title: str, top_label: str) -> str:
    """Readings over time; a reading that failed is a gap. The value axis begins at 0 or below. ValueError without one.

    `top_label` is the highest value in words.
    """
    known = [value for value in values if value is not None]
    if not known:
        raise ValueError("a line needs at least one reading")
    left, bottom = 84.0, float(_SERIES_HEIGHT - 26)
    across = _Scale(low=0.0, high=float(max(at_ns[-1], 1)), start=left, stop=WIDTH - _RIGHT)
    up = _Scale(low=min(0.0, *known), high=max(*known, 0.0) or 1.0, start=bottom, stop=12.0)
    parts = [
        f'<line class="grid" x1="{left}" x2="{WIDTH - _RIGHT}" y1="{_f(y)}" y2="{_f(y)}"/>' for y in (12.0, bottom)
    ]
    parts.append(f'<text class="tick" x="{left - 8}" y="16" text-anchor="end">{html_text(top_label)}</text>')
    ticks = _linear_ticks(0.0, across.high)
    for value, words in zip(ticks, ["0", *_tick_words(ticks[1:])], strict=True):
        x = _f(across.at(value))
        parts.append(f'<text class="tick" x="{x}" y="{_f(bottom + 18)}" text-anchor="middle">{words}</text>')
    for run in _unbroken(_thinned(list(zip(at_ns, values, strict=True)))):
        points = " ".join(f"{_f(across.at(t))},{_f(up.at(v))}" for t, v in run)
        if len(run) == 1:
            x, y = points.split(",")
            parts.append(f'<circle class="dot line" cx="{x}" cy="{y}" r="1.6"/>')
        else:
            parts.append(f'<polyline class="line" points="{points}"/>')
    return _svg(parts, WIDTH, _SERIES_HEIGHT, title)


def _thinned(points: list[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    if len(points) <= _MOST_POINTS:
        return points
    size = math.ceil(len(points) / (_MOST_POINTS // 2))
    kept: list[tuple[int, float | None]] = []
    for i in range(0, len(points), size):
        some = [(at, value) for at, value in points[i : i + size] if value is not None]
        if not some:
            kept.append((points[i][0], None))
        else:
            kept += sorted({min(some, key=lambda p: p[1]), max(some, key=lambda p: p[1])})
    return kept


def _unbroken(points: Sequence[tuple[int, float | None]]) -> list[list[tuple[int, float]]]:
    runs: list[list[tuple[int, float]]] = [[]]
    for at, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((at, value))
    return [run for run in runs if run]


def _linear_ticks(low: float, high: float) -> list[float]:
    if high <= low:
        return [low]
    raw = (high - low) / _TICKS
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)]


def _log_ticks(scale: _Scale) -> list[float]:
    first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    values = [f * 10.0**p for p in range(first, last + 1) for f in factors]
    return [v for v in values if scale.low <= v <= scale.high]


def _svg(parts: Sequence[str], width: int, height: float, title: str) -> str:
    size = f'viewBox="0 0 {width} {_f(height)}" width="{width}"'
    head = f'<svg role="img" {size} aria-label="{html_text(title)}">'
    return "".join((head, *parts, "</svg>"))


def _f(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
