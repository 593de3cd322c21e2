"""VT: clips, cut in time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.nodes import actions
from halo_vae.nodes.decode_latent import decode_latent
from halo_vae.optim.errors import UnknownDecoderError
from halo_vae.optim.settings import DecodeSettings
from halo_vae.tests.cases.exact import exact_settings
from halo_vae.tests.cases.exact_clip import exact_causal, tensors_of
from halo_vae.tests.cases.support import Recorder, decode, max_diff, record, settings, shapes, whole
from halo_vae.tests.fixtures import CausalDec, FakeVAE, Logged, TimeIndexDec, latent
from halo_vae.tests.nodes.support import new_session
from halo_vae.tests.optim.video.reference import Interpreter

LATENTS = (1, 2, 3, 5, 13, 21)
COUNTS = {4: (1, 5, 9, 17, 49, 81), 8: (1, 9, 17, 33, 97, 161), 6: (1, 7, 13, 25, 73, 121)}
"""Output frames of clips of that many latent frames: Wan, Hunyuan, Qwen; LTX; Mochi."""
CLIPS = [(k, t, made) for k, counts in COUNTS.items() for t, made in zip(LATENTS, counts, strict=True)]


def flat_clip(t: int, n: int = 1, height: int = 2, width: int = 2) -> Tensor:
    """Clips whose frames are each of one colour: F12 reads the corner of what it is given."""
    return latent((n, 4, t, 1, 1)).repeat(1, 1, 1, height, width)


@pytest.mark.parametrize(("k", "t", "made"), CLIPS)
def test_vt_1_number_and_order_of_frames(k: int, t: int, made: int) -> None:
    z, model = flat_clip(t), TimeIndexDec(k)
    want = whole(model, z)
    assert want.shape[0] == made
    for chunk in range(1, t + 1):
        for overlap in range(3):
            chosen = settings(chunk_frames=chunk * k, chunk_overlap=overlap * k)
            assert torch.equal(decode(model, z, chosen, dim=3, t_ratio=k), want), (chunk, overlap)


@pytest.mark.parametrize(("k", "t", "made"), CLIPS)
def test_vt_1_tiled_in_space_too(k: int, t: int, made: int) -> None:
    z, model = flat_clip(t, height=3, width=6), TimeIndexDec(k)
    want = whole(model, z)
    for chunk in sorted({1, 3, t // 2 + 1, t}):
        for overlap in range(3):
            chosen = settings(32, 8, chunk_frames=chunk * k, chunk_overlap=overlap * k)
            got, heard = record(model, z, chosen, dim=3, t_ratio=k)
            assert heard.plan.tile_grid == (1, 2)
            assert got.shape[0] == made
            assert max_diff(got, want) <= 1e-6, (chunk, overlap)


def test_vt_2_lowered_fixture_is_the_fixture() -> None:
    model, z = CausalDec(), latent((1, 4, 7, 3, 2))
    decoder = exact_causal(model)
    assert max_diff(Interpreter(decoder.program, tensors_of(decoder)).run(z), model.run(z)) <= 1e-5


@pytest.mark.parametrize("chunk", range(1, 8))
@pytest.mark.parametrize("tile_px", [16, 768])
def test_vt_2_streaming_keeps_what_came_before(chunk: int, tile_px: int) -> None:
    """Chunks are of one length but the last: [1]*7, [2,2,2,1] … [6,1], [7]. Nobody can ask for others.

    Tiny real Wan decoders, in any chunks: tests/optim/video/test_goldens.py, and the host's own in tests/comfyui.
    """
    model, z = CausalDec(), latent((1, 4, 7, 3, 2))
    chosen = exact_settings(tile_px, chunk_frames=4 * chunk)
    got, heard = record_exact(model, z, chosen)
    assert heard.plan.n_chunks == math.ceil(7 / chunk)
    assert not heard.plan.approximate
    assert max_diff(got, whole(model, z)) <= 1e-5
    assert model.log == []


def record_exact(model: CausalDec, z: Tensor, chosen: DecodeSettings) -> tuple[Tensor, Recorder]:
    """The clip by the exact engine, and what happened."""
    heard = Recorder()
    vae = FakeVAE(model, dim=3)
    return decode_latent({"samples": z}, vae, chosen, decoder=exact_causal(model), observer=heard), heard


@pytest.mark.parametrize("method", ["auto", "blended"])
def test_vt_2_unknown_decoder_is_called_once(method: str) -> None:
    model, z = CausalDec(), latent((1, 4, 7, 3, 2))
    got, heard = record(model, z, settings(method=method), dim=3)
    assert shapes(model) == [(1, 4, 7, 3, 2)]
    assert torch.equal(got, whole(CausalDec(), z))
    assert not heard.plan.approximate


def test_vt_2_unknown_decoder_has_no_exact_chunks() -> None:
    model = CausalDec()
    with pytest.raises(UnknownDecoderError, match="no known family"):
        decode(model, latent((1, 4, 7, 3, 2)), settings(method="exact", chunk_frames=8), dim=3)
    assert model.log == []


def test_vt_2_chunks_of_an_unknown_decoder_are_marked() -> None:
    model, z = CausalDec(), latent((1, 4, 7, 3, 2))
    got, heard = record(model, z, settings(chunk_frames=16, chunk_overlap=4), dim=3)
    assert shapes(model) == [(1, 4, 4, 3, 2)] * 2
    wrong = (got - whole(CausalDec(), z)).abs().amax(dim=(1, 2, 3))
    assert wrong[:13].max() <= 1e-6  # the first chunk, latent frames 0 to 3
    assert wrong[13:].max() > 0.1  # a second one that has forgotten: this is why the record must say so
    plan = heard.plan
    assert plan.approximate
    assert (plan.chunk_frames, plan.n_chunks, plan.boundaries) == (13, 2, (13,))
    (choice,) = (c for c in plan.choices if c.name == "chunks")
    assert choice.value.startswith("2 of 4 latent frames")
    assert "16 frames" in choice.reason


@pytest.mark.parametrize("t", [1, 2, 3, 6])
@pytest.mark.parametrize(("size", "overlap"), [(64, 8), (8, 4096), (8, 8)])
@pytest.mark.parametrize("tiled", [False, True])
def test_vt_4_short_clips(t: int, size: int, overlap: int, tiled: bool) -> None:
    z, model = flat_clip(t), TimeIndexDec()
    if tiled:  # through the node that has these widgets
        done = actions.decode_tiled(
            new_session(), {"samples": z}, FakeVAE(model, dim=3), temporal_size=size, temporal_overlap=overlap
        )
        got = done.images
    else:
        got = decode(model, z, settings(chunk_frames=size, chunk_overlap=overlap), dim=3)
    assert got.shape[0] == 1 + 4 * (t - 1)
    assert torch.equal(got, whole(TimeIndexDec(), z))
    if 4 * t <= size:
        assert len(model.log) == 1


@pytest.mark.parametrize(("k", "chunk", "overlap", "calls"), [(4, 16, 2, 3), (8, 8, 1, 6)])
def test_vt_6_overlap_counts_frames(k: int, chunk: int, overlap: int, calls: int) -> None:
    z, model = flat_clip(41), TimeIndexDec(k)
    done = actions.decode_tiled(
        new_session(), {"samples": z}, FakeVAE(model, dim=3, t_ratio=k), temporal_size=64, temporal_overlap=8
    )
    assert [s[2] for s in shapes(model)] == [chunk] * calls
    assert torch.equal(done.images, whole(TimeIndexDec(k), z))
    plan = done.record.plan
    assert (plan.n_chunks, plan.chunk_frames) == (calls, 1 + k * (chunk - 1))
    (choice,) = (c for c in plan.choices if c.name == "chunks")
    assert choice.value == f"{calls} of {chunk} latent frames, {overlap} of them shared"


class TilingVAE(FakeVAE):
    """Has the host's tiled decode, which keeps what it was asked and works in inference mode only."""

    def decode_tiled(self, z: Tensor, **asked: Any) -> Tensor:
        assert torch.is_inference_mode_enabled()
        self.asked = asked
        return self.decode(z)


@pytest.mark.parametrize(("k", "chunk", "overlap", "calls"), [(4, 16, 2, 3), (8, 8, 1, 6)])
def test_vt_6_stock_is_asked_for_the_same(k: int, chunk: int, overlap: int, calls: int) -> None:
    vae = TilingVAE(TimeIndexDec(k), dim=3, t_ratio=k)
    done = actions.decode_tiled(new_session(), {"samples": flat_clip(41)}, vae, method="stock")
    done.images.add_(0)  # a normal tensor
    assert (vae.asked["tile_t"], vae.asked["overlap_t"]) == (chunk, overlap)
    plan = done.record.plan
    assert plan.approximate
    assert (plan.n_chunks, len(plan.boundaries)) == (calls, calls - 1)
    one = actions.decode_tiled(new_session(), {"samples": flat_clip(chunk)}, vae, method="stock").record.plan
    assert (one.n_chunks, one.boundaries, one.approximate) == (1, (), False)


@pytest.mark.parametrize(("tile_px", "overlap_px"), [(768, 0), (16, 8), (24, 8)])
@pytest.mark.parametrize("chunk", [0, 1, 8])
@pytest.mark.parametrize("model", [CausalDec(), TimeIndexDec()], ids=["causal", "index"])
def test_vt_8_clips_do_not_mix(model: Logged, chunk: int, tile_px: int, overlap_px: int) -> None:
    z = torch.cat([latent((1, 4, 3, 4, 4)) - 2, latent((1, 4, 3, 4, 4), seed=3) + 2])
    chosen = settings(tile_px, overlap_px, chunk_frames=chunk, chunk_overlap=4)
    got = decode(model, z, chosen, dim=3)
    assert got.shape == (18, 32, 32, 3)
    for i, frames in enumerate(got.split(9)):
        assert max_diff(frames, decode(model, z[i : i + 1], chosen, dim=3)) <= 1e-5
        if chunk == 0 and isinstance(model, CausalDec):  # it looks at no neighbour in space
            assert max_diff(frames, whole(model, z[i : i + 1])) <= 1e-5


@pytest.mark.parametrize("tile_px", [16, 768])
@pytest.mark.parametrize("chunk", [0, 4, 8])
def test_vt_8_exact_clips_do_not_mix(chunk: int, tile_px: int) -> None:
    model = CausalDec()
    z = torch.cat([latent((1, 4, 3, 4, 4)) - 2, latent((1, 4, 3, 4, 4), seed=3) + 2])
    got, _ = record_exact(model, z, exact_settings(tile_px, chunk_frames=chunk))
    assert got.shape == (18, 32, 32, 3)
    for i, frames in enumerate(got.split(9)):
        assert max_diff(frames, whole(model, z[i : i + 1])) <= 1e-5
