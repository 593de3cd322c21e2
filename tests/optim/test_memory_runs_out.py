"""What the engine does when an allocation fails while it decodes pictures."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halo_vae.optim import executor
from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.errors_oom import DecodeOutOfMemoryError
from halo_vae.optim.kernels import torch_kernels
from halo_vae.optim.ladder import MAX_ATTEMPTS
from halo_vae.optim.opaque import OpaqueDecoder
from halo_vae.optim.pool import MemoryPool
from halo_vae.optim.store import keep_raw
from halo_vae.tests.goldens import TOLERANCE, golden
from halo_vae.tests.optim.helpers import (
    Recorder,
    golden_decoder,
    latent,
    max_diff,
    profile,
    reference,
    settings,
    small_decoder,
)

HOST = torch.device("cpu:0")
"""Another name for the CPU: memory there is what a host has beside a card."""
CARD = profile(tile_bytes=4 << 20, unified_memory=False)
SHAPE = (3, 4, 48, 48)
"""Every rung takes less for the small decoder."""
RUNGS = ["kept memory given back", "smaller tiles", "one picture per pass", "widest values in host memory"]
STEPS = [*RUNGS[:2], *RUNGS[1:]]
"""Tiles get smaller twice."""


def no_room() -> BaseException:
    return torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2 GiB")


class Card:
    """Memory of which the card's part is refused: the first `times` requests, or those of more than `limit` bytes."""

    def __init__(self, *, times: float = 0, limit: float = math.inf, error: Callable[[], BaseException] = no_room):
        self.times, self.limit, self.error = times, limit, error
        self.asked: list[int] = []
        self.far: list[int] = []

    def __call__(self, nbytes: int, device: torch.device) -> Tensor:
        if device == HOST:
            self.far.append(nbytes)
        else:
            self.asked.append(nbytes)
            if len(self.asked) <= self.times or nbytes > self.limit:
                raise self.error()
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def engine_of(card: Card) -> Engine:
    return Engine(profile=CARD, pool=MemoryPool(card), host_device=HOST)


def decode(engine: Engine, decoder: Decoder, z: Tensor, heard: Recorder, **given: object) -> Tensor:
    """The raw picture [B, C, H, W]."""
    chosen = settings(**({"tile_size": 0} | given))
    return engine.decode(decoder, z, chosen, observer=heard, finish=keep_raw).movedim(-1, 1)


def words(heard: Recorder) -> list[str]:
    assert {f.kind for f in heard.fallbacks} <= {"out_of_memory"}
    return [f.used.split(":")[0] for f in heard.fallbacks]


@pytest.mark.parametrize("n", range(len(RUNGS) + 1))
def test_each_rung_in_order_on_a_golden(n: int) -> None:
    decoder, g, card, heard = golden_decoder("kl_sd"), golden("kl_sd"), Card(times=n), Recorder()
    engine = engine_of(card)
    z = torch.cat([g.latents["batch3"]] * 2)
    raw = decode(engine, decoder, z, heard, tile_size=0)
    assert max_diff(raw, torch.cat([g.expected["batch3"]] * 2)) <= TOLERANCE
    assert len(words(heard)) == n
    assert [w for w in RUNGS if w in words(heard)] == list(dict.fromkeys(words(heard)))
    assert words(heard)[:1] == RUNGS[:1][:n]
    assert len(card.asked) == len(heard.plans) == n + 1
    assert card.asked == [plan.predicted.pool for plan in heard.plans]
    assert heard.steps == sorted(heard.steps)


@pytest.mark.parametrize("n", range(len(STEPS) + 1))
def test_each_rung_is_reached_under_a_limit_of_the_allocator(n: int) -> None:
    decoder, z = small_decoder(), latent(*SHAPE)
    expected = reference(decoder, z)
    refusing, story = Card(times=99), Recorder()
    with pytest.raises(DecodeOutOfMemoryError):
        decode(engine_of(refusing), decoder, z, story)
    assert words(story) == STEPS
    assert refusing.asked == sorted(refusing.asked, reverse=True)
    limit = refusing.asked[n]  # what the attempt after n rungs asks for
    card, heard = Card(limit=limit), Recorder()
    raw = decode(engine_of(card), decoder, z, heard)
    assert max_diff(raw, expected) <= 1e-4
    # at the first plan's own limit nothing fails; later ones fail until a plan is within
    reached = next(i for i, asked in enumerate(refusing.asked) if asked <= limit)
    assert words(heard) == STEPS[:reached]
    assert heard.plan.predicted.pool <= limit
    assert (len(card.far) > 0) == (reached == len(STEPS))
    assert sum(card.far) == heard.plan.predicted.host


def test_a_kernel_that_has_no_room_for_its_result_gets_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, z, heard = small_decoder(), latent(1, 4, 48, 48), Recorder()
    expected, real, seen = reference(decoder, z), torch_kernels.convolve, []

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(math.prod(x.shape[-2:]))
        if seen[-1] > 3500:
            raise RuntimeError("HIPBLAS_STATUS_ALLOC_FAILED when calling hipblasCreate(handle)")
        return real(x, weight, bias)

    monkeypatch.setattr(torch_kernels, "convolve", convolve)
    assert max_diff(decode(Engine(profile=CARD), decoder, z, heard), expected) <= 1e-4
    assert words(heard) == ["kept memory given back", "smaller tiles", "smaller tiles"]
    assert heard.plan.n_tiles > heard.plans[0].n_tiles


def test_memory_is_given_back_between_attempts() -> None:
    decoder, z = small_decoder(), latent(*SHAPE)
    held, packed = [], []

    def look(card: Card, nbytes: int, device: torch.device) -> Tensor:
        held.append(engine.pool.held_bytes)
        packed.append(decoder.packed.nbytes)
        return card(nbytes, device)

    card = Card()
    engine = Engine(profile=CARD, pool=MemoryPool(lambda n, device: look(card, n, device)), host_device=HOST)
    decode(engine, decoder, z, Recorder())
    assert engine.pool.held_bytes > 0
    assert decoder.packed.nbytes > 0
    engine.pool.clear()
    card.times, card.asked = 2, []
    decode(engine, decoder, z, Recorder())
    assert held[1:] == [0, 0, 0]
    assert packed[2:] == [0, 0]


def test_what_is_kept_goes_before_anything_is_given_up() -> None:
    """A second decode finds its memory taken by what the first one kept; the host is asked too."""
    decoder, z, heard, asked = small_decoder(), latent(*SHAPE), Recorder(), []
    refused: list[int] = []

    def source(nbytes: int, device: torch.device) -> Tensor:
        if engine.pool.held_bytes or not asked:
            refused.append(nbytes)
            raise no_room()
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    engine = Engine(
        profile=CARD, pool=MemoryPool(source), make_room=lambda nbytes, device: asked.append((nbytes, device))
    )
    decode(engine, decoder, z, heard)
    assert words(heard) == RUNGS[:1]
    assert len(refused) == 1
    assert asked == [(heard.plan.predicted.working, torch.device("cpu"))]


def test_the_budget_says_it_beforehand() -> None:
    """The same rungs, without an attempt: planning goes down until a plan fits."""
    decoder, z = small_decoder(), latent(*SHAPE)
    expected = reference(decoder, z)
    engine = Engine(profile=CARD, host_device=HOST)
    engine._profile = profile(tile_bytes=4 << 20, unified_memory=False, budget_bytes=7 << 20)
    heard = Recorder()
    raw = decode(engine, decoder, z, heard)
    assert max_diff(raw, expected) <= 1e-4
    # one picture per pass is what planning comes to anyway
    assert words(heard) == ["smaller tiles", "widest values in host memory"]
    assert len(heard.plans) == 1
    assert heard.plan.predicted.working <= 7 << 20
    reasons = {c.name: c.reason for c in heard.plan.choices}
    assert reasons["tile_bytes"] == reasons["images_per_pass"] == "limited by free memory"
    assert "host memory" in {c.name: c.value for c in heard.plan.choices}["offload"]
    again = engine.plan(decoder, SHAPE, settings(tile_size=0)).predicted
    assert (again.pool, again.host) == (heard.plan.predicted.pool, heard.plan.predicted.host)


def test_a_tight_plan_is_left_as_soon_as_there_is_room() -> None:
    engine, decoder = Engine(profile=CARD), small_decoder()
    roomy = engine.plan(decoder, SHAPE, settings(tile_size=0)).predicted
    engine._profile = profile(tile_bytes=4 << 20, unified_memory=False, budget_bytes=7 << 20)
    assert engine.plan(decoder, SHAPE, settings(tile_size=0)).predicted.host > 0
    engine._profile = CARD
    assert engine.plan(decoder, SHAPE, settings(tile_size=0)).predicted == roomy


def opaque_of(decoder: Decoder, calls: list[tuple[int, ...]]) -> OpaqueDecoder:
    """The small decoder as one of which only the call is known."""

    def call(tile: Tensor) -> Tensor:
        calls.append(tuple(tile.shape))
        return reference(decoder, tile)

    return OpaqueDecoder(name="small", decode=call, latent_dim=2, latent_channels=4, scale=2)


def test_blended_is_the_last_rung_of_auto() -> None:
    decoder, z, heard, calls = small_decoder(), latent(1, 4, 160, 8), Recorder(), []
    card = Card(times=99)
    got = engine_of(card).decode(
        decoder, z, settings(method="auto", tile_size=0), observer=heard, finish=keep_raw,
        as_opaque=lambda: opaque_of(decoder, calls),
    )  # fmt: skip
    assert words(heard)[-1] == "blended tiles of 256 px"
    assert heard.plan.method == "blended"
    assert heard.plan.approximate
    assert len(calls) == 2
    assert got.shape == (1, 320, 16, 3)
    # away from the seam, where tiles lack only the statistics of the rest
    assert max_diff(got.movedim(-1, 1), reference(decoder, z)) < 3
    assert heard.fallbacks[-1].reason.startswith("decoding 1 latents of 8x160 ran out of memory")


@pytest.mark.parametrize("way", ["exact", "no way"])
def test_blended_only_where_it_may_and_can_be(way: str) -> None:
    decoder, calls = small_decoder(), []
    chosen = settings(method="exact" if way == "exact" else "auto")
    with pytest.raises(DecodeOutOfMemoryError):
        engine_of(Card(times=99)).decode(
            decoder, latent(1, 4, 8, 8), chosen,
            as_opaque=(lambda: opaque_of(decoder, calls)) if way == "exact" else None,
        )  # fmt: skip
    assert calls == []


def test_memory_that_never_comes_is_an_error_with_figures() -> None:
    decoder, card, heard = small_decoder(), Card(times=99), Recorder()
    engine = engine_of(card)
    text = r"ran out of memory: \d MiB planned.*2 GiB; free memory"
    with pytest.raises(torch.OutOfMemoryError, match=text) as caught:
        decode(engine, decoder, latent(*SHAPE), heard)
    error = caught.value
    assert isinstance(error, DecodeOutOfMemoryError)
    assert error.tried == tuple(RUNGS)
    assert all(rung in str(error) for rung in RUNGS)
    assert 3 < len(card.asked) == len(heard.plans) <= MAX_ATTEMPTS
    assert engine.pool.held_bytes == decoder.packed.nbytes == 0
    decode(engine_of(Card()), decoder, latent(1, 4, 6, 5), Recorder())  # the decoder is as it was


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("expected input to have 16 channels"),
        RuntimeError("HIP error: an illegal memory access was encountered"),
        RuntimeError("HIP error: unspecified launch failure"),
    ],
)
def test_other_errors_are_not_taken_for_it(error: RuntimeError) -> None:
    card, heard = Card(times=99, error=lambda: error), Recorder()
    with pytest.raises(RuntimeError) as caught:
        decode(engine_of(card), small_decoder(), latent(1, 4, 6, 5), heard)
    assert caught.value is error
    assert len(card.asked) == 1
    assert heard.fallbacks == []


def test_the_failed_attempts_hold_nothing_when_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Tensor]] = []
    alive: list[list[bool]] = []
    real = executor.PassRunner.run

    def fail_thrice(self: executor.PassRunner) -> None:
        alive.append([ref() is not None for ref in held])
        if len(held) < 3:
            mine = torch.zeros(1000)
            held.append(weakref.ref(mine))
            raise no_room()
        real(self)

    monkeypatch.setattr(executor.PassRunner, "run", fail_thrice)
    decode(engine_of(Card()), small_decoder(), latent(*SHAPE), Recorder())
    assert len(alive) > 3
    assert not any(any(refs) for refs in alive)
