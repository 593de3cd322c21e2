"""Any method of the observer may raise, at any time, and everything is as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halo_vae.optim.decode import Engine
from halo_vae.optim.errors import DecodeCancelled
from halo_vae.optim.events import SilentObserver
from halo_vae.tests.optim.helpers import decode_raw, latent, profile, settings, small_decoder

EVENTS = [
    "mark", "planned", "op_started", "tile_started", "progress", "op_done", "conv_requested", "cache_lookup",
    "pool_request", "prefetch_asked", "pass_done", "converted",
]  # fmt: skip


class RaisesIn(SilentObserver):
    """Raises at the n-th call of one method; counts its calls."""

    def __init__(self, event: str, n: int, error: BaseException) -> None:
        self.calls = 0

        def told(*args: Any) -> None:
            self.calls += 1
            if self.calls == n:
                raise error

        setattr(self, event, told)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("error", [DecodeCancelled("stop"), KeyboardInterrupt()], ids=["cancelled", "interrupt"])
def test_a_decode_stopped_in_any_event_leaves_the_engine_as_it_was(event: str, error: BaseException) -> None:
    engine, decoder, z = Engine(profile=profile(batch_cap=2)), small_decoder(), latent(3, 4, 11, 9)
    given = {"tile_size": 16, "precision_mode": "bf16", "keep_bytes": 8 << 20}
    counter = RaisesIn(event, -1, error)
    before = z.clone()
    good = engine.decode(small_decoder(), z, settings(**given), observer=counter)
    assert counter.calls > 0
    for at in sorted({1, min(2, counter.calls), max(1, counter.calls // 2), counter.calls}):
        with pytest.raises(type(error)) as caught:
            engine.decode(small_decoder(), z, settings(**given), observer=RaisesIn(event, at, error))
        assert caught.value is error
        assert engine.pool.held_bytes <= 8 << 20
        assert not torch.is_inference_mode_enabled()
    assert torch.equal(engine.decode(decoder, z, settings(**given)), good)
    assert torch.equal(z, before)


def test_a_stopped_decode_may_have_packed_weights_and_the_next_one_uses_them() -> None:
    engine, decoder, z = Engine(profile=profile()), small_decoder(), latent(1, 4, 6, 5)
    with pytest.raises(DecodeCancelled):
        engine.decode(decoder, z, settings(), observer=RaisesIn("op_done", 12, DecodeCancelled("stop")))
    raw, heard = decode_raw(engine, decoder, z)
    fresh, _ = decode_raw(Engine(profile=profile()), small_decoder(), z)
    assert torch.equal(raw, fresh)
    assert ("plan", True) in heard.lookups


def test_an_observer_may_decode_too() -> None:
    """A preview during a decode, from the same thread."""
    engine, decoder, z = Engine(profile=profile()), small_decoder(), latent(1, 4, 6, 5)
    plain = engine.decode(decoder, z, settings())
    seen = []

    class Preview(SilentObserver):
        def op_done(self, report: Any) -> None:
            if len(seen) < 3:
                seen.append(engine.decode(small_decoder(1), latent(1, 4, 3, 3), settings()))

    assert torch.equal(engine.decode(decoder, z, settings(), observer=Preview()), plain)
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[0], engine.decode(small_decoder(1), latent(1, 4, 3, 3), settings()))
