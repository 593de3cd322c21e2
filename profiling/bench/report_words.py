"""Figures of benchmarks as words."""

from __future__ import annotations

from collections.abc import Sequence

from ..render.units import NA, format_ratio
from .cases import CASES, SCALE_PX
from .lanes import Figure, Ratio
from .stats import Interval

_CASES = {case.key: case for case in CASES}


def case_words(figure: Figure) -> str:
    """Title and size: "Batch Video 512×512 ×4, 9 → 8 frames": decoded, and kept."""
    case = _CASES.get(figure.key.case)
    if case is None:
        return figure.key.case
    batch = f" ×{case.batch}" if case.batch > 1 else ""
    decoded = next((run.decoded_frames for run in figure.runs if run.decoded_frames is not None), None)
    frames = f", {decoded or case.decoded_frames} → {case.asked_frames} frames" if case.is_video else ""
    return f"{case.title} {case.width_px}×{case.height_px}{batch}{frames}"


def own_size(figure: Figure) -> str | None:
    """ "288×256" of a figure that decodes another size than its case's; None for the others, and for other cases."""
    case, shape = _CASES.get(figure.key.case), figure.key.latent_shape
    if case is None or len(shape) < 4:
        return None
    height, width = (n * SCALE_PX for n in shape[-2:])
    return None if (width, height) == (case.width_px, case.height_px) else f"{width}×{height}"


def interval_words(interval: Interval | None) -> str:
    """ "1.02–1.11"."""
    if interval is None:
        return NA
    return "–".join(format_ratio(value).removesuffix(" ×") for value in (interval.low, interval.high))


def p_words(ratio: Ratio | None) -> str:
    """The p-value: "0.008", "< 0.001"."""
    if ratio is None or ratio.significance is None:
        return NA
    p = ratio.significance.p_value
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def effect_words(ratio: Ratio | None) -> str:
    """ "+1.00": above 0 where the base takes longer."""
    return NA if ratio is None or ratio.significance is None else f"{ratio.significance.effect:+.2f}"


def error_words(value: float | None) -> str:
    """ "1.2e-06"."""
    return NA if value is None else "0" if value == 0 else f"{value:.2g}"


def psnr_words(figure: Figure) -> str:
    """ "52.1 dB", "∞" for equal pictures."""
    if figure.psnr_infinite:
        return "∞"
    return NA if figure.psnr_db is None else f"{figure.psnr_db:.1f} dB"


def ops_words(ops: float) -> str:
    """Per second, with three figures."""
    return format_ratio(ops).removesuffix(" ×")


def listed(words: Sequence[str]) -> str:
    """ "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def counted(n: int, noun: str) -> str:
    """ "1 run", "2 runs"."""
    return f"{n} {noun}{'' if n == 1 else 's'}"
