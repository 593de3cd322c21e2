"""Between a decode and the host: loads the VAE once the plan is known, shows progress, stops on request."""

from __future__ import annotations

from collections.abc import Callable

from ..optim.events import SILENT, DecodeObserver, Phase, PlanSummary, SilentObserver
from .host import Host, ShowProgress


class HostObserver(SilentObserver):
    """Hears a decode's events before the recorder does; what the host raises to interrupt leaves the decode."""

    def __init__(
        self,
        host: Host,
        load: Callable[[PlanSummary], None],
        shown: DecodeObserver = SILENT,
        bar: ShowProgress | None = None,
    ) -> None:
        """`load` is told each plan before it runs; `shown` hears where the decode stands; `bar` None makes one."""
        self._host = host
        self._load = load
        self._shown = shown
        self._bar = bar
        self._quiet = False

    def mark(self, phase: Phase) -> None:
        """Tell the page."""
        self._shown.mark(phase)

    def planned(self, plan: PlanSummary) -> None:
        """Load for this plan. The host's own decode loads for itself, and shows its own progress."""
        self._shown.planned(plan)
        self._quiet = plan.method == "stock"
        if not self._quiet:
            self._host.check_interrupt()
            self._load(plan)

    def op_started(self, index: int, n_ops: int, name: str, n_tiles: int) -> None:
        """Stop here if the user asked to."""
        self._host.check_interrupt()
        self._shown.op_started(index, n_ops, name, n_tiles)

    def tile_started(self, i: int, n: int, shape: tuple[int, ...], dtype: str) -> None:
        """Stop here if the user asked to."""
        self._host.check_interrupt()
        self._shown.tile_started(i, n, shape, dtype)

    def chunk_started(self, i: int, n: int) -> None:
        """Stop here if the user asked to."""
        self._host.check_interrupt()
        self._shown.chunk_started(i, n)

    def progress(self, done: int, total: int) -> None:
        """Move the bar; it is made when the first step is."""
        self._shown.progress(done, total)
        if self._quiet:
            return
        if self._bar is None:
            self._bar = self._host.progress_bar(total)
        self._bar(done, total)
