"""A comparison of two decodes as titled rows of words."""

from __future__ import annotations

from ..ab.comparison import Comparison
from ..ab.heat import legend
from ..ab.quality import Quality
from ..ab.run import SideRuns
from .sections import Row, Section
from .text import render_sections
from .units import NA, format_bytes, format_ns, format_ratio, format_shape, format_share


def render_comparison(result: Comparison) -> str:
    """The whole report as a panel."""
    title = f"Halo VAE · benchmark on {result.device}: {format_shape(result.latent_shape)}"
    return render_sections(title, comparison_sections(result))


def comparison_sections(result: Comparison) -> tuple[Section, ...]:
    """Verdict, times, memory, error, the scale of the difference picture, doubts."""
    made = (
        _verdict(result), _time(result), _memory(result), _error(result.quality), _scale(result.quality),
        _doubts(result),
    )  # fmt: skip
    return tuple(section for section in made if section.rows)


def _verdict(result: Comparison) -> Section:
    rows = (
        Row(label="verdict", value=result.verdict.sentence),
        Row(label="reference", value=result.reference.sentence),
        Row(label="Halo", value=result.ours or NA),
    )
    return Section(title="Stock against Halo", rows=rows)


def _time(result: Comparison) -> Section:
    rows = [_median(side) for side in (result.stock, result.halo)]
    ratio = result.verdict.speedup
    if ratio is not None:
        note = f"{format_ratio(ratio.low)} to {format_ratio(ratio.high)}; above 1 Halo is faster"
        rows.append(Row(label="stock ÷ Halo", value=format_ratio(ratio.ratio), note=note))
    rows += [_before(side) for side in (result.stock, result.halo) if side.warm_ups_ns or side.memory_run_ns]
    return Section(title="Time, the median of runs taken in turn", rows=tuple(rows))


def _median(side: SideRuns) -> Row:
    if side.failure is not None:
        return Row(label=side.name, value=side.failure.status.value.replace("_", " "), note=side.failure.sentence)
    s = side.samples
    note = f"{format_ns(s.min_ns)} to {format_ns(s.max_ns)}, n={s.n}, spread {format_share(s.spread)}"
    return Row(label=side.name, value=format_ns(s.median_ns), note=note)


def _before(side: SideRuns) -> Row:
    parts = [f"warm-up {', '.join(map(format_ns, side.warm_ups_ns))}"] if side.warm_ups_ns else []
    parts += [f"run for the memory {format_ns(side.memory_run_ns)}"] if side.memory_run_ns else []
    return Row(label=f"{side.name}, not counted", value="; ".join(parts))


def _memory(result: Comparison) -> Section:
    if result.memory_of is None:
        return Section(title="Peak memory", rows=())
    rows = [Row(label=side.name, value=format_bytes(side.peak_bytes)) for side in (result.stock, result.halo)]
    rows.append(Row(label="Halo ÷ stock", value=format_ratio(result.memory_ratio), note="below 1 Halo takes less"))
    return Section(title=f"Peak memory: {result.memory_of}", rows=tuple(rows))


def _error(quality: Quality | None) -> Section:
    title = "Error, both pictures in 0 to 1"
    if quality is None:
        return Section(title=title, rows=(Row(label="max error", value=NA, note="a side gave no picture to compare"),))
    if quality.problem is not None:
        return Section(title=title, rows=(Row(label="max error", value=NA, note=quality.problem),))
    most = quality.limits
    ceiling = "any" if most.max_error is None else f"up to {most.max_error:g}"
    psnr = NA if quality.psnr_db is None else f"{quality.psnr_db:.1f} dB"
    rows = (
        Row(label="max error", value=_error_value(quality.max_error), note=f"{ceiling} passes: {most.reason}"),
        Row(label="mean error", value=_error_value(quality.mean_error), note=f"up to {most.mean_error:g} passes"),
        Row(
            label="PSNR",
            value="infinite" if quality.identical else psnr,
            note="the pictures are identical" if quality.identical else "peak value 1",
        ),
        Row(label="worst picture", value=str(quality.worst_picture), note="counted from 0, frames one after another"),
    )
    return Section(title=title, rows=rows)


def _scale(quality: Quality | None) -> Section:
    title = "Colours of the difference picture: largest difference of a pixel's channels, logarithmic"
    if quality is None or (quality.max_error is None and "inf" not in (quality.problem or "")):
        return Section(title=title, rows=())
    rows = [Row(label=name, value=meaning) for name, meaning in legend()]
    if quality.identical:
        rows.insert(0, Row(label="all black", value="the pictures are identical"))
    return Section(title=title, rows=tuple(rows))


def _doubts(result: Comparison) -> Section:
    rows = tuple(Row(label=doubt.short, value=doubt.sentence) for doubt in result.doubts)
    return Section(title="Doubts", rows=rows)


def _error_value(value: float | None) -> str:
    return NA if value is None else "0" if value == 0 else f"{value:.2e}"
