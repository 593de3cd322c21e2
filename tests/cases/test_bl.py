"""BL: seams, blending, colour."""

from __future__ import annotations

import itertools

import pytest
import torch

from halo_vae.nodes.decode_latent import decode_latent
from halo_vae.nodes.vae import describe_vae
from halo_vae.optim.blended import decode_blended
from halo_vae.optim.kernels.eager import run_eager
from halo_vae.tests.cases.exact import decode_raw, exact_conv, exact_kl, exact_norm, exact_settings
from halo_vae.tests.cases.support import Recorder, decode, max_diff, record, settings, whole
from halo_vae.tests.fixtures import ConvDec, FakeVAE, IndexDec, NoiseDec, NormDec, latent, to_image


@pytest.mark.parametrize("plan", ["strips", "tiles"])
def test_bl_1_exact_has_no_seams(plan: str) -> None:
    model, z = ConvDec(), latent((1, 4, 72, 104))
    raw, heard = decode_raw(exact_conv(model), z, exact_settings(256, plan))
    assert max(heard.plan.tile_grid) > 1
    assert not heard.plan.approximate
    assert max_diff(raw, model.run(z)) <= 1e-4
    # the same tiles without a halo, for contrast: the seams that blending hides
    assert max_diff(decode(model, z, settings(256, 0)), to_image(model.run(z))) > 0.5


@pytest.mark.parametrize("plan", ["strips", "tiles"])
def test_bl_1_exact_kl_equals_the_untiled_decode(plan: str) -> None:
    """The tiny KL decoder lowered from its weights; a host's own object of it: tests/comfyui/test_inside.py."""
    decoder, z = exact_kl(), latent((1, 4, 20, 28))
    raw, heard = decode_raw(decoder, z, exact_settings(64, plan))
    assert max(heard.plan.tile_grid) > 1
    assert max_diff(to_image(raw), to_image(run_eager(decoder.program, decoder.weights, z))) <= 1e-4


@pytest.mark.parametrize("plan", ["strips", "tiles"])
@pytest.mark.parametrize("overlap_px", [0, 64])
def test_bl_2_exact_keeps_colours(plan: str, overlap_px: int) -> None:
    model, z, heard = NormDec(), NormDec.two_tone(), Recorder()
    chosen = exact_settings(64, plan, overlap=overlap_px)
    got = decode_latent({"samples": z}, FakeVAE(model), chosen, decoder=exact_norm(model), observer=heard)
    assert max_diff(got, whole(model, z)) <= 1e-4
    assert max(n for _, n, _, _ in heard.tiles) > 1
    assert (heard.plan.method, heard.plan.approximate, heard.plan.overlap_px) == ("exact", False, 0)
    assert model.log == []  # the engine read the weights; the host's decoder was not called
    assert got[:, :, :256].mean() == pytest.approx(0.5758, abs=1e-3)
    assert got[:, :, 256:].mean() == pytest.approx(0.4253, abs=1e-3)


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
    [(1.0, torch.float32), (0.3, torch.float32), (1.0, torch.float16), (0.3, torch.float16),
     (1.0, torch.bfloat16), (0.3, torch.bfloat16)],
)  # fmt: skip
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
