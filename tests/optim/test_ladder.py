"""The ladder as data, and the loop that goes down it, with plans and memory that are only figures."""

from __future__ import annotations

import traceback
import weakref
from dataclasses import replace

import pytest
import torch

from halo_vae.optim.errors import NonFiniteError, PlanError
from halo_vae.optim.errors_oom import DecodeOutOfMemoryError
from halo_vae.optim.events import Fallback
from halo_vae.optim.executor import Progress, RestartDecode
from halo_vae.optim.ladder import (
    BLENDED,
    CLIP_RUNGS,
    MAKE_ROOM,
    MAX_ATTEMPTS,
    OFFLOAD,
    PICTURE_RUNGS,
    SHORTER_CHUNKS,
    SMALLER_BATCH,
    SMALLER_TILES,
    UNSQUEEZED,
    Last,
    Squeeze,
    fit_or_refuse,
    run_ladder,
    steps_of,
)
from halo_vae.optim.precision import DtypeDecision
from halo_vae.tests.optim.helpers import profile
from halo_vae.tests.optim.sketches import CARD, MIB, OUT_OF_MEMORY, Machine, Sketch, sketch

# -- the data


def test_rungs_in_order() -> None:
    assert PICTURE_RUNGS == (MAKE_ROOM, SMALLER_TILES, SMALLER_BATCH, OFFLOAD, BLENDED)
    assert CLIP_RUNGS == (MAKE_ROOM, SMALLER_TILES, SHORTER_CHUNKS, BLENDED)
    for rungs in (PICTURE_RUNGS, CLIP_RUNGS):
        # the first attempt, kept memory given back, every step, blended
        assert 1 + 1 + len(steps_of(rungs)) + 1 <= MAX_ATTEMPTS


def test_each_step_keeps_what_was_given_up_before() -> None:
    assert [(s.rung.name, s.squeeze) for s in steps_of(PICTURE_RUNGS)] == [
        ("smaller_tiles", Squeeze(tiles=1)),
        ("smaller_tiles", Squeeze(tiles=2)),
        ("smaller_batch", Squeeze(tiles=2, batch=1)),
        ("offload", Squeeze(tiles=2, batch=1, offload=1)),
        ("offload", Squeeze(tiles=2, batch=1, offload=2)),
    ]
    assert [s.squeeze.chunks for s in steps_of(CLIP_RUNGS)] == [0, 0, 1, 2]
    assert [s.squeeze.tile_divisor for s in steps_of(CLIP_RUNGS)] == [4, 16, 16, 16]


# -- memory runs out in a running decode

STEPS = steps_of(PICTURE_RUNGS)
NEEDS = [sketch(s).summary.predicted.working // MIB for s in (UNSQUEEZED, *(step.squeeze for step in STEPS))]
WORDS = [step.rung.words for step in STEPS]


@pytest.mark.parametrize("n", range(len(NEEDS)))
def test_each_rung_is_reached_in_order_and_named(n: int) -> None:
    machine = Machine(room=NEEDS[n])
    assert run_ladder(machine.job()) == "done"
    assert machine.words == ([MAKE_ROOM.words, *WORDS[:n]] if n else [])
    # once more at the first plan, as there may be room for it now
    assert machine.ran == [UNSQUEEZED, *([UNSQUEEZED] if n else []), *(s.squeeze for s in steps_of(PICTURE_RUNGS)[:n])]
    assert machine.releases >= len(machine.ran) - 1
    assert not any(machine.alive)
    assert {f.reason for f in machine.heard.fallbacks} <= {OUT_OF_MEMORY.split("\n")[0]}
    assert all("MiB" in f.given and "MiB" in f.used for f in machine.heard.fallbacks)


def test_room_that_was_made_is_enough() -> None:
    machine, asked = Machine(room=1), []

    def make_room(nbytes: int) -> None:
        asked.append(nbytes)
        machine.room = NEEDS[0]

    assert run_ladder(machine.job(make_room=make_room)) == "done"
    assert asked == [NEEDS[0] * MIB]
    assert machine.words == [MAKE_ROOM.words]


def test_steps_that_take_no_less_are_left_out() -> None:
    machine, rungs = Machine(room=0), (MAKE_ROOM, SMALLER_TILES, SHORTER_CHUNKS, SMALLER_BATCH)
    with pytest.raises(DecodeOutOfMemoryError):
        run_ladder(machine.job(rungs=rungs))
    assert machine.words == [MAKE_ROOM.words, *[SMALLER_TILES.words] * 2, SMALLER_BATCH.words]


def test_nothing_helps() -> None:
    machine = Machine(room=0, budget=200)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run_ladder(machine.job())
    error = caught.value
    assert isinstance(error, DecodeOutOfMemoryError)
    assert len(machine.ran) == 7 <= MAX_ATTEMPTS
    assert (error.need_bytes, error.free_bytes) == (NEEDS[-1] * MIB, 200 * MIB)
    assert error.tried == (MAKE_ROOM.words, SMALLER_TILES.words, SMALLER_BATCH.words, OFFLOAD.words)
    for part in ("decoding it", f"{NEEDS[-1]} MiB planned", "200 MiB free", *error.tried, "2 GiB", "free memory"):
        assert part in str(error)
    assert "\n" not in str(error)
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert traceback.extract_tb(error.__cause__.__traceback__) == []
    assert machine._kept is not None
    assert machine._kept() is None  # though the error is held here


def test_an_unknown_budget_is_told_as_unknown() -> None:
    with pytest.raises(DecodeOutOfMemoryError, match="an unknown size free") as caught:
        run_ladder(Machine(room=0).job())
    assert caught.value.free_bytes is None


def test_attempts_are_bounded() -> None:
    machine = Machine(room=0)
    with pytest.raises(DecodeOutOfMemoryError):
        run_ladder(machine.job(attempts=3))
    assert len(machine.ran) == 3


# -- the last rung


def test_blended_comes_last_and_knows_what_is_left() -> None:
    machine, told = Machine(room=0), []

    def blend(last: Last) -> str:
        told.append(last)
        return "blended"

    assert run_ladder(machine.job(blend=blend)) == "blended"
    (last,) = told
    assert last.attempts == MAX_ATTEMPTS - len(machine.ran) == 1
    assert last.ran
    assert isinstance(last.shortage, DecodeOutOfMemoryError)


def test_blended_runs_out_of_memory_too() -> None:
    machine, kept = Machine(room=0), []

    def blend(last: Last) -> str:
        failing = torch.zeros(1000)
        kept.append(weakref.ref(failing))
        raise RuntimeError("HIP error: out of memory")

    with pytest.raises(DecodeOutOfMemoryError, match=BLENDED.words) as caught:
        run_ladder(machine.job(blend=blend))
    assert "HIP error: out of memory" in str(caught.value)
    assert caught.value.tried[-1] == BLENDED.words
    assert kept[0]() is None


def test_other_errors_of_the_last_rung_leave_as_they_are() -> None:
    error = ValueError("out of memory")

    def blend(last: Last) -> str:
        raise error

    with pytest.raises(ValueError, match="out of memory") as caught:
        run_ladder(Machine(room=0).job(blend=blend))
    assert caught.value is error


def test_a_last_rung_that_declines_raises_the_shortage() -> None:
    def blend(last: Last) -> str:
        raise last.shortage

    with pytest.raises(DecodeOutOfMemoryError) as caught:
        run_ladder(Machine(room=0).job(blend=blend))
    assert BLENDED.words not in caught.value.tried


# -- planning says no beforehand


@pytest.mark.parametrize("n", range(len(NEEDS)))
def test_the_first_plan_that_fits_runs_and_the_rungs_on_the_way_are_told(n: int) -> None:
    machine = Machine(room=NEEDS[n], budget=NEEDS[n])
    assert run_ladder(machine.job()) == "done"
    assert len(machine.ran) == len(machine.heard.plans) == 1
    assert machine.words == WORDS[:n]
    if n:
        assert machine.heard.fallbacks[-1].reason == f"{NEEDS[n - 1]} MiB are needed and {NEEDS[n]} MiB are free"
    job = machine.job()
    chosen = fit_or_refuse(sketch, PICTURE_RUNGS, job.profile(), "it", "do")
    assert chosen.squeeze == machine.ran[0]


@pytest.mark.parametrize("way", ["held", "host"])
def test_room_is_made_before_anything_is_given_up(way: str) -> None:
    machine = Machine(budget=1, held=1 if way == "held" else 0)
    devices = iter([replace(CARD, budget_bytes=MIB), *[replace(CARD, budget_bytes=NEEDS[0] * MIB)] * 9])
    asked: list[int] = []
    job = machine.job(profile=lambda: next(devices), make_room=asked.append if way == "host" else None)
    assert run_ladder(job) == "done"
    assert machine.ran == [UNSQUEEZED]
    assert machine.words == [MAKE_ROOM.words]
    assert asked == ([NEEDS[0] * MIB] if way == "host" else [])
    assert machine.releases == 1


def test_no_plan_fits() -> None:
    machine = Machine(budget=NEEDS[-1] - 1)
    with pytest.raises(PlanError, match=rf"it takes {NEEDS[-1]} MiB but {NEEDS[-1] - 1} MiB are free") as caught:
        run_ladder(machine.job())
    assert (caught.value.need_bytes, caught.value.free_bytes) == (NEEDS[-1] * MIB, (NEEDS[-1] - 1) * MIB)
    assert machine.ran == []
    for rung in (SMALLER_TILES, SMALLER_BATCH, OFFLOAD):
        assert rung.words in str(caught.value)


def test_host_memory_is_no_way_out_where_it_is_the_devices_own() -> None:
    machine = Machine()
    unified = profile(unified_memory=True, budget_bytes=(NEEDS[3] + 1) * MIB - 1)
    with pytest.raises(PlanError) as caught:
        run_ladder(machine.job(profile=lambda: unified))
    assert OFFLOAD.words not in str(caught.value)


def test_a_picture_that_kernels_cannot_index_goes_to_the_last_rung() -> None:
    machine, error = Machine(), PlanError("too many elements")

    def plan(squeeze: Squeeze, device: object) -> tuple[Sketch, DtypeDecision]:
        raise error

    with pytest.raises(PlanError) as caught:
        run_ladder(machine.job(plan=plan))
    assert caught.value is error
    told: list[Last] = []

    def blend(last: Last) -> str:
        told.append(last)
        return "blended"

    assert run_ladder(machine.job(plan=plan, blend=blend)) == "blended"
    assert (told[0].shortage, told[0].ran) == (error, False)


def test_memory_that_shrinks_while_it_runs() -> None:
    """An attempt fails, and the budget is read anew: the next plan is the one that fits it."""
    machine = Machine(room=NEEDS[3], budget=NEEDS[0])
    devices = iter([NEEDS[0], NEEDS[0], *[NEEDS[3]] * 20])
    job = machine.job(profile=lambda: replace(CARD, budget_bytes=next(devices) * MIB))
    assert run_ladder(job) == "done"
    assert machine.ran == [UNSQUEEZED, steps_of(PICTURE_RUNGS)[2].squeeze]
    assert machine.words == [MAKE_ROOM.words, *WORDS[:3]]


# -- what is no shortage


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("expected input to have 16 channels"),
        RuntimeError("HIP error: an illegal memory access was encountered"),
        RuntimeError("HIP error: unspecified launch failure (after: out of memory)"),
        NonFiniteError("NaN", op="conv", dtype="float16"),
        KeyboardInterrupt(),
        ValueError("out of memory"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_other_errors_are_never_tried_again(error: BaseException) -> None:
    machine = Machine(room=0, make=lambda: error)
    with pytest.raises(type(error)) as caught:
        run_ladder(machine.job(blend=lambda last: "blended"))
    assert caught.value is error
    assert len(machine.ran) == 1
    assert machine.words == []


def test_beginning_again_wider_is_no_rung() -> None:
    machine = Machine(room=NEEDS[1])

    def restart(n: int) -> None:
        if n in (1, 2, 4):
            raise RestartDecode("conv", "float16", 10)

    machine.on_run = restart
    assert run_ladder(machine.job()) == "done"
    assert machine.careful == [False, True, True, True, True, True]
    assert machine.words == [MAKE_ROOM.words, SMALLER_TILES.words]


def test_wider_restarts_do_not_use_up_attempts() -> None:
    machine = Machine(room=0)

    def restart(n: int) -> None:
        if n <= 20:
            raise RestartDecode("conv", "float16", 10)

    machine.on_run = restart
    with pytest.raises(DecodeOutOfMemoryError):
        run_ladder(machine.job())
    assert len(machine.ran) == 20 + 7


def test_a_dtype_that_was_replaced_is_told_once() -> None:
    event = Fallback(kind="dtype", where="decode", given="fp16", used="float32", reason="test")
    machine = Machine(room=NEEDS[2], fallback=event)
    assert run_ladder(machine.job()) == "done"
    assert machine.heard.fallbacks.count(event) == 1


def test_progress_never_falls() -> None:
    machine = Machine(room=NEEDS[3])

    def run(plan: Sketch, progress: Progress, careful: bool) -> str:
        progress.add(40)
        return machine.run(plan, progress, careful)

    assert run_ladder(machine.job(run=run)) == "done"
    assert machine.heard.steps == sorted(machine.heard.steps)
