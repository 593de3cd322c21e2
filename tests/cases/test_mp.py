"""MP: memory, release, aliasing."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch

from halo_vae.nodes import vae as vae_module
from halo_vae.nodes.decode_latent import decode_latent
from halo_vae.optim.decode import Engine
from halo_vae.optim.pool import MemoryPool
from halo_vae.tests.cases.exact import exact_conv, exact_settings
from halo_vae.tests.cases.support import decode, max_diff, settings, whole
from halo_vae.tests.fixtures import ConvDec, FakeVAE, OverflowDec, PointDec, latent
from halo_vae.tests.nodes.fake_host import FakeHost
from halo_vae.tests.nodes.support import new_session


class ReusesItsBuffer(PointDec):
    """Returns the same tensor at every call of one shape, as a decoder with a pool of its own might."""

    def run(self, z: torch.Tensor) -> torch.Tensor:
        picture = super().run(z)
        self.buffers: dict[torch.Size, torch.Tensor]
        buffer = self.__dict__.setdefault("buffers", {}).setdefault(picture.shape, torch.empty_like(picture))
        return buffer.copy_(picture)


@pytest.mark.parametrize("tile_px", [64, 768])
@pytest.mark.parametrize("shape", [(1, 4, 16, 16), (1, 4, 2, 16, 16)])
def test_mp_1_a_second_decode_leaves_the_first_picture_alone(tile_px: int, shape: tuple[int, ...]) -> None:
    vae = FakeVAE(ReusesItsBuffer(), dim=len(shape) - 2, t_ratio=1)
    a = decode_latent({"samples": latent(shape, seed=1)}, vae, settings(tile_px, 16))
    kept = a.clone()
    b = decode_latent({"samples": latent(shape, seed=2)}, vae, settings(tile_px, 16))
    assert torch.equal(a, kept)
    assert not torch.equal(a, b)
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


@pytest.mark.parametrize("tile_px", [64, 768])
def test_mp_1_exact_pictures_are_their_own(tile_px: int) -> None:
    model, engine, chosen = ConvDec(), Engine(), exact_settings(tile_px)
    decoder = exact_conv(model)
    a = engine.decode(decoder, latent((1, 4, 16, 16), seed=1), chosen)
    kept = a.clone()
    b = engine.decode(decoder, latent((1, 4, 16, 16), seed=2), chosen)
    assert engine.pool.hits > 0  # the pool was really used again
    assert torch.equal(a, kept)
    assert not torch.equal(a, b)
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


def test_mp_3_pool_stays_within_its_cap() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def source(nbytes: int, device: torch.device) -> torch.Tensor:
        with torch.inference_mode(False):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        made.append(weakref.ref(memory))
        return memory

    pool, cap = MemoryPool(source), 4 << 20
    engine, decoder = Engine(pool=pool), exact_conv(ConvDec())
    chosen = exact_settings(128, "tiles", keep_bytes=cap)
    for side in range(8, 38):
        engine.decode(decoder, latent((1, 4, side, side)), chosen)
        assert 0 <= pool.held_bytes <= cap, side
    assert pool.hits > 0
    assert pool.hits + pool.misses == 30  # one slab per decode
    assert pool.misses == len(made)
    alive = sum(ref() is not None for ref in made)
    assert pool.misses - pool.evictions == alive
    pool.clear()
    gc.collect()
    assert pool.held_bytes == 0
    assert [ref() for ref in made] == [None] * len(made)
    assert pool.evictions == pool.misses


def test_mp_5_no_cache_is_emptied_per_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for owner, name in ((gc, "collect"), (torch.cuda, "empty_cache"), (torch.cuda, "synchronize")):
        monkeypatch.setattr(owner, name, lambda *a, _name=name: calls.update([_name]))
    per_decode = []
    for side in (32, 128):
        calls.clear()
        model = PointDec()
        decode(model, latent((1, 4, side, side)), settings(128, 0))
        assert len(model.log) == (side // 16) ** 2
        Engine().decode(exact_conv(ConvDec()), latent((1, 4, side, side)), exact_settings(128, "tiles"))
        per_decode.append(dict(calls))
        host = FakeHost()
        new_session(host).decode({"samples": latent((1, 4, side, side))}, FakeVAE(PointDec()), settings(128, 0))
        assert host.rooms == []  # nor is the host asked to empty its own
    assert per_decode[0] == per_decode[1]
    assert all(n <= 2 for n in per_decode[0].values())


def test_mp_7_each_vae_has_its_own_weights_and_settings() -> None:
    z = latent((1, 4, 24, 24))
    a, b = FakeVAE(ConvDec(seed=1)), FakeVAE(ConvDec(seed=9))
    for vae, seed in ((a, 1), (b, 9), (a, 1)):
        got = decode_latent({"samples": z}, vae, settings())
        assert torch.equal(got, whole(ConvDec(seed=seed), z))
    chosen = settings(128, 32)
    smaller = decode_latent({"samples": z}, a, chosen)
    assert torch.equal(smaller, decode(ConvDec(seed=1), z, chosen))
    assert a.first_stage_model.log[-1]["shape"] == (1, 4, 16, 16)
    assert torch.equal(decode_latent({"samples": z}, a, replace(chosen, tile_size=768)), whole(ConvDec(seed=1), z))
    gone = weakref.ref(a), weakref.ref(a.first_stage_model)
    del a, vae
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_mp_7_exact_decoders_have_their_own_weights() -> None:
    z, engine, chosen = latent((1, 4, 24, 24)), Engine(), exact_settings(128)
    decoders = {seed: exact_conv(ConvDec(seed=seed)) for seed in (1, 9)}
    for seed in (1, 9, 1):
        assert max_diff(engine.decode(decoders[seed], z, chosen), whole(ConvDec(seed=seed), z)) <= 1e-5
    gone = weakref.ref(decoders.pop(1))
    gc.collect()
    assert gone() is None
    assert max_diff(engine.decode(decoders[9], z, exact_settings(64)), whole(ConvDec(seed=9), z)) <= 1e-5


def test_mp_7_nothing_is_kept_of_a_vae_that_is_gone() -> None:
    """So a new object at the address of an old one cannot be taken for it."""
    gc.collect()
    kept = len(vae_module._MEMORIES), len(vae_module._HASHES)
    z = torch.full((1, 4, 12, 12), 2.0)
    for _ in range(4):
        vae = FakeVAE(OverflowDec("natural"))
        decode_latent({"samples": z}, vae, settings(precision_mode="fp16"))
        assert [call["dtype"] for call in vae.first_stage_model.log] == [
            torch.float16,
            torch.float32,
        ]  # nothing known yet
        assert len(vae_module._MEMORIES) == kept[0] + 1
        del vae
        gc.collect()
        assert (len(vae_module._MEMORIES), len(vae_module._HASHES)) == kept
