"""What stops a decode of clips, or makes it begin again, leaves nothing behind; and the shapes that clips come in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.optim.decode import Engine
from halo_vae.optim.errors import DecodeCancelled, SettingsError
from halo_vae.optim.errors_oom import DecodeOutOfMemoryError
from halo_vae.optim.events import SilentObserver
from halo_vae.optim.ladder import MAKE_ROOM, MAX_ATTEMPTS, SMALLER_TILES
from halo_vae.optim.pool import MemoryPool
from halo_vae.optim.store import keep_raw
from halo_vae.optim.video.conv import ClipConvStep
from halo_vae.optim.video.frames import output_frames
from halo_vae.tests.goldens import golden
from halo_vae.tests.optim.helpers import FailAfter, latent, max_diff, profile, settings, small_decoder
from halo_vae.tests.optim.video.helpers import ClipRecorder, decode_clip, golden_decoder

TINY = "taehv"
"""The fastest decoder; Wan where kept frames and in-place sums matter."""
HOW: dict[str, Any] = {"chunk_lat": 1, "plan": "tiles", "tile_size": 16, "keep_bytes": 8 << 20}
EVENTS = [
    "mark", "planned", "op_started", "tile_started", "progress", "op_done", "conv_requested", "cache_lookup",
    "pool_request", "prefetch_asked", "pass_done", "chunk_started", "boundary",
]  # fmt: skip


def z_of(name: str, t: int = 3, h: int = 3, w: int = 4, b: int = 1) -> Tensor:
    return latent(b, golden_decoder(name).program.latent_channels, t, h, w)


class RaisesIn(SilentObserver):
    """Raises at the n-th call of one method; counts its calls."""

    def __init__(self, event: str, n: int, error: BaseException) -> None:
        self.calls = 0

        def told(*args: Any) -> None:
            self.calls += 1
            if self.calls == n:
                raise error

        setattr(self, event, told)


# -- cancelling


@pytest.mark.parametrize("event", EVENTS)
def test_a_decode_stopped_in_any_event_leaves_the_engine_as_it_was(event: str) -> None:
    engine, z = Engine(profile=profile()), z_of(TINY, 2, 2, 2)
    counter = RaisesIn(event, -1, DecodeCancelled("stop"))
    before, state = z.clone(), torch.get_rng_state()
    good = engine.decode(golden_decoder(TINY), z, settings(**HOW), observer=counter)
    assert counter.calls > 0
    for at in sorted({1, max(1, counter.calls // 2), counter.calls}):
        error = KeyboardInterrupt() if at == 1 else DecodeCancelled("stop")
        with pytest.raises(type(error)) as caught:
            engine.decode(golden_decoder(TINY), z, settings(**HOW), observer=RaisesIn(event, at, error))
        assert caught.value is error
        assert engine.pool.held_bytes <= 8 << 20
        assert not torch.is_inference_mode_enabled()
        assert not [t for t in threading.enumerate() if t.name.startswith("halo-vae-prefetch")]
    assert torch.equal(engine.decode(golden_decoder(TINY), z, settings(**HOW)), good)
    assert torch.equal(z, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["wan21", "ltx_noise"])
def test_stopped_at_any_tile(name: str) -> None:
    """Whatever lay in the pool when it stopped, the next decode is the same to the bit."""
    engine, decoder, z = Engine(profile=profile()), golden_decoder(name), z_of(name, h=2, w=3)
    given = HOW | {"seed": 5}
    good, heard = decode_clip(engine, decoder, z, **given)
    n = len(heard.tiles)
    assert n > 70
    for k in range(1, n, n // 4):
        with pytest.raises(DecodeCancelled):
            decode_clip(engine, decoder, z, ClipRecorder(on_tile=FailAfter(k, DecodeCancelled("stop"))), **given)
        assert engine.pool.held_bytes > 0
    again, heard = decode_clip(engine, decoder, z, **given)
    assert torch.equal(again, good)
    assert all(hit for _, hit in heard.requests)  # out of the memory that the stopped ones left


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_frames_before_a_cancelled_chunk_were_handed_on(chunk: int) -> None:
    class Stops(SilentObserver):
        def chunk_started(self, i: int, n: int) -> None:
            assert n == 3
            if i == chunk:
                raise DecodeCancelled("stop")

    taken: list[int] = []
    with pytest.raises(DecodeCancelled):
        Engine(profile=profile()).decode_frames(
            golden_decoder("wan21"), z_of("wan21"), settings(**HOW), observer=Stops(),
            on_frames=lambda first, frames: taken.extend(range(first, first + frames.shape[0])),
        )  # fmt: skip
    assert taken == list(range([0, 1, 5][chunk]))


def test_an_error_of_the_taker_of_frames_is_the_decodes_error() -> None:
    engine, decoder, z = Engine(profile=profile()), golden_decoder(TINY), z_of(TINY)

    def full(first: int, frames: Tensor) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        engine.decode_frames(decoder, z, settings(**HOW), on_frames=full)
    fresh = Engine(profile=profile()).decode(decoder, z, settings(**HOW))
    assert torch.equal(engine.decode(decoder, z, settings(**HOW)), fresh)


def test_an_observer_may_decode_too() -> None:
    engine, z = Engine(profile=profile()), z_of(TINY)
    decoder, other = golden_decoder(TINY), golden_decoder("wan21")
    plain, small = engine.decode(decoder, z, settings(**HOW)), engine.decode(other, z_of("wan21", 1), settings())
    seen: list[Tensor] = []

    class Preview(SilentObserver):
        def op_done(self, report: Any) -> None:
            if len(seen) < 2:
                seen.append(engine.decode(other, z_of("wan21", 1), settings()))

    assert torch.equal(engine.decode(decoder, z, settings(**HOW), observer=Preview()), plain)
    assert torch.equal(seen[0], small)


# -- memory that runs out


FORMS: list[Callable[[], BaseException]] = [
    lambda: torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2 GiB"),
    lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    lambda: MemoryError("no room"),
]


class FailingSource:
    """Memory that is refused the first `times` times."""

    def __init__(self, times: int, error: Callable[[], BaseException] = FORMS[0]) -> None:
        self.times, self.error, self.asked = times, error, 0

    def __call__(self, nbytes: int, device: torch.device) -> Tensor:
        self.asked += 1
        if self.asked <= self.times:
            raise self.error()
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("form", FORMS)
def test_a_failed_allocation_leads_to_smaller_tiles(form: Callable[[], BaseException]) -> None:
    decoder, z = golden_decoder(TINY), golden(TINY).latents["a"]
    source = FailingSource(2, form)
    raw, heard = decode_clip(
        Engine(profile=profile(tile_bytes=1 << 16), pool=MemoryPool(source)), decoder, z, chunk_lat=1, tile_size=0
    )
    assert max_diff(raw, golden(TINY).expected["a"]) <= 5e-5
    assert [f.kind for f in heard.fallbacks] == ["out_of_memory"] * 2
    assert [f.used.split(":")[0] for f in heard.fallbacks] == [MAKE_ROOM.words, SMALLER_TILES.words]
    assert {f.reason for f in heard.fallbacks} == {str(form()).split("\n")[0]}
    assert len(heard.plans) == source.asked == 3
    assert heard.plans[2].n_tiles > heard.plans[1].n_tiles == heard.plans[0].n_tiles


def test_memory_that_never_comes_is_told_with_what_was_tried() -> None:
    source = FailingSource(99)
    engine = Engine(profile=profile(tile_bytes=1 << 16), pool=MemoryPool(source))
    with pytest.raises(DecodeOutOfMemoryError, match=r"^decoding 1 clips of 3 latent frames of 4x3 ran out") as caught:
        engine.decode(golden_decoder(TINY), z_of(TINY), settings(chunk_lat=3, tile_size=0))
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert caught.value.tried[:2] == (MAKE_ROOM.words, SMALLER_TILES.words)
    assert 3 <= source.asked <= MAX_ATTEMPTS
    assert engine.pool.held_bytes == 0
    other = FailingSource(1, lambda: RuntimeError("expected input to have 16 channels"))
    with pytest.raises(RuntimeError, match="16 channels"):
        Engine(profile=profile(), pool=MemoryPool(other)).decode(golden_decoder(TINY), z_of(TINY), settings())
    assert other.asked == 1


@pytest.mark.parametrize(("name", "share", "times"), [
    ("wan21", 0.0, 2), ("wan21", 0.7, 2), ("ltx_timestep", 0.3, 1), ("ltx_timestep", 0.99, 1), ("taehv", 0.8, 2),
])  # fmt: skip
def test_memory_that_runs_out_within_a_run(
    name: str, share: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any run of the decode: the same clip, each frame handed on once, noise that of the same draws."""
    decoder, z = golden_decoder(name), z_of(name, h=5, w=6) if name == TINY else z_of(name, h=2, w=2)
    device = profile(tile_bytes=1 << 18 if name == TINY else 1 << 16)
    given = {"chunk_lat": 1, "seed": 3, "tile_size": 0}
    whole, plain = decode_clip(Engine(profile=device), decoder, z, **given)
    convs = sum(1 for report in plain.ops if report.kind == "conv")
    heard, taken, failed = ClipRecorder(), [], []
    real = ClipConvStep.run

    def fails(self: ClipConvStep) -> Any:
        in_attempt = sum(1 for report in heard.ops if report.kind == "conv") - sum(failed)
        if len(failed) < times and in_attempt == int(share * convs):
            failed.append(in_attempt)
            raise torch.OutOfMemoryError("HIP out of memory")
        return real(self)

    monkeypatch.setattr(ClipConvStep, "run", fails)

    def take(first: int, frames: Tensor) -> None:
        taken.append((first, frames.clone()))

    n = Engine(profile=device).decode_frames(
        decoder, z, settings(**given), observer=heard, finish=keep_raw, on_frames=take
    )
    assert [f.kind for f in heard.fallbacks] == ["out_of_memory"] * times
    assert len(heard.plans) == times + 1
    assert (heard.plans[-1].n_tiles > heard.plans[0].n_tiles) == (times == 2)
    done = 0
    for first, frames in taken:
        assert first == done
        done += frames.shape[0]
    assert done == n == output_frames(decoder.program, 3)
    clip = torch.cat([frames for _, frames in taken]).movedim(-1, 0)[None]
    assert max_diff(clip, whole) <= 2e-5
    steps = [done for done, _ in heard.steps]
    assert steps == sorted(steps)
    assert heard.steps[-1] == (1000, 1000)
    assert len(heard.boundaries) == len(plain.boundaries)


# -- delivery


@pytest.mark.parametrize(("name", "chunk"), [("wan21", 2), ("ltx_plain", 1), ("mochi", 1), ("taehv_wan", 1)])
def test_frames_that_are_handed_on_are_the_pictures(name: str, chunk: int) -> None:
    decoder, z = golden_decoder(name), z_of(name, 3, 2, 2 if name != "mochi" else 1, b=2)
    engine, given = Engine(profile=profile()), {"chunk_lat": chunk}
    pictures = engine.decode(decoder, z, settings(**given))
    taken: list[Tensor] = []
    n = engine.decode_frames(
        decoder, z, settings(**given), out_dtype=torch.float16, on_frames=lambda first, part: taken.append(part.clone())
    )
    assert len(taken) > 2
    frames = torch.cat(taken)
    assert n == frames.shape[0] == pictures.shape[0] == 2 * output_frames(decoder.program, 3)
    assert frames.dtype == torch.float16
    assert torch.equal(frames, pictures.half())
    assert 0 <= float(pictures.min()) <= float(pictures.max()) <= 1


def test_a_decoder_of_pictures_has_no_frames_to_hand_on() -> None:
    with pytest.raises(SettingsError, match="kl decoder makes pictures, not frames; use decode"):
        Engine(profile=profile()).decode_frames(
            small_decoder(), latent(1, 4, 3, 3), settings(), on_frames=lambda first, frames: None
        )


def test_pictures_are_the_callers_own_to_change() -> None:
    pictures = Engine(profile=profile()).decode(golden_decoder(TINY), z_of(TINY), settings())
    pictures += 1.0
    assert not pictures.is_inference()
    assert not pictures.requires_grad


# -- threads, prefetching, memory that stays


def test_two_threads_decode_at_once() -> None:
    engine = Engine(profile=profile())
    jobs = [(name, z_of(name, 2, 2, 3, b=1)) for name in (TINY, "wan21", "ltx_causal")]
    decoders = {name: golden_decoder(name) for name, _ in jobs}
    alone = [Engine(profile=profile()).decode(decoders[name], z, settings(chunk_lat=1)) for name, z in jobs]
    same: list[bool] = []

    def run(order: list[int]) -> None:
        for i in order:
            name, z = jobs[i]
            same.append(torch.equal(engine.decode(decoders[name], z, settings(chunk_lat=1)), alone[i]))

    threads = [threading.Thread(target=run, args=(order,)) for order in ([0, 1, 2], [2, 1, 0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 6


@pytest.mark.parametrize("name", ["wan21", "cogvideox"])
def test_prefetching_changes_nothing_but_when_latents_are_copied(name: str) -> None:
    decoder, z = golden_decoder(name), z_of(name, 2, 2, 2, b=2)
    on, heard_on = decode_clip(Engine(profile=profile()), decoder, z, chunk_lat=1)
    off, heard_off = decode_clip(Engine(profile=profile()), decoder, z, chunk_lat=1, memory_prefetching=False)
    assert torch.equal(on, off)
    assert (len(heard_on.prefetches), heard_off.prefetches) == (3, [])
    assert heard_on.plan.predicted.pool >= heard_off.plan.predicted.pool
    _, single = decode_clip(Engine(profile=profile()), decoder, z[:1, :, :1], chunk_lat=1)
    assert single.prefetches == []


@pytest.mark.parametrize(("keep", "asked"), [(0, 3), (64 << 20, 1)])
def test_memory_is_kept_as_far_as_asked(keep: int, asked: int) -> None:
    source = FailingSource(0)
    engine = Engine(profile=profile(), pool=MemoryPool(source))
    for _ in range(3):
        engine.decode(golden_decoder(TINY), z_of(TINY), settings(keep_bytes=keep))
        assert engine.pool.held_bytes <= keep
    assert source.asked == asked


# -- batches and odd shapes


@pytest.mark.parametrize("name", ["wan21", "cosmos", "ltx_plain", "svd"])
def test_clips_of_a_batch_are_as_alone(name: str) -> None:
    decoder, z = golden_decoder(name), z_of(name, 2, 2, 2, b=3)
    engine = Engine(profile=profile())
    raw, heard = decode_clip(engine, decoder, z, chunk_lat=1)
    alone = [decode_clip(engine, decoder, z[i : i + 1], chunk_lat=1)[0] for i in range(3)]
    assert torch.equal(raw, torch.cat(alone))
    assert heard.passes == [(1, 1)] * 3
    assert heard.chunks == [(i, 6) for i in range(6)]
    assert {clip for clip, *_ in heard.boundaries} == ({0, 1, 2} if name != "svd" else set())


def test_pictures_are_clips_of_one_frame() -> None:
    decoder, z = golden_decoder("wan21"), z_of("wan21", 1, 3, 4, b=2)
    engine = Engine(profile=profile())
    pictures = engine.decode(decoder, z[:, :, 0], settings())
    assert pictures.shape == (2, 24, 32, 3)
    assert torch.equal(pictures, engine.decode(decoder, z, settings()))


def test_a_batch_of_pictures_is_one_clip_of_svd() -> None:
    decoder, z = golden_decoder("svd"), z_of("svd", 4, 2, 3)
    engine = Engine(profile=profile())
    whole = engine.decode(decoder, z, settings())
    assert torch.equal(engine.decode(decoder, z[0].movedim(0, 1), settings()), whole)
    apart = engine.decode(decoder, z[0].movedim(0, 1)[:, :, None], settings())  # clips of one frame each
    assert apart.shape == whole.shape
    assert not torch.allclose(apart, whole, atol=1e-2)


@pytest.mark.parametrize(("name", "size"), [
    ("wan21", (1, 1)), ("wan22", (1, 3)), ("ltx_causal", (1, 5)), ("cosmos", (4, 1)), ("taehv32", (1, 5)),
    ("mochi", (1, 1)), ("mochi", (4, 1)), ("hunyuan15", (1, 1)), ("cosmos", (1, 1)), ("taehv", (4, 1)),
])  # fmt: skip
def test_latents_of_one_pixel_or_row(name: str, size: tuple[int, int]) -> None:
    """Any size and any cut give one answer."""
    decoder, z = golden_decoder(name), z_of(name, 2, *size)
    if name == "ltx_causal":
        z = z_of(name, 2, *(max(2, n) for n in size))  # one pixel cannot be reflected
    whole, _ = decode_clip(Engine(profile=profile()), decoder, z, chunk_lat=2, tile_size=0)
    edge = 2 * decoder.program.scale[1]
    for plan in ("strips", "tiles"):
        raw, heard = decode_clip(Engine(profile=profile()), decoder, z, chunk_lat=1, plan=plan, tile_size=edge)
        height, width = (n * decoder.program.scale[1] for n in z.shape[3:])
        assert raw.shape == (1, 3, output_frames(decoder.program, 2), height, width)
        assert max_diff(raw, whole) <= 2e-5
        assert heard.plan.n_chunks == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_latents_of_any_dtype_and_layout(dtype: torch.dtype) -> None:
    decoder, z = golden_decoder(TINY), z_of(TINY).to(dtype)
    engine = Engine(profile=profile())
    good = engine.decode(decoder, z.float(), settings())
    assert torch.equal(engine.decode(decoder, z, settings()), good)
    strided = z.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)
    assert torch.equal(engine.decode(decoder, strided, settings()), good)
    assert torch.equal(engine.decode(decoder, z.clone().requires_grad_(), settings()), good)


# -- progress


@pytest.mark.parametrize("name", ["wan21", "cosmos", "cogvideox"])
def test_progress_rises_to_the_total(name: str) -> None:
    decoder, z = golden_decoder(name), z_of(name, 3, 2, 2, b=2)
    _, heard = decode_clip(Engine(profile=profile()), decoder, z, chunk_lat=1, tile_size=32)
    done = [done for done, _ in heard.steps]
    assert done == sorted(done)
    assert {total for _, total in heard.steps} == {1000}
    assert (done[0] < 100, done[-2] > 900, done[-1]) == (True, True, 1000)
    assert done.count(1000) == 1
    assert len(set(done)) > 50
