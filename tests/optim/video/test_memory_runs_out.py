"""What the engine does when an allocation fails while it decodes clips."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.errors import PlanError
from halo_vae.optim.errors_oom import DecodeOutOfMemoryError
from halo_vae.optim.ladder import CLIP_RUNGS, MAX_ATTEMPTS, Squeeze, steps_of
from halo_vae.optim.pool import MemoryPool
from halo_vae.optim.precision import WidenedOps, choose_dtypes
from halo_vae.optim.store import keep_raw
from halo_vae.optim.video import runner as runner_module
from halo_vae.optim.video.planner import clip_plan_with
from halo_vae.tests.goldens import TOLERANCE, golden
from halo_vae.tests.optim.helpers import max_diff, profile, settings
from halo_vae.tests.optim.video.helpers import ClipRecorder, decode_clip, golden_decoder

CARD = profile(tile_bytes=1 << 18, unified_memory=False)
EXACT = 1 + 1 + len(steps_of(CLIP_RUNGS))
"""Attempts at exact plans: the first one, the same with room made, and every step."""
WORDS = ["kept memory given back", *(step.rung.words for step in steps_of(CLIP_RUNGS))]
SPANS = "hunyuan_video"
"""Its norms span the clip."""


def no_room() -> BaseException:
    return RuntimeError("HIP error: out of memory")


class Card:
    """Memory whose first `times` requests are refused."""

    def __init__(self, times: float) -> None:
        self.times = times
        self.asked: list[int] = []

    def __call__(self, nbytes: int, device: torch.device) -> Tensor:
        self.asked.append(nbytes)
        if len(self.asked) <= self.times:
            raise no_room()
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def words(heard: ClipRecorder) -> list[str]:
    assert {f.kind for f in heard.fallbacks} <= {"out_of_memory"}
    return [f.used.split(":")[0] for f in heard.fallbacks]


def test_a_squeezed_plan_takes_less_time_and_space() -> None:
    decoder, shape = golden_decoder("wan21"), (1, 16, 9, 12, 12)
    decision = choose_dtypes("fp32", decoder.program, "float32", CARD, 64, WidenedOps(), "")
    plans = [
        clip_plan_with(decoder.program, shape, settings(), CARD, decision, stored="float32", squeeze=squeeze)
        for squeeze in (Squeeze(), *(step.squeeze for step in steps_of(CLIP_RUNGS)))
    ]
    assert [plan.chunk_lat for plan in plans] == [4, 4, 4, 1, 1]
    tiles = [plan.summary.n_tiles for plan in plans]
    assert tiles[0] < tiles[1] < tiles[2] < tiles[3]
    assert max(plans[2].portions) <= max(plans[0].portions)
    reasons = [{c.name: c.reason for c in plan.summary.choices} for plan in plans]
    assert all(r["tile_bytes"] == "limited by free memory" for r in reasons[1:])
    assert reasons[3]["chunks"] == "limited by free memory"
    assert "limited" not in reasons[0]["tile_bytes"] + reasons[0]["chunks"]


@pytest.mark.parametrize("n", range(5))
def test_each_rung_in_order_on_a_golden(n: int) -> None:
    decoder, g, card = golden_decoder("wan21"), golden("wan21"), Card(n)
    engine = Engine(profile=CARD, pool=MemoryPool(card))
    clips, heard = decode_clip(engine, decoder, g.latents["a"], chunk_lat=4)
    assert max_diff(clips, g.expected["a"]) <= TOLERANCE
    assert words(heard) == WORDS[:n]
    assert len(heard.plans) == len(card.asked) == n + 1
    assert heard.steps == sorted(heard.steps)


def test_memory_that_never_comes() -> None:
    decoder, card = golden_decoder("wan21"), Card(99)
    engine = Engine(profile=CARD, pool=MemoryPool(card))
    text = r"clips of \d+ latent frames.*shorter chunks.*HIP error"
    with pytest.raises(DecodeOutOfMemoryError, match=text) as caught:
        decode_clip(engine, decoder, golden("wan21").latents["a"], chunk_lat=4, method="auto")
    assert caught.value.tried == tuple(dict.fromkeys(WORDS))
    assert 3 < len(card.asked) <= EXACT <= MAX_ATTEMPTS
    assert engine.pool.held_bytes == decoder.packed.nbytes == 0


class FailingRun:
    """Ops of a clip that fail from the n-th on, as often as told, each holding a tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, may_fail: Callable[[int], bool]) -> None:
        self.calls = 0
        self.held: list[weakref.ref[Tensor]] = []
        self.alive: list[bool] = []
        real = runner_module.ClipRunner._run_op

        def run(runner: runner_module.ClipRunner, step: object) -> None:
            self.calls += 1
            self.alive += [ref() is not None for ref in self.held]
            if may_fail(self.calls):
                mine = torch.zeros(1000)
                self.held.append(weakref.ref(mine))
                raise no_room()
            real(runner, step)  # type: ignore[arg-type]

        monkeypatch.setattr(runner_module.ClipRunner, "_run_op", run)


def frames_of(engine: Engine, decoder: Decoder, z: Tensor, heard: ClipRecorder, **given: object) -> list[Tensor]:
    """Raw frames [H, W, C] as they were handed on; each index once and in order."""
    frames: list[Tensor] = []

    def take(first: int, part: Tensor) -> None:
        assert first == len(frames)
        frames.extend(part.clone())

    engine.decode_frames(decoder, z, settings(**given), observer=heard, finish=keep_raw, on_frames=take)
    return frames


@pytest.mark.parametrize("n_failures", [1, 3])
def test_frames_are_handed_on_once_though_memory_runs_out_half_way(
    n_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, g, heard = golden_decoder("wan21"), golden("wan21"), ClipRecorder()
    expected = g.expected["a"][0].permute(1, 2, 3, 0)
    whole = ClipRecorder()
    frames_of(Engine(profile=CARD), decoder, g.latents["a"], whole, chunk_lat=1)
    late = len(whole.runs) - 2  # the first frames are out by then
    failing = FailingRun(monkeypatch, lambda calls: calls >= late and len(failing.held) < n_failures)
    frames = frames_of(Engine(profile=CARD), decoder, g.latents["a"], heard, chunk_lat=1)
    assert len(frames) == expected.shape[0]
    assert max_diff(torch.stack(frames), expected) <= TOLERANCE
    assert words(heard) == WORDS[:n_failures]
    assert failing.alive
    assert not any(failing.alive)


# -- cut in time


def spanning() -> tuple[Decoder, Tensor]:
    """A decoder whose norms span the clip, and a latent of more frames than a chunk must have."""
    z = golden(SPANS).latents["a"][..., :5, :4]
    return golden_decoder(SPANS), torch.cat([z, z], 2)


def decode_spanning(engine: Engine, heard: ClipRecorder, **given: object) -> Tensor:
    decoder, z = spanning()
    return decode_clip(engine, decoder, z, heard, **({"method": "auto"} | given))[0]


def test_a_norm_over_the_clip_is_cut_in_time_at_last() -> None:
    card, heard, tries = Card(99), ClipRecorder(), ClipRecorder()
    engine = Engine(profile=CARD, pool=MemoryPool(card))
    with pytest.raises(DecodeOutOfMemoryError, match="blended tiles") as caught:
        decode_spanning(engine, tries)
    assert caught.value.tried[-1] == "blended tiles"
    assert len(card.asked) <= MAX_ATTEMPTS
    n_exact = words(tries).index("blended tiles") + 1
    card.times, card.asked = n_exact, []
    got = decode_spanning(engine, heard)
    whole = decode_spanning(Engine(profile=CARD), ClipRecorder())
    assert got.shape == whole.shape
    assert words(heard) == words(tries)[:n_exact]
    assert heard.fallbacks[-1].used == f"blended tiles: chunks of {spanning()[1].shape[2] // 2} latent frames"
    assert heard.plan.approximate
    assert torch.isfinite(got).all()


def test_a_norm_over_the_clip_is_not_cut_where_exact_is_asked_for() -> None:
    card = Card(99)
    with pytest.raises(DecodeOutOfMemoryError) as caught:
        decode_spanning(Engine(profile=CARD, pool=MemoryPool(card)), ClipRecorder(), method="exact")
    assert "blended tiles" not in caught.value.tried


def test_a_budget_that_only_chunks_fit() -> None:
    decoder, z = spanning()
    with pytest.raises(PlanError) as caught:
        Engine(profile=replace(CARD, budget_bytes=1)).plan(decoder, tuple(z.shape), settings())
    assert caught.value.need_bytes is not None
    tight, heard = replace(CARD, budget_bytes=caught.value.need_bytes - 1), ClipRecorder()
    decode_spanning(Engine(profile=tight), heard)
    blended = heard.fallbacks[words(heard).index("blended tiles")]
    assert blended.reason.startswith(f"decoding 1 clips of {z.shape[2]} latent frames of 4x5 takes")
    assert len(set(heard.fallbacks)) == len(heard.fallbacks)  # every chunk comes to the same
    with pytest.raises(PlanError, match=r"takes \d+ MiB but \d+ MiB are free"):
        decode_spanning(Engine(profile=tight), ClipRecorder(), method="exact")


def test_frames_that_were_handed_on_are_not_blended_again(monkeypatch: pytest.MonkeyPatch) -> None:
    (decoder, z), heard, whole = spanning(), ClipRecorder(), ClipRecorder()
    expected = frames_of(Engine(profile=CARD), decoder, z, whole, chunk_lat=1)
    late = len(whole.runs) - 2

    def may_fail(calls: int) -> bool:
        return calls >= late and "blended tiles" not in words(heard)

    FailingRun(monkeypatch, may_fail)
    frames = frames_of(Engine(profile=CARD), decoder, z, heard, chunk_lat=1, method="auto")
    assert len(frames) == len(expected)
    assert words(heard)[-1] == "blended tiles"
    exact = [i for i, (a, b) in enumerate(zip(frames, expected, strict=True)) if max_diff(a, b) <= 1e-4]
    assert exact == list(range(len(exact)))
    assert 0 < len(exact) < len(frames)
