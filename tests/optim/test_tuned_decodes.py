"""Tuned choices in the engine, and tuning's real timer and child process."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.tune import DecodeTimer
from halo_vae.optim.tune_child import survives
from halo_vae.optim.tune_work import planned_work
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


@pytest.mark.parametrize("name", ["kl_sd", "wan21"])
def test_what_is_planned_alike_is_the_same_work(name: str) -> None:
    decoder = golden_decoder(name)
    shape = (1, decoder.program.latent_channels, *((3,) if name == "wan21" else ()), 8, 8)

    def work(**given: object) -> object:
        return planned_work(decoder, PROFILE, shape, Overrides(**given))  # type: ignore[arg-type]

    rules = work()
    assert work(layout=PROFILE.layout) == work(strategy=PROFILE.strategy) == rules
    assert work(kernel_backend="winograd", layout=PROFILE.layout) == work(kernel_backend="winograd")
    others: tuple[dict[str, object], ...] = (
        {"layout": "contiguous"}, {"kernel_backend": "shifted_gemm"}, {"tile_bytes": 1 << 10},
        {"precision_mode": "mixed"},
    )  # fmt: skip
    for change in others:
        assert work(**change) != rules, change


def test_a_step_is_the_same_whatever_was_refused_for_it() -> None:
    decoder = golden_decoder("kl_sd")  # too narrow for transforms: all that is asked for is refused
    shape, asked = (1, 4, 8, 8), ("kitchen", "conv2d_sum")
    work = [planned_work(decoder, PROFILE, shape, Overrides(kernel_backend=name)) for name in asked]
    plans = [Engine(profile=PROFILE).plan(decoder, shape, DecodeSettings(kernel_backend=name)) for name in asked]
    assert plans[0].passes != plans[1].passes
    assert work[0] == work[1] is not None


def test_a_choice_without_a_plan_is_the_same_as_none() -> None:
    small = replace(PROFILE, budget_bytes=1)
    assert planned_work(golden_decoder("kl_sd"), small, (1, 4, 8, 8), Overrides()) is None


def test_a_candidate_is_tried_in_a_process_of_its_own() -> None:
    decoder = golden_decoder("kl_sd")
    assert survives(decoder, Overrides(layout="contiguous"), dict(os.environ)) == "ok"
    # more channels than its weights have: an error, not a crash
    broken = Decoder(
        weights=MappingWeights({"a": torch.zeros(2)}), program=decoder.program, loaded_dtype=torch.float32
    )  # fmt: skip
    assert survives(broken, Overrides(), dict(os.environ)) == "failed"
    assert survives(decoder, Overrides(), dict(os.environ), timeout_s=0.01) == "timeout"
