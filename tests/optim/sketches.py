"""A decode that is only figures: what the loop down the ladder is tried on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from halo_vae.optim.events import Choice, Fallback, PeakPrediction, PlanSummary
from halo_vae.optim.executor import Progress
from halo_vae.optim.ladder import PICTURE_RUNGS, Job, Squeeze
from halo_vae.optim.plan import DtypePlan
from halo_vae.optim.precision import DtypeDecision
from halo_vae.tests.optim.helpers import Recorder, profile

MIB = 1 << 20
CARD = profile(unified_memory=False)
DTYPES = DtypePlan(native="float32", stream="float32", compute="float32")
OUT_OF_MEMORY = "HIP out of memory. Tried to allocate 2 GiB\nand a second line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """A plan that is only its summary."""

    squeeze: Squeeze
    summary: PlanSummary


def sketch(squeeze: Squeeze) -> Sketch:
    """64 MiB: half of it tiles, a quarter a second picture, an eighth widest values."""
    tiles, batch = 32 // 4**squeeze.tiles, 0 if squeeze.batch else 16
    values, host = 16 >> (2 * squeeze.offload), 16 - (16 >> (2 * squeeze.offload))
    predicted = PeakPrediction(pool=(tiles + batch + values) * MIB, scratch=0, packed=0, output=MIB, host=host * MIB)
    return Sketch(
        squeeze=squeeze,
        summary=PlanSummary(
            method="exact", approximate=False, strategy="tiles", layout="contiguous", tile_px=(64, 64), overlap_px=0,
            n_tiles=1, tile_grid=(1, 1), images_per_pass=1 if squeeze.batch else 2, n_passes=1, macs=100,
            bytes_moved=0, predicted=predicted, choices=(),
        ),
    )  # fmt: skip


@dataclass
class Machine:
    """Fails where a plan takes more than `room`, or while `fails` says so, and keeps what it was asked."""

    room: float = float("inf")
    """MiB that allocators really give."""
    budget: int | None = None
    """MiB that planning is told of."""
    held: int = 0
    make: Callable[[], BaseException] = lambda: torch.OutOfMemoryError(OUT_OF_MEMORY)
    fallback: Fallback | None = None
    ran: list[Squeeze] = field(default_factory=list)
    careful: list[bool] = field(default_factory=list)
    alive: list[bool] = field(default_factory=list)
    releases: int = 0
    heard: Recorder = field(default_factory=Recorder)
    on_run: Callable[[int], None] = lambda n: None
    _kept: weakref.ref[torch.Tensor] | None = None

    def plan(self, squeeze: Squeeze, device: object) -> tuple[Sketch, DtypeDecision]:
        choice = Choice(name="precision", value="float32", reason="test")
        return sketch(squeeze), DtypeDecision(dtypes=DTYPES, choice=choice, fallback=self.fallback)

    def run(self, plan: Sketch, progress: Progress, careful: bool) -> str:
        self.alive.append(self._kept is not None and self._kept() is not None)
        self.ran.append(plan.squeeze)
        self.careful.append(careful)
        self.on_run(len(self.ran))
        if plan.summary.predicted.working > self.room * MIB:
            failing = torch.zeros(1000)
            self._kept = weakref.ref(failing)
            raise self.make()
        return "done"

    def release(self) -> None:
        self.releases += 1
        self.held = 0

    def job(self, **changes: object) -> Job[Sketch, str]:
        budget = None if self.budget is None else self.budget * MIB
        job: Job[Sketch, str] = Job(
            observer=self.heard, what="decoding it", advice="free memory", rungs=PICTURE_RUNGS,
            profile=lambda: replace(CARD, budget_bytes=budget), plan=self.plan, run=self.run, release=self.release,
            held=lambda: self.held,
        )  # fmt: skip
        return replace(job, **changes)  # type: ignore[arg-type]

    @property
    def words(self) -> list[str]:
        """The rungs that were told."""
        return [f.used.split(":")[0] for f in self.heard.fallbacks if f.kind == "out_of_memory"]
