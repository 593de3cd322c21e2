"""Which of torch's switches a decode moves on which device and why; that decodes do so, and tell it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch

from halo_vae.nodes.decode_latent import decode_latent
from halo_vae.optim import scope
from halo_vae.optim.decode import Engine
from halo_vae.optim.events import SILENT
from halo_vae.optim.scope import BackendFlags, FlagsInForce, backend_scope, flags_for, telling
from halo_vae.optim.settings import DecodeSettings
from halo_vae.tests.cases.exact_clip import exact_causal
from halo_vae.tests.fixtures import CausalDec, FakeVAE, PointDec
from halo_vae.tests.flags import EXITS, booleans, given, leave_by, running, state
from halo_vae.tests.optim.helpers import Recorder, latent, profile, settings, small_decoder

HIP = profile(kind="hip", family="rdna3.5", gfx="gfx1151", name="cuda:0", attention="matmul")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No scope of another test, and nobody warned; each test must leave the state as it was."""
    monkeypatch.setattr(scope, "_REGISTRY", scope._Registry())
    before = state()
    yield
    assert state() == before
    assert scope._REGISTRY.entries == []
    assert scope._REGISTRY.applied == {}


# -- which switches, and why


def values(flags: BackendFlags) -> dict[str, str]:
    return {choice.name: choice.value for choice in flags.reasons}


def test_every_flag_has_a_reason() -> None:
    told = {f.name for f in fields(BackendFlags)} - {"reasons", "benchmark_is_slow"}
    for device in (profile(), HIP, profile(kind="cuda", family="cuda"), profile(kind="other")):
        for opaque in (True, False):
            reasons = flags_for(device, settings(), opaque=opaque).reasons
            assert {choice.name for choice in reasons} == told
            assert all(choice.reason for choice in reasons)


RULES = [  # device, settings, head, opaque, what differs from leaving all as it is
    (profile(), {}, 64, False, {"float32": "mkldnn"}),  # fp32 asked for
    (profile(), {"precision_mode": "auto"}, 64, False, {}),
    (profile(convolution="winograd"), {"precision_mode": "auto"}, 64, False, {"float32": "mkldnn"}),
    (profile(convolution="winograd"), {}, None, True, {}),
    (profile(), {"precision_mode": "auto", "kernel_backend": "winograd"}, 64, False, {"float32": "mkldnn"}),
    (profile(), {"cudnn": "on", "precision_mode": "auto"}, 64, False, {"cudnn": "on"}),
    (HIP, {}, 512, False, {"fp16_accumulation": "off", "reduced_sums": "off", "sdpa": "math"}),
    (HIP, {"fp16_accumulation": True}, 0, False, {"fp16_accumulation": "off", "reduced_sums": "off"}),
    (HIP, {}, 256, False, {"fp16_accumulation": "off", "reduced_sums": "off"}),
    (HIP, {}, 384, False, {"fp16_accumulation": "off", "reduced_sums": "off", "sdpa": "math"}),
    (HIP, {}, None, True, {"fp16_accumulation": "off", "reduced_sums": "off", "sdpa": "math"}),
    (HIP, {"cudnn": "off"}, 0, False, {"cudnn": "off", "fp16_accumulation": "off", "reduced_sums": "off"}),
    (
        profile(kind="hip", family="cdna", gfx="gfx942"), {}, 0, False,
        {"float32": "cuda", "fp16_accumulation": "off", "reduced_sums": "off"},
    ),
    (profile(kind="cuda", family="cuda"), {}, 512, False, {"float32": "cuda", "fp16_accumulation": "off"}),
    (profile(kind="cuda", family="cuda"), {"precision_mode": "auto"}, 512, False, {"fp16_accumulation": "off"}),
    (
        profile(kind="cuda", family="cuda"), {"precision_mode": "fp16", "fp16_accumulation": True}, 512, False,
        {"fp16_accumulation": "on"},
    ),
    (profile(kind="cuda", family="cuda"), {}, None, True, {}),
]  # fmt: skip


@pytest.mark.parametrize(("device", "asked", "head", "opaque", "expected"), RULES)
def test_flags_of_devices(
    device: Any, asked: dict[str, Any], head: int | None, opaque: bool, expected: dict[str, str]
) -> None:
    flags = flags_for(device, settings(**asked), head_dim=head, opaque=opaque)
    assert {name: value for name, value in values(flags).items() if value != "leave"} == expected
    assert flags.benchmark == "leave"
    assert flags.benchmark_is_slow == (device.kind == "hip")


# -- around decodes


def wide_picture(observer: Any, engine: Engine) -> None:
    engine.decode(small_decoder(), latent(1, 4, 6, 5), settings(cudnn="off"), observer=observer)


def clip(observer: Any, engine: Engine) -> None:
    engine.decode(exact_causal(CausalDec()), latent(1, 4, 2, 4, 4), settings(cudnn="off"), observer=observer)


def frames(observer: Any, engine: Engine) -> None:
    engine.decode_frames(
        exact_causal(CausalDec()), latent(1, 4, 2, 4, 4), settings(cudnn="off"), observer=observer,
        on_frames=lambda first, frames: None,
    )  # fmt: skip


def blended(observer: Any, engine: Engine) -> None:
    chosen = DecodeSettings(method="blended", tile_size=64, cudnn="off")
    decode_latent({"samples": latent(1, 4, 12, 12)}, FakeVAE(PointDec()), chosen, observer=observer, profile=HIP)


ROUTES = {"picture": wide_picture, "clip": clip, "frames": frames, "blended": blended}


@pytest.mark.parametrize("way_out", EXITS)
@pytest.mark.parametrize("route", ROUTES)
def test_decodes_run_with_their_flags_and_leave_none(route: str, way_out: str) -> None:
    inside: list[dict[str, bool]] = []

    def look(*_: object) -> None:
        inside.append(booleans())
        leave_by(way_out)

    heard = Recorder(on_tile=look)
    heard.started.append((0, 1, "decode", 1))
    with given(cudnn=True, fp16_reduced_sums=True, sdpa_flash=True):
        before = state()
        running(lambda: ROUTES[route](heard, Engine(profile=HIP)), way_out)
        assert state() == before
    assert len(inside) > 0
    assert {(now["cudnn"], now["fp16_reduced_sums"], now["sdpa_math"]) for now in inside} == {(False, False, True)}
    for plan in heard.plans:
        told = [choice for choice in plan.choices if choice.name == "flags"]
        assert len(told) == 1
        assert "cudnn off (was on)" in told[0].value
        assert "fp16_reduced_sums off (was on)" in told[0].value
        assert "reduced_sums: sums in float32" in told[0].reason


def test_a_plan_says_nothing_of_flags_that_are_as_before() -> None:
    heard = Recorder()
    with given(cudnn=False):
        Engine(profile=profile()).decode(small_decoder(), latent(1, 4, 6, 5), settings(cudnn="off"), observer=heard)
    assert [choice for choice in heard.plan.choices if choice.name == "flags"] == []


def test_a_scope_within_another_is_told_once() -> None:
    heard = Recorder()
    with given(cudnn=True), backend_scope(BackendFlags(cudnn="off")) as outer:
        once = telling(heard, outer)
        with backend_scope(BackendFlags(cudnn="off")) as inner:
            Engine(profile=profile()).decode(
                small_decoder(), latent(1, 4, 6, 5), settings(), observer=telling(once, inner)
            )
    assert [choice.value for choice in heard.plan.choices if choice.name == "flags"] == ["cudnn off (was on)"]
    assert telling(SILENT, FlagsInForce(changes=(), unreadable=(), flags=BackendFlags())) is SILENT


def test_the_hosts_own_decode_runs_without_a_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[dict[str, object]] = []

    class Looks(PointDec):
        def run(self, z: torch.Tensor) -> torch.Tensor:
            inside.append(state() | {"scopes": len(scope._REGISTRY.entries)})
            return super().run(z)

    z = {"samples": latent(1, 4, 4, 4)}
    with given(cudnn=True), torch.no_grad():
        before = state()
        decode_latent(z, FakeVAE(Looks()), DecodeSettings(method="stock", cudnn="off"), profile=HIP)
        decode_latent(z, FakeVAE(Looks()), DecodeSettings(method="blended", cudnn="off"), profile=HIP)
    stock, ours = inside
    assert stock == before | {"scopes": 0}
    assert (ours["scopes"], ours["cudnn"]) == (1, False)


# -- the mode that searches


@pytest.mark.parametrize("cudnn", [True, False])
def test_a_benchmark_mode_of_the_users_is_kept_with_one_warning(cudnn: bool, caplog: pytest.LogCaptureFixture) -> None:
    flags = flags_for(HIP, settings(), head_dim=0)
    with given(benchmark=True, cudnn=cudnn), caplog.at_level(logging.WARNING):
        for _ in range(3):
            with backend_scope(flags):
                assert booleans()["benchmark"]
    warnings = [r.message for r in caplog.records if "benchmark" in r.message]
    assert len(warnings) == int(cudnn)  # with MIOpen off nothing is searched for


def test_no_warning_where_a_search_is_quick(caplog: pytest.LogCaptureFixture) -> None:
    with given(benchmark=True), backend_scope(flags_for(profile(kind="cuda", family="cuda"), settings(), head_dim=0)):
        pass
    assert caplog.records == []
