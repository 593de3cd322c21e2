"""Whether a figure's pictures are right, which is asked before whether it is fast."""

from __future__ import annotations

from dataclasses import dataclass

from ..ab.quality import Limits, limits_for
from .lanes import Figure

_TORCH_NAMES = {"fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a table says of a figure's pictures."""

    passed: bool | None
    """None where nothing was compared."""
    sentence: str
    """ "pass", "FAIL: max error 0.1 (at most 0.01)", "not compared"."""


def verdict_of(figure: Figure) -> Verdict:
    """Judge the worst picture of a figure's runs. One that was not finite, or not compared, has no error."""
    if any(run.status == "not_finite" for run in figure.runs):
        return Verdict(passed=False, sentence="FAIL: the picture holds inf or nan")
    if figure.max_error is None or figure.mean_error is None:
        return Verdict(passed=None, sentence="not compared")
    limits = _limits_of(figure)
    most = limits.max_error
    if figure.mean_error <= limits.mean_error and (most is None or figure.max_error <= most):
        return Verdict(passed=True, sentence="pass")
    allowed = "" if most is None else f" (at most {most:g})"
    return Verdict(
        passed=False,
        sentence=f"FAIL: max error {figure.max_error:.3g}{allowed}, mean error {figure.mean_error:.3g} "
        f"(at most {limits.mean_error:g})",
    )


def _limits_of(figure: Figure) -> Limits:
    """Limits for what the figure computes in, against an untiled float32 decode."""
    return limits_for({"float32", _TORCH_NAMES.get(figure.key.dtype, figure.key.dtype)}, approximate=False)
