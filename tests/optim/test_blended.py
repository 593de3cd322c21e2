"""The blended method by itself: weights, plans, the ladder after a shortage of memory, what is left as it was."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.nodes.vae import describe_vae
from halo_vae.optim.blend_plan import FLOOR_LAT, plan_blend, predict_peak
from halo_vae.optim.blend_weights import feather, overlapped_spans
from halo_vae.optim.blended import MAX_ATTEMPTS, decode_blended
from halo_vae.optim.device import describe_device
from halo_vae.optim.errors import HaloError
from halo_vae.optim.opaque import OpaqueDecoder, PrecisionMemory
from halo_vae.optim.tiling import Span
from halo_vae.tests.cases.support import Recorder, capped, max_diff, record, settings, shapes, whole
from halo_vae.tests.fixtures import FakeVAE, LimitDec, NoiseDec, PointDec, TimeIndexDec, latent, to_image


def opaque(model: torch.nn.Module, **changed: Any) -> OpaqueDecoder:
    return replace(describe_vae(FakeVAE(model)), **changed)


# -- weights


def test_spans_cover_everything_at_one_length() -> None:
    for extent, tile in itertools.product(range(1, 40), range(1, 14)):
        for overlap in range(tile):
            spans = overlapped_spans(extent, tile, overlap)
            assert {s.size for s in spans} == {min(tile, extent)}
            assert (spans[0].start, spans[-1].stop) == (0, extent)
            assert all(a.start < b.start and a.stop - b.start >= overlap for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("overlap", [-1, 4, 5])
def test_spans_refuse_an_overlap_of_a_whole_tile(overlap: int) -> None:
    with pytest.raises(ValueError, match=f"overlap of {overlap}"):
        overlapped_spans(20, 4, overlap)


def test_feather_weights_are_positive_and_sum_to_one() -> None:
    for extent, tile, overlap in itertools.product((7, 16, 29, 61), (5, 16), (0, 1, 3, 4)):
        spans = [s.scaled(4) for s in overlapped_spans(extent, tile, overlap)]
        weights = feather(spans)
        total, n_tiles = torch.zeros(extent * 4), torch.zeros(extent * 4)
        for span, weight in zip(spans, weights, strict=True):
            assert weight.min() > 0
            total[span.start : span.stop] += weight
            n_tiles[span.start : span.stop] += 1
        assert (total - 1).abs().max() <= 2e-7
        for span, weight in zip(spans, weights, strict=True):  # where a tile is alone nothing is rounded
            assert (weight[n_tiles[span.start : span.stop] == 1] == 1).all()


def test_feather_is_linear_over_an_overlap() -> None:
    first, second = feather((Span(0, 8), Span(4, 12)))
    assert first.tolist() == [1, 1, 1, 1, 0.875, 0.625, 0.375, 0.125]
    assert second.tolist() == first.flip(0).tolist()


# -- plans


def test_plan_fills_a_pass_within_the_cap() -> None:
    cpu = describe_device("cpu")
    cases = [  # latent, settings, cap, pictures per call
        ((64, 4, 8, 8), settings(), 16, 16),  # never the whole batch, however small the pictures
        ((64, 4, 8, 8), settings(), 99, 16),
        ((3, 4, 8, 8), settings(), 16, 3),
        ((8, 4, 32, 32), settings(), 16, 4),  # four of 256 px fill a pass
        ((8, 4, 512, 512), settings(), 16, 1),
        ((8, 4, 8, 8), settings(batch_optimization=False), 16, 1),
    ]
    for shape, chosen, cap, n in cases:
        plan = plan_blend(opaque(PointDec()), shape, chosen, replace(cpu, batch_cap=cap))
        assert plan.images_per_pass == n, shape
        assert sum(span.size for span in plan.passes) == shape[0]


def test_tile_size_zero_leaves_it_to_the_plan() -> None:
    plan = plan_blend(opaque(PointDec()), (1, 4, 256, 256), settings(0, 96), describe_device("cpu"))
    assert (plan.tile_px, plan.overlap_px) == ((768, 768), 96)


def test_predicted_peak_is_that_of_one_tile() -> None:
    vae = FakeVAE(PointDec())
    one, cpu = describe_vae(vae), describe_device("cpu")
    plan = plan_blend(one, (1, 4, 512, 512), settings(512), cpu)
    peak = predict_peak(plan, one, torch.float32)
    assert vae.mem_shapes == [(1, 4, 64, 64)]
    assert peak.output == 4 * 3 * 4096 * 4096
    assert peak.scratch == vae.memory_used_decode((1, 4, 64, 64), torch.float32) + 4 * 3 * 512 * 512


def test_batch_gives_the_bits_of_single_decodes() -> None:
    z = latent((5, 4, 8, 8))
    got, heard = record(PointDec(), z, settings(), capped(4))
    assert heard.passes == [(4, 4), (1, 4)]
    assert torch.equal(got, torch.cat([whole(PointDec(), z[i : i + 1]) for i in range(5)]))


# -- shortage of memory


def accelerator_error(text: str, code: int | None = None) -> Exception:
    error = torch.AcceleratorError(text)
    if code is not None:
        error.error_code = code
    return error


SHORTAGES: dict[str, Callable[[], BaseException]] = {
    "torch": lambda: torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2 GiB"),
    "hip": lambda: RuntimeError("HIP error: out of memory"),
    "accelerator": lambda: accelerator_error("hipErrorOutOfMemory: out of memory"),
    "code": lambda: accelerator_error("an allocation failed", 2),
    "host": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"),
}


@pytest.mark.parametrize("form", SHORTAGES)
def test_shortage_in_any_form_leads_to_smaller_tiles(form: str, caplog: pytest.LogCaptureFixture) -> None:
    model, z = LimitDec(PointDec(), limit=4 * 32 * 32, exc=SHORTAGES[form]), latent((1, 4, 64, 64))
    with caplog.at_level(logging.WARNING):
        got, heard = record(model, z, settings(768, 64))
    assert shapes(model)[0] == (1, 4, 64, 64)
    assert set(shapes(model)[1:]) == {(1, 4, 32, 32)}
    assert max_diff(got, whole(PointDec(), z)) <= 1e-6
    assert heard.kinds() == ["out_of_memory"]
    assert heard.fallbacks[0].reason == str(SHORTAGES[form]()).split("\n")[0]
    assert len(caplog.records) == 1


def test_any_other_error_is_raised_unchanged() -> None:
    error = RuntimeError("expected input to have 16 channels")
    model = LimitDec(PointDec(), limit=4 * 32 * 32, exc=lambda: error)
    with pytest.raises(RuntimeError) as caught:
        record(model, latent((1, 4, 64, 64)))
    assert caught.value is error
    assert len(model.log) == 1


def test_failed_attempt_is_freed_before_the_next() -> None:
    held: list[weakref.ref[Tensor]] = []
    alive: list[list[bool]] = []

    def allocate(z: Tensor) -> None:
        failing = torch.zeros(1000)
        held.append(weakref.ref(failing))
        raise torch.OutOfMemoryError("HIP out of memory. (fake)")  # the traceback holds this frame and its tensor

    model = LimitDec(PointDec(), limit=4 * 16 * 16, hook=allocate)
    heard = Recorder(on_tile=lambda i, n: alive.append([ref() is not None for ref in held]))
    decode_blended(opaque(model), latent((1, 4, 64, 64)), settings(), observer=heard)
    assert len(held) == 2
    assert alive[1] == [False]
    assert alive[2] == [False, False]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("edge", [64, 300])
def test_ladder_ends_at_the_floor(n: int, edge: int) -> None:
    model = LimitDec(PointDec(), limit=0)
    with pytest.raises(torch.OutOfMemoryError, match="even with tiles of 64x64 px") as caught:
        record(model, latent((n, 4, edge, edge)), settings(16384))
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    sizes = [b * h * w for b, _, h, w in shapes(model)]
    assert all(a > b for a, b in itertools.pairwise(sizes))
    assert len(sizes) <= MAX_ATTEMPTS
    assert shapes(model)[-1] == (1, 4, FLOOR_LAT, FLOOR_LAT)


def test_ladder_ends_within_its_attempts_far_from_the_floor() -> None:
    model = LimitDec(PointDec(r=1), limit=0)
    with pytest.raises(torch.OutOfMemoryError):
        decode_blended(opaque(model, scale=1), latent((1, 4, 1, 4096)), settings(16384))
    assert len(model.log) == MAX_ATTEMPTS


@pytest.mark.parametrize("after", [0, 3])
def test_ladder_starts_again_from_a_clean_picture(after: int) -> None:
    """The limit holds from the start, or falls half way, as when another program takes memory."""
    model, z = LimitDec(PointDec(), limit=10**9), latent((1, 4, 64, 64))
    model.limit = 4 * 24 * 24 if after == 0 else 10**9

    def tighten(i: int, n: int) -> None:
        if len(model.log) == after:
            model.limit = 4 * 24 * 24

    heard = Recorder(on_tile=tighten)
    got = decode_blended(opaque(model), z, settings(512 if after == 0 else 256, 64), observer=heard)
    assert max_diff(got, whole(PointDec(), z)) <= 1e-6
    assert heard.kinds().count("out_of_memory") == (2 if after == 0 else 1)
    assert heard.plan.tile_px == (128, 128)
    assert len(heard.plans) == 1 + len(heard.fallbacks)
    shares = [done / total for done, total in heard.steps]
    assert shares == sorted(shares)
    assert heard.steps[-1] == (heard.plan.n_tiles, heard.plan.n_tiles)


def test_batch_is_split_before_tiles_shrink() -> None:
    model, z = LimitDec(PointDec(), limit=4 * 16 * 16), latent((4, 4, 16, 16))
    got, heard = record(model, z)
    assert shapes(model) == [(4, 4, 16, 16), *[(1, 4, 16, 16)] * 4]
    assert torch.equal(got, whole(PointDec(), z))
    assert not heard.plan.approximate


# -- what is left as it was


class SpoilsItsInput(PointDec):
    def run(self, z: Tensor) -> Tensor:
        picture = super().run(z).clone()
        z.fill_(float("nan"))
        return picture


@pytest.mark.parametrize("tile_px", [128, 768])
def test_latent_is_only_read(tile_px: int) -> None:
    z = latent((1, 4, 24, 24))
    before = z.clone()
    got, _ = record(SpoilsItsInput(), z, settings(tile_px, 32))
    assert torch.equal(z, before)
    assert max_diff(got, whole(PointDec(), before)) <= 1e-6


def test_random_state_is_restored_after_an_error() -> None:
    class Fails(NoiseDec):
        def run(self, z: Tensor) -> Tensor:
            super().run(z)
            raise KeyError("broken")

    torch.manual_seed(5)
    before = torch.get_rng_state()
    for seed in (-1, 7):
        with pytest.raises(KeyError):
            record(Fails(), latent((1, 4, 8, 8)), settings(seed=seed))
        assert torch.equal(torch.get_rng_state(), before)


def test_decode_that_starts_again_draws_the_same_noise() -> None:
    z = latent((1, 4, 32, 32))
    torch.manual_seed(3)
    want, _ = record(NoiseDec(), z, settings(128, 0))
    got, heard = record(LimitDec(NoiseDec(), limit=4 * 16 * 16, hook=torch.randn_like), z, settings(256, 0))
    assert heard.plan.tile_px == (128, 128)
    assert torch.equal(got, want)


# -- clips, and decoders that are not what they say


@pytest.mark.parametrize("t", [1, 2, 5])
def test_clips_are_decoded_one_by_one_and_whole_in_time(t: int) -> None:
    z = latent((2, 4, t, 1, 1)).repeat(1, 1, 1, 12, 20)
    vae = FakeVAE(TimeIndexDec(), dim=3)
    heard = Recorder()
    got = decode_blended(describe_vae(vae), z, settings(64, 16), observer=heard)
    assert {s[:3] for s in shapes(vae.first_stage_model)} == {(1, 4, t)}
    want = torch.cat([whole(TimeIndexDec(), z[i : i + 1]) for i in range(2)])
    assert got.shape[0] == 2 * (1 + 4 * (t - 1))
    assert max_diff(got, want) <= 1e-6
    assert heard.plan.predicted.output == got.numel() * 4


def test_wrong_scale_is_told() -> None:
    with pytest.raises(HaloError, match=r"PointDec gave \(1, 3, 64, 64\).*\(128, 128\)"):
        decode_blended(opaque(PointDec(r=4)), latent((1, 4, 16, 16)), settings())


def test_changing_channels_are_told() -> None:
    class Changes(PointDec):
        def run(self, z: Tensor) -> Tensor:
            return super().run(z)[:, : 4 - len(self.log)]

    with pytest.raises(HaloError, match="different kinds"):
        decode_blended(opaque(Changes()), latent((1, 4, 32, 16)), settings(128))


def test_decoder_without_another_dtype_stays_in_its_own() -> None:
    model = PointDec()
    fixed = OpaqueDecoder(name="fixed", decode=model.decode, latent_dim=2, latent_channels=None, scale=8)
    heard = Recorder()
    got = decode_blended(fixed, latent((1, 4, 8, 8)), settings(precision_mode="fp16"), observer=heard)
    assert [call["dtype"] for call in model.log] == [torch.float32]
    assert heard.kinds() == ["dtype"]
    assert torch.equal(got, to_image(PointDec().run(latent((1, 4, 8, 8)))))


def test_precision_memory_keeps_what_mostly_fails() -> None:
    memory = PrecisionMemory()
    memory.record(torch.float16, n_calls=4, n_failed=1)
    assert not memory.fails_in(torch.float16)
    memory.record(torch.float16, n_calls=4, n_failed=2)
    assert memory.fails_in(torch.float16)
    assert not memory.fails_in(torch.bfloat16)
    memory.record(torch.bfloat16, n_calls=0, n_failed=0)
    assert not memory.fails_in(torch.bfloat16)
