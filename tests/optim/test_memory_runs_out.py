"""What the engine does when an allocation fails while it decodes."""

import weakref

import pytest
import torch

from halo_vae.optim import executor as engine_module
from halo_vae.optim.decode import Engine, open_decoder
from halo_vae.optim.events import SilentObserver
from halo_vae.optim.ladder import MAX_ATTEMPTS
from halo_vae.optim.pool import MemoryPool
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.goldens import golden

FORMS = [
    lambda: torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2 GiB"),
    lambda: RuntimeError("HIP error: out of memory"),
    lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    lambda: MemoryError("no room"),
]


class Watcher(SilentObserver):
    def __init__(self):
        self.fallbacks, self.progress_seen = [], []

    def fallback(self, event):
        self.fallbacks.append(event)

    def progress(self, done, total):
        self.progress_seen.append(done)


class FailingSource:
    """Memory that is refused the first `times` times, or for ever."""

    def __init__(self, times, error):
        self.times, self.error, self.asked = times, error, []

    def __call__(self, nbytes, device):
        self.asked.append(nbytes)
        if len(self.asked) <= self.times:
            raise self.error()
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def case():
    g = golden("kl_sd")
    return open_decoder(MappingWeights(g.weights)), g.latents["batch3"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_failed_allocation_leads_to_smaller_tiles(form):
    decoder, latent = case()
    watcher, source = Watcher(), FailingSource(2, form)
    engine = Engine(pool=MemoryPool(source))
    image = engine.decode(decoder, latent, DecodeSettings(tile_size=0), observer=watcher)
    assert torch.allclose(image, Engine().decode(decoder, latent), atol=1e-5)
    assert [f.kind for f in watcher.fallbacks] == ["out_of_memory"] * 2
    assert source.asked == sorted(source.asked, reverse=True)
    assert source.asked[0] > source.asked[-1]
    assert watcher.progress_seen == sorted(watcher.progress_seen)


def test_memory_that_never_comes_is_the_error_itself_after_a_few_attempts():
    decoder, latent = case()
    source = FailingSource(99, FORMS[0])
    engine = Engine(pool=MemoryPool(source))
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        engine.decode(decoder, latent)
    assert 3 < len(source.asked) <= MAX_ATTEMPTS
    assert engine.pool.held_bytes == 0


def test_other_errors_are_not_taken_for_it():
    decoder, latent = case()
    source = FailingSource(1, lambda: RuntimeError("expected input to have 16 channels"))
    with pytest.raises(RuntimeError, match="16 channels"):
        Engine(pool=MemoryPool(source)).decode(decoder, latent)
    assert len(source.asked) == 1


def test_the_failed_attempt_holds_nothing_when_the_next_begins(monkeypatch):
    decoder, latent = case()
    engine, held, alive = Engine(), [], []
    real = engine_module.PassRunner.run

    def fail_once(self):
        if not held:
            mine = torch.zeros(1000)
            held.append(weakref.ref(mine))
            raise torch.OutOfMemoryError("HIP out of memory")
        alive.append(held[0]() is not None)
        real(self)

    monkeypatch.setattr(engine_module.PassRunner, "run", fail_once)
    engine.decode(decoder, latent)
    assert alive
    assert not any(alive)
