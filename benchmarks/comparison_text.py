"""A comparison as markdown. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Sequence

from halo_vae.benchmarks.comparison import Comparison, EngineResult
from halo_vae.benchmarks.peak import render_peaks
from halo_vae.profiling.render.units import NA, format_bytes, format_seconds

NAMES = {
    "plain": "stock, untiled",
    "three_pass": "stock, tiled (mean of three passes)",
    "strips": "Halo VAE, strips",
    "tiles": "Halo VAE, tiles",
}


def render_comparison(result: Comparison) -> str:
    """The whole report."""
    r = result.request
    parts = [
        f"# {r.size_px}x{r.size_px} pixels, {r.precision}\n",
        f"torch {result.torch_version}, {result.cores or NA} core(s), load average {_load(result.load_before)} before "
        f"and {_load(result.load_after)} after; times: median of {r.runs} run(s), taken in turn; peak memory: median "
        f"of {r.processes} process(es).\n",
        _main_table(result),
        "\nTimes are at the thread count that suits each engine best; ratios below 1 are less than stock. Memory is "
        "above the loaded weights. Errors are against the untiled float32 picture in 0-1.\n",
        "## Times\n",
        _times_table(result),
        "\n## Convolution shapes\n",
        _shapes_table(result),
    ]
    planned = [e.peak for e in result.engines if e.peak is not None and e.peak.predicted_bytes is not None]
    if planned:
        parts += ["\n## Peak memory as promised (MiB)\n", render_peaks(planned)]
    if result.doubts:
        parts += ["\n## Doubts\n", "\n".join(f"- {doubt}" for doubt in result.doubts)]
    return "\n".join(parts)


def _main_table(result: Comparison) -> str:
    rows = [["engine", "time", "× untiled", "× tiled", "peak memory", "× untiled", "× tiled", "max error", "PSNR"]]
    plain, tiled = result.of("plain"), result.of("three_pass")
    for e in result.engines:
        psnr = "identical" if e.fidelity.mse == 0 else f"{e.fidelity.psnr_db:.1f} dB"
        rows.append([
            NAMES[e.engine], format_seconds(e.best_ns / 1e9), _ratio(e.best_ns, plain and plain.best_ns),
            _ratio(e.best_ns, tiled and tiled.best_ns), format_bytes(_peak(e)), _ratio(_peak(e), _peak(plain)),
            _ratio(_peak(e), _peak(tiled)), f"{e.fidelity.max_abs:.1e}", psnr,
        ])  # fmt: skip
    return _table(rows)


def _times_table(result: Comparison) -> str:
    rows = [["engine", "threads", "median", "spread", "runs"]]
    for case in result.times:
        runs = ", ".join(f"{ns / 1e9:.2f}" for ns in case.samples_ns)
        median = format_seconds(case.median_ns / 1e9)
        rows.append([NAMES[case.engine], str(case.threads), median, f"{case.spread:.0%}", f"{runs} s"])
    return _table(rows)


def _shapes_table(result: Comparison) -> str:
    rows = [["engine", "resolutions", "distinct shapes", "new at each after the first"]]
    for count in result.shapes:
        later = count.new_at_each[1:]
        new = f"{min(later)} to {max(later)}" if later else NA
        rows.append([NAMES[count.engine], str(len(count.new_at_each)), str(count.total), new])
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|---" + "|---:" * (len(rows[0]) - 1) + "|", *body])


def _peak(engine: EngineResult | None) -> int | None:
    return None if engine is None or engine.peak is None else engine.peak.measured_bytes


def _ratio(value: float | None, base: float | None) -> str:
    return NA if value is None or not base else f"{value / base:.2f}"


def _load(load: float | None) -> str:
    return NA if load is None else f"{load:.2f}"
