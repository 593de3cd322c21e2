"""Memory over time as a picture. Needs matplotlib, the extra `charts`, imported when a chart is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..optim.errors import HaloError
from .record import DecodeRecord
from .trace_layout import lay_out
from .trace_log import TraceLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 1 << 20
_LABELS = {"allocated": "allocated by torch", "process": "resident set of the process"}
_LINE, _PROMISE, _PEAK, _QUIET = "#1f6f8b", "#c8553d", "#3a3a3a", "#8a8a8a"
_CHARACTERS = 190
"""Characters of an op's name that fit the width of the chart."""


class ChartError(HaloError):
    """There is nothing to draw, or nothing to draw with."""


def write_memory_chart(record: DecodeRecord, path: Path) -> None:
    """Draw the memory of a decode over time into a PNG file.

    A step per sample, the level at the start plus the predicted peak, the measured peak, and the ops below.
    ChartError where matplotlib is missing or the record has no samples (it needs level `per_op`); OSError if the disk
    refuses.
    """
    trace = record.trace
    if trace is None or trace.memory_of is None or len(trace.memory_bytes) < 2:
        raise ChartError("this record holds no memory samples; decode at profile level per_op to have them")
    figure, canvas = _new_figure()
    axes = figure.add_axes((0.09, 0.27, 0.89, 0.57))
    below = figure.add_axes((0.09, 0.12, 0.89, 0.1), sharex=axes)
    _draw_memory(axes, record, trace)
    _draw_ops(below, record, trace)
    figure.suptitle(_title(record), x=0.09, y=0.965, ha="left", fontsize=11)
    canvas.print_png(str(path))


def _new_figure() -> tuple[Any, Any]:
    """A figure with a canvas of its own: neither pyplot nor a backend is chosen for the process."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ChartError("charts need matplotlib; install it (pip install 'halo-vae[charts]')") from None
    figure = Figure(figsize=(10, 5), dpi=110, facecolor="white")
    return figure, FigureCanvasAgg(figure)


def _title(record: DecodeRecord) -> str:
    identity, latent = record.identity, "×".join(map(str, record.request.latent_shape))
    ending = "" if record.error is None else f", {record.status.value}"
    return f"{identity.family} on {identity.device}, latent {latent}, {record.wall_ns / 1e9:.2f} s{ending}"


def _draw_memory(axes: Axes, record: DecodeRecord, trace: TraceLog) -> None:
    """The samples, and the two figures that they are held against."""
    seconds, mib = [], []
    at_ns = 0
    for after_ns, nbytes in zip(trace.memory_after_ns, trace.memory_bytes, strict=True):
        at_ns += after_ns
        seconds.append(at_ns / 1e9)
        mib.append(nbytes / MIB)
    assert trace.memory_of is not None
    low = min(mib)
    axes.fill_between(seconds, mib, low, step="post", color=_LINE, alpha=0.15, linewidth=0)
    axes.step(seconds, mib, where="post", color=_LINE, linewidth=1.2, label=_LABELS[trace.memory_of])
    memory = record.memory
    reading = None if memory is None else memory.allocated if trace.memory_of == "allocated" else memory.process
    if memory is not None and reading is not None and reading.start_bytes is not None and memory.planned is not None:
        promised = (reading.start_bytes + memory.planned.total) / MIB
        text = f"start + predicted peak ({memory.planned.total / MIB:.0f} MiB)"
        axes.axhline(promised, color=_PROMISE, linewidth=1, linestyle="--", label=text)
    if reading is not None and reading.peak_bytes is not None:
        text = "measured peak" + (" since process start" if reading.since_process_start else "")
        axes.axhline(reading.peak_bytes / MIB, color=_PEAK, linewidth=1, linestyle=":", label=text)
    axes.set_ylabel("MiB", color=_PEAK)
    axes.set_xlim(0, record.wall_ns / 1e9)
    axes.margins(y=0.08)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    axes.tick_params(labelbottom=False, length=0, colors=_PEAK)
    _hide_frame(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.005, 1.1), ncols=3, frameon=False, fontsize=8, borderaxespad=0)


def _draw_ops(axes: Axes, record: DecodeRecord, trace: TraceLog) -> None:
    """Ops as a strip, with their names where they fit."""
    ops = [s for s in lay_out(record, trace)[0] if s.kind == "op"]
    for i, op in enumerate(ops):
        shade = "#b9cdd4" if i % 2 else "#d9e4e8"
        axes.axvspan(op.start_ns / 1e9, op.end_ns / 1e9, color=shade, linewidth=0)
        short = op.name.removeprefix("decoder.")
        if (op.end_ns - op.start_ns) * _CHARACTERS < record.wall_ns * (len(short) + 1):
            continue  # its name would run into its neighbours
        axes.text(
            (op.start_ns + op.end_ns) / 2e9, 0.5, short, ha="center", va="center", fontsize=6, color=_PEAK, clip_on=True
        )  # fmt: skip
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_xlabel("seconds", color=_PEAK)
    axes.set_ylabel("ops", color=_PEAK, rotation=0, ha="right", va="center")
    axes.tick_params(length=0, colors=_PEAK)
    _hide_frame(axes)


def _hide_frame(axes: Axes) -> None:
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
