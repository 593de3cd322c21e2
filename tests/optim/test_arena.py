"""Buffers alive at once never overlap unless one was made to lie in the other's tail."""

from __future__ import annotations

import random

import pytest

from halo_vae.optim.arena import ALIGN, Arena, Buffer, align, pack_buffers


def live_peak(buffers: list[Buffer]) -> int:
    """Bytes alive at once at the worst step; a buffer in a tail needs no memory while its host lives."""
    by_key = {b.key: b for b in buffers}

    def at(step: int) -> int:
        alive = [b for b in buffers if b.first <= step <= b.last]
        return sum(
            align(b.nbytes)
            for b in alive
            if b.tail_of is None or not by_key[b.tail_of].first <= step <= by_key[b.tail_of].last
        )

    return max((at(step) for b in buffers for step in (b.first, b.last)), default=0)


def overlaps(buffers: list[Buffer], arena: Arena) -> list[tuple[str, str]]:
    """Pairs that share bytes while both live, except a buffer and the host of its tail."""
    bad = []
    for i, a in enumerate(buffers):
        for b in buffers[i + 1 :]:
            both = a.first <= b.last and b.first <= a.last
            x, y = arena.offsets[a.key], arena.offsets[b.key]
            shared = x < y + b.nbytes and y < x + a.nbytes
            if both and shared and a.tail_of != b.key and b.tail_of != a.key:
                bad.append((a.key, b.key))
    return bad


def check(buffers: list[Buffer], arena: Arena) -> None:
    assert overlaps(buffers, arena) == []
    assert set(arena.offsets) == {b.key for b in buffers}
    assert all(offset >= 0 and offset % ALIGN == 0 for offset in arena.offsets.values())
    assert arena.nbytes == max((arena.offsets[b.key] + align(b.nbytes) for b in buffers), default=0)
    assert arena.nbytes >= live_peak(buffers)
    for b in buffers:
        if b.tail_of is not None:
            host = next(h for h in buffers if h.key == b.tail_of)
            assert arena.offsets[b.key] + align(b.nbytes) == arena.offsets[host.key] + align(host.nbytes)


def test_align() -> None:
    assert [align(n) for n in (0, 1, 256, 257)] == [0, 256, 256, 512]


def test_nothing_takes_nothing() -> None:
    assert pack_buffers([]) == Arena(offsets={}, nbytes=0)


def test_buffers_of_different_times_share_memory() -> None:
    buffers = [Buffer(key=str(i), nbytes=1000, first=i, last=i + 1) for i in range(6)]
    arena = pack_buffers(buffers)
    check(buffers, arena)
    assert arena.nbytes == 2 * align(1000)


def test_a_tail_costs_no_memory_of_its_own() -> None:
    big = Buffer(key="big", nbytes=4000, first=2, last=5)
    small = Buffer(key="small", nbytes=1000, first=0, last=2, tail_of="big")
    arena = pack_buffers([small, big])
    check([small, big], arena)
    assert arena.nbytes == align(4000)


def test_a_third_buffer_keeps_off_a_tail() -> None:
    big = Buffer(key="big", nbytes=4096, first=2, last=5)
    small = Buffer(key="small", nbytes=1024, first=0, last=2, tail_of="big")
    other = Buffer(key="other", nbytes=3072, first=0, last=1)
    arena = pack_buffers([small, big, other])
    check([small, big, other], arena)
    assert arena.nbytes == 4096  # the other one ends before the big one begins, in front of the small one


@pytest.mark.parametrize("seed", range(60))
def test_random_lives(seed: int) -> None:
    rng = random.Random(seed)
    buffers = []
    for i in range(rng.randint(1, 14)):
        first = rng.randint(0, 12)
        buffers.append(
            Buffer(key=f"b{i}", nbytes=rng.choice((0, 1, 255, 256, 257, 1000, 5000)), first=first,
                   last=first + rng.randint(0, 5))
        )  # fmt: skip
    # chains, as a row of doublings makes them: each lies in the tail of the next
    size, step, previous = 300, 0, None
    for i in range(rng.randint(0, 4)):
        link = Buffer(key=f"c{i}", nbytes=size, first=step, last=step + 2, tail_of=f"c{i + 1}")
        buffers.append(link)
        previous, size, step = link, size * 2 + rng.randint(0, 99), step + 2
    if previous is not None:
        buffers.append(Buffer(key=str(previous.tail_of), nbytes=size, first=step, last=step + 2))
    rng.shuffle(buffers)
    check(buffers, pack_buffers(buffers))


def test_the_check_sees_an_overlap() -> None:
    a = Buffer(key="a", nbytes=300, first=0, last=1)
    b = Buffer(key="b", nbytes=300, first=1, last=2)
    assert overlaps([a, b], Arena(offsets={"a": 0, "b": 256}, nbytes=768)) == [("a", "b")]
