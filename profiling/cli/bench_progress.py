"""How far a benchmark is: a bar with the time left where a person watches, and a line for each run that has ended."""

from __future__ import annotations

import statistics
import sys
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..render.units import format_ns

if TYPE_CHECKING:
    from ..bench.results import RunLine
    from ..bench.runner import Progress

_FORMAT = "{percentage:3.0f}% |{bar}| {elapsed}, {remaining} left, {desc}"
_UNITS = 10_000


class BenchBar:
    """Shows progress on stderr; the bar only on a terminal with tqdm installed."""

    def __init__(self) -> None:
        """Nothing is drawn yet."""
        self._draws = sys.stderr.isatty() and find_spec("tqdm") is not None
        self._bar: Any = None

    def __enter__(self) -> BenchBar:
        """The bar appears with the first report."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Take the bar away, so that messages start on a line of their own."""
        if self._bar is not None:
            self._bar.close()

    def report(self, progress: Progress) -> None:
        """See `run_bench`."""
        if progress.line is not None:
            self._write(run_text(progress.line))
        if not self._draws:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=_UNITS, file=sys.stderr, bar_format=_FORMAT, leave=False)
        self._bar.set_description_str(progress.text, refresh=False)
        self._bar.update(max(0, round(_UNITS * progress.done / max(1.0, progress.total)) - self._bar.n))
        self._bar.refresh()

    def _write(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def run_text(line: RunLine) -> str:
    """One run in one line; what went wrong in words."""
    what = f"{line.case} {line.configuration} {line.scenario_label}"
    if line.status != "ok":
        return f"{what}: {line.status}, {line.error}"
    median = format_ns(statistics.median(line.samples_ns))
    parts = [f"median {median}", f"n = {len(line.samples_ns)}", line.dtype]
    if line.max_error is not None:
        psnr = "inf" if line.psnr_infinite else "n/a" if line.psnr_db is None else f"{line.psnr_db:.1f}"
        parts.append(f"max error {line.max_error:.1e}, PSNR {psnr} dB")
    if line.shapes is not None and line.shapes.not_in_hot:
        n, first = len(line.shapes.not_in_hot), line.shapes.not_in_hot[0]
        parts.append(f"asked for {n} convolution shape(s) that the hot run did not, such as {first}")
    return f"{what}: {', '.join(parts)}"
