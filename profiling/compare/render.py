"""A comparison as Markdown, and as one JSON object."""

from __future__ import annotations

from typing import Any

from ..bench.report_markdown import render_markdown
from ..bench.report_parts import Part, Report, Section, Text
from ..codec import encode
from ..render.units import NA
from .causes import causes_of
from .config_rows import config_rows, config_table
from .figures import average, figures_of, relative
from .records import Comparison, DeviceKind, Setup
from .tables import cases_table, relative_table, resources_table, rounds_table


def render_comparison(comparison: Comparison) -> str:
    """All tables as Markdown, and what `torch.__config__` says in full."""
    return render_markdown(report_of(comparison)) + "".join(
        _full_text(name, setup)
        for name in comparison.installations
        if (setup := comparison.setup_of(name)) is not None
    )


def report_of(comparison: Comparison) -> Report:
    """The parts of it: CPU and GPU apart, configurations at the end."""
    sections = []
    for device in comparison.devices:
        where = device.upper()
        sections += [
            Section(title=f"Relative speed, {where}", parts=(relative_table(comparison, device),)),
            Section(title=f"Resources, {where}", parts=(resources_table(comparison, device),)),
            Section(title=f"Rounds, {where}", parts=(rounds_table(comparison, device),)),
        ]
    sections += [
        Section(title="Cases", parts=(cases_table(comparison),)),
        Section(title="Likely causes", parts=_causes(comparison)),
        Section(title="Configurations", parts=(config_table(comparison),)),
    ]
    return Report(title=_title(comparison), facts=_facts(comparison), sections=tuple(sections))


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Every round and setup, and what is computed of them under `figures`, `config` and `causes`."""
    return {
        **encode(comparison),
        "figures": {device: _figures_json(comparison, device) for device in comparison.devices},
        "config": encode(config_rows(comparison)),
        "causes": encode(causes_of(comparison)),
    }


def _figures_json(comparison: Comparison, device: DeviceKind) -> dict[str, Any]:
    figures = figures_of(comparison, device)
    rows = []
    columns: dict[str, list[Any]] = {name: [] for name in comparison.installations}
    for (case, name), figure in figures.items():
        found = relative(figure, figures[case, comparison.reference])
        columns[name].append(found)
        stats = figure.stats
        rows.append({
            "case": case, "installation": name, "failure": figure.failure,
            "relative_percent": None if found is None else found.percent,
            "may_be_chance": None if found is None else not found.apart,
            "stats": None if stats is None else {
                **encode(stats), "iqr_ns": stats.iqr_ns, "ops": stats.ops,
            },
            "doubts": [doubt.sentence for doubt in figure.doubts],
        })  # fmt: skip
    return {"rows": rows, "average_percent": {name: average(column) for name, column in columns.items()}}


def _title(comparison: Comparison) -> str:
    names = comparison.installations
    return "PyTorch installations compared: " + (names[0] if len(names) == 1 else f"{', '.join(names)}")


def _facts(comparison: Comparison) -> tuple[str, ...]:
    setup = next((read.setup for read in comparison.setups if read.setup is not None), None)
    machine = () if setup is None else (
        f"{setup.environment.cpu or NA} with {setup.environment.cpu_count or '?'} logical processors",
        setup.environment.os,
    )  # fmt: skip
    ended = ("cancelled before its end",) if comparison.cancelled else ()
    return (
        f"Measured on {comparison.host}, {comparison.started_at}", *machine,
        f"{comparison.rounds_asked} rounds of a process each, installations in turn",
        f"{comparison.reference} is 100 %", *ended,
    )  # fmt: skip


def _causes(comparison: Comparison) -> tuple[Part, ...]:
    found = causes_of(comparison)
    if not found:
        return (Text(text="Nothing is known to differ that changes speed."),)
    return tuple(Text(text=f"{cause.sentence}.") for cause in found)


def _full_text(name: str, setup: Setup) -> str:
    """As a block of code: nothing in it is markup, whatever its installation says."""
    label = " ".join(name.split())
    text = f"{setup.build.rstrip()}\n\n{setup.parallel.rstrip()}"
    body = "\n".join(f"    {line.rstrip()}".rstrip() for line in text.splitlines())
    return f"\n## What torch says of itself: {label}\n\n{body}\n"
