"""Every setting changes what runs; progress is reported; a budget is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.optim import decode as decode_module
from halo_vae.optim.decode import Engine
from halo_vae.optim.errors import PlanError, SettingsError
from halo_vae.optim.settings import DecodeSettings
from halo_vae.tests.goldens import TOLERANCE, golden
from halo_vae.tests.optim.helpers import (
    PROFILE,
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

PLANS = ("strips", "tiles")


# -- settings


def test_layout_setting_changes_the_layout() -> None:
    decoder, z = small_decoder(), latent(1, 4, 6, 5)
    shapes = {}
    for on in (True, False):
        raw, heard = decode_raw(Engine(profile=PROFILE), decoder, z, tensor_layout_optimization=on)
        shapes[on] = {s.layout for _, s in heard.convs}
        assert max_diff(raw, reference(decoder, z)) <= TOLERANCE
    assert shapes == {True: {"channels_last"}, False: {"contiguous"}}


def test_the_kernels_really_see_that_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    from halo_vae.optim import executor

    real, seen = executor.kernels.convolve, []

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return real(x, weight, bias)

    monkeypatch.setattr(executor.kernels, "convolve", convolve)
    engine = Engine(profile=PROFILE)
    for on in (True, False):
        seen.clear()
        decode_raw(engine, small_decoder(), latent(1, 4, 6, 5), tensor_layout_optimization=on)
        assert len(seen) > 5
        assert sum(seen) > 0.8 * len(seen) if on else sum(seen) == 0


def test_batch_setting_changes_the_passes() -> None:
    for on, passes in ((True, [(3, 3)]), (False, [(1, 1)] * 3)):
        _, heard = decode_raw(Engine(profile=PROFILE), small_decoder(), latent(3, 4, 6, 5), batch_optimization=on)
        assert heard.passes == passes


def test_prefetch_setting_prepares_the_next_pass() -> None:
    decoder, z = small_decoder(), latent(3, 4, 6, 5)
    results = {}
    for on in (True, False):
        results[on], heard = decode_raw(Engine(profile=profile(batch_cap=1)), decoder, z, memory_prefetching=on)
        assert len(heard.prefetches) == (2 if on else 0)
    assert torch.equal(results[True], results[False])
    _, heard = decode_raw(Engine(profile=PROFILE), decoder, z, memory_prefetching=True)
    assert heard.prefetches == []  # one pass: nothing to prepare


def test_caching_setting_keeps_plans_and_packed_weights_or_not() -> None:
    decoder, z = golden_decoder("kl_sd"), golden("kl_sd").latents["batch3"][:1]
    engine = Engine(profile=PROFILE)
    first, heard = decode_raw(engine, decoder, z)
    assert decoder.packed.nbytes > 0
    assert {hit for _, hit in heard.lookups} == {False}
    assert heard.plan.predicted.packed >= decoder.packed.nbytes > 0
    again, second = decode_raw(engine, decoder, z)
    assert {hit for _, hit in second.lookups} == {True}
    assert {name for name, _ in second.lookups} == {"plan", "packed"}
    assert second.plan.predicted.packed <= heard.plan.predicted.packed - decoder.packed.nbytes
    assert second.converted_bytes < heard.converted_bytes or heard.converted_bytes == 0

    bare, other = golden_decoder("kl_sd"), Engine(profile=PROFILE)
    for _ in range(2):
        third, off = decode_raw(other, bare, z, advanced_caching=False)
        assert {hit for _, hit in off.lookups} == {False}
        assert bare.packed.nbytes == 0
        assert other._plans == {}
        assert off.plan.predicted.packed == 0
    assert torch.equal(first, again)
    assert torch.equal(first, third)


def test_packed_weights_are_as_large_as_promised() -> None:
    for name in ("kl_sd", "hunyuan_image"):
        for mode in ("fp32", "bf16"):
            decoder = golden_decoder(name)
            _, heard = decode_raw(Engine(profile=PROFILE), decoder, golden(name).latents["a"], precision_mode=mode)
            assert heard.plan.predicted.packed == decoder.packed.nbytes


def test_tile_size_changes_the_number_of_tiles() -> None:
    decoder, z = small_decoder(), latent(1, 4, 20, 20)
    for plan in PLANS:
        counts = [decode_raw(Engine(profile=PROFILE), decoder, z, plan=plan, tile_size=t)[1].plan.n_tiles
                  for t in (16, 32, 0)]  # fmt: skip
        assert counts[0] > counts[1] > counts[2]


def test_plan_setting_changes_the_shape_of_the_tiles() -> None:
    decoder, z = small_decoder(), latent(1, 4, 20, 20)
    widths = {}
    for plan in PLANS:
        _, heard = decode_raw(Engine(profile=PROFILE), decoder, z, plan=plan, tile_size=16)
        widths[plan] = {shape[3] for op, _, _, shape, _ in heard.tiles if op == "decoder.conv_out"}
    assert widths == {"strips": {42}, "tiles": {18}}


@pytest.mark.parametrize("method", ["blended", "stock"])
def test_other_methods_are_refused(method: str) -> None:
    engine, decoder = Engine(profile=PROFILE), small_decoder()
    with pytest.raises(SettingsError, match=f"method {method} is not the exact engine's"):
        engine.decode(decoder, latent(1, 4, 3, 3), DecodeSettings(method=method))


# -- progress


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("batch", [1, 5])
def test_progress_rises_with_every_tile_and_ends_at_the_total(plan: str, batch: int) -> None:
    engine = Engine(profile=profile(batch_cap=2))
    _, heard = decode_raw(engine, small_decoder(), latent(batch, 4, 11, 9), plan=plan, tile_size=16)
    done, totals = zip(*heard.steps, strict=True)
    assert set(totals) == {1000}
    assert list(done) == sorted(done)
    assert done[0] >= 0
    assert done[-1] == 1000
    assert done.count(1000) == 1
    assert len(done) >= len(heard.tiles) + 1
    assert done[-2] > 950  # it does not jump at the end
    assert len(set(done)) > 20
    for _, i, n, _, _ in heard.tiles:
        assert 0 <= i < n


def test_events_come_in_order() -> None:
    _, heard = decode_raw(Engine(profile=PROFILE), small_decoder(), latent(1, 4, 6, 5))
    n = heard.started[0][1]
    assert [i for i, *_ in heard.started] == list(range(n))
    assert [report.name for report in heard.ops] == [name for _, _, name, _ in heard.started]
    assert heard.phases[0] == "plan"
    assert heard.phases[-1] == "other"
    assert sum(report.macs for report in heard.ops) == heard.plan.macs


# -- budget


@pytest.mark.parametrize("plan", PLANS)
def test_a_small_budget_makes_smaller_tiles_and_then_an_error(plan: str) -> None:
    decoder, z = golden_decoder("kl_flux"), latent(1, 16, 24, 24)
    roomy = profile(tile_bytes=1 << 20)
    free, heard = decode_raw(Engine(profile=roomy), decoder, z, plan=plan, tile_size=0)
    need = heard.plan.predicted.total
    engine = Engine(profile=replace(roomy, budget_bytes=need - 1))
    decoder = golden_decoder("kl_flux")
    raw, short = decode_raw(engine, decoder, z, plan=plan, tile_size=0)
    assert short.plan.predicted.total < need
    assert short.plan.n_tiles > heard.plan.n_tiles
    assert max_diff(raw, free) <= TOLERANCE
    tight, told = Engine(profile=replace(roomy, budget_bytes=1 << 20)), Recorder()
    with pytest.raises(PlanError, match=r"takes \d+ MiB but 1 MiB are free") as caught:
        tight.decode(decoder, z, settings(plan=plan, tile_size=0), observer=told)
    assert caught.value.free_bytes == 1 << 20
    assert caught.value.need_bytes is not None
    assert caught.value.need_bytes > 1 << 20
    assert told.tiles == []


def test_a_cached_plan_is_used_only_while_it_fits() -> None:
    decoder, shape = golden_decoder("kl_flux"), (1, 16, 24, 24)
    engine = Engine(profile=profile(tile_bytes=1 << 20))
    first = engine.plan(decoder, shape, settings())
    assert engine.plan(decoder, shape, settings()).passes is first.passes
    engine._profile = profile(tile_bytes=1 << 20, budget_bytes=first.predicted.total)
    assert engine.plan(decoder, shape, settings()).passes is first.passes
    engine._profile = profile(tile_bytes=1 << 20, budget_bytes=first.predicted.total - 1)
    assert engine.plan(decoder, shape, settings()).predicted.total < first.predicted.total
    engine._profile = profile(tile_bytes=1 << 20, budget_bytes=1 << 20)
    with pytest.raises(PlanError):
        engine.plan(decoder, shape, settings())


def test_the_latest_plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "MAX_PLANS", 3)
    engine, decoder = Engine(profile=PROFILE), small_decoder()
    for width in range(1, 7):
        engine.plan(decoder, (1, 4, 2, width))
    assert len(engine._plans) == 3


def test_two_decoders_of_one_structure_do_not_mix() -> None:
    engine, z = Engine(profile=PROFILE), latent(1, 4, 6, 5)
    one, two = small_decoder(0), small_decoder(1)
    for decoder in (one, two, one):
        raw, _ = decode_raw(engine, decoder, z)
        assert max_diff(raw, reference(decoder, z)) <= TOLERANCE


# -- values


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "best"}, "method is 'best'; choose one of auto, exact, blended, stock"),
        ({"precision_mode": "fp8"}, "precision_mode is 'fp8'; choose one of auto, fp32, bf16, fp16, mixed"),
        ({"plan": ""}, "plan is ''; choose one of auto, strips, tiles"),
        ({"tile_size": 15}, "tile_size is 15 pixels; give 0 .the planner chooses. or 16 to 16384"),
        ({"tile_size": 16385}, "tile_size is 16385 pixels"),
        ({"tile_size": -16}, "tile_size is -16 pixels"),
        ({"tile_size": 64.0}, "tile_size is 64.0; give a whole number"),
        ({"tile_size": True}, "tile_size is True; give a whole number"),
        ({"overlap": -1}, "overlap is -1 pixels; give 0 to 8192"),
        ({"overlap": 8193}, "overlap is 8193 pixels"),
        ({"chunk_frames": -1}, "chunk_frames is -1; give 0"),
        ({"seed": -2}, "seed is -2; give -1"),
        ({"seed": 2**64}, f"seed is {2**64}; give -1"),
        ({"keep_bytes": -1}, "keep_bytes is -1; give 0 or more"),
        ({"keep_bytes": 1e6}, "keep_bytes is 1000000.0; give a whole number"),
        ({"batch_optimization": 1}, "batch_optimization is 1; give true or false"),
        ({"memory_prefetching": None}, "memory_prefetching is None; give true or false"),
        ({"adaptive_precision": "yes"}, "adaptive_precision is 'yes'; give true or false"),
    ],
)
def test_bad_values_are_named_in_one_sentence(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        DecodeSettings(**given)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "given",
    [{"tile_size": 0}, {"tile_size": 16}, {"tile_size": 16384}, {"overlap": 0}, {"seed": 2**64 - 1}, {"keep_bytes": 0}],
)
def test_ends_of_the_ranges_are_allowed(given: dict[str, Any]) -> None:
    name, value = next(iter(given.items()))
    assert getattr(DecodeSettings(**given), name) == value


def test_settings_cannot_be_changed_and_tell_plans_apart() -> None:
    chosen = DecodeSettings()
    with pytest.raises(AttributeError):
        chosen.tile_size = 5  # type: ignore[misc]
    assert DecodeSettings() == chosen
    assert hash(DecodeSettings(tile_size=64)) != hash(chosen)
