"""How smooth decodes are where their chunks meet: exact ones as smooth as undivided ones, blended ones less."""

from __future__ import annotations

import statistics
from functools import cache

import pytest
import torch
from torch import Tensor

from halo_vae.optim.blended import decode_blended
from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.opaque import OpaqueDecoder
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.store import keep_raw
from halo_vae.optim.video.consistency import ConsistencyMeter, boundary_scores, clip_score
from halo_vae.optim.video.frames import output_frames
from halo_vae.tests.optim.helpers import latent, max_diff, profile, settings
from halo_vae.tests.optim.video.helpers import ClipRecorder, golden_decoder

T = 7
CLIPS = 2


@cache
def decoder() -> Decoder:
    return golden_decoder("wan21")


@cache
def still_life() -> Tensor:
    """Latents of clips that change little from frame to frame, so that a seam would show."""
    base = latent(CLIPS, 16, 1, 2, 2)
    return base + 0.15 * latent(CLIPS, 16, T, 2, 2, seed=9)


@cache
def undivided() -> tuple[Tensor, ...]:
    """Each clip's frames [n, H, W, C], decoded in one chunk."""
    heard = ClipRecorder()
    frames = Engine(profile=profile()).decode(decoder(), still_life(), settings(chunk_lat=T), observer=heard)
    assert heard.boundaries == []
    assert heard.plan.n_chunks == 1
    return frames.chunk(CLIPS)


def steps_of(frames: Tensor) -> list[float]:
    x = frames.double()
    steps: list[float] = (x[1:] - x[:-1]).abs().mean(dim=(1, 2, 3)).tolist()
    return steps


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_an_exact_decode_is_as_smooth_as_the_undivided_one(chunk: int) -> None:
    heard = ClipRecorder()
    frames = Engine(profile=profile()).decode(decoder(), still_life(), settings(chunk_lat=chunk), observer=heard)
    at = heard.plan.boundaries
    assert at == tuple(1 + 4 * (start - 1) for start in range(chunk, T, chunk))
    wanted = []
    for clip, whole in enumerate(undivided()):
        wanted += [(clip, *score) for score in boundary_scores(steps_of(whole), at)]
    assert [(clip, frame) for clip, frame, _ in heard.boundaries] == [(clip, frame) for clip, frame, _ in wanted]
    assert len(wanted) == CLIPS * len(at)
    for (_, _, score), (_, _, whole) in zip(heard.boundaries, wanted, strict=True):
        assert score == pytest.approx(whole, abs=1e-3)
    assert max_diff(frames, torch.cat(undivided())) <= 2e-5


def exact_in_chunks(engine: Engine) -> OpaqueDecoder:
    """The same decoder for a caller that knows its call alone: no chunk knows what came before."""

    def decode(z: Tensor) -> Tensor:
        n = output_frames(decoder().program, z.shape[2])
        frames = engine.decode(decoder(), z, settings(chunk_lat=z.shape[2]), finish=keep_raw)
        return frames.unflatten(0, (z.shape[0], n)).movedim(-1, 1)

    return OpaqueDecoder(
        name="wan21", decode=decode, latent_dim=3, latent_channels=16, scale=8, time_ratio=4,
        frames=lambda n: output_frames(decoder().program, n),
    )  # fmt: skip


def test_a_blended_decode_is_less_smooth_than_the_exact_one() -> None:
    """Evenly moving clips, in chunks of two latent frames that do not know what came before them."""
    n_latents = 9
    way = torch.linspace(0, 1, n_latents).view(1, 1, -1, 1, 1)
    z = latent(CLIPS, 16, 1, 3, 4) * (1 - way) + latent(CLIPS, 16, 1, 3, 4, seed=5) * way
    engine, blended, exact = Engine(profile=profile()), ClipRecorder(), ClipRecorder()
    asked = DecodeSettings(
        method="blended", precision_mode="fp32", tile_size=0, overlap=0, chunk_frames=8, chunk_overlap=4
    )
    frames = decode_blended(exact_in_chunks(engine), z, asked, observer=blended)
    streamed = engine.decode(decoder(), z, settings(chunk_lat=1), observer=exact)
    assert max_diff(frames, streamed) > 1e-2
    assert blended.plan.n_chunks == n_latents - 1
    assert (blended.plan.approximate, exact.plan.approximate) == (True, False)
    at = blended.plan.boundaries
    assert set(at) <= set(exact.plan.boundaries)
    for clip, whole in enumerate(streamed.chunk(CLIPS)):
        smooth = boundary_scores(steps_of(whole), at)
        cut = [(frame, score) for c, frame, score in blended.boundaries if c == clip]
        assert [frame for frame, _ in cut] == [frame for frame, _ in smooth]
        worst = clip_score(cut), clip_score(smooth)
        assert worst[0] is not None
        assert worst[1] is not None
        assert worst[0] < worst[1] - 0.02
        assert statistics.mean(score for _, score in cut) < statistics.mean(score for _, score in smooth) - 0.1


def test_scores_are_of_the_pictures_that_are_given() -> None:
    """Heard scores are those of the meter on the frames themselves, in 0 to 1."""
    heard = ClipRecorder()
    frames = Engine(profile=profile()).decode(decoder(), still_life(), settings(chunk_lat=2), observer=heard)
    wanted = []
    for clip, part in enumerate(frames.chunk(CLIPS)):
        meter = ConsistencyMeter()
        meter.feed(part)
        wanted += [(clip, *score) for score in meter.scores(heard.plan.boundaries)]
    assert heard.boundaries == wanted


def test_scores_are_the_same_where_frames_are_handed_on() -> None:
    whole, streamed = ClipRecorder(), ClipRecorder()
    engine = Engine(profile=profile())
    engine.decode(decoder(), still_life(), settings(chunk_lat=2), observer=whole)
    engine.decode_frames(
        decoder(), still_life(), settings(chunk_lat=2), observer=streamed, on_frames=lambda first, frames: None
    )
    assert streamed.boundaries == whole.boundaries != []
