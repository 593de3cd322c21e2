"""Where frames lie, and that a clip's memory does not grow with its length."""

from __future__ import annotations

import random

import pytest

from halo_vae.benchmarks.plain_wan import wan_shapes
from halo_vae.optim.arena import align
from halo_vae.optim.families import lower
from halo_vae.optim.video.frames import output_frames
from halo_vae.optim.video.memory import FrameArena
from halo_vae.optim.video.plan import ClipPlan
from halo_vae.tests.optim.families.layouts import specs
from halo_vae.tests.optim.helpers import profile
from halo_vae.tests.optim.video.helpers import golden_decoder
from halo_vae.tests.optim.video.walk import Walk, WatchedArena, plan_clip

UNIT = align(1)

# -- the arena


def test_ranges_follow_each_other_and_are_aligned() -> None:
    arena = FrameArena()
    assert [arena.take(n) for n in (1, UNIT, UNIT + 1, 0)] == [0, UNIT, 2 * UNIT, 4 * UNIT]
    assert arena.peak_bytes == arena.live_bytes == 5 * UNIT


def test_the_smallest_hole_that_fits_is_taken() -> None:
    arena = FrameArena()
    holes = [arena.take(n * UNIT) for n in (3, 1, 2, 1, 3, 1)]
    for start in (holes[0], holes[2], holes[4]):
        arena.give_back(start)
    assert arena.take(2 * UNIT) == holes[2]
    assert arena.take(2 * UNIT) == holes[0]  # of equal ones the first
    assert arena.take(UNIT) == holes[0] + 2 * UNIT  # what was left of it
    assert arena.take(4 * UNIT) == 11 * UNIT  # none fits
    assert arena.take(3 * UNIT) == holes[4]


def test_neighbouring_holes_become_one() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        arena = FrameArena()
        starts = [arena.take(UNIT) for _ in range(4)]
        for i in order:
            arena.give_back(starts[i])
        assert arena.take(3 * UNIT) == 0
        assert arena.peak_bytes == 4 * UNIT


def test_a_hole_at_the_end_is_grown() -> None:
    arena = FrameArena()
    first, last = arena.take(UNIT), arena.take(2 * UNIT)
    arena.give_back(last)
    assert arena.take(5 * UNIT) == last
    assert arena.peak_bytes == 6 * UNIT
    arena.give_back(first)
    arena.give_back(last)
    assert arena.live_bytes == 0
    assert arena.take(7 * UNIT) == 0
    assert arena.peak_bytes == 7 * UNIT


def test_what_was_not_taken_cannot_be_given_back() -> None:
    arena = FrameArena()
    start = arena.take(10)
    for wrong in (start + 1, UNIT, -1):
        with pytest.raises(KeyError):
            arena.give_back(wrong)
    arena.give_back(start)
    with pytest.raises(KeyError):
        arena.give_back(start)


def test_any_order_of_taking_and_giving_back() -> None:
    """The watched arena checks each range against all others."""
    for seed in range(20):
        rng, arena, live = random.Random(seed), WatchedArena(), []
        for _ in range(120):
            if live and rng.random() < 0.45:
                arena.give_back(live.pop(rng.randrange(len(live))))
            else:
                live.append(arena.take(rng.randrange(1, 9 * UNIT)))
        while live:
            arena.give_back(live.pop())
        assert arena.live_bytes == 0
        assert arena.take(arena.peak_bytes) == 0  # all holes have become one


# -- flat in the length of a clip


def full_wan(frames: int) -> ClipPlan:
    program = lower(specs(wan_shapes()))
    t = (frames + 3) // 4
    assert output_frames(program, t) == frames
    return plan_clip(program, (1, 16, t, 32, 32), profile(convolution="winograd"))


def test_a_full_size_wan_decode_takes_as_much_for_129_frames_as_for_33() -> None:
    """256 x 256 pixels; the picture itself is the caller's."""
    short, long = full_wan(33), full_wan(129)
    assert (short.summary.n_chunks, long.summary.n_chunks) == (3, 9)
    for field in ("pool", "scratch", "packed"):
        a, b = getattr(short.predicted, field), getattr(long.predicted, field)
        assert a <= b <= 1.05 * a, field
    assert short.predicted.pool > 100 << 20
    assert long.predicted.output == 129 * 256 * 256 * 3 * 4
    assert 0 < short.summary.carried_bytes <= long.summary.carried_bytes <= 1.05 * short.summary.carried_bytes


def walked(name: str, t: int) -> Walk:
    program = golden_decoder(name).program
    return Walk(plan_clip(program, (1, program.latent_channels, t, 8, 8), chunk_lat=2)).walk()


@pytest.mark.parametrize("name", ["wan21", "wan22", "mochi", "taehv", "ltx_split"])
def test_memory_is_the_same_for_any_length(name: str) -> None:
    short, long = walked(name, 9), walked(name, 33)
    assert long.driver.peak_bytes == short.driver.peak_bytes
    assert long.driver.carried_bytes == short.driver.carried_bytes > 0
    assert long.plan.summary.carried_bytes == long.driver.carried_bytes  # what was planned is what happens


@pytest.mark.parametrize("name", ["ltx_plain", "ltx_causal"])
def test_memory_stops_growing(name: str) -> None:
    """Where an op looks ahead, the first chunks are cut otherwise than later ones, and holes move for a while."""
    program, peaks = golden_decoder(name).program, []
    for t in (33, 97, 161):
        driver = plan_clip(program, (1, program.latent_channels, t, 8, 8), chunk_lat=2).driver()
        assert sum(1 for _ in driver.steps()) > t
        peaks.append(driver.peak_bytes)
    assert peaks[2] <= 1.02 * peaks[1] <= 1.1 * peaks[0]


def test_keys_of_the_past_are_all_that_grows_in_cosmos() -> None:
    short, long = walked("cosmos", 9), walked("cosmos", 33)
    keys = [sum(w.plan.backends.past_bytes(dict(enumerate(w.counts))).values()) for w in (short, long)]
    assert 0 < keys[0] < keys[1]
    assert long.driver.peak_bytes - short.driver.peak_bytes == keys[1] - keys[0]
    assert long.driver.carried_bytes - short.driver.carried_bytes == keys[1] - keys[0]


@pytest.mark.parametrize("name", ["wan21", "hunyuan15", "cosmos", "ltx_plain"])
def test_history_is_a_part_of_what_is_carried(name: str) -> None:
    found = walked(name, 6)
    driver = found.driver
    assert 0 < driver.history_bytes <= driver.carried_bytes < driver.peak_bytes <= found.plan.pool_bytes


def test_one_frame_carries_nothing() -> None:
    for name in ("wan21", "hunyuan_video", "mochi"):
        found = walked(name, 1)
        assert (found.driver.history_bytes, found.driver.carried_bytes) == (0, 0)
        assert next(c.value for c in found.plan.summary.choices if c.name == "state") == "none"
