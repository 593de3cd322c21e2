"""Sides that take the time they are told to, on a clock turned by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halo_vae.profiling.ab.comparison import Compared, Facts, compare
from halo_vae.profiling.ab.doubts import Seen
from halo_vae.profiling.ab.quality import EXACT, Limits, Reference
from halo_vae.profiling.ab.run import Means, Plan, Side
from halo_vae.tests.profiling.fakes import SECOND, FakeClock, FakeCounter

TRUE = Reference(dtype="float32", untiled=True)


@dataclass
class Timed:
    """A decode that takes the next of `seconds`, or fails with what is in their place."""

    name: str
    seconds: Sequence[float | BaseException]
    clock: FakeClock
    picture: Tensor = field(default_factory=lambda: torch.full((1, 4, 4, 3), 0.5))
    counter: FakeCounter | None = None
    takes_bytes: int = 0
    log: list[str] = field(default_factory=list)

    def decode(self) -> Tensor:
        now = self.seconds[self.log.count(self.name)]
        self.log.append(self.name)
        if isinstance(now, BaseException):
            raise now
        self.clock.advance(round(now * SECOND))
        if self.counter is not None:
            self.counter.touch(self.takes_bytes)
        return self.picture.clone()

    @property
    def side(self) -> Side:
        return Side(name=self.name, decode=self.decode)


def compared(
    stock: Sequence[float | BaseException],
    halo: Sequence[float | BaseException],
    *,
    warm_ups: int = 1,
    runs: int = 4,
    error: float | Tensor = 0.0,
    truth: Tensor | None = None,
    limits: Limits = EXACT,
    seen: Seen = Seen(),  # noqa: B008 (frozen)
    load: float | None = 0.0,
    reference: Reference = TRUE,
) -> Compared:
    """A comparison of two such decodes, ours off by `error`."""
    clock = FakeClock()
    theirs = torch.full((1, 4, 4, 3), 0.5) if truth is None else truth
    one, other = Timed("stock", stock, clock, theirs), Timed("Halo", halo, clock, theirs + error)
    return compare(
        one.side, other.side, Plan(warm_ups=warm_ups, runs=runs), Means(clock=clock),
        lambda: Facts(reference=reference, limits=limits, seen=seen), device="cpu", latent_shape=(1, 4, 2, 2),
        load=lambda: load,
    )  # fmt: skip
