"""Tables of a report: measured results, phase ablation with quality, ratios between conditions, runs that failed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..render.units import NA, format_bytes, format_ns, format_ratio
from .cases import SCENARIOS
from .lanes import Figure, MixedError, Ratio, may_compare, ratio_of
from .report_parts import Cell, Column, Notes, Table, Tone, without_constant
from .report_words import (
    case_words,
    effect_words,
    error_words,
    interval_words,
    ops_words,
    own_size,
    p_words,
    psnr_words,
)
from .stats import SCIPY_HINT, has_scipy
from .verdict import verdict_of

_LIFTED = ("condition", "dtype", "threads", "VAE")
"""Columns that a caption replaces where every row says the same."""
_TONES: dict[bool | None, Tone] = {True: "good", False: "bad", None: "quiet"}


def _columns(words: Sequence[str], numbers: Sequence[str]) -> tuple[Column, ...]:
    return (*(Column(title=w) for w in words), *(Column(title=n, is_number=True) for n in numbers))


def _cells(*texts: str) -> tuple[Cell, ...]:
    return tuple(Cell(text=text) for text in texts)


def _identity(figure: Figure) -> tuple[Cell, ...]:
    key = figure.key
    return _cells(case_words(figure), key.configuration, key.scenario, key.dtype, str(key.threads), key.vae)


def _marks(figure: Figure, notes: Notes) -> tuple[int, ...]:
    """Doubts of a figure, and that it decodes another size than its case's, as warm runs do."""
    size = own_size(figure)
    why = ", a size not decoded before" if figure.key.scenario == "warm" else ""
    return (*notes.doubt(figure.doubts), *(notes.mark(f"decodes {size} pixels{why}") if size else ()))


_IDENTITY = ("case", "configuration", "condition", "dtype", "threads", "VAE")


def results_table(figures: Sequence[Figure]) -> Table:
    """Statistics of every figure that has samples."""
    notes, rows = Notes(), []
    for figure in figures:
        stats = figure.stats
        if stats is None:
            continue
        few = tuple(format_ns(ns) for ns in (stats.mean_ns, stats.min_ns, stats.max_ns, stats.stdev_ns))
        rows.append(
            (
                *_identity(figure),
                Cell(text=str(stats.n)),
                Cell(text=format_ns(stats.median_ns), marks=_marks(figure, notes)),
                *_cells(*few, format_ns(stats.iqr_ns), format_ns(stats.mad_ns), str(len(stats.outliers))),
                *_cells(ops_words(stats.ops), format_bytes(figure.peak_bytes)),
            )
        )
    numbers = ("n", "median", "mean", "min", "max", "stdev", "IQR", "MAD", "outliers", "per second", "peak memory")
    table = Table(columns=_columns(_IDENTITY, numbers), rows=tuple(rows), notes=notes.sentences)
    return without_constant(table, _LIFTED)


def ablation_table(figures: Sequence[Figure]) -> Table:
    """Each configuration against `baseline`: speed with its interval and test, beside how right the pictures are."""
    notes, rows = Notes(), []
    for figure in figures:
        stats = figure.stats
        if stats is None:
            if verdict_of(figure).passed is False:
                rows.append(_wrong_row(figure))
            continue
        base = baseline_of(figure, figures)
        ratio = ratio_of(base, figure) if base is not None else None
        marks = () if base is None else notes.doubt(base.doubts)
        if base is not None and base.key.dtype != figure.key.dtype:
            marks += notes.mark(f"against the baseline in {base.key.dtype}")
        rows.append(
            (
                *_identity(figure),
                _judged(figure),
                Cell(text=str(stats.n)),
                Cell(text=format_ns(stats.median_ns), marks=_marks(figure, notes)),
                *_ratio_cells(figure, ratio, marks),
                *_quality_cells(figure),
            )
        )
    numbers = ("n", "median", "speed ÷ baseline", "95 % interval", "p", "effect", *_QUALITY)
    if rows and not has_scipy():
        notes.mark(SCIPY_HINT)
    columns = _columns((*_IDENTITY, "pictures"), numbers)
    return without_constant(Table(columns=columns, rows=tuple(rows), notes=notes.sentences), _LIFTED)


_QUALITY = ("max error", "mean error", "PSNR")


def _quality_cells(figure: Figure) -> tuple[Cell, ...]:
    errors = (error_words(figure.max_error), error_words(figure.mean_error), psnr_words(figure))
    return _cells(*errors)


def _judged(figure: Figure) -> Cell:
    verdict = verdict_of(figure)
    return Cell(text=verdict.sentence, tone=_TONES[verdict.passed])


def _wrong_row(figure: Figure) -> tuple[Cell, ...]:
    return (*_identity(figure), _judged(figure), *_cells("0", NA, "", "", "", ""), *_quality_cells(figure))


def _ratio_cells(figure: Figure, ratio: Ratio | None, marks: tuple[int, ...]) -> tuple[Cell, ...]:
    if ratio is None:
        word = "base" if figure.key.configuration == "baseline" else NA
        return (Cell(text=word, tone="quiet"), *(Cell(text="", tone="quiet") for _ in range(3)))
    tone: Tone = "plain" if not ratio.is_clear else "good" if ratio.value > 1 else "bad"
    return (
        Cell(text=format_ratio(ratio.value), marks=marks, tone=tone),
        *_cells(interval_words(ratio.interval), p_words(ratio), effect_words(ratio)),
    )


def baseline_of(figure: Figure, figures: Sequence[Figure]) -> Figure | None:
    """What a figure's speed is compared with: `baseline` of the same case, condition and machine.

    Of several dtypes the figure's own, else the first. None for a baseline itself, and where there is none.
    """
    if figure.key.configuration == "baseline":
        return None
    found = [
        other for other in figures
        if other.key.configuration == "baseline" and other.key.scenario == figure.key.scenario
        and may_compare(other, figure)
    ]  # fmt: skip
    same = [other for other in found if other.key.dtype == figure.key.dtype]
    return next(iter(same or found), None)


def conditions_table(figures: Sequence[Figure]) -> Table | None:
    """How many times the time of `hot` the other cache conditions take. None where there is no pair to compare."""
    notes, rows = Notes(), []
    for hot in figures:
        if hot.key.scenario != "hot" or not hot.samples_ns:
            continue
        others = {f.key.scenario: f for f in figures if _same_but_condition(hot, f) and f.samples_ns}
        if len(others) < 2:
            continue
        cells = [_condition_cell(hot, others, scenario, notes) for scenario in reversed(SCENARIOS[:-1])]
        key = hot.key
        rows.append(
            (
                *_cells(case_words(hot), key.configuration, key.dtype, str(key.threads), key.vae),
                Cell(text=format_ns(hot.stats.median_ns if hot.stats else None), marks=notes.doubt(hot.doubts)),
                *cells,
            )
        )
    if not rows:
        return None
    words = ("case", "configuration", "dtype", "threads", "VAE")
    numbers = ("hot", *(f"{scenario} ÷ hot" for scenario in reversed(SCENARIOS[:-1])))
    table = Table(
        columns=_columns(words, numbers), rows=tuple(rows), notes=notes.sentences,
        caption="Times as multiples of hot's median, with their 95 % interval.",
    )  # fmt: skip
    return without_constant(table, _LIFTED)


def _same_but_condition(one: Figure, other: Figure) -> bool:
    names = ("case", "configuration", "host", "arch", "device", "dtype", "threads", "vae")
    shapes_fit = one.key.latent_shape == other.key.latent_shape or other.key.scenario == "warm"
    return shapes_fit and all(getattr(one.key, name) == getattr(other.key, name) for name in names)


def _condition_cell(hot: Figure, others: dict[str, Figure], scenario: str, notes: Notes) -> Cell:
    figure = others.get(scenario)
    if figure is None:
        unverified = others.get(f"{scenario}*")
        marks = () if unverified is None else notes.doubt(unverified.doubts)
        return Cell(text=NA, marks=marks, tone="quiet")
    try:
        ratio = ratio_of(figure, hot)  # the hot run is the faster one: this is a multiple of its time
    except MixedError:
        ratio = None
    if ratio is None:
        return Cell(text=NA, tone="quiet")
    between = "" if ratio.interval is None else f" ({interval_words(ratio.interval)})"
    marks = notes.doubt(figure.doubts)
    if figure.key.latent_shape != hot.key.latent_shape:
        larger = math.prod(figure.key.latent_shape) / max(1, math.prod(hot.key.latent_shape))
        size = f"{format_ratio(larger)} the elements of hot's, as a size not decoded before"
        marks += notes.mark(f"{scenario} decodes {size}; times are not corrected for it")
    return Cell(text=f"{format_ratio(ratio.value)}{between}, n={ratio.n_base}", marks=marks)


def caches_table(figures: Sequence[Figure]) -> Table | None:
    """What each run found in its caches. None where no run tells."""
    rows = []
    for figure in figures:
        runs = [run for run in figure.runs if run.counts]
        shapes = [run.shapes for run in runs if run.shapes is not None]
        served = dict.fromkeys(run.served for run in runs if run.served is not None)
        charges = [run.cache_charges for run in runs if run.cache_charges is not None]
        if not shapes and not served and not charges:
            continue
        words = (
            " and ".join(served),
            _span([one.requested for one in shapes]),
            _span([one.new for one in shapes if one.new is not None]),
            _span([len(one.not_in_hot) for one in shapes]) if figure.key.scenario == "warm" else "",
            _span(charges),
        )
        rows.append((*_identity(figure), *_cells(*words)))
    if not rows:
        return None
    numbers = ("convolution shapes", "new to the process", "that hot did not ask for", "kernel searches")
    table = Table(columns=_columns((*_IDENTITY, "served"), numbers), rows=tuple(rows))
    return without_constant(table, ("dtype", "threads", "VAE"))


def _span(counts: Sequence[int]) -> str:
    """ "3", or of runs that differ "3–5"."""
    if not counts:
        return NA
    return str(counts[0]) if min(counts) == max(counts) else f"{min(counts)}–{max(counts)}"


def failures_table(figures: Sequence[Figure]) -> Table | None:
    """Runs that are no figure, and why. None where there are none."""
    rows = tuple(
        (*_identity(figure), Cell(text=run.status, tone="bad"), *_cells(run.started_at, run.error or ""))
        for figure in figures
        for run in figure.failed
    )
    if not rows:
        return None
    columns = _columns((*_IDENTITY, "status", "started (UTC)", "reason"), ())
    return without_constant(Table(columns=columns, rows=rows), _LIFTED)
