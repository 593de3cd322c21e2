"""`bench.json`: every figure with its statistics, for other programs. Lanes stay apart, ratios within a machine."""

from __future__ import annotations

import json
from typing import Any

from ..codec import encode
from .lanes import Figure, Ratio, figures_of, in_lane, lanes_in, ratio_of
from .report_tables import baseline_of
from .results import Results
from .verdict import verdict_of

SCHEMA_VERSION = 1
"""Of `bench.json`. History: 1, the first."""


def aggregate(results: Results) -> dict[str, Any]:
    """A JSON object, equal for equal results: lane to figures, and the environments that they name."""
    lanes: dict[str, Any] = {}
    for lane in lanes_in(results):
        figures = figures_of(in_lane(results, lane).runs)
        lanes[lane] = [_figure(figure, figures) for figure in figures]
    environments = {run.environment_id: encode(run.environment) for run in results.runs}
    return {
        "schema_version": SCHEMA_VERSION, "kind": "bench", "lanes": lanes,
        "environments": dict(sorted(environments.items())),
    }  # fmt: skip


def to_json(value: dict[str, Any]) -> str:
    """As text with a line feed at its end; no inf, no nan."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, indent=1) + "\n"


def _figure(figure: Figure, figures: tuple[Figure, ...]) -> dict[str, Any]:
    stats, verdict, base = figure.stats, verdict_of(figure), baseline_of(figure, figures)
    ratio = ratio_of(base, figure) if base is not None else None
    return {
        **encode(figure.key),
        "n": 0 if stats is None else stats.n,
        "samples_ns": list(figure.samples_ns),
        "stats": None if stats is None else {**encode(stats), "iqr_ns": stats.iqr_ns, "ops": stats.ops},
        "speed_over_baseline": None if ratio is None or base is None else _ratio(ratio, base),
        "max_error": figure.max_error,
        "mean_error": figure.mean_error,
        "psnr_db": figure.psnr_db,
        "psnr_infinite": figure.psnr_infinite,
        "peak_bytes": figure.peak_bytes,
        "passed": verdict.passed,
        "verdict": verdict.sentence,
        "doubts": [doubt.sentence for doubt in figure.doubts],
        "failures": [{"status": run.status, "error": run.error, "run_id": run.run_id} for run in figure.failed],
        "environment_ids": list(dict.fromkeys(run.environment_id for run in figure.runs)),
    }


def _ratio(ratio: Ratio, base: Figure) -> dict[str, Any]:
    return {**encode(ratio), "is_clear": ratio.is_clear, "base_dtype": base.key.dtype}
