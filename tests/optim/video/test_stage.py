"""Staging of one frame: norms, activations, borders, bands and dtypes against torch's own functions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from halo_vae.optim.tiling import Span
from halo_vae.optim.video import stage
from halo_vae.optim.video.ops import ClipActivation
from halo_vae.optim.video.stage import Normaliser, activate_, fill_border, in_columns, stage_frame
from halo_vae.tests.optim.helpers import latent, max_diff

C, H, W = 6, 7, 5
GAIN, SHIFT = latent(C, 1, 1, seed=1), latent(C, 1, 1, seed=2)


def wanted(kind: str, x: Tensor, eps: float = 1e-3) -> Tensor:
    """By torch's own functions, channels first."""
    if kind == "none":
        return x
    if kind == "affine":
        return x * GAIN + SHIFT
    if kind == "layer":
        y = F.layer_norm(x.movedim(0, -1), (C,), GAIN.flatten(), SHIFT.flatten(), eps)
        return y.movedim(-1, 0)
    if kind == "rms":
        return F.normalize(x, dim=0, eps=eps) * math.sqrt(C) * GAIN + SHIFT
    return x / torch.sqrt((x * x).mean(0, keepdim=True) + eps) * GAIN + SHIFT


def norm_of(kind: str) -> Normaliser:
    return Normaliser(kind=kind) if kind == "none" else Normaliser(kind=kind, eps=1e-3, gain=GAIN, shift=SHIFT)


KINDS = ["none", "affine", "rms", "pixel", "layer"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("channels_last", [True, False])
def test_bands_do_not_show(kind: str, rows: int, channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "BAND_BYTES", rows * C * W * 4)
    x = latent(C, H, W)
    x = x.permute(1, 2, 0).contiguous().permute(2, 0, 1) if channels_last else x
    before, out = x.clone(), torch.full((C, H, W), float("nan"))
    stage_frame(x, out, norm_of(kind), "silu", 0, workers=2)
    assert max_diff(out, F.silu(wanted(kind, x))) <= 1e-6
    assert torch.equal(x, before)
    stage_frame(x, x, norm_of(kind), "silu", 0, workers=1)  # where it lies
    assert max_diff(x, out) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("source", "target"), [
    (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16),
])  # fmt: skip
def test_arithmetic_is_in_float32_and_rounded_once(kind: str, source: torch.dtype, target: torch.dtype) -> None:
    x = latent(C, H, W).to(source)
    out = torch.empty(C, H, W, dtype=target)
    stage_frame(x, out, norm_of(kind), "tanh3", 0, workers=1)
    exact = torch.tanh(wanted(kind, x.float()) / 3) * 3
    # half a unit in the last place, and a little for the order of sums
    ulp = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[target]
    assert float(((out.float() - exact).abs() - ulp * exact.abs()).max()) <= 2e-6
    if source == target:
        stage_frame(x, x, norm_of(kind), "tanh3", 0, workers=1)
        assert torch.equal(x, out)


def test_a_zero_pixel_stays_finite() -> None:
    x = torch.zeros(C, H, W)
    for kind in ("rms", "pixel", "layer"):
        out = torch.empty(C, H, W)
        stage_frame(x, out, norm_of(kind), "none", 0, workers=1)
        assert max_diff(out, SHIFT.expand(C, H, W)) <= 1e-6


@pytest.mark.parametrize(("act", "function"), [
    ("none", lambda x: x), ("silu", F.silu), ("relu", F.relu), ("leaky_relu", lambda x: F.leaky_relu(x, 0.2)),
    ("tanh3", lambda x: torch.tanh(x / 3) * 3),
])  # fmt: skip
def test_activations(act: ClipActivation, function: object) -> None:
    x = latent(C, H, W) * 4
    expected = function(x.clone())  # type: ignore[operator]
    assert max_diff(activate_(x, act), expected) <= 1e-6
    assert max_diff(x, expected) <= 1e-6  # in place


def test_rows_of_the_latent_are_asked_for_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that reads the latent is told which rows of which frame, in the picture's own coordinates."""
    monkeypatch.setattr(stage, "BAND_BYTES", 2 * C * W * 4)
    scale, shift = latent(C, 20, W, seed=5), latent(C, 20, W, seed=6)
    asked: list[tuple[int, int, int]] = []

    def rows(top: int, stop: int, frame: int) -> tuple[Tensor, Tensor]:
        asked.append((top, stop, frame))
        return scale[:, top:stop], shift[:, top:stop]

    x, out = latent(C, H, W), torch.empty(C, H, W)
    norm = Normaliser(kind="affine", gain=GAIN, shift=SHIFT, latent=rows)
    stage_frame(x, out, norm, "none", 3, workers=1, top=4)
    assert asked == [(4, 6, 3), (6, 8, 3), (8, 10, 3), (10, 11, 3)]
    assert max_diff(out, (x * GAIN + SHIFT) * scale[:, 4:11] + shift[:, 4:11]) <= 1e-6
    narrow = in_columns(norm, Span(1, 3))
    stage_frame(x[:, :, 1:3], out[:, :, 1:3], narrow, "none", 3, workers=1, top=4)
    assert max_diff(out, (x * GAIN + SHIFT) * scale[:, 4:11] + shift[:, 4:11]) <= 1e-6
    assert in_columns(norm_of("rms"), Span(1, 3)) == norm_of("rms")


# -- borders


@pytest.mark.parametrize("halo", [0, 1, 2])
@pytest.mark.parametrize("border", ["zero", "replicate", "reflect"])
@pytest.mark.parametrize("channels_last", [True, False])
def test_border(halo: int, border: str, channels_last: bool) -> None:
    x = latent(C, H, W)
    mode = {"zero": "constant"}.get(border, border)
    expected = F.pad(x[None], (halo,) * 4, mode=mode)[0] if halo else x
    page = torch.full((C, H + 2 * halo, W + 2 * halo), float("nan"))
    if channels_last:
        page = page.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    page[:, halo : halo + H, halo : halo + W] = x
    fill_border(page, halo, border)  # type: ignore[arg-type]
    assert torch.equal(page, expected)


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (4, 1), (2, 2)])
@pytest.mark.parametrize("border", ["replicate", "reflect"])
def test_the_reflection_of_one_pixel_is_the_pixel(size: tuple[int, int], border: str) -> None:
    h, w = size
    page = torch.full((C, h + 2, w + 2), float("nan"))
    x = latent(C, h, w)
    page[:, 1:-1, 1:-1] = x
    fill_border(page, 1, border)  # type: ignore[arg-type]
    rows = [0, *range(h), h - 1] if border == "replicate" or h == 1 else [1, *range(h), h - 2]
    cols = [0, *range(w), w - 1] if border == "replicate" or w == 1 else [1, *range(w), w - 2]
    assert torch.equal(page, x[:, rows][:, :, cols])
