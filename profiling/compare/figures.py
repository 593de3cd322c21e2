"""Figures of a comparison, computed from its rounds: each installation's statistics, or why it has none."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from ..ab.doubts import Doubt
from ..ab.samples import Samples, speedup_of
from ..bench.doubts import doubts_of
from ..bench.stats import Stats, describe, geometric_mean
from .cases import CompareCase
from .records import Comparison, DeviceKind, Measured, Round
from .results_lines import line_of_round, per_decode

TOLERANCE = {"fp32": 0.01, "bf16": 0.1, "fp16": 0.05}
"""Largest difference between pictures of two installations, in 0-1; beyond, one of them is wrong."""
NOT_RUN = "it was not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One case in one installation on one kind of device."""

    installation: str
    case: CompareCase
    device: DeviceKind
    rounds: tuple[Round, ...]
    """Those that were measured."""
    failure: str | None
    """Why it is an `x`; None where its statistics count."""
    doubts: tuple[Doubt, ...] = ()

    @property
    def samples_ns(self) -> tuple[int, ...]:
        """Time of one decode in each round."""
        return tuple(map(per_decode, self.rounds))

    @property
    def stats(self) -> Stats | None:
        """Of what was measured, also where a later round failed; None without any."""
        return describe(self.samples_ns) if self.rounds else None

    @property
    def good(self) -> Stats | None:
        """Its statistics where they count."""
        return self.stats if self.failure is None else None

    def median(self, read: Callable[[Measured], float | None]) -> float | None:
        """Median over the rounds of one reading; None where a round lacks it."""
        values = [read(one.measured) for one in self.rounds if one.measured is not None]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known and len(known) == len(values) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Relative:
    """One installation against the reference."""

    percent: float
    """Decodes per second as a share of the reference's, in per cent; by medians, which one bad round moves little."""
    apart: bool
    """False where the difference may be chance, see `Speedup.apart`."""


def figures_of(comparison: Comparison, device: DeviceKind) -> dict[tuple[str, str], Figure]:
    """By case and installation."""
    found = {
        (case.key, name): _figure(comparison, name, case, device)
        for case in comparison.cases
        for name in comparison.installations
    }
    for case in comparison.cases:
        reference = found[case.key, comparison.reference]
        for name in comparison.installations:
            found[case.key, name] = _checked(found[case.key, name], reference)
    return found


def relative(figure: Figure, reference: Figure) -> Relative | None:
    """None where either has no time that counts."""
    one, base = figure.good, reference.good
    if one is None or base is None:
        return None
    pair = speedup_of(Samples(ns=reference.samples_ns), Samples(ns=figure.samples_ns))
    same = figure.installation == reference.installation
    return Relative(percent=100 * base.median_ns / one.median_ns, apart=same or (pair is not None and pair.apart))


def average(relatives: list[Relative | None]) -> float | None:
    """Geometric mean of those there are, in per cent; None without any."""
    return geometric_mean([one.percent for one in relatives if one is not None])


def _figure(comparison: Comparison, name: str, case: CompareCase, device: DeviceKind) -> Figure:
    mine = [r for r in comparison.rounds if (r.installation, r.case, r.device) == (name, case.key, device)]
    measured = tuple(r for r in mine if r.measured is not None)
    lines = [line_of_round(comparison, one, f"{i:032x}") for i, one in enumerate(measured)]
    doubts = doubts_of([line for line in lines if line is not None])
    return Figure(
        installation=name, case=case, device=device, rounds=measured, doubts=doubts,
        failure=_failure(comparison, name, mine),
    )  # fmt: skip


def _failure(comparison: Comparison, name: str, mine: list[Round]) -> str | None:
    read = next((one for one in comparison.setups if one.installation == name), None)
    if read is not None and read.setup is None:
        return read.error or "it told nothing of itself"
    for one in mine:
        if one.status != "ok":
            when = f" (round {one.round + 1} of {comparison.rounds_asked})" if one.round else ""
            return f"{_WORDS.get(one.status, one.status)}: {one.error}{when}"
    if mine:
        return None
    return "cancelled before its first round" if comparison.cancelled else NOT_RUN


_WORDS = {"not_finite": "not finite", "timeout": "too slow"}


def _checked(figure: Figure, reference: Figure) -> Figure:
    """A failure where the picture is another one than the reference's: what is wrong has no speed."""
    if figure.failure is not None or reference.failure is not None or figure is reference:
        return figure
    one, base = figure.rounds[0].measured, reference.rounds[0].measured
    if one is None or base is None or len(one.look) != len(base.look):
        return figure
    apart = max((abs(a - b) for a, b in zip(one.look, base.look, strict=True)), default=0.0)
    if apart <= TOLERANCE[figure.case.precision]:
        return figure
    return Figure(
        installation=figure.installation, case=figure.case, device=figure.device, rounds=figure.rounds,
        doubts=figure.doubts,
        failure=f"its picture differs from {reference.installation}'s by up to {apart:.2g} in 0-1: one is wrong",
    )  # fmt: skip
