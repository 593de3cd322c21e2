"""VK: kinds of VAE, and VAE objects that differ from version to version."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.nodes import actions
from halo_vae.tests.cases.support import max_diff, whole
from halo_vae.tests.fixtures import CausalDec, FakeVAE, Logged, PointDec, TimeIndexDec, latent, to_image
from halo_vae.tests.nodes.support import kl_vae, new_session, stock

KINDS = [
    # Flux.2: as many channels as LTX, but pictures
    (PointDec(r=16), {"channels": 128, "ratio": 16}, (1, 128, 8, 8), (1, 128, 128, 3)),
    # LTX: clips, and eight frames per latent frame
    (TimeIndexDec(k=8, r=32), {"channels": 128, "dim": 3, "t_ratio": 8, "ratio": 32}, (1, 128, 3, 4, 4),
     (17, 128, 128, 3)),
    # Flux and SD3
    (PointDec(), {"channels": 16}, (1, 16, 16, 16), (1, 128, 128, 3)),
    # Wan and Hunyuan: as many channels, but clips
    (TimeIndexDec(), {"channels": 16, "dim": 3}, (1, 16, 3, 8, 8), (9, 64, 64, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("model", "options", "shape", "made"), KINDS)
@pytest.mark.parametrize("method", ["auto", "stock"])
def test_vk_1_kind_is_not_told_by_channels(
    model: Logged, options: dict[str, Any], shape: tuple[int, ...], made: tuple[int, ...], method: str
) -> None:
    z = latent(shape)
    images = actions.decode(new_session(), {"samples": z}, FakeVAE(model, **options), method=method).images
    assert tuple(images.shape) == made
    assert max_diff(images, whole(model, z)) <= 1e-6


@pytest.mark.parametrize(("model", "options", "shape", "made"), [kind for kind in KINDS if len(kind[2]) == 5])
def test_vk_1_video_is_chunked_by_its_own_ratio(
    model: Logged, options: dict[str, Any], shape: tuple[int, ...], made: tuple[int, ...]
) -> None:
    z = latent(shape)
    done = actions.decode_tiled(new_session(), {"samples": z}, FakeVAE(model, **options), temporal_size=16)
    k = options.get("t_ratio", 4)
    assert done.record.plan.n_chunks == (1 if k == 4 else 2)
    assert tuple(done.images.shape) == made
    assert torch.equal(done.images, whole(model, z))


@pytest.mark.parametrize(("tile_px", "edge"), [(16, 16), (768, 53)])
def test_vk_2_pixel_space(tile_px: int, edge: int) -> None:
    z = latent((1, 3, 37, 53)).clamp(-1, 1)
    before = z.clone()
    model = PointDec(r=1)
    done = actions.decode(
        new_session(), {"samples": z}, FakeVAE(model, ratio=1, channels=3), tile_size=tile_px, overlap=0
    )
    assert max_diff(done.images, ((z + 1) / 2).movedim(1, -1)) <= 1e-6
    assert max(call["shape"][-1] for call in model.log) == edge
    assert torch.equal(z, before)


def expected(model: Logged, z: Tensor, dtype: torch.dtype) -> Tensor:
    """Each picture or clip alone, in the VAE's dtype."""
    with torch.no_grad():
        return torch.cat([to_image(model.run(part.to(dtype))) for part in z.split(1)])


@pytest.mark.parametrize("inplace", [True, False], ids=["in place", "returned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile_px", [64, 768])
@pytest.mark.parametrize(
    ("model", "dim", "shape"),
    [(PointDec(), 2, (1, 4, 12, 12)), (PointDec(), 2, (3, 4, 12, 12)), (PointDec(), 3, (2, 4, 1, 12, 12)),
     (CausalDec(), 3, (1, 4, 3, 4, 4))],
)  # fmt: skip
def test_vk_4_values_are_shifted_once(
    inplace: bool, dtype: torch.dtype, tile_px: int, model: Logged, dim: int, shape: tuple[int, ...]
) -> None:
    z = latent(shape)
    vae = FakeVAE(model, dim=dim, dtype=dtype, inplace=inplace)
    images = actions.decode(new_session(), {"samples": z}, vae, tile_size=tile_px, overlap=0).images
    assert max_diff(images, expected(model, z, dtype)) <= 1e-6


@pytest.mark.parametrize("inplace", [True, False], ids=["in place", "returned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("tile_px", [64, 512])
def test_vk_4_chunks_are_shifted_once(inplace: bool, dtype: torch.dtype, n: int, tile_px: int) -> None:
    z, model = latent((n, 4, 7, 1, 1)).repeat(1, 1, 1, 9, 12), TimeIndexDec()
    vae = FakeVAE(model, dim=3, dtype=dtype, inplace=inplace)
    done = actions.decode_tiled(new_session(), {"samples": z}, vae, tile_size=tile_px, overlap=16, temporal_size=12)
    assert done.record.plan.n_chunks > 1
    assert max_diff(done.images, expected(model, z, dtype)) <= 1e-6


@pytest.mark.parametrize("inplace", [True, False], ids=["in place", "returned"])
@pytest.mark.parametrize("n", [1, 3])
def test_vk_4_exact_shifts_values_once(inplace: bool, n: int) -> None:
    z = latent((n, 4, 9, 11))
    images = actions.decode(new_session(), {"samples": z}, kl_vae(inplace=inplace), tile_size=16).images
    assert max_diff(images, stock(kl_vae(), z)) <= 1e-4
    assert images.min() >= 0
    assert images.max() <= 1
