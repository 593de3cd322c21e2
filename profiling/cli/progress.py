"""Progress bars on stderr where a person watches, silence elsewhere."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from ...optim.events import SilentObserver

_FORMAT = "{desc} {percentage:3.0f}% |{bar}| {elapsed}, {remaining} left"
_STEPS = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed} {postfix}"


class ProgressBar(SilentObserver):
    """An observer that draws a decode's progress. Draws nothing if stderr is no terminal or tqdm is not installed."""

    def __init__(self, label: str) -> None:
        """`label` stands before the bar."""
        self._label = label
        self._shown = sys.stderr.isatty() and find_spec("tqdm") is not None
        self._bar: Any = None

    def __enter__(self) -> ProgressBar:
        """The bar appears with the first progress."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Take the bar away, so that messages start on a line of their own."""
        if self._bar is not None:
            self._bar.close()

    def progress(self, done: int, total: int) -> None:
        """See DecodeObserver."""
        if not self._shown:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=self._label, file=sys.stderr, bar_format=_FORMAT, leave=False)
        self._bar.update(done - self._bar.n)


class StepBar:
    """Draws steps that each have a name. Draws nothing if stderr is no terminal or tqdm is not installed."""

    def __init__(self, label: str) -> None:
        """`label` stands before the bar."""
        self._label = label
        self._shown = sys.stderr.isatty() and find_spec("tqdm") is not None
        self._bar: Any = None

    def __enter__(self) -> StepBar:
        """The bar appears with the first step."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Take the bar away, so that messages start on a line of their own."""
        if self._bar is not None:
            self._bar.close()

    def step(self, done: int, total: int, text: str) -> None:
        """`done` of `total` steps are finished, and `text` is going on."""
        if not self._shown:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=self._label, file=sys.stderr, bar_format=_STEPS, leave=False)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(done - self._bar.n)
        self._bar.refresh()
