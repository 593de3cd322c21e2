"""Pages around reports: one per published folder, and one to choose among them. No script, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .report import build_report
from .report_escape import html_text
from .report_html import page, render_html
from .report_words import counted, listed
from .results import Results

GENERATOR = '<meta name="generator" content="halo-vae publish">'
"""Tells a start page of ours from one that is somebody's own."""
_GROUPS = (
    ("data/single", "Case by case", "One case at a time, nothing sampled meanwhile: the figures to compare with."),
    ("data/nightly", "Nightly", "The same night after night, by a timer. Never compared with the others."),
    ("data/perf", "Instrumented runs", "The whole suite with load, memory, clocks and power read throughout."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One published folder."""

    folder: str
    results: Results


def render_target(results: Results, depth: int) -> str:
    """The report of one folder, `depth` folders below the start page."""
    up = "../" * depth
    links = (
        f'<p class="quiet"><a href="{up}data/index.html">All benchmarks</a> · '
        '<a href="results.jsonl">every sample</a> · <a href="bench.json">figures as JSON</a></p>'
    )
    return _with_generator(render_html(build_report(results), links=links))


def render_choice(targets: Sequence[Target], prefix: str) -> str:
    """The page to choose from; `prefix` leads to the folder that `data` is in."""
    parts = ['<header class="page"><h1>Halo VAE benchmarks</h1>', _facts(targets, prefix), "</header><main>"]
    for folder, title, about in _GROUPS:
        some = [t for t in targets if t.folder == folder or t.folder.startswith(f"{folder}/")]
        if some:
            parts.append(f"<section><h2>{title}</h2><p class='quiet'>{about}</p>")
            parts.append(_list(sorted(some, key=lambda t: t.folder, reverse=True), prefix))
            parts.append("</section>")
    parts.append("</main><footer>Lanes are never mixed, and machines never compared with each other.</footer>")
    return _with_generator(page("Halo VAE benchmarks", "\n".join(parts)))


def _facts(targets: Sequence[Target], prefix: str) -> str:
    n = sum(len(t.results.runs) for t in targets)
    return f'<p class="quiet">{counted(n, "run")} · <a href="{html_text(prefix)}bench.json">all figures as JSON</a></p>'


def _list(targets: Sequence[Target], prefix: str) -> str:
    rows = "".join(_row(target, prefix) for target in targets)
    head = "".join(f'<th scope="col">{title}</th>' for title in ("report", "machines", "cases", "runs", "last"))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="card small"><div class="scroll">{table}</div></div>'


def _row(target: Target, prefix: str) -> str:
    runs = target.results.runs
    hosts = sorted({f"{run.host} ({run.arch})" for run in runs})
    cells = (
        listed(hosts), str(len({run.case for run in runs})), str(len(runs)),
        max((run.started_at for run in runs), default="")[:16].replace("T", " "),
    )  # fmt: skip
    name = html_text(target.folder.rsplit("/", 1)[-1])
    link = f'<a href="{html_text(prefix + target.folder)}/">{name}</a>'
    return f"<tr><td>{link}</td>{''.join(f'<td>{html_text(cell)}</td>' for cell in cells)}</tr>"


def _with_generator(html: str) -> str:
    return html.replace("<meta name=\"viewport\"", f"{GENERATOR}\n<meta name=\"viewport\"", 1)
