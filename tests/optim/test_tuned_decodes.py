"""Tuned choices in the engine, and tuning's real timer and child process."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.tune import DecodeTimer
from halo_vae.optim.tune_child import survives
from halo_vae.optim.tuning import Overrides, TuningStore, key_of
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.optim.helpers import PROFILE, Recorder, golden_decoder
from halo_vae.tests.optim.test_tuning import entry


def test_a_decode_uses_what_was_tuned_and_says_so(tmp_path: Path) -> None:
    store = TuningStore(tmp_path / "tuning.json")
    decoder = golden_decoder("kl_sd")
    key = key_of(decoder.program, "float32", PROFILE)
    store.put(entry(key, best=Overrides(layout="contiguous", strategy="tiles", kernel_backend="shifted_gemm")))
    engine, plain = Engine(profile=PROFILE, tuning=store), Engine(profile=PROFILE)
    shape = (1, 4, 12, 10)
    plan = engine.plan(decoder, shape)
    assert (plan.layout, plan.strategy) == ("contiguous", "tiles")
    reasons = {c.name: c.reason for c in plan.summary.choices}
    assert reasons["layout"].startswith("tuned: 25%")
    assert reasons["plan"].startswith("tuned: ")
    assert reasons["convolutions"].startswith("tuned: ")
    asked = engine.plan(decoder, shape, DecodeSettings(plan="strips", kernel_backend="torch", advanced_caching=True))
    assert asked.strategy == "strips"
    assert "asked for" in {c.name: c.reason for c in asked.summary.choices}["plan"]
    untuned = engine.plan(decoder, shape, DecodeSettings(advanced_caching=False))
    assert untuned.layout == PROFILE.layout
    heard, z = Recorder(), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    picture = engine.decode(decoder, z, observer=heard)
    assert ("tuning", True) in heard.lookups
    assert torch.allclose(picture, plain.decode(decoder, z), atol=1e-4)
    heard = Recorder()
    golden = golden_decoder("kl_flux")
    engine.decode(golden, torch.randn(1, 16, 4, 4), observer=heard)
    assert ("tuning", False) in heard.lookups


def test_real_decodes_are_timed_and_compared() -> None:
    timer = DecodeTimer(golden_decoder("kl_sd"), PROFILE)
    assert timer(Overrides(), 0, first=True) > 0
    assert timer.check(Overrides(layout="contiguous"), 0) < 1e-4
    timer.close()


def test_a_candidate_is_tried_in_a_process_of_its_own() -> None:
    decoder = golden_decoder("kl_sd")
    assert survives(decoder, Overrides(layout="contiguous"), dict(os.environ)) == "ok"
    # more channels than its weights have: an error, not a crash
    broken = Decoder(
        weights=MappingWeights({"a": torch.zeros(2)}), program=decoder.program, loaded_dtype=torch.float32
    )  # fmt: skip
    assert survives(broken, Overrides(), dict(os.environ)) == "failed"
    assert survives(decoder, Overrides(), dict(os.environ), timeout_s=0.01) == "timeout"
