"""Clips of an opaque decoder in time: where chunks lie, how they are faded, when a plan cuts, what memory leads to."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.nodes.vae import describe_vae
from halo_vae.optim.blend_canvas import Canvas, Spot
from halo_vae.optim.blend_plan import BlendPlan, DtypeChoice, choose_dtype, plan_blend, predict_peak, summarise
from halo_vae.optim.blend_time import FLOOR_CHUNK, TimePlan, asked_chunks
from halo_vae.optim.blended import MAX_ATTEMPTS, decode_blended
from halo_vae.optim.device import DeviceProfile, describe_device
from halo_vae.optim.errors import HaloError, SettingsError
from halo_vae.optim.opaque import OpaqueDecoder
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.tiling import Span
from halo_vae.optim.video.consistency import ConsistencyMeter
from halo_vae.profiling.codec import decode as decode_json
from halo_vae.profiling.codec import encode
from halo_vae.tests.cases.support import Recorder, max_diff, settings, shapes, whole
from halo_vae.tests.fixtures import CausalDec, FakeVAE, LimitDec, Logged, NoiseDec, PointDec, TimeIndexDec, latent

CPU = describe_device("cpu")


def causal(k: int) -> Callable[[int], int]:
    return lambda n: max(0, 1 + k * (n - 1))


def opaque(model: Logged, k: int = 4, **changed: Any) -> OpaqueDecoder:
    return replace(describe_vae(FakeVAE(model, dim=3, t_ratio=k)), **changed)


def even(model: Logged) -> OpaqueDecoder:
    """A decoder that makes one frame of every latent frame, the first included."""
    return opaque(model, frames=lambda n: n, time_ratio=1)


def time_plan(t: int, size: int, overlap: int, frames: Callable[[int], int] | None = None) -> TimePlan:
    frames = frames or causal(4)
    return TimePlan(n_latents=t, size=size, overlap=overlap, frames=frames, reason="as asked")


def cut(t: int, **asked: int) -> TimePlan:
    return asked_chunks(opaque(TimeIndexDec()), t, DecodeSettings(**asked))


# -- chunks


@pytest.mark.parametrize("frames", [causal(4), causal(8), causal(6), lambda n: n, lambda n: 4 * n])
def test_chunks_cover_every_frame_and_know_their_place(frames: Callable[[int], int]) -> None:
    for t, size in itertools.product(range(1, 24), range(2, 9)):
        for overlap in range(1, size // 2 + 1):
            plan = time_plan(t, size, overlap, frames)
            chunks = plan.chunks
            assert (chunks[0].frames.start, chunks[-1].frames.stop) == (0, frames(t))
            assert (chunks[0].lead_in, chunks[0].shared) == (0, 0)
            assert len(chunks) == plan.n_chunks
            for before, chunk in itertools.pairwise(chunks):
                assert chunk.latents.size == size
                assert before.latents.stop - chunk.latents.start >= overlap
                assert before.frames.start <= chunk.frames.start <= before.frames.stop < chunk.frames.stop
                assert chunk.shared == before.frames.stop - chunk.frames.start
                assert chunk.lead_in + chunk.frames.size == frames(size)
            for chunk in chunks[:-1]:  # what a latent frame gives lies where the undivided clip has it
                first_shown = chunk.latents.start + (1 if chunk.lead_in else 0)
                assert chunk.frames == Span(frames(first_shown), frames(chunk.latents.stop))


def test_lead_in_is_the_single_frame_of_a_causal_start_and_what_is_repeated() -> None:
    assert [c.lead_in for c in time_plan(10, 4, 1).chunks] == [0, 1, 1]
    assert [c.shared for c in time_plan(10, 4, 1).chunks] == [0, 0, 0]
    assert [c.lead_in for c in time_plan(9, 4, 1).chunks] == [0, 1, 5]  # the last one slid back by a latent frame
    assert [c.shared for c in time_plan(10, 4, 2).chunks] == [0, 4, 4, 4]
    assert [c.lead_in for c in time_plan(9, 4, 1, lambda n: n).chunks] == [0, 0, 1]
    assert [c.shared for c in time_plan(9, 4, 1, lambda n: n).chunks] == [0, 1, 1]


def test_frames_become_latent_frames_of_the_family() -> None:
    assert (cut(41, chunk_frames=64).size, cut(41, chunk_frames=64).overlap) == (16, 2)
    rounded = cut(41, chunk_frames=67, chunk_overlap=11)
    assert (rounded.size, rounded.overlap) == (16, 2)
    for tiny in (1, 4, 8):
        plan = cut(41, chunk_frames=tiny, chunk_overlap=0)
        assert (plan.size, plan.overlap) == (FLOOR_CHUNK, 1)  # a lead-in is needed, whatever was asked
    assert cut(41, chunk_frames=16, chunk_overlap=4096).overlap == 2


def test_uneven_decoder_is_left_whole() -> None:
    odd = opaque(TimeIndexDec(), frames=lambda n: n * n)
    plan = asked_chunks(odd, 9, DecodeSettings(chunk_frames=8))
    assert plan.n_chunks == 1
    assert "do not grow evenly" in plan.reason
    assert plan.smaller() is None


# -- fading


def weights_of(plan: TimePlan, i: int, *, tiled: bool) -> Tensor:
    """How much of each output frame chunk `i` is: it alone gives ones."""
    n_frames = plan.frames(plan.n_latents)
    canvas = Canvas("test", (1, 1, plan.n_latents, 2, 2), 1, n_frames, torch.device("cpu"))
    for j, chunk in enumerate(plan.chunks):
        for row in (Span(0, 1), Span(1, 2)) if tiled else (Span(0, 2),):
            given = torch.full((chunk.lead_in + chunk.frames.size, 1, row.size, 2), float(i == j))
            given[: chunk.lead_in] = 9.0  # must not be seen
            spot = Spot(images=Span(0, 1), row=row, col=Span(0, 2), chunk=chunk)
            canvas.add(given, spot, torch.ones(row.size, 2) if tiled else None)
        canvas.close_chunk(Span(0, 1), chunk)
    clip = canvas.finished(lambda x: x)[..., 0]
    assert (clip == clip[:, :1, :1]).all()
    return clip[:, 0, 0]


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(("t", "size", "overlap"), [(7, 5, 2), (9, 4, 1), (9, 2, 1), (12, 8, 4), (5, 8, 2)])
@pytest.mark.parametrize("frames", [causal(4), lambda n: n])
def test_weights_in_time_sum_to_one(t: int, size: int, overlap: int, frames: Callable[[int], int], tiled: bool) -> None:
    plan = time_plan(t, size, overlap, frames)
    weights = torch.stack([weights_of(plan, i, tiled=tiled) for i in range(plan.n_chunks)])
    assert (weights.sum(0) - 1).abs().max() <= 2e-7
    covered = torch.zeros(weights.shape[1], dtype=torch.int)
    for chunk, weight in zip(plan.chunks, weights, strict=True):
        inside = torch.zeros(weights.shape[1], dtype=torch.bool)
        inside[chunk.frames.start : chunk.frames.stop] = True
        covered += inside
        assert (weight[inside] > 0).all()
        assert (weight[~inside] == 0).all()
    assert (weights.amax(0)[covered == 1] == 1).all()


def test_fade_is_linear_over_the_shared_frames() -> None:
    plan = time_plan(8, 5, 2)  # the second begins at latent frame 3: its lead-in is frame 12, both have 13 to 16
    weight = weights_of(plan, 1, tiled=False)
    assert plan.boundaries == (13,)
    assert weight[:13].tolist() == [0] * 13
    assert weight[13:17].tolist() == [(i + 0.5) / 4 for i in range(4)]
    assert weight[17:].tolist() == [1] * 12
    slid = weights_of(time_plan(7, 5, 2), 1, tiled=False)  # begins a latent frame earlier, and takes over as late
    assert slid[:17].tolist() == weight[:17].tolist()


def test_canvas_refuses_another_number_of_frames() -> None:
    wrong = opaque(TimeIndexDec(k=2))  # said to be 4
    with pytest.raises(HaloError, match=r"gave 3 frames for 2 latent frames, where 5 were promised"):
        decode_blended(wrong, latent((1, 4, 5, 2, 2)), settings(chunk_frames=8))


@pytest.mark.parametrize("tile_px", [32, 768])
def test_decoder_that_gives_a_frame_for_each_is_chunked_too(tile_px: int) -> None:
    z, heard = latent((2, 4, 9, 6, 7)), Recorder()
    model = PointDec()
    got = decode_blended(
        even(model), z, settings(tile_px, 8, chunk_frames=4, chunk_overlap=2), observer=heard, finish=lambda x: x
    )
    want = model.run(z).movedim(1, -1).flatten(0, 1)
    assert heard.plan.n_chunks == 4
    assert max_diff(got, want) <= 1e-6


def test_tiles_of_chunks_are_faded_as_whole_frames_are() -> None:
    z = latent((2, 4, 9, 4, 5))  # this decoder looks at no neighbour in space, and its chunks disagree
    asked = {"chunk_frames": 16, "chunk_overlap": 8}
    tiled, whole_frames = (
        decode_blended(opaque(CausalDec()), z, settings(px, 8, **asked), finish=lambda x: x) for px in (24, 768)
    )
    assert max_diff(tiled, whole_frames) <= 1e-5


# -- plans


def choose() -> DtypeChoice:
    return choose_dtype(opaque(PointDec()), settings())


def budget(nbytes: int | None, *, unified: bool = True) -> DeviceProfile:
    return replace(CPU, budget_bytes=nbytes, unified_memory=unified)


def estimating(per_element: int) -> OpaqueDecoder:
    def estimate(shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return per_element * shape[2] * shape[3] * shape[4]

    return opaque(TimeIndexDec(), estimate_bytes=estimate)


SHAPE = (1, 4, 21, 4, 4)
OUTPUT = 4 * 3 * 81 * 32 * 32
SCRATCH = 1000 * 21 * 16 + OUTPUT  # the estimate, and the raw clip


def planned(one: OpaqueDecoder, profile: DeviceProfile, **more: Any) -> BlendPlan:
    return plan_blend(one, SHAPE, settings(**more), profile)


def test_clip_that_fits_is_one_call() -> None:
    plan = planned(estimating(1000), budget(SCRATCH + OUTPUT))
    assert plan.n_chunks == 1
    assert predict_peak(plan, estimating(1000), torch.float32).total == SCRATCH + OUTPUT
    assert plan.is_whole


def test_clip_that_does_not_fit_is_cut_into_chunks_of_sixteen_frames() -> None:
    plan = planned(estimating(1000), budget(SCRATCH + OUTPUT - 1))
    assert plan.time is not None
    assert (plan.time.size, plan.time.overlap, plan.tile_shape) == (4, 2, (1, 4, 4, 4, 4))
    assert "GiB" in plan.time.reason
    summary = summarise(plan, estimating(1000), choose())
    assert (summary.approximate, summary.strategy) == (True, "chunks")
    assert (summary.chunk_frames, summary.n_chunks, summary.n_tiles) == (13, 10, 10)
    assert len(summary.boundaries) == 9
    assert summary.predicted.scratch == 1000 * 4 * 16 + 4 * 3 * 13 * 32 * 32


def test_picture_elsewhere_does_not_count() -> None:
    assert planned(estimating(1000), budget(SCRATCH, unified=False)).n_chunks == 1
    assert planned(estimating(1000), budget(SCRATCH - 1, unified=False)).n_chunks == 10
    assert planned(estimating(1000), budget(SCRATCH, unified=True)).n_chunks == 10


def test_what_nobody_knows_does_not_cut() -> None:
    assert planned(opaque(TimeIndexDec(), estimate_bytes=None), budget(1)).n_chunks == 1
    assert planned(estimating(1000), budget(None)).n_chunks == 1


def test_asked_chunks_are_taken_whatever_fits() -> None:
    assert planned(estimating(1000), budget(None), chunk_frames=32).n_chunks == 4
    assert planned(estimating(1000), budget(1), chunk_frames=4096).n_chunks == 1


def test_pictures_have_no_chunks() -> None:
    summary = summarise(
        plan_blend(replace(opaque(PointDec()), latent_dim=2), (2, 4, 8, 8), settings(chunk_frames=8), CPU),
        opaque(PointDec()), choose(),
    )  # fmt: skip
    assert (summary.chunk_frames, summary.n_chunks, summary.boundaries) == (0, 1, ())
    assert "chunks" not in {c.name for c in summary.choices}


def test_shared_frames_are_in_the_prediction_where_tiles_gather_them() -> None:
    one = opaque(TimeIndexDec(), estimate_bytes=None)
    for tile_px, held in ((16, 4), (768, 0)):
        plan = plan_blend(one, (1, 4, 30, 4, 4), settings(tile_px, chunk_frames=16, chunk_overlap=8), CPU)
        assert plan.time is not None
        assert plan.time.most_shared == 4
        assert predict_peak(plan, one, torch.float32).output == 4 * 3 * (117 + held) * 32 * 32


@pytest.mark.parametrize(("overlap", "warned"), [(8, False), (9, False), (16, True)])
def test_cut_overlap_is_told_once(overlap: int, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    z = latent((2, 4, 9, 2, 2))
    with caplog.at_level(logging.WARNING):
        decode_blended(opaque(TimeIndexDec()), z, settings(chunk_frames=16, chunk_overlap=overlap))
        decode_blended(opaque(TimeIndexDec()), z, settings(chunk_frames=64, chunk_overlap=100))  # not cut at all
    said = [r.getMessage() for r in caplog.records]
    assert said == (["an overlap of 16 frames is too much for chunks of 16 frames; using 8 (half a chunk at most)"]
                    if warned else [])  # fmt: skip


# -- what is told


def test_chunks_and_boundaries_are_told_for_every_clip() -> None:
    @dataclass
    class Hears(Recorder):
        chunks: list[tuple[int, int]] = field(default_factory=list)
        measured: list[tuple[int, int, float]] = field(default_factory=list)

        def chunk_started(self, i: int, n: int) -> None:
            self.chunks.append((i, n))

        def boundary(self, clip: int, frame: int, smoothness: float) -> None:
            self.measured.append((clip, frame, smoothness))

    heard, z = Hears(), latent((2, 4, 9, 3, 4))
    got = decode_blended(opaque(CausalDec()), z, settings(16, chunk_frames=16, chunk_overlap=4), observer=heard)
    assert heard.chunks == [(i, 6) for i in range(6)]
    assert heard.passes == [(1, 1), (1, 1)]
    assert [t[:2] for t in heard.tiles] == [(i, 12) for i in range(12)] * 2
    assert heard.steps[-1] == (24, 24)
    want = []
    for clip, frames in enumerate(got.chunk(2)):
        meter = ConsistencyMeter()
        meter.feed(frames)
        want += [(clip, *score) for score in meter.scores(heard.plan.boundaries)]
    assert heard.measured == want
    assert len(want) == 4


# -- shortage of memory


def test_tiles_shrink_before_chunks_and_chunks_before_small_tiles() -> None:
    model = LimitDec(TimeIndexDec(), limit=0)
    with pytest.raises(torch.OutOfMemoryError, match="64x64 px, 1 per call of 2 latent frames"):
        decode_blended(opaque(model, estimate_bytes=None), latent((2, 4, 41, 100, 60)), settings())
    assert [(t, h, w) for _, _, t, h, w in shapes(model)] == [
        (41, 96, 60), (41, 48, 48), (41, 32, 32), (4, 32, 32), (2, 32, 32), (2, 16, 16), (2, 8, 8),
    ]  # fmt: skip
    assert len(model.log) <= MAX_ATTEMPTS


def test_small_clip_is_cut_in_time_when_memory_runs_out() -> None:
    z = latent((2, 4, 9, 1, 1)).repeat(1, 1, 1, 8, 8)
    model, heard = LimitDec(TimeIndexDec(), limit=4 * 4 * 64), Recorder()
    got = decode_blended(opaque(model), z, settings(), observer=heard)
    assert torch.equal(got, torch.cat([whole(TimeIndexDec(), z[i : i + 1]) for i in range(2)]))
    assert [s[2] for s in shapes(model)] == [9, *[4] * 8]
    assert heard.kinds() == ["out_of_memory"]
    assert heard.fallbacks[0].given.endswith("of 9 latent frames")
    assert [p.approximate for p in heard.plans] == [False, True]
    (choice,) = (c for c in heard.plan.choices if c.name == "chunks")
    assert choice.reason == "memory ran out with a longer one"


@pytest.mark.parametrize(("tile_px", "edge"), [(16, 2), (768, 4)])
def test_chunks_start_again_from_a_clean_clip(tile_px: int, edge: int) -> None:
    """Memory runs out in the second chunk of the second clip."""
    z = latent((2, 4, 9, 1, 1)).repeat(1, 1, 1, 4, 4)
    model = LimitDec(TimeIndexDec(), limit=10**9)

    def tighten(i: int, n: int) -> None:
        if i == n - 1 and heard.passes:
            model.limit = 4 * 2 * edge**2

    heard = Recorder(on_tile=tighten)
    got = decode_blended(opaque(model), z, settings(tile_px, chunk_frames=24, chunk_overlap=8), observer=heard)
    want = torch.cat([whole(TimeIndexDec(), z[i : i + 1]) for i in range(2)])
    assert max_diff(got, want) <= 1e-6
    assert [p.chunk_frames for p in heard.plans] == [21, 13, 5]
    assert heard.kinds() == ["out_of_memory"] * 2


def test_noise_of_chunks_repeats_and_leaves_the_generator_alone() -> None:
    z = latent((1, 4, 9, 4, 4))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    runs = [decode_blended(even(NoiseDec()), z, settings(chunk_frames=4, seed=7)) for _ in range(2)]
    assert torch.equal(*runs)
    assert torch.equal(torch.get_rng_state(), before)


# -- the setting


@pytest.mark.parametrize("value", [-1, 4097, 1.5, True])
def test_chunk_overlap_is_checked(value: Any) -> None:
    with pytest.raises(SettingsError, match="chunk_overlap"):
        DecodeSettings(chunk_overlap=value)


def test_settings_written_before_the_field_are_read() -> None:
    written = encode(DecodeSettings(chunk_frames=16))
    assert decode_json(DecodeSettings, json.loads(json.dumps(written))) == DecodeSettings(chunk_frames=16)
    del written["chunk_overlap"]
    assert decode_json(DecodeSettings, written) == DecodeSettings(chunk_frames=16, chunk_overlap=8)
