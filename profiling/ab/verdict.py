"""One sentence on a comparison: right or wrong first, then faster or slower, with its doubts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..render.units import format_ns, format_ratio
from .doubts import Doubt
from .quality import Quality
from .run import Failure, SideRuns
from .samples import Speedup, speedup_of

VerdictKind = Literal["faster", "slower", "unclear", "wrong", "stock_failed", "halo_failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of it."""

    kind: VerdictKind
    sentence: str
    speedup: Speedup | None
    """Of ours over stock; None where a side has no runs. Stated for a wrong picture too."""

    @property
    def passed(self) -> bool:
        """True where our picture is right, whatever the speed; False where it is wrong or could not be compared."""
        return self.kind in ("faster", "slower", "unclear")


def judge(stock: SideRuns, halo: SideRuns, quality: Quality | None, doubts: Sequence[Doubt]) -> Verdict:
    """The verdict. `quality` is None where a side failed."""
    if halo.failure is not None:
        return Verdict(kind="halo_failed", sentence=f"FAIL: Halo {_failed(halo.failure)}", speedup=None)
    if stock.failure is not None:
        sentence = f"no comparison: stock {_failed(stock.failure)}; Halo took {format_ns(halo.samples.median_ns)}"
        return Verdict(kind="stock_failed", sentence=sentence, speedup=None)
    ratio = speedup_of(stock.samples, halo.samples)
    if quality is not None and quality.is_wrong:
        return Verdict(kind="wrong", sentence=_wrong(quality, ratio), speedup=ratio)
    kind, words = _speed(ratio)
    doubt = f", doubt: {'; '.join(dict.fromkeys(d.short for d in doubts))}" if doubts else ""
    return Verdict(kind=kind, sentence=words + doubt, speedup=ratio)


def _speed(ratio: Speedup | None) -> tuple[VerdictKind, str]:
    if ratio is None:
        return "unclear", "too fast to be timed"
    span = f"({_plain(ratio.low)}–{_plain(ratio.high)})"
    if not ratio.apart:
        return "unclear", f"no clear difference: {format_ratio(ratio.ratio)} stock's speed {span}"
    if ratio.ratio > 1:
        return "faster", f"{format_ratio(ratio.ratio)} faster {span}"
    slower = f"takes {format_ratio(1 / ratio.ratio)} stock's time"
    return "slower", f"slower: {format_ratio(ratio.ratio)} stock's speed {span}, {slower}"


def _wrong(quality: Quality, ratio: Speedup | None) -> str:
    speed = "" if ratio is None else f"; its speed, {format_ratio(ratio.ratio)} stock's, does not count"
    if quality.problem is not None:
        return f"FAIL: {quality.problem}{speed}"
    limits = quality.limits
    most = "" if limits.max_error is None else f" (at most {limits.max_error:g})"
    errors = f"max error {quality.max_error:.3g}{most}, mean error {quality.mean_error:.3g}"
    return f"FAIL: {errors} (at most {limits.mean_error:g}){speed}"


def _failed(failure: Failure) -> str:
    what = "ran out of memory" if failure.status.value == "out_of_memory" else "failed"
    return f"{what}: {failure.sentence}"


def _plain(value: float) -> str:
    return format_ratio(value).removesuffix(" ×")
