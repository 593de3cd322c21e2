"""LS: what comes in as a latent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.nodes import actions
from halo_vae.nodes.decode_latent import decode_latent
from halo_vae.optim.errors import LatentError
from halo_vae.tests.cases.exact import exact_conv, exact_settings
from halo_vae.tests.cases.exact_clip import exact_causal
from halo_vae.tests.cases.support import Recorder, decode, max_diff, record, settings, shapes, whole
from halo_vae.tests.fixtures import CausalDec, ConvDec, FakeVAE, Logged, PointDec, TimeIndexDec, latent
from halo_vae.tests.nodes.support import kl_vae, new_session


class NestedPair:
    """As comfy.nested_tensor.NestedTensor looks from outside; hosts before it have no such module."""

    is_nested = True

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts

    def unbind(self) -> list[Tensor]:
        return self.parts


@pytest.mark.parametrize("tile_px", [16, 768])
@pytest.mark.parametrize("chunk_frames", [0, 8])
@pytest.mark.parametrize("order", [1, -1], ids=["video first", "sound first"])
def test_ls_1_video_part_of_a_nested_latent(tile_px: int, chunk_frames: int, order: int) -> None:
    video = latent((1, 16, 3, 1, 1)).repeat(1, 1, 1, 4, 4)  # the decoder reads the corner of what it is given
    samples = {"samples": NestedPair([video, latent((1, 8, 16, 16), seed=3)][::order])}
    chosen = settings(tile_px, chunk_frames=chunk_frames)
    got = decode_latent(samples, FakeVAE(TimeIndexDec(), channels=16, dim=3), chosen)
    assert got.shape == (9, 32, 32, 3)
    assert max_diff(got, whole(TimeIndexDec(), video)) <= 1e-6


def test_ls_1_nested_latent_without_a_video() -> None:
    picture = latent((1, 4, 8, 8))
    nested = {"samples": NestedPair([picture, latent((1, 8, 16, 16), seed=3)])}
    assert torch.equal(decode_latent(nested, FakeVAE(PointDec()), settings()), decode(PointDec(), picture))
    with pytest.raises(LatentError, match="no part"):
        decode_latent({"samples": NestedPair([])}, FakeVAE(TimeIndexDec(), dim=3), settings())


def test_ls_3_extras_ride_along_untouched() -> None:
    z, mask, index = latent((1, 4, 8, 8)), torch.ones(1, 1, 64, 64), [3]
    samples: dict[str, Any] = {"samples": z, "noise_mask": mask, "batch_index": index, "downscale_ratio_spacial": 8}
    before, values = dict(samples), z.clone()
    got = decode_latent(samples, FakeVAE(PointDec()), settings())
    assert torch.equal(got, decode(PointDec(), z))
    assert list(samples) == list(before)
    assert all(samples[key] is before[key] for key in before)
    assert torch.equal(z, values)
    assert torch.equal(mask, torch.ones(1, 1, 64, 64))
    assert index == [3]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ({"noise_mask": 1}, "no 'samples'"),
        ({}, "no 'samples'"),
        (latent((1, 4, 8, 8)), "a Tensor"),  # the dictionary taken for the tensor, the other way round
        ({"samples": None}, "NoneType"),
        ({"samples": torch.zeros(4, 8, 8)}, r"\[B, C, H, W\]"),
        ({"samples": torch.zeros(1, 4, 0, 8)}, "empty"),
        ({"samples": torch.zeros(1, 4, 3, 8, 8)}, "clips of 3 frames"),
    ],
)
def test_ls_3_not_a_latent(samples: Any, said: str) -> None:
    model = PointDec()
    with pytest.raises(ValueError, match=said):
        decode_latent(samples, FakeVAE(model), settings())
    assert model.log == []


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("tile_px", [64, 768])
@pytest.mark.parametrize("chunk_frames", [0, 1])
def test_ls_4_one_frame_clip_is_a_picture(dim: int, n: int, tile_px: int, chunk_frames: int) -> None:
    z = latent((n, 4, 1, 16, 16))
    got, heard = record(PointDec(), z, settings(tile_px, chunk_frames=chunk_frames), dim=dim, t_ratio=4)
    assert heard.plan.n_chunks == 1
    assert got.shape == (n, 128, 128, 3)
    assert max_diff(got, decode(PointDec(), z[:, :, 0], settings(tile_px))) <= 1e-6


@pytest.mark.parametrize("model", [TimeIndexDec(), CausalDec()], ids=["index", "causal"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tile_px", [32, 768])
@pytest.mark.parametrize("chunk_frames", [0, 8])
def test_ls_6_pictures_into_a_video_vae(model: Logged, n: int, tile_px: int, chunk_frames: int) -> None:
    z = latent((n, 4, 8, 8))
    calls = len(model.log)
    got = decode(model, z, settings(tile_px, chunk_frames=chunk_frames), dim=3)
    assert got.shape == (n, 64, 64, 3)
    assert {s[2] for s in shapes(model)[calls:]} == {1}
    assert all(torch.equal(got[i : i + 1], decode(model, z[i : i + 1], settings(tile_px), dim=3)) for i in range(n))
    if tile_px > 64:
        assert max_diff(got, torch.cat([whole(model, z[i : i + 1, :, None]) for i in range(n)])) <= 1e-6


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tile_px", [32, 768])
def test_ls_6_exact_pictures_into_a_video_vae(n: int, tile_px: int) -> None:
    model, z = CausalDec(), latent((n, 4, 8, 8))
    vae = FakeVAE(model, dim=3)
    got = decode_latent({"samples": z}, vae, exact_settings(tile_px), decoder=exact_causal(model))
    assert got.shape == (n, 64, 64, 3)
    assert max_diff(got, torch.cat([whole(model, z[i : i + 1, :, None]) for i in range(n)])) <= 1e-5
    assert model.log == []


@pytest.mark.parametrize(
    ("options", "c", "shape", "both"),
    [
        ({"channels": 16}, 16, (1, 4, 32, 32), ("4", "16")),
        ({"channels": 48, "dim": 3}, 48, (1, 16, 3, 8, 8), ("16", "48")),
    ],
)
@pytest.mark.parametrize("method", ["auto", "blended", "stock"])
def test_ls_7_vae_of_another_model(
    options: dict[str, Any], c: int, shape: tuple[int, ...], both: tuple[str, str], method: str
) -> None:
    model, heard, loads = ConvDec(c=c), Recorder(), []
    with pytest.raises(LatentError, match=f"{both[0]} channels.* {both[1]}"):
        decode_latent(
            {"samples": latent(shape)}, FakeVAE(model, **options), settings(method=method, chunk_frames=8),
            observer=heard, load=lambda shape, dtype: loads.append(shape),
        )  # fmt: skip
    assert model.log == []
    assert loads == []
    assert heard.fallbacks == []


@pytest.mark.parametrize("inside", [False, True])
def test_ls_8_exact_keeps_no_graph(inside: bool) -> None:
    model, z = ConvDec(), latent((1, 4, 20, 20)).requires_grad_()
    for weight in model.parameters():
        weight.requires_grad_()
    with torch.set_grad_enabled(True), torch.inference_mode(inside):
        chosen = exact_settings(128)
        got = decode_latent({"samples": z}, FakeVAE(model), chosen, decoder=exact_conv(model))
        assert torch.is_grad_enabled() != inside
    assert not got.requires_grad
    assert got.grad_fn is None
    assert not got.is_inference()
    got.add_(0)


@pytest.mark.parametrize("tile_px", [128, 768])
@pytest.mark.parametrize("inside", [False, True])
def test_ls_8_no_graph_is_kept(tile_px: int, inside: bool) -> None:
    model, z = ConvDec(), latent((1, 4, 20, 20)).requires_grad_()
    for weight in model.parameters():
        weight.requires_grad_()
    with torch.set_grad_enabled(True), torch.inference_mode(inside):
        got, _ = record(model, z, settings(tile_px))
        assert torch.is_inference_mode_enabled() == inside
        assert torch.is_grad_enabled() != inside
    assert all(call["inference"] or not call["grad"] for call in model.log)
    assert not got.requires_grad
    assert got.grad_fn is None
    assert not got.is_inference()
    got.add_(0)
    assert z.requires_grad
    assert all(weight.requires_grad for weight in model.parameters())


def test_ls_8_nor_by_the_benchmark() -> None:
    vae = kl_vae()
    vae.first_stage_model.requires_grad_()
    modes: list[bool] = []
    vae.first_stage_model.register_forward_pre_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    vae.first_stage_model.decoder.register_forward_pre_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    with torch.set_grad_enabled(True):
        done = actions.benchmark(new_session(), {"samples": latent((1, 4, 4, 4)).requires_grad_()}, vae, 0, 1)
        assert torch.is_grad_enabled()
    assert modes
    assert not any(modes)
    for picture in (done.images, done.difference):
        assert picture is not None
        assert not picture.requires_grad
        picture.add_(0)
