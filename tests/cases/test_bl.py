"""BL: seams, blending, colour."""

from __future__ import annotations

import itertools

import pytest
import torch

from halo_vae.nodes.vae import describe_vae
from halo_vae.optim.blended import decode_blended
from halo_vae.tests.cases.support import decode, max_diff, record, settings, whole
from halo_vae.tests.fixtures import FakeVAE, IndexDec, NoiseDec, NormDec, latent


@pytest.mark.parametrize("overlap_px", [0, 64])
def test_bl_2_blended_calls_itself_approximate(overlap_px: int) -> None:
    z = NormDec.two_tone()
    want = whole(NormDec(), z)
    assert want[:, :, :256].mean() == pytest.approx(0.5758, abs=1e-3)
    assert want[:, :, 256:].mean() == pytest.approx(0.4253, abs=1e-3)
    got, heard = record(NormDec(), z, settings(256, overlap_px))
    assert max_diff(got, want) > 0.1  # statistics of each tile shift the colours
    assert heard.plan.approximate
    got, heard = record(NormDec(), z, settings(512, overlap_px))
    assert torch.equal(got, want)
    assert not heard.plan.approximate


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    ("const", "dtype"),
    [(1.0, torch.float32), (0.3, torch.float32), (1.0, torch.float16), (0.3, torch.float16), (0.3, torch.bfloat16)],
)
def test_bl_4_weights_sum_to_one(const: float, dtype: torch.dtype, clips: bool) -> None:
    value = float(torch.tensor(const, dtype=dtype))
    vae = FakeVAE(IndexDec(const, r=1, dtype=dtype), ratio=1, dim=3 if clips else 2, t_ratio=1)
    opaque = describe_vae(vae)
    per_side = [(1, 1), (1, 4), (2, 2), (3, 2), (4, 4)]
    for overlap, (down, across) in itertools.product((1, 2, 3, 5, 8, 12), per_side):
        # Not a whole number of steps, so that the last tile slides back.
        height, width = (40 + (n - 1) * (40 - overlap) - (3 if n > 1 else 0) for n in (down, across))
        z = torch.zeros((1, 4, 2, height, width) if clips else (1, 4, height, width))
        calls = len(vae.first_stage_model.log)
        raw = decode_blended(opaque, z, settings(40, overlap), finish=lambda x: x)
        assert len(vae.first_stage_model.log) - calls == down * across
        assert raw.shape == (2 if clips else 1, height, width, 3)
        assert float((raw - value).abs().max()) <= 1e-6  # NaN would fail this too


def test_bl_6_noise_is_repeatable_and_leaves_the_generator_alone() -> None:
    z = latent((1, 4, 40, 40))
    torch.manual_seed(123)
    expected_next = torch.randn(4)
    pictures = []
    for _ in range(2):
        torch.manual_seed(123)
        before = torch.get_rng_state()
        pictures.append(decode(NoiseDec(), z, settings(128, 32)))
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(torch.randn(4), expected_next)
    assert torch.equal(*pictures)
    assert max_diff(pictures[0], whole(NoiseDec(), z)) > 0.01  # there is noise at all
    seeded = [decode(NoiseDec(), z, settings(128, 32, seed=seed)) for seed in (7, 7, 8)]
    assert torch.equal(seeded[0], seeded[1])
    assert not torch.equal(seeded[0], seeded[2])
