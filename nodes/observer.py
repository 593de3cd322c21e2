"""Between a decode and the host: loads the VAE once the plan is known, shows progress, stops on request."""

from __future__ import annotations

from collections.abc import Callable

from ..optim.events import PlanSummary, SilentObserver
from .host import Host, ShowProgress


class HostObserver(SilentObserver):
    """Hears a decode's events before the recorder does; what the host raises to interrupt leaves the decode."""

    def __init__(self, host: Host, load: Callable[[PlanSummary], None]) -> None:
        """`load` is told each plan before it runs."""
        self._host = host
        self._load = load
        self._bar: ShowProgress | None = None
        self._quiet = False

    def planned(self, plan: PlanSummary) -> None:
        """Load for this plan. The host's own decode loads for itself, and shows its own progress."""
        self._quiet = plan.method == "stock"
        if not self._quiet:
            self._host.check_interrupt()
            self._load(plan)

    def op_started(self, index: int, n_ops: int, name: str, n_tiles: int) -> None:
        """Stop here if the user asked to."""
        self._host.check_interrupt()

    def tile_started(self, i: int, n: int, shape: tuple[int, ...], dtype: str) -> None:
        """Stop here if the user asked to."""
        self._host.check_interrupt()

    def chunk_started(self, i: int, n: int) -> None:
        """Stop here if the user asked to."""
        self._host.check_interrupt()

    def progress(self, done: int, total: int) -> None:
        """Move the bar; it is made when the first step is."""
        if self._quiet:
            return
        if self._bar is None:
            self._bar = self._host.progress_bar(total)
        self._bar(done, total)
