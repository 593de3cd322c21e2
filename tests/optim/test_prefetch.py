"""The next pass's latent is prepared in time, in its own buffer, and never after the memory went back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.optim import prefetch
from halo_vae.optim.decode import Engine
from halo_vae.optim.prefetch import LatentFeeder
from halo_vae.tests.optim.helpers import (
    FailAfter,
    Recorder,
    decode_raw,
    latent,
    max_diff,
    profile,
    reference,
    settings,
    small_decoder,
)

PARTS = [(0, 2), (2, 4), (4, 5)]


def buffers(n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.full((2, 4, 3, 3), float("nan"), dtype=dtype) for _ in range(n)]


@pytest.mark.parametrize("n_buffers", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_pass_gets_its_own_images(n_buffers: int, dtype: torch.dtype) -> None:
    z, heard = latent(5, 4, 3, 3), Recorder()
    feeder = LatentFeeder(z, PARTS, buffers(n_buffers, dtype), heard)
    try:
        for i, (start, stop) in enumerate(PARTS):
            got = feeder.get(i)
            assert torch.equal(got, z[start:stop].to(dtype))
            kept = got.clone()
            if feeder._pending is not None:
                feeder._pending.result()  # the next one is written while this one is in use
            assert torch.equal(got, kept)
    finally:
        feeder.close()
    assert len(heard.prefetches) == (2 if n_buffers == 2 else 0)


def test_readiness_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, heard = threading.Event(), Recorder()
    real = LatentFeeder._copy_aside

    def slow(self: LatentFeeder, i: int) -> None:
        if i == 2:
            assert gate.wait(10)
        real(self, i)

    monkeypatch.setattr(LatentFeeder, "_copy_aside", slow)
    feeder = LatentFeeder(latent(5, 4, 3, 3), PARTS, buffers(2), heard)
    feeder.get(0)
    assert feeder._pending is not None
    feeder._pending.result()
    feeder.get(1)
    threading.Timer(0.05, gate.set).start()
    feeder.get(2)
    feeder.close()
    assert heard.prefetches == [True, False]


def test_closing_waits_for_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, gate, done = threading.Event(), threading.Event(), []
    real = LatentFeeder._copy_aside

    def slow(self: LatentFeeder, i: int) -> None:
        entered.set()
        assert gate.wait(10)
        real(self, i)
        done.append(i)

    monkeypatch.setattr(LatentFeeder, "_copy_aside", slow)
    feeder = LatentFeeder(latent(5, 4, 3, 3), PARTS, buffers(2), Recorder())
    feeder.get(0)
    assert entered.wait(10)
    threading.Timer(0.05, gate.set).start()
    feeder.close()
    assert done == [1]


def test_a_failed_copy_is_the_decodes_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: LatentFeeder, i: int) -> None:
        raise OSError("disk gone")

    engine, decoder, z = Engine(profile=profile(batch_cap=1)), small_decoder(), latent(3, 4, 6, 5)
    monkeypatch.setattr(LatentFeeder, "_copy_aside", broken)
    with pytest.raises(OSError, match="disk gone"):
        engine.decode(decoder, z, settings())
    monkeypatch.undo()
    raw, _ = decode_raw(engine, decoder, z)
    assert max_diff(raw, reference(decoder, z)) <= 1e-4


@pytest.mark.parametrize("fails", [False, True])
def test_no_worker_outlives_a_decode(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = prefetch.ThreadPoolExecutor

    def executor(*args: Any, **kwargs: Any) -> Any:
        made.append(real(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(prefetch, "ThreadPoolExecutor", executor)
    engine, z = Engine(profile=profile(batch_cap=1)), latent(3, 4, 6, 5)
    heard = Recorder(on_tile=FailAfter(20, KeyboardInterrupt())) if fails else Recorder()
    if fails:
        with pytest.raises(KeyboardInterrupt):
            engine.decode(small_decoder(), z, settings(), observer=heard)
    else:
        engine.decode(small_decoder(), z, settings(), observer=heard)
    assert len(made) == 1
    assert not [t for t in threading.enumerate() if t.name.startswith("halo-vae-prefetch")]
