"""What a VAE object is taken for, and the function under the decode nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.nodes.decode_latent import decode_latent
from halo_vae.nodes.vae import VaeError, describe_vae, finish_of
from halo_vae.optim.errors import LatentError, NonFiniteError, UnknownDecoderError
from halo_vae.tests.cases.exact import exact_conv
from halo_vae.tests.cases.support import Recorder, max_diff, settings, whole
from halo_vae.tests.fixtures import ConvDec, FakeVAE, OverflowDec, PointDec, TimeIndexDec, latent


def changed(vae: FakeVAE, **attributes: Any) -> FakeVAE:
    vae.__dict__.update(attributes)
    return vae


def without(vae: FakeVAE, *names: str) -> SimpleNamespace:
    kept = {k: v for k, v in vae.__dict__.items() if k not in names}
    return SimpleNamespace(**kept)  # no methods either


def test_video_vae_is_described() -> None:
    one = describe_vae(FakeVAE(TimeIndexDec(k=8, r=32), ratio=32, channels=128, dim=3, t_ratio=8))
    assert (one.name, one.latent_dim, one.latent_channels, one.scale, one.time_ratio) == ("TimeIndexDec", 3, 128, 32, 8)
    assert [one.frames(n) for n in (1, 2, 5)] == [1, 9, 33]
    assert one.working_dtypes == (torch.float16, torch.bfloat16, torch.float32)
    assert one.content_hash == describe_vae(FakeVAE(TimeIndexDec())).content_hash  # both hold the same one parameter


def test_hash_tells_weights_apart() -> None:
    hashes = [describe_vae(FakeVAE(ConvDec(seed=seed))).content_hash for seed in (1, 1, 9)]
    assert hashes[0] == hashes[1] != hashes[2]
    with torch.device("meta"):
        unread = ConvDec()
    assert describe_vae(FakeVAE(unread)).content_hash is None


@pytest.mark.parametrize(
    ("vae", "said"),
    [
        (None, "no valid VAE in this checkpoint"),
        (FakeVAE(None), "no valid VAE in this checkpoint"),
        (SimpleNamespace(), "no valid VAE in this checkpoint"),
        (without(FakeVAE(PointDec()), "vae_dtype"), "lacks vae_dtype"),
        (without(FakeVAE(PointDec()), "process_output", "upscale_ratio"), "lacks process_output, upscale_ratio"),
        (changed(FakeVAE(PointDec()), first_stage_model=torch.nn.Identity()), "lacks a decode method"),
        (changed(FakeVAE(PointDec()), vae_dtype=None), "dtype is None"),
        (FakeVAE(PointDec(), ratio="8"), "upscale ratio is '8'"),
        (FakeVAE(PointDec(), ratio=7.5), "upscale ratio is 7.5"),
    ],
)
def test_what_is_no_vae_is_told_in_plain_words(vae: Any, said: str) -> None:
    with pytest.raises(VaeError, match=said):
        decode_latent({"samples": latent((1, 4, 8, 8))}, vae, settings())


def test_vae_without_the_helper_methods_still_decodes() -> None:
    z = latent((1, 4, 8, 8))
    vae = without(FakeVAE(PointDec()), "working_dtypes", "device", "output_device")
    assert torch.equal(decode_latent({"samples": z}, vae, settings()), whole(PointDec(), z))


@pytest.mark.parametrize("attributes", [{"latent_dim": 1}, {"extra_1d_channel": 16}])
@pytest.mark.parametrize("method", ["auto", "blended", "exact", "stock"])
def test_audio_vae_is_refused(attributes: dict[str, Any], method: str) -> None:
    model, loads = PointDec(), []
    vae = changed(FakeVAE(model, channels=64, ratio=2048), **attributes)
    with pytest.raises(LatentError, match=r"audio VAE.*VAE Decode Audio"):
        decode_latent(
            {"samples": torch.zeros(1, 64, 256)}, vae, settings(method=method), load=lambda *given: loads.append(given)
        )
    assert (model.log, loads) == ([], [])


def test_process_output_by_return_value_or_side_effect() -> None:
    def only_in_place(x: Tensor) -> None:
        x.add_(1.0).div_(2.0).clamp_(0.0, 1.0)

    z = latent((3, 4, 12, 12))
    for tile_px in (64, 768):
        for vae in (
            FakeVAE(PointDec(), inplace=True),
            FakeVAE(PointDec(), inplace=False),
            changed(FakeVAE(PointDec()), process_output=only_in_place),
        ):
            assert max_diff(decode_latent({"samples": z}, vae, settings(tile_px, 16)), whole(PointDec(), z)) <= 1e-6
    assert torch.equal(finish_of(vae)(torch.zeros(2)), torch.full((2,), 0.5))


def test_pixel_space_vae_has_a_ratio_of_one() -> None:
    z = latent((1, 3, 37, 53)).clamp(-1, 1)
    before = z.clone()
    vae = FakeVAE(PointDec(r=1), ratio=1, channels=3)
    for tile_px in (16, 768):
        got = decode_latent({"samples": z}, vae, settings(tile_px))
        assert max_diff(got, ((z + 1) / 2).movedim(1, -1)) <= 1e-6
    assert vae.first_stage_model.log[0]["shape"] == (1, 3, 16, 16)
    assert torch.equal(z, before)


# -- methods


def test_auto_is_exact_where_the_decoder_is_known() -> None:
    model, z, heard = ConvDec(), latent((1, 4, 16, 16)), Recorder()
    vae, decoder = FakeVAE(model), exact_conv(model)
    got = decode_latent({"samples": z}, vae, settings(64, method="auto"), decoder=decoder, observer=heard)
    assert heard.plan.method == "exact"
    assert max_diff(got, whole(ConvDec(), z)) <= 1e-5
    decode_latent({"samples": z}, vae, settings(64, method="blended"), decoder=decoder, observer=heard)
    assert heard.plan.method == "blended"
    decode_latent({"samples": z}, vae, settings(64, method="auto"), observer=heard)
    assert heard.plan.method == "blended"


def test_exact_on_an_unknown_decoder_names_blended() -> None:
    model = PointDec()
    with pytest.raises(UnknownDecoderError, match=r"PointDec.*blended"):
        decode_latent({"samples": latent((1, 4, 8, 8))}, FakeVAE(model), settings(method="exact"))
    assert model.log == []


@pytest.mark.parametrize(("dim", "shape"), [(2, (2, 4, 8, 8)), (3, (2, 4, 3, 8, 8)), (3, (2, 4, 8, 8))])
def test_stock_is_the_host_decode_bit_for_bit(dim: int, shape: tuple[int, ...]) -> None:
    model = PointDec() if dim == 2 else TimeIndexDec()
    z, heard = latent(shape), Recorder()
    got = decode_latent({"samples": z}, FakeVAE(model, dim=dim), settings(16, method="stock"), observer=heard)
    fed = z.unsqueeze(2) if dim == 3 and len(shape) == 4 else z
    assert torch.equal(got, whole(type(model)(), fed))
    assert [call["shape"] for call in model.log] == [tuple(fed.shape)]
    assert (heard.plan.method, heard.plan.n_tiles, heard.steps) == ("stock", 1, [(1, 1)])
    assert heard.plan.predicted.output == got.numel() * 4


@pytest.mark.parametrize(
    ("method", "told"), [("blended", (1, 4, 16, 16)), ("auto", (1, 4, 16, 16)), ("stock", (1, 4, 40, 40))]
)
def test_load_is_told_the_largest_call(method: str, told: tuple[int, ...]) -> None:
    model, loads = PointDec(), []

    def load(shape: tuple[int, ...], dtype: torch.dtype) -> None:
        assert model.log == []
        loads.append((shape, dtype))

    vae = FakeVAE(model, dtype=torch.bfloat16)
    decode_latent({"samples": latent((1, 4, 40, 40))}, vae, settings(128, 32, method=method), load=load)
    assert loads == [(told, torch.bfloat16)]
    assert max(call["shape"][-1] for call in model.log) == told[-1]


def test_widest_dtype_that_fails_is_an_error() -> None:
    model = OverflowDec("nan", bad=(torch.float16, torch.float32))
    z = torch.full((1, 4, 8, 8), 2.0)
    with pytest.raises(NonFiniteError, match=r"float32.*no wider dtype") as caught:
        decode_latent({"samples": z}, FakeVAE(model), settings(precision_mode="fp16"))
    assert (caught.value.op, caught.value.dtype) == ("decode", "float32")
    assert [call["dtype"] for call in model.log] == [torch.float16, torch.float32]


class CastsItself(torch.nn.Conv2d):
    """A layer that brings its weights to the input's dtype, as hosts' layers do."""

    comfy_cast_weights = True

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.dtype == torch.float32, "the weight was cast for it"
        return self._conv_forward(x, self.weight.to(x.dtype), None)


def test_layers_that_cast_themselves_are_left_alone() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = CastsItself(4, 3, 1, bias=False)
            self.gain = torch.nn.Parameter(torch.ones(1))

        def decode(self, z: Tensor) -> Tensor:
            assert self.gain.dtype == z.dtype
            return self.conv(z) * self.gain

    chosen = settings(precision_mode="bf16")
    got = decode_latent({"samples": latent((1, 4, 8, 8))}, FakeVAE(Model(), ratio=1), chosen)
    assert got.shape == (1, 8, 8, 3)
