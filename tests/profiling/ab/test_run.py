"""Two decodes in turn: what is a sample and what is not, what is waited for, what a failure leaves."""

from __future__ import annotations

import weakref
from itertools import pairwise

import pytest
import torch

from halo_vae.profiling.ab.run import Means, Plan, Side, Taken, run_in_turn
from halo_vae.profiling.parts import DecodeStatus
from halo_vae.tests.fixtures import device_memory_error
from halo_vae.tests.profiling.ab.sides import Timed, compared
from halo_vae.tests.profiling.fakes import SECOND, FakeClock, FakeCounter, FakeDevice

COLD = (5.0, 0.1, 0.1, 0.12, 0.1)


class StoppedError(Exception):
    pass


def test_bm_1_the_cold_run_is_no_sample() -> None:
    result = compared(COLD, (9.0, 0.05, 0.05, 0.05, 0.05), warm_ups=1, runs=4).comparison
    assert result.stock.warm_ups_ns == (5 * SECOND,)
    assert result.stock.samples.ns == (100_000_000, 100_000_000, 120_000_000, 100_000_000)
    assert (result.stock.samples.median_ns, result.stock.samples.n) == (100_000_000, 4)
    assert result.verdict.speedup is not None
    assert result.verdict.speedup.ratio == 2.0
    line = result.to_json()
    assert line["stock"]["samples"]["ns"] == [100_000_000, 100_000_000, 120_000_000, 100_000_000]
    assert line["stock"]["warm_ups_ns"] == [5_000_000_000]
    assert line["figures"]["stock_median_ns"] == 100_000_000


def test_bm_1_a_cold_run_among_the_samples_is_a_doubt() -> None:
    result = compared(COLD, COLD, warm_ups=0, runs=5).comparison
    assert result.stock.samples.ns[0] == 5 * SECOND
    assert "no warm-up" in [doubt.short for doubt in result.doubts]
    assert "no warm-up" not in [d.short for d in compared(COLD, COLD).comparison.doubts]


def test_sides_take_turns_at_going_first() -> None:
    clock, log = FakeClock(), list[str]()
    one, other = (Timed(name, (1.0,) * 5, clock, log=log) for name in ("a", "b"))
    steps: list[tuple[int, int]] = []
    plan, means = Plan(warm_ups=1, runs=4), Means(clock=clock, report=lambda *step: steps.append(step))
    run_in_turn(one.side, other.side, plan, means)
    assert "".join(log) == "ab" + "ab" + "ba" + "ab" + "ba"
    assert steps == [(i, 10) for i in range(11)]


def with_memory(counter: FakeCounter, *, runs: int = 1) -> tuple[Taken, list[str]]:
    clock, log = FakeClock(), list[str]()
    one = Timed("a", (1.0,) * 9, clock, counter=counter, takes_bytes=300, log=log)
    other = Timed("b", (2.0,) * 9, clock, counter=counter, takes_bytes=100, log=log)
    means = Means(
        clock=clock, counter=counter, before_each=lambda: log.append("each"), before_memory=lambda: log.append("empty")
    )
    return run_in_turn(one.side, other.side, Plan(warm_ups=1, runs=runs), means), log


def test_memory_is_of_a_run_of_its_own_and_of_both_alike() -> None:
    taken, log = with_memory(FakeCounter(now=1000))
    assert log == ["each", "a", "each", "b", "each", "empty", "a", "each", "empty", "b", "each", "a", "each", "b"]
    assert (taken.first.peak_bytes, taken.second.peak_bytes) == (300, 100)
    assert (taken.first.memory_run_ns, taken.first.samples.ns) == (SECOND, (SECOND,))
    assert taken.first.warm_ups_ns == (SECOND,)


def test_memory_that_cannot_be_told_is_unknown() -> None:
    taken, _ = with_memory(FakeCounter(now=1000, resettable=False))
    assert (taken.first.peak_bytes, taken.second.peak_bytes) == (None, None)  # the warm-ups were as high


def test_the_device_is_waited_for_at_both_ends() -> None:
    clock = FakeClock()
    device = FakeDevice(clock)

    def decode() -> torch.Tensor:
        device.launch(3 * SECOND)  # returns at once
        return torch.zeros(1, 2, 2, 3)

    side = Side(name="a", decode=decode)
    device.launch(7 * SECOND)  # somebody else's work, before
    taken = run_in_turn(side, side, Plan(warm_ups=0, runs=2), Means(clock=clock, timer=device))
    assert taken.first.samples.ns == taken.second.samples.ns == (3 * SECOND, 3 * SECOND)
    assert device.syncs == 8


def test_a_side_that_fails_is_not_run_again_and_the_other_goes_on() -> None:
    made = compared((1.0, 1.0, device_memory_error()), (1.0,) * 5)
    stock, halo = made.comparison.stock, made.comparison.halo
    assert stock.failure is not None
    assert (stock.failure.status, stock.failure.after) == (DecodeStatus.OUT_OF_MEMORY, 2)
    assert stock.failure.sentence == "HIP out of memory. (fake)"
    assert halo.samples.n == 4
    assert made.stock is None
    assert made.ours is not None
    assert made.comparison.quality is None
    assert made.comparison.verdict.sentence.startswith("no comparison: stock ran out of memory: HIP out of memory.")
    assert made.comparison.verdict.sentence.endswith("Halo took 1.00 s")


def test_an_error_that_shows_only_while_waiting_is_the_sides_own() -> None:
    class Broken(FakeDevice):
        def sync(self) -> None:
            super().sync()
            if self.syncs == 2:
                raise RuntimeError("a fault of the device")

    side = Side(name="a", decode=lambda: torch.zeros(1, 2, 2, 3))
    clock = FakeClock()
    taken = run_in_turn(side, side, Plan(warm_ups=0, runs=1), Means(clock=clock, timer=Broken(clock)))
    assert taken.first.failure is not None
    assert taken.first.failure.sentence == "a fault of the device"
    assert taken.second.failure is None


@pytest.mark.parametrize("stop", [StoppedError(), KeyboardInterrupt()], ids=["an Exception", "none"])
def test_a_cancel_passes(stop: BaseException) -> None:
    clock, log = FakeClock(), list[str]()
    one, other = Timed("a", (1.0, stop), clock, log=log), Timed("b", (1.0,) * 9, clock, log=log)
    with pytest.raises(type(stop)):
        run_in_turn(one.side, other.side, Plan(warm_ups=0, runs=4), Means(clock=clock, cancel_types=(StoppedError,)))
    assert log == ["a", "b", "b", "a"]


def test_only_the_other_sides_picture_is_held_while_one_decodes() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def decode() -> torch.Tensor:
        alive.append(sum(picture() is not None for picture in made))
        picture = torch.zeros(1, 2, 2, 3)
        made.append(weakref.ref(picture))
        return picture

    side = Side(name="a", decode=decode)
    run_in_turn(side, side, Plan(warm_ups=1, runs=2), Means(clock=FakeClock(), counter=FakeCounter()))
    assert alive == [0] + [1] * 7


def test_times_are_the_clocks_own() -> None:
    clock = FakeClock()
    seconds = (0.25, 0.5, 0.75)
    taken = run_in_turn(
        Timed("a", seconds, clock).side, Timed("b", seconds, clock).side, Plan(warm_ups=0, runs=3), Means(clock=clock)
    )
    assert [b - a for a, b in pairwise(taken.first.samples.ns)] == [SECOND // 4, SECOND // 4]


@pytest.mark.parametrize("plan", [Plan(warm_ups=0, runs=0), Plan(warm_ups=-1, runs=1)])
def test_a_plan_without_runs_is_refused(plan: Plan) -> None:
    side = Side(name="a", decode=lambda: torch.zeros(1, 2, 2, 3))
    with pytest.raises(ValueError, match="at least 0 and 1"):
        run_in_turn(side, side, plan, Means(clock=FakeClock()))
