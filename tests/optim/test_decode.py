"""The front door: any size, batch and latent; an ordinary picture; decoders opened and kept apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.optim import decoder as decoder_module
from halo_vae.optim.decode import Engine, open_decoder
from halo_vae.optim.decoder import ProgramCache
from halo_vae.optim.errors import LatentError, UnknownDecoderError
from halo_vae.optim.events import SILENT
from halo_vae.optim.store import keep_raw, to_unit_range
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.goldens import TOLERANCE
from halo_vae.tests.optim.helpers import (
    PROFILE,
    Recorder,
    decode_raw,
    golden_decoder,
    latent,
    max_diff,
    profile,
    reference,
    settings,
    small_decoder,
    small_weights,
)

PLANS = ("strips", "tiles")


# -- sizes and batches


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (5, 1), (7, 31), (13, 17), (2, 23)])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["small", "hunyuan_image", "taesd"])
def test_odd_sizes(size: tuple[int, int], plan: str, name: str) -> None:
    if name != "small" and size[0] * size[1] > 40:
        size = size[0], 3
    decoder = small_decoder() if name == "small" else golden_decoder(name)
    z = latent(1, decoder.program.latent_channels, *size)
    tile = max(16, 4 * decoder.program.scale[1])
    raw, heard = decode_raw(Engine(profile=PROFILE), decoder, z, plan=plan, tile_size=tile)
    expected = reference(decoder, z)
    assert max_diff(raw, expected) <= TOLERANCE * max(1.0, float(expected.abs().max()))
    edge = tile // decoder.program.scale[1]
    if max(size) > edge:
        assert max(heard.plan.tile_grid) > 1 or plan == "strips"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("tile_size", [16, 0])
@pytest.mark.parametrize(("batch", "cap", "passes"), [(1, 16, [1]), (5, 16, [5]), (5, 2, [2, 2, 1]), (4, 3, [3, 1])])
def test_a_batch_is_its_single_decodes(plan: str, tile_size: int, batch: int, cap: int, passes: list[int]) -> None:
    decoder, z = small_decoder(), latent(batch, 4, 11, 9)
    engine = Engine(profile=profile(batch_cap=cap))
    raw, heard = decode_raw(engine, decoder, z, plan=plan, tile_size=tile_size)
    assert heard.passes == [(n, passes[0]) for n in passes]
    assert (heard.plan.images_per_pass, heard.plan.n_passes) == (passes[0], len(passes))
    for i in range(batch):
        alone, _ = decode_raw(engine, decoder, z[i : i + 1], plan=plan, tile_size=tile_size)
        # a backend may sum in another order for several pictures per call; less than both differ from the reference
        assert max_diff(raw[i : i + 1], alone) <= 1e-5
    assert max_diff(raw, reference(decoder, z)) <= TOLERANCE


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_a_batch_is_bit_by_bit_its_single_decodes_where_each_call_holds_one_picture(mode: str) -> None:
    decoder, z = small_decoder(), latent(3, 4, 11, 9)
    engine = Engine(profile=PROFILE)
    given = {"plan": "strips", "tile_size": 16, "precision_mode": mode}
    raw, heard = decode_raw(engine, decoder, z, **given)
    assert heard.passes == [(3, 3)]
    assert all(shape.input[0] == 1 for _, shape in heard.convs)
    for i in range(3):
        assert torch.equal(raw[i : i + 1], decode_raw(engine, decoder, z[i : i + 1], **given)[0])


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("mode", ["bf16", "fp32"])
def test_a_batch_of_unlike_pictures_in_sixteen_bits(mode: str, prefetch: bool) -> None:
    """Each picture has its own statistics."""
    decoder = small_decoder()
    z = latent(5, 4, 6, 7) * torch.tensor([1.0, 9.0, 0.01, 3.0, 0.5]).view(5, 1, 1, 1)
    engine = Engine(profile=profile(batch_cap=2))
    raw, _ = decode_raw(engine, decoder, z, precision_mode=mode, memory_prefetching=prefetch)
    for i in range(5):
        expected = reference(decoder, z[i : i + 1])
        limit = 1e-4 if mode == "fp32" else 0.3 * float(expected.std())
        assert max_diff(raw[i : i + 1], expected) <= limit


@pytest.mark.parametrize("plan", PLANS)
def test_convolutions_asked_for_are_those_that_were_planned(plan: str) -> None:
    decoder, engine = small_decoder(), Engine(profile=profile(batch_cap=2))
    given = {"plan": plan, "tile_size": 16}
    for shape in [(5, 4, 11, 9), (1, 4, 19, 7), (1, 4, 2, 2)]:
        _, heard = decode_raw(engine, decoder, latent(*shape), **given)
        planned = engine.plan(decoder, shape, settings(**given)).conv_shapes
        assert {s for _, s in heard.convs} == set(planned)
        assert len(planned) == len(set(planned))


def test_fixed_tiles_ask_for_the_same_shapes_at_every_larger_size() -> None:
    decoder, engine = small_decoder(), Engine(profile=PROFILE)
    seen: set[Any] = set()
    for i, size in enumerate([(9, 9), (8, 20), (31, 10), (13, 17)]):
        _, heard = decode_raw(engine, decoder, latent(1, 4, *size), plan="tiles", tile_size=16)
        shapes = {s for _, s in heard.convs}
        assert i == 0 or shapes <= seen
        seen |= shapes


def test_a_slid_back_tile_counts_and_writes_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    from halo_vae.optim import executor

    written: dict[int, Tensor] = {}
    real = executor.PassRunner.store

    def store(self: executor.PassRunner, v: int, y: Tensor, image: int, row: int, col: int) -> None:
        scale = self.program.values[v].scale
        size = self.a_pass.latent[1] * scale[1], self.a_pass.latent[2] * scale[2]
        seen = written.setdefault(v, torch.zeros(self.a_pass.n_images, *size, dtype=torch.int))
        seen[image : image + y.shape[0], row : row + y.shape[2], col : col + y.shape[3]] += 1
        real(self, v, y, image, row, col)

    monkeypatch.setattr(executor.PassRunner, "store", store)
    decoder = small_decoder()
    decode_raw(Engine(profile=PROFILE), decoder, latent(2, 4, 11, 9), plan="tiles", tile_size=16)
    conv_outputs = {op.output for op in decoder.program.ops if hasattr(op, "kernel")}
    assert set(written) >= conv_outputs
    assert all(bool((seen == 1).all()) for seen in written.values())


# -- the latent


def hold_still(z: Tensor) -> Tensor:
    return z.detach().clone()


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize(
    "kind",
    ["float16", "bfloat16", "float64", "transposed", "strided", "expanded", "channels_last", "wants grad", "inference"],
)
def test_any_latent_is_read_and_left_alone(kind: str, prefetch: bool) -> None:
    base = latent(3, 4, 6, 5)
    if kind == "inference":
        with torch.inference_mode():
            z = base * 1
    else:
        z = {
            "float16": lambda: base.half(),
            "bfloat16": lambda: base.bfloat16(),
            "float64": lambda: base.double(),
            "transposed": lambda: latent(3, 4, 5, 6).transpose(2, 3),
            "strided": lambda: latent(3, 8, 12, 10)[:, ::2, 1::2, ::2],
            "expanded": lambda: latent(1, 4, 6, 5).expand(3, 4, 6, 5),
            "channels_last": lambda: base.contiguous(memory_format=torch.channels_last),
            "wants grad": lambda: base.clone().requires_grad_(),
        }[kind]()
    before, version = hold_still(z), None if z.is_inference() else z._version
    strides = z.stride()
    decoder = small_decoder()
    raw, _ = decode_raw(Engine(profile=profile(batch_cap=2)), decoder, z, memory_prefetching=prefetch)
    assert max_diff(raw, reference(decoder, before)) <= TOLERANCE
    assert torch.equal(z, before)
    assert z.stride() == strides
    assert version is None or z._version == version
    assert not raw.requires_grad


@pytest.mark.parametrize(
    ("z", "words"),
    [
        (torch.zeros(4, 8, 8), "has shape \\[4, 8, 8\\]; give four dimensions"),
        (torch.zeros(1, 4, 1, 8, 8), "give four dimensions"),
        (torch.zeros(0, 4, 8, 8), "holds no picture"),
        (torch.zeros(1, 4, 0, 8), "holds no picture"),
        (torch.zeros(1, 16, 8, 8), "has 16 channels but this kl decoder takes 4"),
        (torch.zeros(1, 4, 8, 8, dtype=torch.int64), "holds torch.int64 values; give floating-point values"),
    ],
)
def test_a_latent_that_does_not_fit_is_an_error_in_one_sentence(z: Tensor, words: str) -> None:
    heard = Recorder()
    with pytest.raises(LatentError, match=words) as caught:
        Engine(profile=PROFILE).decode(small_decoder(), z, observer=heard)
    assert "\n" not in str(caught.value)
    assert heard.tiles == []


# -- the picture


def test_the_picture_is_an_ordinary_tensor() -> None:
    engine, decoder, z = Engine(profile=PROFILE), small_decoder(), latent(2, 4, 6, 5)
    picture = engine.decode(decoder, z)
    assert (picture.shape, picture.dtype, picture.is_contiguous()) == ((2, 12, 10, 3), torch.float32, True)
    assert not picture.is_inference()
    assert 0 <= float(picture.min()) < float(picture.max()) <= 1
    assert max_diff(picture.movedim(-1, 1), to_unit_range(reference(decoder, z))) <= TOLERANCE
    picture.mul_(2).requires_grad_()
    (picture * 2).sum().backward()
    assert picture.grad is not None


def test_decodes_inside_and_outside_inference_mode_alternate() -> None:
    engine, decoder, z = Engine(profile=PROFILE), small_decoder(), latent(1, 4, 6, 5)
    pictures = []
    for inside in (True, False, True, False):
        with torch.inference_mode(inside):
            pictures.append(engine.decode(decoder, z, settings(precision_mode="bf16")))
            assert torch.is_inference_mode_enabled() == inside
    assert all(torch.equal(p, pictures[0]) for p in pictures)
    assert not any(p.is_inference() for p in pictures)
    for p in pictures:
        p.add_(1)


@pytest.mark.parametrize("grad", [True, False])
def test_grad_mode_is_left_as_it_was(grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        decode_raw(Engine(profile=PROFILE), small_decoder(), latent(1, 4, 3, 3))
        assert torch.is_grad_enabled() == grad
        assert not torch.is_inference_mode_enabled()


def test_autocast_of_the_caller_does_not_round_a_decode() -> None:
    engine, decoder, z = Engine(profile=PROFILE), small_decoder(), latent(1, 4, 6, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        raw, heard = decode_raw(engine, decoder, z)
        assert torch.is_autocast_enabled("cpu")
    assert {r.dtype for r in heard.ops} == {"float32"}
    assert max_diff(raw, reference(decoder, z)) <= TOLERANCE


def test_default_dtype_of_the_caller_does_not_matter() -> None:
    engine, decoder, z = Engine(profile=PROFILE), small_decoder(), latent(1, 4, 6, 5)
    expected = reference(decoder, z)
    torch.set_default_dtype(torch.float64)
    try:
        raw, _ = decode_raw(engine, decoder, z)
        narrow, _ = decode_raw(engine, decoder, z, precision_mode="bf16")
    finally:
        torch.set_default_dtype(torch.float32)
    assert (raw.dtype, narrow.dtype) == (torch.float32, torch.float32)
    assert max_diff(raw, expected) <= TOLERANCE


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("in_place", [True, False])
def test_finish_may_work_in_place_or_return_something_new(plan: str, in_place: bool) -> None:
    engine, decoder, z = Engine(profile=PROFILE), small_decoder(), latent(2, 4, 11, 9)
    seen: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def finish(x: Tensor) -> Tensor:
        seen.append((x.dtype, tuple(x.shape)))
        return x.mul_(0.25).add_(7.0) if in_place else x * 0.25 + 7.0

    given = settings(plan=plan, tile_size=16)
    picture = engine.decode(decoder, z, given, finish=finish)
    raw = engine.decode(decoder, z, given, finish=keep_raw)
    assert torch.allclose(picture, raw * 0.25 + 7.0, atol=1e-6)
    assert {dtype for dtype, _ in seen} == {torch.float32}
    assert sum(b * h * w for _, (b, _, h, w) in seen) == 2 * 22 * 18


@pytest.mark.parametrize("mode", ["bf16", "mixed", "fp32"])
def test_finish_gets_float32_whatever_was_computed(mode: str) -> None:
    def finish(x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return x

    Engine(profile=PROFILE).decode(small_decoder(), latent(1, 4, 3, 3), settings(precision_mode=mode), finish=finish)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float32])
def test_out_dtype(dtype: torch.dtype) -> None:
    engine, decoder, z = Engine(profile=PROFILE), small_decoder(), latent(1, 4, 6, 5)
    recorder = Recorder()
    picture = engine.decode(decoder, z, settings(), out_dtype=dtype, observer=recorder)
    assert picture.dtype == dtype
    assert recorder.plans[0].predicted.output == picture.numel() * dtype.itemsize
    assert torch.equal(picture, engine.decode(decoder, z, settings()).to(dtype))


# -- opening


def test_open_decoder_lowers_once_per_structure() -> None:
    heard, weights = Recorder(), MappingWeights(small_weights())
    decoder_module.PROGRAMS._programs.clear()
    one = open_decoder(weights, observer=heard)
    two = open_decoder(MappingWeights(small_weights(1)), observer=heard)
    assert one.program is two.program
    assert heard.lookups == [("program", False), ("program", True)]
    assert heard.phases == ["lower", "lower"]
    assert one.loaded_dtype == torch.float32
    assert one.content_hash != two.content_hash
    assert open_decoder(weights, loaded_dtype=torch.float16).loaded_dtype == torch.float16


def test_open_decoder_refuses_what_it_does_not_know() -> None:
    with pytest.raises(UnknownDecoderError, match="no known decoder"):
        open_decoder(MappingWeights({"a": torch.zeros(2)}))


def test_the_program_cache_keeps_the_latest_few() -> None:
    from halo_vae.tests.optim.families import layouts

    cache = ProgramCache()
    for z in range(1, ProgramCache.SIZE + 4):
        cache.get(MappingWeights(layouts.random_weights(layouts.kl_ldm(z, (32,), n_res=0))), SILENT)
    assert len(cache._programs) == ProgramCache.SIZE


def test_the_default_profile_is_that_of_the_decoders_device() -> None:
    profile_found = Engine().profile_for(small_decoder())
    assert (profile_found.kind, profile_found.name) == ("cpu", "cpu")
    assert Engine(profile=PROFILE).profile_for(small_decoder()) is PROFILE
