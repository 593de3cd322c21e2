"""Goldens through every convolution backend: what it decodes, what really ran, and what the record says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.optim.convolvers import kitchen
from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.device import DeviceProfile
from halo_vae.optim.events import Choice
from halo_vae.optim.plan import Plan, is_conv3
from halo_vae.optim.pool import MemoryPool
from halo_vae.optim.tuning import Overrides, TunedEntry, key_of
from halo_vae.tests.goldens import IMAGE_GOLDENS, TOLERANCE, golden
from halo_vae.tests.optim.helpers import (
    EVERY_DTYPE,
    HOT,
    Recorder,
    decode_raw,
    decoder_of,
    golden_decoder,
    hot_decoder,
    latent,
    max_diff,
    narrow_winograd,
    profile,
    reference,
    settings,
    small_weights,
    tolerance,
)
from halo_vae.tests.optim.kernels import fake_kitchen
from halo_vae.tests.optim.kernels.test_backends import HIP, lifted

PLANS = ("strips", "tiles")
PACKAGES = ("real", "plain")
"""The installed package, and a stand-in for it where there is none."""


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """These decoders are too narrow for `winograd` to pay."""
    narrow_winograd(monkeypatch, 8)


@pytest.fixture(params=PACKAGES)
def heard_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> fake_kitchen.Heard:
    return fake_kitchen.install(monkeypatch, real=request.param == "real")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> fake_kitchen.Heard:
    """The stand-in."""
    return fake_kitchen.install(monkeypatch)


def convolutions(heard: Recorder) -> Choice:
    return next(c for c in heard.plan.choices if c.name == "convolutions")


def ran_on(heard: Recorder, decoder: Decoder) -> dict[str, str]:
    """Backends of the 3x3 convolutions."""
    names = {op.name for op in decoder.program.ops if is_conv3(op)}
    return {report.name: report.backend for report in heard.ops if report.name in names}


def counted(backends: dict[str, str]) -> str:
    used = list(backends.values())
    return ", ".join(f"{name} {used.count(name)}" for name in sorted(set(used)))


def refused_channels(decoder: Decoder) -> set[str]:
    """Convolutions whose channels `kitchen` does not take."""
    return {
        op.name
        for op in decoder.program.ops
        if is_conv3(op) and (op.out_channels % 8 or (op.in_channels % 8 and op.in_channels > 8))
    }


# -- float32


@pytest.mark.parametrize(("plan", "channels_last"), [("strips", True), ("tiles", False)])
@pytest.mark.parametrize("name", IMAGE_GOLDENS)
def test_goldens_through_shifted_products(name: str, plan: str, channels_last: bool) -> None:
    decoder = golden_decoder(name)
    for case, z in golden(name).latents.items():
        engine = Engine(profile=profile())
        raw, heard = decode_raw(
            engine, decoder, z, kernel_backend="shifted_gemm", plan=plan, tile_size=5 * decoder.program.scale[1],
            tensor_layout_optimization=channels_last,
        )  # fmt: skip
        assert max_diff(raw, golden(name).expected[case]) <= TOLERANCE
        assert set(ran_on(heard, decoder).values()) == {"shifted_gemm"}
        assert convolutions(heard).reason == "asked for shifted_gemm"
        assert engine.pool.high_water_bytes == heard.plan.predicted.pool
        assert heard.plan.macs == sum(report.macs for report in heard.ops)


@pytest.mark.parametrize("name", ["kl_flux", "hunyuan_image", "taesd"])
@pytest.mark.parametrize(("asked", "plan"), [("torch", "tiles"), ("winograd", "strips"), ("winograd", "tiles")])
def test_goldens_through_kernels_that_are_asked_for(asked: str, plan: str, name: str) -> None:
    z, decoder = golden(name).latents["a"], golden_decoder(name)
    raw, heard = decode_raw(Engine(profile=profile()), decoder, z, kernel_backend=asked, plan=plan)
    assert max_diff(raw, golden(name).expected["a"]) <= TOLERANCE
    found = ran_on(heard, decoder)
    assert asked in found.values()
    assert (set(found.values()) == {asked}) == ("refused" not in convolutions(heard).reason)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["kl_sd", "kl_flux"])
def test_goldens_through_kitchen_with_its_rule_of_dtypes_lifted(
    name: str, plan: str, heard_calls: fake_kitchen.Heard
) -> None:
    decoder = golden_decoder(name)
    for case, z in golden(name).latents.items():
        engine = Engine(profile=profile(backends=(lifted("float32"),)))
        raw, heard = decode_raw(
            engine, decoder, z, kernel_backend="kitchen", fp16_accumulation=True, plan=plan, tile_size=40
        )
        assert max_diff(raw, golden(name).expected[case]) <= TOLERANCE
        found = ran_on(heard, decoder)
        assert {op for op, backend in found.items() if backend != "kitchen"} == {"decoder.conv_out"}
        assert convolutions(heard).value == counted(found)
        assert engine.pool.high_water_bytes == heard.plan.predicted.pool
        assert heard.fallbacks == []
    assert all(given for _, given in heard_calls.staged)


# -- 16 bits, as on the device


def as_on_hip(name: str, mode: str, dtype: str = "float16") -> tuple[Decoder, Tensor, DeviceProfile, Tensor]:
    """A golden's decoder, a tiny latent, the device and the float32 truth."""
    loaded = torch.float32 if mode == "mixed" else getattr(torch, dtype)
    decoder = golden_decoder(name, loaded)
    decoder.program = replace(decoder.program, working_dtypes=EVERY_DTYPE)
    z = golden(name).latents["a"][..., :6, :5].contiguous()
    device = HIP if dtype == "float16" else replace(HIP, backends=(lifted(dtype),))
    return decoder, z, device, reference(decoder, z)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("mode", ["fp16", "mixed"])
@pytest.mark.parametrize("name", ["kl_sd", "kl_flux"])
def test_goldens_through_kitchen_in_float16(
    name: str, mode: str, plan: str, heard_calls: fake_kitchen.Heard
) -> None:
    decoder, z, device, truth = as_on_hip(name, mode)
    asked = {"precision_mode": mode, "plan": plan, "tile_size": 24, "fp16_accumulation": True}
    engine = Engine(profile=device)
    raw, heard = decode_raw(engine, decoder, z, kernel_backend="kitchen", **asked)
    assert max_diff(raw, truth) <= tolerance(mode, truth)
    assert heard.plan.layout == "channels_last"  # though the device's default is the other
    assert convolutions(heard).value == "kitchen 32, torch 1"
    assert "1 of 33 refused: 3 output channels are not a multiple of 8 (decoder.conv_out)" in convolutions(heard).reason
    assert counted(ran_on(heard, decoder)) == "kitchen 32, torch 1"
    assert (len(heard_calls.staged) > 30) == (mode == "fp16")  # a wider stream is staged by our own kernels
    assert any(residual for _, residual in heard_calls.convolved) == (mode == "fp16")
    assert engine.pool.high_water_bytes == heard.plan.predicted.pool
    # no worse than the framework's own float16, which rounds as often
    plain, _ = decode_raw(Engine(profile=device), decoder, z, kernel_backend="torch", **asked)
    error, usual = (float((x - truth).std()) for x in (raw, plain))
    assert error <= 1.5 * usual


@pytest.mark.parametrize("name", ["kl_sd", "kl_flux"])
def test_goldens_through_kitchen_in_bfloat16(name: str, heard_calls: fake_kitchen.Heard) -> None:
    decoder, z, device, truth = as_on_hip(name, "bf16", "bfloat16")
    asked = {"precision_mode": "bf16", "tile_size": 24, "fp16_accumulation": True}
    raw, heard = decode_raw(Engine(profile=device), decoder, z, kernel_backend="kitchen", **asked)
    assert max_diff(raw, truth) <= tolerance("bf16", truth)
    assert counted(ran_on(heard, decoder)) == "kitchen 32, torch 1"
    assert heard_calls.staged


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("channels_last", [True, False])
def test_shifted_products_in_16_bits_lose_no_more_than_the_frameworks(dtype: str, channels_last: bool) -> None:
    mode = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    decoder, z, _, truth = as_on_hip("kl_sd", mode, dtype)
    errors = {}
    for name in ("torch", "shifted_gemm"):
        engine = Engine(profile=HIP)
        raw, heard = decode_raw(
            engine, decoder, z, kernel_backend=name, precision_mode=mode, tile_size=24,
            tensor_layout_optimization=channels_last,
        )  # fmt: skip
        errors[name] = float((raw - truth).std())
        assert set(ran_on(heard, decoder).values()) == {name}
        assert engine.pool.high_water_bytes == heard.plan.predicted.pool
    assert errors["shifted_gemm"] <= 1.5 * errors["torch"]


# -- statistics


@pytest.mark.parametrize("plan", PLANS)
def test_statistics_are_those_of_whole_maps(plan: str, package: fake_kitchen.Heard) -> None:
    decoder, z, device, _ = as_on_hip("kl_sd", "fp16")
    _, heard = decode_raw(
        Engine(profile=device), decoder, z, kernel_backend="kitchen", precision_mode="fp16", plan=plan, tile_size=16,
        fp16_accumulation=True,
    )  # fmt: skip
    assert heard.plan.tile_grid[0] > 1
    sizes = {tuple(6 * s if i == 0 else 5 * s for i in range(2)) for s in (1, 2, 4, 8)}
    assert {shape[-2:] for shape in package.statistics} <= sizes
    assert len(package.statistics) > 20
    assert all(given for _, given in package.staged)
    assert any(shape[-2:] not in sizes for shape, _ in package.staged)  # parts of maps, with the statistics of all


def test_statistics_of_a_part_would_be_seen(package: fake_kitchen.Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance is tight enough: with each strip's own statistics, the error is far above it."""
    real = kitchen.stage

    def by_itself(src: Tensor, tile: Any, halo: int, norm: Any, act: Any, out: Tensor) -> None:
        if norm is not None:
            part = src[:, :, tile.rows.start : tile.rows.stop].contiguous(memory_format=torch.channels_last)
            norm = (*norm[:3], kitchen.map_statistics(part, norm[0]))
        real(src, tile, halo, norm, act, out)

    monkeypatch.setattr(kitchen, "stage", by_itself)
    decoder, z = golden_decoder("kl_sd"), golden("kl_sd").latents["a"]
    raw, _ = decode_raw(
        Engine(profile=profile(backends=(lifted("float32"),))), decoder, z, kernel_backend="kitchen", plan="strips",
        tile_size=40, fp16_accumulation=True,
    )  # fmt: skip
    assert max_diff(raw, golden("kl_sd").expected["a"]) > 50 * TOLERANCE


# -- what the plan and the record say


def plan_for(decoder: Decoder, z: Tensor, device: DeviceProfile, **asked: Any) -> Plan:
    plan = Engine(profile=device).plan(decoder, tuple(z.shape), settings(**asked))
    assert isinstance(plan, Plan)
    return plan


def test_strips_are_written_where_they_lie(package: fake_kitchen.Heard) -> None:
    decoder, z, device, _ = as_on_hip("kl_sd", "fp16")
    asked = {"kernel_backend": "kitchen", "precision_mode": "fp16", "tile_size": 16, "fp16_accumulation": True}
    strips = plan_for(decoder, z, device, plan="strips", **asked)
    homes = [step for step in strips.ops if step.writes_home]
    assert len(homes) > 25
    assert all(f"result{step.index}" not in step.buffers for step in homes)
    assert any(step.adds_residual for step in homes)
    tiles = plan_for(decoder, z, device, plan="tiles", **asked)
    assert not any(step.writes_home for step in tiles.ops if step.grid.n_across > 1)


def test_float16_sums_need_to_be_allowed(package: fake_kitchen.Heard) -> None:
    decoder, z, device, truth = as_on_hip("kl_sd", "fp16")
    raw, heard = decode_raw(Engine(profile=device), decoder, z, kernel_backend="kitchen", precision_mode="fp16")
    assert max_diff(raw, truth) <= tolerance("fp16", truth)
    assert set(ran_on(heard, decoder).values()) == {"torch"}
    assert "33 of 33 refused: adds up in float16, which fp16_accumulation does not allow" in convolutions(heard).reason
    assert package.convolved == []


def test_nothing_is_asked_of_the_package_by_default(package: fake_kitchen.Heard) -> None:
    decoder, z, device, _ = as_on_hip("kl_sd", "fp16")
    _, heard = decode_raw(Engine(profile=device), decoder, z, precision_mode="fp16", fp16_accumulation=True)
    assert set(ran_on(heard, decoder).values()) == {"torch"}
    assert (heard.plan.layout, convolutions(heard).value) == ("contiguous", "torch 33")
    assert package.convolved == package.staged == package.statistics == []


@pytest.mark.parametrize("error", [0.01, None])
def test_a_tuned_entry_allows_float16_sums_by_its_measured_error(
    error: float | None, package: fake_kitchen.Heard
) -> None:
    decoder, z, device, truth = as_on_hip("kl_sd", "fp16")
    entry = TunedEntry(
        key=key_of(decoder.program, "float16", device),
        best=Overrides(kernel_backend="kitchen", fp16_accumulation=True),
        rule_ns=200, best_ns=100, max_error=error, complete=True, measured=(), created="2026-01-02T03:04:05+00:00",
    )  # fmt: skip
    engine = Engine(profile=replace(device, tuned=entry))
    raw, heard = decode_raw(engine, decoder, z, precision_mode="fp16")
    assert max_diff(raw, truth) <= tolerance("fp16", truth)
    refused = "1 of 33 refused: 3 output channels" if error is not None else "33 of 33 refused: adds up in float16"
    assert counted(ran_on(heard, decoder)) == ("kitchen 32, torch 1" if error is not None else "torch 33")
    assert convolutions(heard).reason.startswith("tuned: 50% faster than the rules, measured 2026-01-02; ")
    assert refused in convolutions(heard).reason
    _, heard = decode_raw(engine, decoder, z, precision_mode="fp16", kernel_backend="torch")  # what is asked for wins
    assert counted(ran_on(heard, decoder)) == "torch 33"


@pytest.mark.parametrize("gone", ["package", "function"])
def test_a_decode_without_the_package_says_so(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kitchen.install(monkeypatch)
    if gone == "package":
        monkeypatch.setitem(fake_kitchen.sys.modules, fake_kitchen.NAME, None)
    else:
        monkeypatch.delattr(fake_kitchen.sys.modules[fake_kitchen.NAME], "fp16_conv3d")
    decoder, z, device, truth = as_on_hip("kl_sd", "fp16")
    raw, heard = decode_raw(
        Engine(profile=device), decoder, z, kernel_backend="kitchen", precision_mode="fp16", fp16_accumulation=True
    )
    assert max_diff(raw, truth) <= tolerance("fp16", truth)
    assert set(ran_on(heard, decoder).values()) == {"torch"}
    told = "not installed" if gone == "package" else "has no fp16_conv3d"
    assert told in convolutions(heard).reason
    assert "33 of 33 refused" in convolutions(heard).reason


def test_a_call_that_is_refused_runs_on_torch_and_is_told(
    package: fake_kitchen.Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kitchen, "call_refusals", lambda x, *rest: ["of no use"] if x.shape[1] == 4 else [])
    decoder, z, device, truth = as_on_hip("kl_sd", "fp16")
    raw, heard = decode_raw(
        Engine(profile=device), decoder, z, kernel_backend="kitchen", precision_mode="fp16", tile_size=16,
        fp16_accumulation=True,
    )  # fmt: skip
    assert max_diff(raw, truth) <= tolerance("fp16", truth)
    found = ran_on(heard, decoder)
    assert found["decoder.conv_in"] == "torch"
    assert counted(found) == "kitchen 31, torch 2"
    told = [(f.kind, f.where, f.given, f.used, f.reason) for f in heard.fallbacks]
    assert told == [("backend", "decoder.conv_in", "kitchen", "torch", "of no use")]


@pytest.mark.parametrize("asked", ["kitchen", "shifted_gemm"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_result_that_is_not_finite_is_redone_wider(asked: str, plan: str, package: fake_kitchen.Heard) -> None:
    decoder, z = hot_decoder(HOT, loaded=torch.float16), latent(1, 4, 5, 6)
    engine, how = Engine(profile=HIP), {"kernel_backend": asked, "precision_mode": "fp16", "fp16_accumulation": True}
    truth = reference(decoder, z)
    for attempt in range(2):
        raw, heard = decode_raw(engine, decoder, z, plan=plan, **how)
        assert max_diff(raw, truth) <= tolerance("mixed", truth)
        found = ran_on(heard, decoder)
        assert found[HOT] == "torch"
        assert heard.dtype_of(HOT) == "float32"
        assert asked in found.values()
        assert [name for name, *_ in heard.redone] == ([HOT] if attempt == 0 else [])
    assert "runs in float32, as float16 was not finite" in convolutions(heard).reason


@pytest.mark.parametrize("asked", ["kitchen", "shifted_gemm"])
@pytest.mark.parametrize("plan", PLANS)
def test_what_fresh_memory_holds_does_not_matter(asked: str, plan: str, package: fake_kitchen.Heard) -> None:
    def rubbish(nbytes: int, device: torch.device) -> Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8, device=device)  # NaN in every float dtype

    decoder, z = decoder_of(small_weights()), latent(2, 4, 9, 7)
    device = profile(backends=(lifted("float32"),), tile_bytes=100_000)
    engine = Engine(profile=device, pool=MemoryPool(rubbish))
    raw, heard = decode_raw(engine, decoder, z, kernel_backend=asked, plan=plan, fp16_accumulation=True)
    assert max_diff(raw, reference(decoder, z)) <= TOLERANCE
    assert asked in ran_on(heard, decoder).values()
