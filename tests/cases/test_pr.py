"""PR: precision, NaN and inf, dtypes."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from halo_vae.nodes.decode_latent import decode_latent
from halo_vae.optim.decode import Engine
from halo_vae.optim.device import describe_device
from halo_vae.optim.errors import LatentError, NonFiniteError
from halo_vae.tests.cases.exact import exact_conv, exact_settings
from halo_vae.tests.cases.exact_clip import exact_causal
from halo_vae.tests.cases.support import DTYPE_NAMES, Recorder, decode, max_diff, record, settings, whole
from halo_vae.tests.fixtures import CausalDec, ConvDec, FakeVAE, OverflowDec, PointDec, latent, to_image

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
MODES = ("auto", "fp32", "bf16", "fp16", "mixed")


def flat_latent_with_a_bad_square() -> torch.Tensor:
    z = torch.rand((1, 4, 64, 64), generator=torch.Generator().manual_seed(2)) * 1.8 - 0.9
    z[..., 40:44, 40:44] = 2.0
    return z


def test_pr_1_half_precision_overflow_is_repaired(caplog: pytest.LogCaptureFixture) -> None:
    model, z = OverflowDec("natural"), latent((1, 4, 16, 16))
    assert not torch.isfinite(OverflowDec("natural").run(z.half())).all()
    with caplog.at_level(logging.WARNING):
        got, heard = record(model, z, settings(precision_mode="fp16"))
    assert max_diff(got, whole(OverflowDec("natural"), z)) <= 2e-3
    assert [call["dtype"] for call in model.log] == [F16, F32]
    assert heard.redone == [("decode", "float16")]
    assert [(f.kind, f.given, f.used) for f in heard.fallbacks] == [("non_finite", "float16", "float32")]
    assert len(caplog.records) == 1
    assert [op.dtype for op in heard.ops] == ["float32"]


def test_pr_1_is_remembered_for_this_vae_only() -> None:
    z = latent((1, 4, 16, 16))
    vae, other = FakeVAE(OverflowDec("natural")), FakeVAE(OverflowDec("natural"))
    chosen = settings(precision_mode="fp16")
    for _ in range(2):
        decode_latent({"samples": z}, vae, chosen)
    assert [call["dtype"] for call in vae.first_stage_model.log] == [F16, F32, F32]
    decode_latent({"samples": z}, vae, replace(chosen, advanced_caching=False))
    assert [call["dtype"] for call in vae.first_stage_model.log][3:] == [F16, F32]
    decode_latent({"samples": z}, other, chosen)
    assert [call["dtype"] for call in other.first_stage_model.log] == [F16, F32]


def test_pr_1_repairs_can_be_turned_off() -> None:
    model = OverflowDec("natural")
    with pytest.raises(NonFiniteError, match="adaptive_precision") as caught:
        decode(model, latent((1, 4, 16, 16)), settings(precision_mode="fp16", adaptive_precision=False))
    assert caught.value.dtype == "float16"
    assert len(model.log) == 1


@pytest.mark.parametrize("kind", ["nan", "inf", "mark"])
def test_pr_2_only_the_bad_tile_is_decoded_again(kind: str) -> None:
    model, z = OverflowDec(kind), flat_latent_with_a_bad_square()
    got, heard = record(model, z, settings(256, 0, precision_mode="fp16"))
    assert [call["dtype"] for call in model.log] == [F16, F16, F16, F16, F32]
    assert torch.isfinite(got).all()
    assert len(heard.redone) == 1
    clean = whole(PointDec(), z)
    assert max_diff(got[:, 256:, 256:], clean[:, 256:, 256:]) <= 2e-3  # repaired, and no mark on it
    marked = to_image(PointDec().run(z) + (0.5 if kind == "mark" else 0.0))
    for part in ((slice(0, 256), slice(None)), (slice(256, None), slice(0, 256))):
        assert max_diff(got[:, part[0], part[1]], marked[:, part[0], part[1]]) <= 2e-3


def test_pr_2_a_dtype_that_fails_everywhere_is_given_up() -> None:
    model, z = OverflowDec("natural"), torch.full((1, 4, 48, 48), 2.0)
    got, heard = record(model, z, settings(128, 0, precision_mode="fp16"))
    n_narrow = sum(call["dtype"] == F16 for call in model.log)
    assert n_narrow == 2  # of nine tiles
    assert len(heard.redone) == 2
    assert max_diff(got, whole(PointDec(), z)) <= 1e-6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tile_px", [128, 768])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_pr_4_bad_latent_is_named_as_the_cause(mode: str, tile_px: int, bad: float) -> None:
    model, z = PointDec(), latent((1, 4, 32, 32))
    z[0, 2, 5, 7] = bad
    with pytest.raises(LatentError, match="the latent itself holds 1 NaN or infinite"):
        decode(model, z, settings(tile_px, precision_mode=mode))
    assert model.log == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", [False, True])
def test_pr_4_in_the_exact_engine(mode: str, bad: float, clip: bool) -> None:
    decoder = exact_causal(CausalDec()) if clip else exact_conv(ConvDec())
    z, heard = latent((1, 4, 3, 4, 4) if clip else (1, 4, 16, 16)), Recorder()
    z.view(-1)[7] = bad
    with pytest.raises(LatentError, match="the latent itself holds NaN or inf"):
        Engine().decode(decoder, z, exact_settings(64, precision_mode=mode), observer=heard)
    assert heard.plans == []  # the latent is tested first


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("tile_px", [64, 768])
@pytest.mark.parametrize("shape", [(2, 4, 16, 16), (2, 4, 3, 16, 16)])
def test_pr_6_picture_is_plain_float32(dtype: torch.dtype, tile_px: int, shape: tuple[int, ...]) -> None:
    model, z = PointDec(), latent(shape)
    got = decode(model, z, settings(tile_px), dtype=dtype, dim=len(shape) - 2, t_ratio=1)
    assert {call["dtype"] for call in model.log} == {dtype}
    assert (got.dtype, got.device.type, got.is_contiguous()) == (F32, "cpu", True)
    assert got.numpy().shape == (2 * (3 if len(shape) == 5 else 1), 128, 128, 3)
    assert 0 <= got.min() <= got.max() <= 1
    assert max_diff(got, whole(PointDec(), z.to(dtype))) <= 1e-6


@pytest.mark.parametrize("weights", [F32, BF16])
@pytest.mark.parametrize("given", [F32, BF16, F16])
def test_pr_8_decoder_sees_its_own_dtype_only(weights: torch.dtype, given: torch.dtype) -> None:
    model, z = ConvDec().to(weights), latent((1, 4, 20, 20), dtype=given)
    before = z.clone()
    got = decode(model, z, settings(128, 32), dtype=weights)
    assert {call["dtype"] for call in model.log} == {weights}
    assert z.dtype == given
    assert torch.equal(z, before)
    assert {p.dtype for p in model.parameters()} == {weights}
    assert max_diff(got, decode(ConvDec(), z.float(), settings(128, 32))) <= 5e-2  # rounding of bfloat16 only
    assert torch.equal(decode(model, z, settings(), dtype=weights), whole(model, z.to(weights)))


@pytest.mark.parametrize("mode", ["fp16", "bf16", "fp32"])
def test_pr_8_another_dtype_leaves_the_weights_alone(mode: str) -> None:
    wanted = {"fp16": F16, "bf16": BF16, "fp32": F32}[mode]
    for stored in (F32, BF16):
        model, z = ConvDec().to(stored), latent((1, 4, 12, 12))
        weights = [p.clone() for p in model.parameters()]
        got = decode(model, z, settings(precision_mode=mode), dtype=stored)
        assert {call["dtype"] for call in model.log} == {wanted}
        assert max_diff(got, whole(ConvDec().to(stored).to(F32), z)) <= 5e-2
        assert all(torch.equal(p, w) and p.dtype == stored for p, w in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize("vae_dtype", [F32, torch.float8_e4m3fn])
@pytest.mark.parametrize("tile_px", [128, 768])
def test_pr_10_eight_bit_weights_are_widened_for_the_call(vae_dtype: torch.dtype, tile_px: int) -> None:
    model, z = ConvDec().to(torch.float8_e4m3fn), latent((1, 4, 20, 20))
    twin = ConvDec().to(torch.float8_e4m3fn).to(F32)
    got, heard = record(model, z, settings(tile_px), dtype=vae_dtype)
    assert max_diff(got, decode(twin, z, settings(tile_px))) <= 1e-3
    assert max_diff(decode(model, z, settings()), whole(twin, z)) <= 1e-3
    assert {p.dtype for p in model.parameters()} == {torch.float8_e4m3fn}
    assert torch.float8_e4m3fn not in {call["dtype"] for call in model.log}
    assert heard.fallbacks == []


@pytest.mark.parametrize("plan", ["strips", "tiles"])
def test_pr_10_in_the_exact_engine(plan: str) -> None:
    model, z, heard = ConvDec().to(torch.float8_e4m3fn), latent((1, 4, 20, 20)), Recorder()
    twin = ConvDec().to(torch.float8_e4m3fn).to(F32)
    decoder = exact_conv(model)
    got = Engine().decode(decoder, z, exact_settings(64, plan, precision_mode="auto"), observer=heard)
    assert max_diff(got, whole(twin, z)) <= 1e-3
    assert {spec.dtype for spec in decoder.weights.specs.values()} == {torch.float8_e4m3fn}
    assert {op.dtype for op in heard.ops} == {"float32"}
    assert heard.fallbacks == []


def test_pr_12_dtype_that_the_vae_does_not_allow() -> None:
    model, z = OverflowDec("natural"), latent((1, 4, 16, 16))
    got, heard = record(model, z, settings(precision_mode="fp16"), working=(BF16, F32))
    assert {call["dtype"] for call in model.log} == {BF16}
    assert max_diff(got, whole(OverflowDec("natural"), z)) <= 2e-3
    assert [(f.kind, f.given, f.used) for f in heard.fallbacks] == [("dtype", "float16", "bfloat16")]


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("arch", ["gfx1151", "gfx1100", None])
def test_pr_13_auto_keeps_the_loaded_dtype(dtype: torch.dtype, arch: str | None) -> None:
    model, z = PointDec(), latent((1, 4, 160, 16))  # longer than 1024 px
    profile = describe_device("cpu")
    if arch is not None:
        profile = replace(profile, kind="hip", name=arch, native_dtypes=("float16", "bfloat16"), strategy="tiles")
    _, heard = record(model, z, settings(precision_mode="auto"), profile, dtype=dtype)
    assert {call["dtype"] for call in model.log} == {dtype}
    choice = next(c for c in heard.plan.choices if c.name == "precision")
    assert (choice.value, choice.reason) == (DTYPE_NAMES[dtype], "the VAE's own dtype")
