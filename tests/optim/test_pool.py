"""Memory lives across decodes, is leased to one at a time, and comes back whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halo_vae.optim import executor
from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.errors import DecodeCancelled
from halo_vae.optim.pool import GRAIN, MemoryPool, slab_bytes
from halo_vae.optim.store import keep_raw
from halo_vae.tests.optim.helpers import (
    PROFILE,
    FailAfter,
    Recorder,
    decode_raw,
    golden_decoder,
    latent,
    max_diff,
    profile,
    reference,
    settings,
    small_decoder,
)

CPU = torch.device("cpu")
MIB = 1 << 20


class Source:
    """Counts what the pool asks of the system."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, nbytes: int, device: torch.device) -> Tensor:
        self.asked.append(nbytes)
        # rubbish, as fresh memory may hold: NaN in every float dtype
        return torch.full((nbytes,), 255, dtype=torch.uint8, device=device)


# -- the pool by itself


def test_size_classes() -> None:
    assert [slab_bytes(n) for n in (0, 1, GRAIN, GRAIN + 1)] == [0, GRAIN, GRAIN, 2 * GRAIN]


def test_a_returned_slab_is_given_again() -> None:
    source = Source()
    pool = MemoryPool(source)
    with pool.lease(3 * MIB, CPU, 100 * MIB) as first:
        assert (first.nbytes, pool.held_bytes) == (4 * MIB, 0)
    assert pool.held_bytes == 4 * MIB
    with pool.lease(3 * MIB, CPU, 100 * MIB) as again:
        assert again.memory.data_ptr() == first.memory.data_ptr()
    assert source.asked == [4 * MIB]
    assert (pool.hits, pool.misses, pool.evictions) == (1, 1, 0)
    assert pool.high_water_bytes == 4 * MIB


def test_a_larger_slab_serves_a_smaller_request_and_a_smaller_one_makes_way() -> None:
    source = Source()
    pool = MemoryPool(source)
    with pool.lease(4 * MIB, CPU, 100 * MIB):
        pass
    with pool.lease(2 * MIB, CPU, 100 * MIB) as small:
        assert (small.nbytes, small.memory.numel()) == (2 * MIB, 4 * MIB)
    with pool.lease(8 * MIB, CPU, 100 * MIB):
        assert pool.held_bytes == 0
    assert source.asked == [4 * MIB, 8 * MIB]
    assert (pool.held_bytes, pool.evictions) == (8 * MIB, 1)


@pytest.mark.parametrize(("keep", "held"), [(0, 0), (4 * MIB - 1, 0), (4 * MIB, 4 * MIB), (1 << 40, 4 * MIB)])
def test_at_most_keep_bytes_stay(keep: int, held: int) -> None:
    pool = MemoryPool(Source())
    with pool.lease(4 * MIB, CPU, keep):
        pass
    assert pool.held_bytes == held


def test_trim_gives_the_largest_back_first_and_clear_all() -> None:
    pool = MemoryPool(Source())
    with pool.lease(2 * MIB, CPU, 1 << 40), pool.lease(8 * MIB, CPU, 1 << 40), pool.lease(4 * MIB, CPU, 1 << 40):
        pass
    assert pool.held_bytes == 14 * MIB
    pool.trim(7 * MIB)
    assert pool.held_bytes == 6 * MIB
    pool.clear()
    assert (pool.held_bytes, pool.evictions) == (0, 3)


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), MemoryError()])
def test_a_slab_comes_back_after_an_error(error: BaseException) -> None:
    pool = MemoryPool(Source())
    with pytest.raises(type(error)), pool.lease(4 * MIB, CPU, 100 * MIB):
        raise error
    assert pool.held_bytes == 4 * MIB
    with pool.lease(4 * MIB, CPU, 100 * MIB):
        pass
    assert pool.hits == 1


def test_a_failed_allocation_leaves_an_empty_pool_that_works() -> None:
    def refuse(nbytes: int, device: torch.device) -> Tensor:
        if nbytes > 4 * MIB:
            raise MemoryError
        return torch.empty(nbytes, dtype=torch.uint8)

    pool = MemoryPool(refuse)
    with pool.lease(4 * MIB, CPU, 100 * MIB):
        pass
    with pytest.raises(MemoryError), pool.lease(8 * MIB, CPU, 100 * MIB):
        pass
    assert pool.held_bytes == 0
    with pool.lease(4 * MIB, CPU, 100 * MIB):
        pass


def test_a_decode_survives_a_memory_error_that_says_nothing() -> None:
    source, refused = Source(), []

    def refuse_once(nbytes: int, device: torch.device) -> Tensor:
        if not refused:
            refused.append(nbytes)
            raise MemoryError
        return source(nbytes, device)

    decoder, z = small_decoder(), latent(1, 4, 6, 5)
    raw, heard = decode_raw(Engine(profile=PROFILE, pool=MemoryPool(refuse_once)), decoder, z)
    assert [(f.kind, f.reason) for f in heard.fallbacks] == [("out_of_memory", "MemoryError")]
    assert max_diff(raw, reference(decoder, z)) <= 1e-4


def test_what_is_held_can_be_asked_during_a_decode() -> None:
    pool, asked = MemoryPool(Source()), []
    with pool.lease(MIB, CPU, 100 * MIB):
        thread = threading.Thread(target=lambda: asked.append(pool.held_bytes))
        thread.start()
        thread.join(10)
    assert asked == [0]


def test_a_request_is_a_hit_only_where_memory_was_used_before() -> None:
    pool = MemoryPool(Source())
    with pool.lease(4 * MIB, CPU, 100 * MIB) as slab:
        assert slab.take(MIB, 1000)[1] is False
        assert slab.take(MIB, 1000)[1] is True
        assert slab.take(MIB + 256, 100)[1] is True
        assert slab.take(0, 256)[1] is False  # in front of what was used
        assert slab.take(MIB, 2000)[1] is False  # longer than what was used
        assert slab.take(0, MIB)[1] is False
        assert slab.take(0, MIB + 2000)[1] is True  # three pieces that meet
        assert slab.take(3 * MIB, 0)[0].numel() == 0
    with pool.lease(2 * MIB, CPU, 100 * MIB) as slab:
        assert slab.take(0, MIB)[1] is True
        memory, hit = slab.take(MIB + 2048, 512)
        assert (memory.numel(), hit) == (512, False)


def test_pooled_memory_may_be_written_outside_inference_mode() -> None:
    pool = MemoryPool()
    with torch.inference_mode(), pool.lease(MIB, CPU, 100 * MIB) as slab:
        assert not slab.memory.is_inference()
        slab.memory.zero_()
    with pool.lease(MIB, CPU, 100 * MIB) as slab:
        slab.memory.fill_(1)


def test_a_second_thread_waits_for_the_lease() -> None:
    pool, order = MemoryPool(Source()), []
    waiting = threading.Event()

    def second() -> None:
        waiting.set()
        with pool.lease(MIB, CPU, 100 * MIB):
            order.append("second")

    with pool.lease(MIB, CPU, 100 * MIB):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        thread.join(0.05)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


# -- decodes out of the pool


@pytest.mark.parametrize("plan", ["strips", "tiles"])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_the_second_decode_of_a_size_takes_nothing_new(plan: str, mode: str) -> None:
    source, decoder, z = Source(), small_decoder(), latent(3, 4, 11, 9)
    engine = Engine(profile=profile(batch_cap=2), pool=MemoryPool(source))
    given = {"plan": plan, "tile_size": 16, "precision_mode": mode}
    first, heard = decode_raw(engine, decoder, z, **given)
    assert False in {hit for _, hit in heard.requests}
    assert heard.requests[0][1] is False
    again, second = decode_raw(engine, decoder, z, **given)
    assert len(source.asked) == 1
    assert [n for n, _ in second.requests] == [n for n, _ in heard.requests]
    assert {hit for _, hit in second.requests} == {True}
    assert torch.equal(first, again)
    assert max_diff(first, reference(decoder, z)) < (1e-4 if mode == "fp32" else 0.2)


@pytest.mark.parametrize("plan", ["strips", "tiles"])
@pytest.mark.parametrize("shape", [(1, 4, 9, 7), (5, 4, 6, 4), (1, 4, 1, 1)])
def test_the_promised_bytes_are_what_was_leased(plan: str, shape: tuple[int, ...]) -> None:
    source = Source()
    engine = Engine(profile=profile(batch_cap=2), pool=MemoryPool(source))
    _, heard = decode_raw(engine, small_decoder(), latent(*shape), plan=plan, tile_size=32)
    promised = heard.plan.predicted.pool
    assert engine.pool.high_water_bytes == promised == sum(source.asked)
    assert heard.plan.predicted.output == shape[0] * 3 * shape[2] * shape[3] * 4 * 4
    engine.pool.reset_high_water()
    assert engine.pool.high_water_bytes == 0


def test_every_request_lies_inside_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    from halo_vae.optim import pool as module

    taken: list[tuple[int, int, int]] = []
    real = module.Slab.take

    def take(self: module.Slab, offset: int, nbytes: int) -> tuple[Tensor, bool]:
        memory, hit = real(self, offset, nbytes)
        assert memory.numel() == nbytes
        taken.append((offset, nbytes, self.nbytes))
        return memory, hit

    monkeypatch.setattr(module.Slab, "take", take)
    engine = Engine(profile=profile(batch_cap=2))
    decode_raw(engine, small_decoder(), latent(5, 4, 12, 9))
    decode_raw(engine, small_decoder(), latent(1, 4, 3, 3))
    assert len(taken) > 30
    assert all(offset + nbytes <= leased for offset, nbytes, leased in taken)


@pytest.mark.parametrize("plan", ["strips", "tiles"])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "mixed"])
@pytest.mark.parametrize("convolution", ["direct", "winograd"])
@pytest.mark.parametrize("make", [small_decoder, lambda: golden_decoder("hunyuan_image")], ids=["kl", "hunyuan"])
def test_every_buffer_was_planned_large_enough(
    make: Callable[[], Decoder], plan: str, mode: str, convolution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an op that is redone may ask for memory besides the plan's."""
    real, asked = executor.PassRunner.buffer, []

    def buffer(self: executor.PassRunner, key: str, nbytes: int) -> Tensor:
        asked.append(key)
        assert nbytes <= self.a_pass.buffer_bytes[key], key
        return real(self, key, nbytes)

    monkeypatch.setattr(executor.PassRunner, "buffer", buffer)
    decoder = make()
    z = latent(2, decoder.program.latent_channels, 5, 6)
    engine = Engine(profile=profile(convolution=convolution, tile_bytes=200_000))
    decode_raw(engine, decoder, z, plan=plan, precision_mode=mode, tile_size=0)
    assert {key.rstrip("0123456789") for key in asked} >= {"value", "stage", "keys", "vals"}


def test_a_picture_never_changes_and_shares_nothing_with_the_pool() -> None:
    engine, decoder = Engine(profile=PROFILE, pool=MemoryPool(Source())), small_decoder()
    picture = engine.decode(decoder, latent(2, 4, 6, 5), settings(), finish=keep_raw)
    before = picture.clone()
    start, stop = picture.data_ptr(), picture.data_ptr() + picture.numel() * 4
    for slabs in engine.pool._kept.values():
        for memory, _ in slabs:
            assert memory.data_ptr() + memory.numel() <= start or stop <= memory.data_ptr()
    for seed, shape in enumerate([(2, 4, 6, 5), (1, 4, 9, 9), (3, 4, 2, 2)]):
        decode_raw(engine, decoder, latent(*shape, seed=seed))
    engine.pool.clear()
    decode_raw(engine, decoder, latent(2, 4, 6, 5, seed=9))
    assert torch.equal(picture, before)
    assert picture.untyped_storage().nbytes() == picture.numel() * 4


@pytest.mark.parametrize("keep", [0, 3 * MIB, 1 << 40])
def test_keep_bytes_bounds_what_stays(keep: int) -> None:
    engine, decoder = Engine(profile=PROFILE), small_decoder()
    for size in (4, 40, 12):
        decode_raw(engine, decoder, latent(1, 4, size, size), keep_bytes=keep)
        assert engine.pool.held_bytes <= keep
    assert (engine.pool.held_bytes > 0) == (keep > 2 * MIB)


ERRORS = [DecodeCancelled("stop"), RuntimeError("boom"), KeyboardInterrupt(), SystemExit(3), BaseException("host")]


@pytest.mark.parametrize(
    ("error", "plan", "keep"),
    [*((error, "strips", 1 << 40) for error in ERRORS), (ERRORS[2], "tiles", 0), (ERRORS[4], "tiles", 3 << 20)],
)
def test_an_error_at_any_tile_leaves_the_engine_as_good_as_new(error: BaseException, plan: str, keep: int) -> None:
    decoder, z = small_decoder(), latent(3, 4, 11, 9)
    engine = Engine(profile=profile(batch_cap=2), pool=MemoryPool(Source()))
    good, heard = decode_raw(engine, decoder, z, plan=plan, tile_size=16, keep_bytes=keep)
    n = len(heard.tiles)
    assert n > 40
    for at in (1, n // 3, n // 2, n - 1, n):
        stopped = Recorder(on_tile=FailAfter(at, error))
        with pytest.raises(type(error)) as caught:
            engine.decode(decoder, z, settings(plan=plan, tile_size=16, keep_bytes=keep), observer=stopped)
        assert caught.value is error
        assert len(stopped.tiles) == at - 1
        assert engine.pool.held_bytes <= keep
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
    again, _ = decode_raw(engine, decoder, z, plan=plan, tile_size=16, keep_bytes=keep)
    assert torch.equal(again, good)
    # the pass's own thread has ended; idle workers stay for the next decode
    assert not [t.name for t in threading.enumerate() if t.name.startswith("halo-vae-prefetch")]


def test_an_error_from_finish_leaves_the_engine_as_good_as_new() -> None:
    engine, decoder, z = Engine(profile=PROFILE), small_decoder(), latent(1, 4, 6, 5)

    def broken(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.decode(decoder, z, settings(), finish=broken)
    raw, _ = decode_raw(engine, decoder, z)
    assert max_diff(raw, reference(decoder, z)) < 1e-4
