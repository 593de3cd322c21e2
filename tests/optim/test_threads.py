"""Two threads decode with one engine, and both get their own pictures."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from halo_vae.optim.decode import Engine
from halo_vae.optim.events import SilentObserver
from halo_vae.tests.optim.helpers import decode_raw, golden_decoder, latent, max_diff, profile, reference, small_decoder

JOBS = [
    (lambda: small_decoder(0), (3, 4, 9, 7), "strips"),
    (lambda: small_decoder(1), (1, 4, 5, 12), "tiles"),
    (lambda: golden_decoder("taesd"), (1, 4, 4, 3), "strips"),
]


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_decoders_and_sizes_at_once(mode: str) -> None:
    engine = Engine(profile=profile(batch_cap=2))
    work = []
    for make, shape, plan in JOBS:
        decoder, z = make(), latent(*shape)
        alone, _ = decode_raw(Engine(profile=profile(batch_cap=2)), decoder, z, plan=plan, tile_size=16,
                              precision_mode=mode)  # fmt: skip
        if mode == "fp32":
            assert max_diff(alone, reference(decoder, z)) <= 1e-4
        work.append((decoder, z, plan, alone))
    barrier = threading.Barrier(len(work))

    def run(job: int) -> list[bool]:
        decoder, z, plan, alone = work[job]
        barrier.wait(10)
        return [
            torch.equal(decode_raw(engine, decoder, z, plan=plan, tile_size=16, precision_mode=mode)[0], alone)
            for _ in range(4)
        ]

    with ThreadPoolExecutor(len(work)) as threads:
        assert list(threads.map(run, range(len(work)))) == [[True] * 4] * len(work)


def test_one_decoder_in_two_threads() -> None:
    engine, decoder = Engine(profile=profile()), golden_decoder("kl_x4")
    latents = [latent(1, 4, 3, 4, seed=i) for i in range(4)]
    expected = [reference(decoder, z) for z in latents]
    with ThreadPoolExecutor(2) as threads:
        pictures = list(threads.map(lambda z: decode_raw(engine, decoder, z)[0], latents))
    assert all(max_diff(a, b) <= 2e-4 for a, b in zip(pictures, expected, strict=True))


def test_a_decode_holds_the_pool_to_its_end() -> None:
    """Tiles of two decodes never interleave, so the memory of one is never under the other."""
    engine, order, lock = Engine(profile=profile()), [], threading.Lock()

    class Named(SilentObserver):
        def __init__(self, name: int) -> None:
            self.name = name

        def tile_started(self, i: int, n: int, shape: tuple[int, ...], dtype: str) -> None:
            with lock:
                order.append(self.name)

    def run(name: int) -> None:
        engine.decode(small_decoder(), latent(1, 4, 9, 9), observer=Named(name))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(run, range(3)))
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes == 2
