"""ST-4: the statistics say what happened."""

from __future__ import annotations

from collections import Counter

import torch

from halo_vae.nodes.decode_latent import decode_latent
from halo_vae.optim.events import DecodeObserver
from halo_vae.profiling.collector import Collector
from halo_vae.profiling.record import DecodeRecord, DecodeStatus, Identity
from halo_vae.profiling.recorded import record_call
from halo_vae.tests.cases.support import DTYPE_NAMES, Recorder, capped, record, settings
from halo_vae.tests.fixtures import ConvDec, FakeVAE, LimitDec, Logged, OverflowDec, PointDec, latent


def assert_told_as_it_was(heard: Recorder, model: Logged) -> None:
    """Tiles, shapes, dtypes and counts that were told equal the decoder's own log."""
    assert [(shape, dtype) for _, _, shape, dtype in heard.tiles] == [
        (call["shape"], DTYPE_NAMES[call["dtype"]]) for call in model.log
    ]
    out_of_memory = heard.kinds().count("out_of_memory")
    assert len(heard.plans) == 1 + out_of_memory
    assert heard.kinds().count("non_finite") == len(heard.redone)
    assert sum(op.n_tiles for op in heard.ops) == heard.plan.n_tiles  # kept ones only
    assert heard.steps[-1] == (heard.plan.n_tiles, heard.plan.n_tiles)
    assert heard.plan.approximate == (heard.plan.tile_grid != (1, 1))
    last = model.log[-1]["shape"]
    assert heard.plan.tile_px == (last[-2] * 8, last[-1] * 8)


def test_st_4_plain_decode() -> None:
    model = ConvDec()
    _, heard = record(model, latent((1, 4, 24, 40)), settings(overlap_px=96))
    assert_told_as_it_was(heard, model)
    assert (heard.plan.tile_grid, heard.plan.overlap_px, heard.plan.n_tiles) == ((1, 1), 0, 1)
    assert heard.plan.strategy == "whole"


def test_st_4_picture_smaller_than_the_tile() -> None:
    model = ConvDec()
    _, heard = record(model, latent((1, 4, 20, 24)), settings(512, 64))
    assert_told_as_it_was(heard, model)
    assert heard.plan.tile_px == (160, 192)


def test_st_4_tiles() -> None:
    model = ConvDec()
    _, heard = record(model, latent((1, 4, 40, 28)), settings(128, 100))
    assert_told_as_it_was(heard, model)
    assert len(model.log) == heard.plan.n_tiles == 4 * 3  # a step of 11 latents
    assert (heard.plan.tile_grid, heard.plan.overlap_px) == ((4, 3), 40)  # a third of the tile, not what was asked
    assert heard.plan.approximate


def test_st_4_overflow_everywhere() -> None:
    model = OverflowDec("natural")
    _, heard = record(model, latent((1, 4, 16, 16)), settings(precision_mode="fp16"))
    assert_told_as_it_was(heard, model)
    assert [op.dtype for op in heard.ops] == ["float32"]
    assert len(heard.redone) == 1


def test_st_4_overflow_in_one_tile() -> None:
    model, z = OverflowDec("nan"), torch.zeros(1, 4, 64, 64)
    z[..., 40:44, 40:44] = 2.0
    _, heard = record(model, z, settings(256, precision_mode="fp16"))
    assert_told_as_it_was(heard, model)
    assert {op.dtype: op.n_tiles for op in heard.ops} == {"float16": 3, "float32": 1}
    assert {op.native_dtype for op in heard.ops} == {"float32"}
    assert [(f.where, f.given, f.used) for f in heard.fallbacks] == [("tile 3", "float16", "float32")]


def test_st_4_out_of_memory() -> None:
    model = LimitDec(PointDec(), limit=4 * 24 * 24)
    _, heard = record(model, latent((1, 4, 64, 64)), settings(512))
    assert_told_as_it_was(heard, model)
    assert [plan.tile_px for plan in heard.plans] == [(512, 512), (256, 256), (128, 128)]
    assert [(f.given.split(",")[0], f.used.split(",")[0]) for f in heard.fallbacks] == [
        ("512x512 px", "256x256 px"),
        ("256x256 px", "128x128 px"),
    ]


def test_st_4_batch_split() -> None:
    model = PointDec()
    _, heard = record(model, latent((5, 4, 8, 8)), settings(), capped(2))
    assert_told_as_it_was(heard, model)
    assert [op.n_tiles for op in heard.ops] == [1, 1, 1]
    assert [call["shape"][0] for call in model.log] == [2, 2, 1]
    assert heard.passes == [(2, 2), (2, 2), (1, 2)]
    assert (heard.plan.n_passes, heard.plan.images_per_pass) == (3, 2)
    assert Counter(c.reason for c in heard.plan.choices)["at most 2"] == 1


def test_st_4_record_of_a_repaired_decode() -> None:
    """All of it at once, in the record that nodes and command line show: memory runs out, then one tile overflows."""
    z = torch.zeros(3, 4, 48, 48)
    z[1, ..., 40:44, 40:44] = 2.0
    model = LimitDec(OverflowDec("nan"), limit=4 * 24 * 24)
    vae, chosen = FakeVAE(model), settings(384, precision_mode="fp16")
    identity = Identity(vae_hash=None, family="LimitDec", loaded_dtype="float32", device="cpu")

    def call(observer: DecodeObserver) -> torch.Tensor:
        return decode_latent({"samples": z}, vae, chosen, observer=observer)

    image, told = record_call(call, identity, z, chosen, collector=Collector())
    assert told.status is DecodeStatus.OK
    assert told.image_shape == tuple(image.shape) == (3, 384, 384, 3)
    assert told.plan is not None
    assert (told.plan.tile_px, told.plan.n_tiles, told.plan.approximate) == ((192, 192), 12, True)
    assert told.plan.images_per_pass == 1
    assert told.tiles is not None
    assert told.tiles.count == len(model.log) == 1 + 12 + 1
    assert {shape.shape for shape in told.tiles.shapes} == {call["shape"] for call in model.log}
    assert [event.kind for event in told.fallbacks] == ["out_of_memory", "non_finite"]
    assert told.n_fallbacks == 2
    assert told.batch is not None
    assert (told.batch.images, told.batch.slots, told.batch.n_passes) == (3, 3, 3)
    assert told.precision is not None
    assert told.precision.ops_below_native == 3
    assert {d.dtype for d in told.precision.kept} == {"float16", "float32"}
    assert told.first_of_shape is not None
    assert DecodeRecord.from_json(told.to_json()) == told
