"""OM: memory runs out."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.nodes.decode_latent import decode_latent
from halo_vae.optim import executor
from halo_vae.optim.decode import Engine
from halo_vae.optim.errors_oom import is_out_of_memory
from halo_vae.optim.kernels import torch_kernels
from halo_vae.optim.ladder import MAX_ATTEMPTS
from halo_vae.tests.cases.exact import exact_conv, exact_settings
from halo_vae.tests.cases.support import Recorder, decode, max_diff, record, settings, whole
from halo_vae.tests.fixtures import ConvDec, FakeVAE, LimitDec, PointDec, latent, to_image
from halo_vae.tests.optim.helpers import profile


def accelerator_error(text: str, code: int | None = None) -> Exception:
    error = torch.AcceleratorError(text)
    if code is not None:
        error.error_code = code
    return error


FORMS: dict[str, Callable[[], BaseException]] = {
    "torch": lambda: torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2 GiB"),
    "hip": lambda: RuntimeError("HIP error: out of memory"),
    "accelerator": lambda: accelerator_error("HIP error: out of memory"),
    "code": lambda: accelerator_error("HIP error: an allocation failed", 2),
    "host": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"),
}
OTHERS: dict[str, Callable[[], BaseException]] = {
    "shape": lambda: RuntimeError("expected input to have 16 channels"),
    "lost": lambda: RuntimeError("HIP error: an illegal memory access was encountered"),
    "launch": lambda: accelerator_error("hipErrorLaunchFailure: unspecified launch failure", 719),
}
LIMIT = 4 * 32 * 32


@pytest.mark.parametrize("form", FORMS)
def test_om_1_every_form_leads_to_tiles(form: str) -> None:
    model, z = LimitDec(PointDec(), limit=LIMIT, exc=FORMS[form]), latent((1, 4, 64, 64))
    got, heard = record(model, z)
    assert max_diff(got, whole(PointDec(), z)) <= 1e-6
    assert heard.kinds() == ["out_of_memory"]
    assert [call["shape"][-1] for call in model.log] == [64, 32, 32, 32, 32]


@pytest.mark.parametrize("form", OTHERS)
def test_om_1_other_errors_are_raised_unchanged(form: str) -> None:
    error = OTHERS[form]()
    model = LimitDec(PointDec(), limit=LIMIT, exc=lambda: error)
    with pytest.raises(RuntimeError) as caught:
        decode(model, latent((1, 4, 64, 64)))
    assert caught.value is error
    assert len(model.log) == 1


class ConvLimit:
    """A convolution of the exact engine that fails where its result would have more than `limit` elements."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: float, make: Callable[[], BaseException]) -> None:
        self.limit, self.calls, self.failures = limit, 0, 0
        self.on_failure: Callable[[], None] = lambda: None
        real = torch_kernels.convolve

        def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            self.calls += 1
            if weight.shape[0] * math.prod(x.shape[-2:]) > self.limit:
                self.failures += 1
                kept = torch.zeros(1000, 1000)
                self.kept = weakref.ref(kept)
                self.on_failure()
                raise make()
            return real(x, weight, bias)

        monkeypatch.setattr(torch_kernels, "convolve", convolve)


PROFILE = profile(tile_bytes=1 << 18)


def exact(z: Tensor, heard: Recorder, **given: Any) -> Tensor:
    """The raw picture of F2 by the exact engine."""
    engine = Engine(profile=PROFILE)
    return engine.decode(exact_conv(ConvDec()), z, exact_settings(0, **given), observer=heard, finish=lambda x: x)


@pytest.mark.parametrize("form", FORMS)
def test_om_1_in_the_exact_engine(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    z, heard = latent((1, 4, 16, 16)), Recorder()
    expected = exact(z, Recorder())
    limited = ConvLimit(monkeypatch, 20_000, FORMS[form])
    assert max_diff(exact(z, heard), expected) <= 1e-5
    assert heard.kinds() == ["out_of_memory"] * limited.failures
    assert limited.failures >= 2


@pytest.mark.parametrize("form", OTHERS)
def test_om_1_other_errors_in_the_exact_engine(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, heard = OTHERS[form](), Recorder()
    limited = ConvLimit(monkeypatch, 0, lambda: error)
    with pytest.raises(RuntimeError) as caught:
        exact(latent((1, 4, 16, 16)), heard)
    assert caught.value is error
    assert (limited.calls, heard.kinds()) == (1, [])


def test_om_2_the_failed_attempt_is_gone_when_the_next_begins() -> None:
    held: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def hold(z: Tensor) -> None:
        mine = torch.zeros(1000, 1000)
        held.append(weakref.ref(mine))
        raise torch.OutOfMemoryError("HIP out of memory")

    model = LimitDec(PointDec(), limit=LIMIT, hook=hold)
    real = model.inner.run

    def look(z: Tensor) -> Tensor:
        alive.append(held[-1]() is not None)
        return real(z)

    model.inner.run = look  # type: ignore[method-assign]
    decode(model, latent((1, 4, 64, 64)))
    assert alive == [False] * 4


def test_om_2_in_the_exact_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = ConvLimit(monkeypatch, 20_000, FORMS["hip"])
    alive: list[bool] = []
    real = executor.PassRunner.run

    def run(self: executor.PassRunner) -> None:
        if limited.failures:
            alive.append(limited.kept() is not None)
        real(self)

    monkeypatch.setattr(executor.PassRunner, "run", run)
    exact(latent((1, 4, 16, 16)), Recorder())
    assert len(alive) == limited.failures >= 2
    assert not any(alive)


def flags(vae: FakeVAE) -> tuple[object, ...]:
    """What a decode must leave as it was."""
    return torch.backends.cudnn.enabled, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dict(vars(vae))


def test_om_4_always_short_of_memory() -> None:
    model = LimitDec(PointDec(), limit=0)
    vae, heard = FakeVAE(model), Recorder()
    before = flags(vae)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        decode_latent({"samples": latent((1, 4, 64, 64))}, vae, settings(0, method="auto"), observer=heard)
    areas = [math.prod(call["shape"][-2:]) for call in model.log]
    assert len(areas) <= MAX_ATTEMPTS <= 8
    assert all(a > b for a, b in itertools.pairwise(areas))
    height, width = heard.plans[-1].tile_px
    assert f"{height}x{width} px" in str(caught.value)
    assert caught.value.__cause__ is not None
    assert is_out_of_memory(caught.value.__cause__)
    assert flags(vae) == before


def test_om_4_in_the_exact_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    limited, engine, heard = ConvLimit(monkeypatch, 0, FORMS["torch"]), Engine(profile=PROFILE), Recorder()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        engine.decode(exact_conv(ConvDec()), latent((2, 4, 16, 16)), exact_settings(0), observer=heard)
    assert 3 <= limited.failures <= MAX_ATTEMPTS
    assert is_out_of_memory(caught.value)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert "Tried to allocate 2 GiB" in str(caught.value)
    assert engine.pool.held_bytes == 0
    assert limited.kept() is None  # though the error is held here


def test_om_4_blended_tiles_after_an_exact_decode_stay_within_the_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    limited, model = ConvLimit(monkeypatch, 0, FORMS["torch"]), LimitDec(ConvDec(), limit=0)
    with pytest.raises(torch.OutOfMemoryError, match="blended tiles"):
        decode_latent(
            {"samples": latent((2, 4, 48, 48))}, FakeVAE(model), settings(0, method="auto"),
            decoder=exact_conv(ConvDec()), engine=Engine(profile=PROFILE),
        )  # fmt: skip
    assert len(model.log) >= 1
    assert limited.failures + len(model.log) <= MAX_ATTEMPTS


@pytest.mark.parametrize("late", [False, True])
def test_om_6_no_holes_and_nothing_twice(late: bool) -> None:
    model, z = LimitDec(PointDec(), limit=10**9 if late else 4 * 24 * 24), latent((1, 4, 64, 64))
    expected = whole(PointDec(), z)

    def tighten(i: int, n: int) -> None:
        if late and len(model.log) == 3:
            model.limit = 4 * 24 * 24

    heard = Recorder(on_tile=tighten)
    size = 256 if late else 512  # 32 latents, so that there is a third tile; or 64
    got = decode_latent({"samples": z}, FakeVAE(model), settings(size, 64), observer=heard)
    assert max_diff(got, expected) <= 1e-6
    sizes = [plan.tile_px[0] for plan in heard.plans]
    assert sizes == ([256, 128] if late else [512, 256, 128])
    assert heard.kinds().count("out_of_memory") == len(sizes) - 1


@pytest.mark.parametrize("plan", ["strips", "tiles"])
@pytest.mark.parametrize("late", [False, True])
def test_om_6_in_the_exact_engine(plan: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    z = latent((1, 4, 64, 64))
    expected = to_image(ConvDec().run(z))
    limited = ConvLimit(monkeypatch, math.inf if late else 200_000, FORMS["hip"])

    def tighten(i: int, n: int) -> None:
        if late and limited.calls == 3:
            limited.limit = 200_000

    heard = Recorder(on_tile=tighten)
    engine = Engine(profile=profile(tile_bytes=8 << 20))
    got = engine.decode(exact_conv(ConvDec()), z, exact_settings(0, plan), observer=heard)
    assert max_diff(got, expected) <= 1e-5
    assert heard.kinds() == ["out_of_memory"] * limited.failures
    assert limited.failures >= 2
    assert len(heard.plans) == limited.failures + 1
    assert heard.plan.n_tiles > heard.plans[0].n_tiles
