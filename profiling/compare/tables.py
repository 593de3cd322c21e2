"""The tables of a comparison: relative speed, resources, rounds. Text only; whoever writes it escapes it."""

from __future__ import annotations

from collections.abc import Sequence

from ..bench.report_parts import Cell, Column, Notes, Table
from ..bench.report_words import ops_words
from ..render.units import NA, format_bytes, format_ns, format_shape, format_share
from .figures import Figure, Relative, average, figures_of, relative
from .records import Comparison, DeviceKind

FAILED = "x"
AVERAGE = "AVERAGE"
_CHANCE = "the difference may be chance: the medians lie within each other's middle half"


def case_title(figure: Figure) -> str:
    """ "SD, plain torch 128×128": what is decoded, in pixels."""
    case = figure.case
    batch = f" ×{case.batch}" if case.batch > 1 else ""
    frames = f", {1 + 4 * (case.latent_frames - 1)} frames" if case.family == "wan21" else ""
    return f"{case.title}: {case.width_px}×{case.height_px}{batch}{frames}"


def relative_table(comparison: Comparison, device: DeviceKind) -> Table:
    """Decodes per second of each installation as a share of the reference's."""
    figures, notes, names = figures_of(comparison, device), Notes(), comparison.installations
    rows = []
    columns: dict[str, list[Relative | None]] = {name: [] for name in names}
    for case in comparison.cases:
        reference = figures[case.key, comparison.reference]
        cells = [Cell(text=case_title(reference))]
        for name in names:
            figure = figures[case.key, name]
            found = relative(figure, reference)
            columns[name].append(found)
            cells.append(_relative_cell(figure, found, reference, notes))
        rows.append(tuple(cells))
    rows.append((Cell(text=AVERAGE), *(_average_cell(columns[name], notes) for name in names)))
    return Table(
        columns=_head(["case"], names), rows=tuple(rows), notes=notes.sentences,
        caption=f"Decodes per second as a share of {comparison.reference}'s, by medians; more is faster. {AVERAGE} "
        f"is the geometric mean. {FAILED} failed, see its note.",
    )  # fmt: skip


def _relative_cell(figure: Figure, found: Relative | None, reference: Figure, notes: Notes) -> Cell:
    if figure.failure is not None:
        return Cell(text=FAILED, marks=notes.mark(f"{figure.installation}: {figure.failure}"), tone="bad")
    doubts = notes.doubt(figure.doubts)
    if found is None:
        why = f"no share: {reference.installation}, which is 100 %, failed here"
        return Cell(text=NA, marks=(*notes.mark(why), *doubts))
    chance = () if found.apart else notes.mark(_CHANCE)
    return Cell(text=percent_words(found.percent), marks=(*chance, *doubts))


def _average_cell(column: Sequence[Relative | None], notes: Notes) -> Cell:
    known = [one for one in column if one is not None]
    mean = average(list(column))
    if mean is None:
        return Cell(text=FAILED if column else NA, marks=notes.mark("no case can be compared"), tone="bad")
    few = () if len(known) == len(column) else notes.mark(f"of {len(known)} of {len(column)} cases")
    return Cell(text=percent_words(mean), marks=few)


def resources_table(comparison: Comparison, device: DeviceKind) -> Table:
    """What each installation's decodes took: cores, memory, time. Medians over rounds."""
    figures, notes = figures_of(comparison, device), Notes()
    rows = []
    for case in comparison.cases:
        base = _memory(figures[case.key, comparison.reference])
        for name in comparison.installations:
            figure = figures[case.key, name]
            rows.append(_resources_row(figure, base, notes))
    memory = "the GPU's, as torch's allocator took it" if device == "gpu" else "of the whole process, libraries too"
    return Table(
        columns=(
            Column(title="case"), Column(title="installation"),
            *(Column(title=title, is_number=True) for title in (
                "cores", "peak memory", "memory relative", "wall time", "CPU time", "CPU use", "CPU efficiency",
            )),
        ),
        rows=tuple(rows), notes=notes.sentences,
        caption=f"Medians over rounds, times of one decode. Cores: threads of torch. Peak memory: {memory}. CPU use: "
        "CPU time ÷ wall time. CPU efficiency: CPU use ÷ cores.",
    )  # fmt: skip


def _resources_row(figure: Figure, base: float | None, notes: Notes) -> tuple[Cell, ...]:
    head = (Cell(text=case_title(figure)), Cell(text=figure.installation))
    if figure.failure is not None:
        mark = notes.mark(f"{figure.installation}: {figure.failure}")
        return (*head, Cell(text=FAILED, marks=mark, tone="bad"), *(Cell(text="–"),) * 6)
    threads = figure.median(lambda m: m.threads)
    wall = figure.median(lambda m: m.ns / m.iterations)
    cpu = figure.median(lambda m: m.cpu_ns / m.iterations)
    use = figure.median(lambda m: m.cpu_ns / m.ns)
    memory = _memory(figure)
    share = None if memory is None or not base else memory / base
    texts = (
        NA if threads is None else f"{threads:g}", format_bytes(memory),
        NA if share is None else percent_words(100 * share), format_ns(wall), format_ns(cpu), _use_words(use),
        NA if use is None or not threads else _use_words(use / threads),
    )  # fmt: skip
    return (*head, *(Cell(text=text) for text in texts))


def _memory(figure: Figure) -> float | None:
    if figure.failure is not None:
        return None
    return figure.median(lambda m: m.gpu_peak_bytes if figure.device == "gpu" else m.peak_bytes)


def rounds_table(comparison: Comparison, device: DeviceKind) -> Table:
    """Statistics of every installation's rounds, doubts included."""
    figures, notes = figures_of(comparison, device), Notes()
    titles = (
        "min", "max", "mean", "stdev", "median", "IQR", "outliers", "OPS", "rounds", "iterations",
    )  # fmt: skip
    rows = []
    for case in comparison.cases:
        for name in comparison.installations:
            figure = figures[case.key, name]
            marks = notes.doubt(figure.doubts)
            if figure.failure is not None:
                marks = (*notes.mark(f"{name}: {figure.failure}"), *marks)
            rows.append(_rounds_row(figure, marks, len(titles)))
    return Table(
        columns=(
            Column(title="case"), Column(title="installation"), *(Column(title=t, is_number=True) for t in titles),
        ),
        rows=tuple(rows), notes=notes.sentences,
        caption="Times of one decode. A round is one process: the VAE is opened, one decode warms up and is in no "
        "figure, then so many iterations are timed together. OPS: 1 ÷ mean, per second. Outliers: more than 1.5 IQR "
        "outside the quartiles; they stay in every statistic.",
    )  # fmt: skip


def _rounds_row(figure: Figure, marks: tuple[int, ...], width: int) -> tuple[Cell, ...]:
    found = figure.stats
    bad = figure.failure is not None
    head = (Cell(text=case_title(figure)), Cell(text=figure.installation, marks=marks))
    if found is None:
        return (*head, Cell(text=FAILED, tone="bad"), *(Cell(text="–"),) * (width - 1))
    texts = (
        *map(format_ns, (found.min_ns, found.max_ns, found.mean_ns, found.stdev_ns, found.median_ns, found.iqr_ns)),
        str(len(found.outliers)), ops_words(found.ops), str(found.n), str(figure.case.iterations),
    )  # fmt: skip
    return (*head, *(Cell(text=text, tone="quiet" if bad else "plain") for text in texts))


def cases_table(comparison: Comparison) -> Table:
    """What each case is."""
    shapes = {one.case: one.latent_shape for one in comparison.rounds}
    ways = {"baseline": "plain torch", "phase3": "the engine"}
    rows = tuple(
        tuple(
            Cell(text=text) for text in (
                case.key, case.title, case.vae, format_shape(shapes.get(case.key) or None), ways[case.way],
                case.precision,
            )
        )
        for case in comparison.cases
    )  # fmt: skip
    titles = ("case", "title", "VAE", "latent", "decoded by", "precision")
    return Table(columns=tuple(Column(title=title) for title in titles), rows=rows)


def percent_words(percent: float) -> str:
    """ "100.00 %"."""
    return f"{percent:.2f} %"


def _use_words(share: float | None) -> str:
    """More than 100 % is possible."""
    return NA if share is None else format_share(share) if share <= 1 else f"{100 * share:.1f} %"


def _head(words: Sequence[str], names: Sequence[str]) -> tuple[Column, ...]:
    return (*(Column(title=w) for w in words), *(Column(title=n, is_number=True) for n in names))
