"""A report of one lane: what was measured, how right it is, every run, and what to doubt. Depends on results alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from ..environment import Environment
from ..render.sections import built_with, device_note
from ..render.units import NA, format_bytes, format_ns, format_ratio, format_share
from .cases import CONFIGURATIONS, SCENARIOS, Lane
from .lanes import Figure, figures_of, in_lane, ratio_of
from .report_parts import Cell, Chart, Column, Notes, Part, Report, Section, Table, Text
from .report_tables import ablation_table, baseline_of, caches_table, conditions_table, failures_table, results_table
from .report_words import case_words, counted, listed
from .results import Results, RunLine, SeriesLine
from .stats import geometric_mean
from .svg import Strip, line_chart, scatter
from .verdict import verdict_of

Format = Literal["md", "html", "json"]
FORMATS: tuple[Format, ...] = ("md", "html", "json")
_SHOWN_SAMPLES = 64


def build_report(results: Results, lane: Lane | None = None) -> Report:
    """The report of a lane. MixedError where `lane` is None and the results are of several."""
    chosen = in_lane(results, lane)
    figures = figures_of(chosen.runs)
    sections: list[Section] = []
    for machine in _machines(figures):
        sections += _machine_sections(machine)
    sections += _series_sections(chosen.series)
    if chosen.runs:
        sections.append(Section(title="Environments", parts=(_environments(chosen.runs),)))
    if chosen.problems:
        sections.append(Section(title="Lines left out", parts=tuple(Text(text=p) for p in chosen.problems)))
    return Report(
        title="Halo VAE benchmarks",
        facts=_facts(chosen, figures),
        sections=tuple(sections) or (Section(title="Results", parts=(Text(text="There are no runs."),)),),
        failures=tuple(_failures(figures)),
    )


def render(report: Report, fmt: Literal["md", "html"]) -> str:
    """As text of a format."""
    if fmt == "html":
        from .report_html import render_html

        return render_html(report)
    from .report_markdown import render_markdown

    return render_markdown(report)


def _facts(results: Results, figures: Sequence[Figure]) -> tuple[str, ...]:
    runs = results.runs
    lanes = tuple(dict.fromkeys((*(run.lane for run in runs), *(line.lane for line in results.series))))
    started = sorted(run.started_at for run in runs)
    facts = [f"lane {lane}" for lane in lanes]
    facts += [counted(len(runs), "run"), f"{sum(len(f.samples_ns) for f in figures)} samples"]
    days = sorted({day[:10] for day in (started[0], started[-1])}) if started else []
    facts.append(" to ".join(days))
    doubtful = sum(bool(figure.doubts) for figure in figures)
    if doubtful:
        facts.append(f"{doubtful} of {counted(len(figures), 'figure')} doubtful")
    if results.skipped:
        facts.append(f"{counted(results.skipped, 'line')} left out")
    return tuple(filter(None, facts))


def _failures(figures: Sequence[Figure]) -> Iterator[str]:
    for figure in figures:
        verdict = verdict_of(figure)
        if verdict.passed is False:
            key = figure.key
            what = f"{case_words(figure)}, {key.configuration}, {key.scenario}, {key.dtype}"
            yield f"{what} on {key.host}: {verdict.sentence}"


def _machines(figures: Sequence[Figure]) -> list[tuple[Figure, ...]]:
    """Figures of one machine and device each: nothing is ever compared across."""
    found: dict[tuple[str, str, str], list[Figure]] = {}
    for figure in figures:
        found.setdefault((figure.key.host, figure.key.arch, figure.key.device), []).append(figure)
    return [tuple(some) for some in found.values()]


def _machine_sections(figures: Sequence[Figure]) -> list[Section]:
    key = figures[0].key
    on = f" on {key.host}, {key.arch} ({key.device})"
    summary = _summary(figures)
    made = [
        Section(title=f"Measured results{on}", parts=(results_table(figures),)),
        Section(title=f"Phases against the baseline{on}", parts=(*summary, ablation_table(figures))),
    ]
    for title, table in (
        ("Ratios between cache conditions", conditions_table(figures)),
        ("Caches", caches_table(figures)),
        ("Runs without a figure", failures_table(figures)),
    ):
        if table is not None:
            made.append(Section(title=title + on, parts=(table,)))
    charts = tuple(_charts(figures))
    if charts:
        about = Text(
            text="Every sample is a point, in order from top to bottom of its row; the line is the median and the bar "
            "the middle half. Warm-ups are not shown. The time axis does not begin at 0."
        )
        made.append(Section(title=f"Every run{on}", parts=(about, *charts)))
    return made


def _summary(figures: Sequence[Figure]) -> tuple[Part, ...]:
    """Geometric mean of the speeds of each configuration and condition over cases whose pictures are not wrong."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for figure in figures:
        base = baseline_of(figure, figures)
        ratio = ratio_of(base, figure) if base is not None else None
        if ratio is not None and verdict_of(figure).passed is not False:
            ratios.setdefault(figure.key.configuration, {}).setdefault(figure.key.scenario, []).append(ratio.value)
    if not ratios:
        return ()
    conditions = [s for s in reversed(SCENARIOS) if any(s in found for found in ratios.values())]
    rows = []
    for configuration in (c for c in CONFIGURATIONS if c in ratios):
        found = ratios[configuration]
        rows.append((Cell(text=configuration), *(_mean_cell(found.get(condition, ())) for condition in conditions)))
    columns = (Column(title="configuration"), *(Column(title=c, is_number=True) for c in conditions))
    caption = "Speed ÷ baseline, geometric mean over figures whose pictures are not wrong, and how many those are."
    return (Table(columns=columns, rows=tuple(rows), caption=caption),)


def _mean_cell(ratios: Sequence[float]) -> Cell:
    return Cell(text=f"{format_ratio(geometric_mean(ratios))} (n={len(ratios)})" if ratios else "")


def _charts(figures: Sequence[Figure]) -> Iterator[Chart]:
    """One per case."""
    cases: dict[str, list[Figure]] = {}
    for figure in figures:
        if figure.samples_ns:
            cases.setdefault(case_words(figure), []).append(figure)
    for title, some in cases.items():
        differing = [n for n in ("dtype", "threads", "vae") if len({getattr(f.key, n) for f in some}) > 1]
        labels = [_label(figure, differing) for figure in some]
        strips = [_strip_of(figure, label) for figure, label in zip(some, labels, strict=True)]
        yield Chart(title=title, svg=scatter(strips, f"every run of {title}"), data=_samples_table(some, labels))


def _label(figure: Figure, differing: Sequence[str]) -> str:
    key = figure.key
    words = {"dtype": key.dtype, "threads": counted(key.threads, "thread"), "vae": key.vae}
    label = ", ".join((f"{key.configuration} {key.scenario}", *(words[n] for n in differing)))
    return label if len(label) <= 38 else f"{label[:37]}…"


def _strip_of(figure: Figure, label: str) -> Strip:
    stats = figure.stats
    if stats is None:
        raise ValueError(f"{label} has no samples; only figures with samples are drawn")
    return Strip(
        label=label, colour=figure.key.configuration, samples_ns=figure.samples_ns, median_ns=stats.median_ns,
        q1_ns=stats.q1_ns, q3_ns=stats.q3_ns, is_hollow=figure.key.scenario.endswith("*"),
    )  # fmt: skip


def _samples_table(figures: Sequence[Figure], labels: Sequence[str]) -> Table:
    notes, rows = Notes(), []
    for figure, label in zip(figures, labels, strict=True):
        shown = [format_ns(ns) for ns in figure.samples_ns[:_SHOWN_SAMPLES]]
        more = len(figure.samples_ns) - len(shown)
        text = ", ".join(shown) + (f" and {more} more" if more else "")
        cells = (label, str(len(figure.samples_ns)), text)
        marks = notes.doubt(figure.doubts)
        rows.append((Cell(text=cells[0]), Cell(text=cells[1], marks=marks), Cell(text=cells[2])))
    columns = (Column(title="figure"), Column(title="n", is_number=True), Column(title="samples in order"))
    return Table(columns=columns, rows=tuple(rows), notes=notes.sentences)


def _series_sections(series: Sequence[SeriesLine]) -> list[Section]:
    found: dict[tuple[str, str], list[Chart]] = {}
    for line in series:
        known = [value for value in line.values if value is not None]
        if not known:
            continue
        words = [_reading(value, line.unit) for value in (min(known), sum(known) / len(known), max(known))]
        title = f"{line.name}, up to {words[2]}"
        data = Table(
            columns=tuple(Column(title=t, is_number=True) for t in ("readings", "failed", "least", "mean", "most")),
            rows=((Cell(text=str(len(known))), Cell(text=str(len(line.values) - len(known))),
                   *(Cell(text=word) for word in words)),),
        )  # fmt: skip
        chart = Chart(title=title, svg=line_chart(line.at_ns, line.values, title, words[2]), data=data)
        found.setdefault((line.host, line.session), []).append(chart)
    return [
        Section(title=f"Readings on {host}, session {session}", parts=tuple(charts))
        for (host, session), charts in found.items()
    ]


def _reading(value: float, unit: str) -> str:
    if unit == "share":
        return format_share(value)
    if unit.startswith("bytes"):
        return format_bytes(value) + unit.removeprefix("bytes")
    for prefix, size in (("G", 1e9), ("M", 1e6)):
        if unit == "Hz" and value >= size:
            return f"{value / size:.2f} {prefix}Hz"
    return f"{value:.3g} {unit}"


def _environments(runs: Sequence[RunLine]) -> Table:
    """One column per environment, so that differences meet the eye."""
    found: dict[str, Environment] = {}
    hosts: dict[str, dict[str, None]] = {}
    for run in runs:
        found.setdefault(run.environment_id, run.environment)
        hosts.setdefault(run.environment_id, {})[run.host] = None
    found = dict(sorted(found.items()))
    facts = [("machine", [listed(tuple(hosts[key])) for key in found])]
    words = [_environment_words(e) for e in found.values()]
    facts += [(name, [one[name] for one in words]) for name in words[0]]
    rows = tuple((Cell(text=name), *(Cell(text=value) for value in values)) for name, values in facts)
    return Table(columns=(Column(title="environment"), *(Column(title=key) for key in found)), rows=rows)


def _environment_words(e: Environment) -> dict[str, str]:
    return {
        "device": ", ".join(filter(None, (e.device, device_note(e)))),
        "CPU": e.cpu or NA,
        "logical processors": NA if e.cpu_count is None else str(e.cpu_count),
        "threads": str(e.threads),
        "torch": e.torch,
        "built with": ", ".join(built_with(e)) or NA,
        "Python": e.python,
        "system": f"{e.os}, {e.machine}",
        "variables": ", ".join(f"{v.name}={v.value}" for v in e.variables) or "none that matter",
    }
