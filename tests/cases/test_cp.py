"""CP: cancel and progress."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halo_vae.nodes.decode_latent import decode_latent
from halo_vae.optim.decode import Engine
from halo_vae.optim.kernels import torch_kernels
from halo_vae.optim.pool import MemoryPool
from halo_vae.tests.cases.exact import exact_conv, exact_settings
from halo_vae.tests.cases.exact_clip import exact_causal
from halo_vae.tests.cases.support import Recorder, capped, decode, record, settings
from halo_vae.tests.fixtures import (
    CausalDec,
    ConvDec,
    FakeVAE,
    Logged,
    PointDec,
    TimeIndexDec,
    device_memory_error,
    latent,
)
from halo_vae.tests.flags import state


class OldInterrupt(Exception):  # noqa: N818 (named as hosts name it)
    """As ComfyUI 0.3.64 has it."""


class NewInterrupt(BaseException):
    """As ComfyUI 0.20.1 has it."""


class StopsAt(PointDec):
    """Raises `error` at its nth call."""

    def __init__(self, n: int, error: BaseException) -> None:
        super().__init__()
        self.n, self.error = n, error

    def run(self, z: torch.Tensor) -> torch.Tensor:
        if len(self.log) == self.n:
            raise self.error
        return super().run(z)


def global_state() -> dict[str, Any]:
    """All of RF-1, and the random state."""
    return state() | {"random": torch.get_rng_state().tolist()}


@pytest.mark.parametrize("kind", [OldInterrupt, NewInterrupt])
@pytest.mark.parametrize(("tile_px", "nth"), [(128, 3), (768, 1)])
def test_cp_1_interrupt_leaves_as_it_is(kind: type[BaseException], tile_px: int, nth: int) -> None:
    error = kind("stop")
    model, z, before = StopsAt(nth, error), latent((1, 4, 48, 48)), global_state()
    heard = Recorder()
    with pytest.raises(kind) as caught:
        decode_latent({"samples": z}, FakeVAE(model), settings(tile_px, 0), observer=heard)
    assert caught.value is error
    assert len(model.log) == nth
    assert heard.fallbacks == []
    assert global_state() == before


@pytest.mark.parametrize("kind", [OldInterrupt, NewInterrupt])
@pytest.mark.parametrize(("tile_px", "nth"), [(128, 3), (768, 1)])
def test_cp_1_exact_interrupt_returns_the_pool(kind: type[BaseException], tile_px: int, nth: int) -> None:
    error, seen, model, engine = kind("stop"), [], ConvDec(), Engine()
    z, decoder, chosen = latent((1, 4, 48, 48)), exact_conv(model), exact_settings(tile_px)

    def stop(i: int, n: int) -> None:
        seen.append(i)
        if len(seen) == nth:
            raise error

    before, heard = global_state(), Recorder(on_tile=stop)
    with pytest.raises(kind) as caught:
        decode_latent({"samples": z}, FakeVAE(model), chosen, decoder=decoder, engine=engine, observer=heard)
    assert caught.value is error
    assert len(seen) == nth
    assert heard.fallbacks == []
    assert global_state() == before
    assert engine.pool.misses == 1
    engine.decode(decoder, z, chosen)  # gets the slab that the cancelled decode gave back
    assert (engine.pool.hits, engine.pool.misses) == (1, 1)


class HostFlag:
    """The interrupt flag of a host: consumed when it raises."""

    def __init__(self) -> None:
        self.raised, self.flag = 0, False

    def throw_if_set(self, i: int, n: int) -> None:
        if self.flag:
            self.flag = False
            self.raised += 1
            raise NewInterrupt


class SetsFlagAt(Logged):
    def __init__(self, inner: Logged, n: int, host: HostFlag) -> None:
        super().__init__()
        self.inner, self.n, self.host = inner, n, host

    def run(self, z: torch.Tensor) -> torch.Tensor:
        self.host.flag = len(self.log) == self.n
        return self.inner.run(z)


CANCEL = [
    pytest.param(PointDec(), latent((1, 4, 64, 64)), settings(64, 0), 64, {}, id="tiles"),
    pytest.param(PointDec(), latent((6, 4, 8, 8)), settings(batch_optimization=False), 6, {}, id="batch"),
    pytest.param(CausalDec(), latent((5, 4, 2, 4, 4)), settings(), 5, {"dim": 3}, id="clips"),
    pytest.param(TimeIndexDec(), latent((1, 4, 9, 4, 4)), settings(chunk_frames=8), 8, {"dim": 3}, id="chunks"),
]


def test_cp_3_exact_cancel_before_the_next_tile() -> None:
    host, seen = HostFlag(), []

    def check(i: int, n: int) -> None:
        host.throw_if_set(i, n)
        seen.append(i)
        host.flag = len(seen) == 3

    model, z = ConvDec(), latent((2, 4, 32, 32))
    with pytest.raises(NewInterrupt):
        Engine().decode(exact_conv(model), z, exact_settings(64), observer=Recorder(on_tile=check))
    assert len(seen) == 3
    assert host.raised == 1


@pytest.mark.parametrize("first_tile_of_chunk", [False, True])
def test_cp_3_exact_cancel_within_and_between_chunks(first_tile_of_chunk: bool) -> None:
    """A host without a progress hook: the flag is looked at with every tile. It is set in the third chunk."""
    host, heard = HostFlag(), ChunkRecorder()

    def check(i: int, n: int) -> None:
        host.throw_if_set(i, n)
        heard.n_tiles_since += 1
        host.flag = len(heard.chunks) == 3 and heard.n_tiles_since == (1 if first_tile_of_chunk else 4)

    heard.on_tile = check
    with pytest.raises(NewInterrupt):
        Engine().decode(
            exact_causal(CausalDec()), latent((1, 4, 5, 4, 4)), exact_settings(0, chunk_frames=4), observer=heard
        )
    assert heard.chunks == [(0, 5), (1, 5), (2, 5)]
    assert heard.n_tiles_since == (1 if first_tile_of_chunk else 4)
    assert host.raised == 1


class ChunkRecorder(Recorder):
    """Also counts tiles since a chunk began."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[tuple[int, int]] = []
        self.n_tiles_since = 0

    def chunk_started(self, i: int, n: int) -> None:
        self.chunks.append((i, n))
        self.n_tiles_since = 0


@pytest.mark.parametrize(("inner", "z", "chosen", "n_calls", "options"), CANCEL)
def test_cp_3_cancel_before_the_next_call(
    inner: Logged, z: torch.Tensor, chosen: Any, n_calls: int, options: dict[str, Any]
) -> None:
    host = HostFlag()
    model, heard = SetsFlagAt(inner, 3, host), Recorder(on_tile=host.throw_if_set)
    with pytest.raises(NewInterrupt):
        decode_latent({"samples": z}, FakeVAE(model, **options), chosen, observer=heard)
    assert len(model.log) == 3
    assert host.raised == 1
    assert heard.plan.n_tiles == n_calls
    assert not host.flag


PROGRESS = [  # latent, settings, pictures per pass, decoder options, calls
    ((1, 4, 16, 16), settings(), 16, {}, 1),
    ((1, 4, 48, 48), settings(128, 0), 16, {}, 9),
    ((3, 4, 32, 32), settings(128, 0), 1, {}, 12),  # three passes of four tiles
    ((3, 4, 2, 32, 32), settings(128, 0), 16, {"dim": 3, "t_ratio": 1}, 12),  # clips
    ((1, 4, 4, 32, 32), settings(128, 0, chunk_frames=2), 16, {"dim": 3, "t_ratio": 1}, 12),  # three chunks of four
    ((5, 4, 8, 8), settings(), 2, {}, 3),  # an untiled batch
]


@pytest.mark.parametrize(("shape", "chosen", "cap", "options", "n_calls"), PROGRESS)
def test_cp_4_progress_counts_decoder_calls(
    shape: tuple[int, ...], chosen: Any, cap: int, options: dict[str, Any], n_calls: int
) -> None:
    model, z = PointDec(), latent(shape)
    _, heard = record(model, z, chosen, capped(cap), **options)
    assert heard.steps == [(i, n_calls) for i in range(1, n_calls + 1)]
    assert len(model.log) == n_calls == heard.plan.n_tiles
    decode(PointDec(), z, chosen, **options)  # without anyone listening


@pytest.mark.parametrize(("shape", "tile_px"), [((1, 4, 8, 8), 768), ((3, 4, 24, 24), 64)])
@pytest.mark.parametrize("plan", ["strips", "tiles"])
def test_cp_4_exact_progress_ends_at_the_total(shape: tuple[int, ...], tile_px: int, plan: str) -> None:
    heard = Recorder()
    chosen = exact_settings(tile_px, plan)
    Engine().decode(exact_conv(ConvDec()), latent(shape), chosen, observer=heard)
    values = [done for done, _ in heard.steps]
    assert values == sorted(values)
    assert {total for _, total in heard.steps} == {1000}
    assert values[-1] == 1000
    assert values.count(1000) == 1
    assert len(values) >= len(heard.tiles) == heard.plan.n_tiles
    Engine().decode(exact_conv(ConvDec()), latent(shape), chosen)  # without anyone listening


class Widens:
    """A decoder whose second convolution is not finite in float16, the first time it is run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_spoilt, real = 0, torch_kernels.convolve

        def convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            y = real(x, weight, bias)
            if x.dtype == torch.float16 and weight.shape[1] == 8 and not self.n_spoilt:
                self.n_spoilt += 1
                y[..., 0, 0] = float("nan")
            return y

        monkeypatch.setattr(torch_kernels, "convolve", convolve)


def test_cp_4_exact_progress_is_never_moved_back_by_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once an op is run again wider, once memory runs out and the decode begins again."""
    spoilt, heard, pool = Widens(monkeypatch), Recorder(), MemoryPool()

    def short_of_memory(i: int, n: int) -> None:
        if heard.redone and not heard.fallbacks[1:]:
            raise device_memory_error()

    heard.on_tile = short_of_memory
    chosen = exact_settings(64, precision_mode="fp16")
    picture = Engine(pool=pool).decode(exact_conv(ConvDec()), latent((2, 4, 24, 24)), chosen, observer=heard)
    assert torch.isfinite(picture).all()
    assert spoilt.n_spoilt == 1
    assert heard.kinds() == ["non_finite", "out_of_memory"]
    values = [done for done, _ in heard.steps]
    assert values == sorted(values)
    assert {total for _, total in heard.steps} == {1000}
    assert values.count(1000) == 1
    assert values[-1] == 1000
