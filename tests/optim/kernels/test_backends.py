"""Convolution backends: what they take and refuse as data, and their results against plain float64 and float32."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import Tensor

import halo_vae
from halo_vae.optim.decode import Engine
from halo_vae.optim.kernels import backends, kitchen, packages
from halo_vae.optim.kernels.backends import BACKENDS, KITCHEN, ConvCase, norm_refusals, picture_case, refusals
from halo_vae.optim.kernels.dispatch import choose_backend, choose_layout
from halo_vae.optim.plan import is_conv3
from halo_vae.optim.program import Conv, Norm
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.tiling import Span, Tile, TileGrid
from halo_vae.tests.goldens import TOLERANCE
from halo_vae.tests.optim.families import layouts
from halo_vae.tests.optim.helpers import decode_raw, decoder_of, latent, max_diff, narrow_winograd, profile, reference
from halo_vae.tests.optim.kernels import fake_kitchen
from halo_vae.tests.optim.kernels.test_shifted_gemm import in_layout

ALLOWED = DecodeSettings(fp16_accumulation=True)
HIP = profile(
    kind="hip", name="cuda:0", gfx="gfx1151", family="rdna3.5", native_dtypes=("float16", "bfloat16"),
    strategy="tiles", layout="contiguous", attention="matmul",
)  # fmt: skip
CUDA = profile(kind="cuda", name="cuda:0", family="cuda", native_dtypes=("float16", "bfloat16"))


def conv(**changes: Any) -> Conv:
    fields: dict[str, Any] = {
        "name": "c", "inputs": (0,), "output": 1, "weight": "w", "bias": None, "in_channels": 64, "out_channels": 64,
        "kernel": (1, 3, 3),
    }  # fmt: skip
    return Conv(**{**fields, **changes})


def case(**changes: Any) -> ConvCase:
    grid = TileGrid(n_images=1, height=64, width=64, images_per_call=1, rows=32, cols=32)
    made = picture_case(conv(), fold=False, dtype="float16", layout="channels_last", grid=grid)
    return replace(made, **changes)


# -- every backend against the eager reference


def lifted(dtype: str) -> backends.Constraints:
    """`kitchen` without its rule of dtypes."""
    assert KITCHEN.norm is not None
    return replace(KITCHEN, dtypes=(dtype,), norm=replace(KITCHEN.norm, dtypes=(dtype,)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["torch", "winograd", "shifted_gemm", "kitchen"])
def test_random_decoders_equal_the_eager_reference(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kitchen.install(monkeypatch)
    narrow_winograd(monkeypatch, 8)
    rng = random.Random(seed)
    widths = tuple(32 * rng.randint(1, 2) for _ in range(rng.randint(1, 3)))
    z = rng.choice((4, 16))
    decoder = decoder_of(layouts.random_weights(layouts.kl_ldm(z, widths, n_res=1, embed=z), seed))
    n, h, w = rng.randint(1, 3), rng.randint(3, 11), rng.randint(3, 11)
    x = latent(n, z, h, w, seed=seed)
    engine = Engine(profile=profile(backends=(lifted("float32"),)))
    raw, heard = decode_raw(
        engine, decoder, x, kernel_backend=name, plan=rng.choice(("strips", "tiles")),
        tile_size=rng.choice((0, 16, 24)), fp16_accumulation=True,
        tensor_layout_optimization=name != "shifted_gemm" or seed % 2 == 0,
    )  # fmt: skip
    assert max_diff(raw, reference(decoder, x)) <= TOLERANCE
    ran = {report.name: report.backend for report in heard.ops}
    assert name in ran.values()
    expected = {op.name for op in decoder.program.ops if is_conv3(op)}
    if name == "kitchen":
        expected -= {"decoder.conv_out"}  # three channels
    if name != "winograd":
        assert {op for op, backend in ran.items() if backend == name} >= expected
    assert heard.fallbacks == []


# -- refusals as data

TAKEN = {"torch": {}, "winograd": {"dtype": "float32"}, "shifted_gemm": {}, "kitchen": {}}
REFUSED: list[tuple[str, dict[str, Any], Any, DecodeSettings, str]] = [
    ("winograd", {"dtype": "bfloat16"}, HIP, ALLOWED, "bfloat16 would round the transformed values"),
    ("winograd", {"dtype": "float32", "layout": "contiguous"}, HIP, ALLOWED, "needs channels_last"),
    ("winograd", {"dtype": "float32", "out_channels": 8}, HIP, ALLOWED, "fewer than 32 channels"),
    ("winograd", {"dtype": "float32", "out_channels": 64, "fold": True, "upsample": 2}, HIP, ALLOWED, "fewer than 32"),
    ("winograd", {"dtype": "float32", "edge": 3}, HIP, ALLOWED, "a tile is smaller than 4x4"),
    ("winograd", {"dtype": "float32", "pixels": 1000}, HIP, ALLOWED, "fewer than 1024 pixels"),
    ("shifted_gemm", {"kernel": (1, 1, 1)}, HIP, ALLOWED, "takes only 3x3 kernels"),
    ("shifted_gemm", {"kernel": (3, 1, 1), "medium": "clips"}, HIP, ALLOWED, "takes only 3x3 kernels"),
    ("shifted_gemm", {"upsample": 2}, HIP, ALLOWED, "takes only 3x3 kernels, upsampled or not"),
    ("shifted_gemm", {"tile": 2**26}, HIP, ALLOWED, "more than 2147483647 elements"),
    ("conv2d_sum", {}, HIP, ALLOWED, "takes clips only"),
    ("conv2d_sum", {"medium": "clips"}, HIP, ALLOWED, "kernels over 2, 3, 4 or 5 frames only"),
    ("torch", {"medium": "clips", "kernel": (3, 3, 3), "upsample": 2, "fold": True}, HIP, ALLOWED, "several frames"),
    ("kitchen", {"dtype": "float32"}, HIP, ALLOWED, "takes float16, not float32"),
    ("kitchen", {"dtype": "bfloat16"}, HIP, ALLOWED, "takes float16, not bfloat16"),
    ("kitchen", {"layout": "contiguous"}, HIP, ALLOWED, "needs channels_last"),
    ("kitchen", {"in_channels": 12}, HIP, ALLOWED, "12 input channels are not a multiple of 8"),
    ("kitchen", {"out_channels": 3}, HIP, ALLOWED, "3 output channels are not a multiple of 8"),
    ("kitchen", {"kernel": (1, 1, 1)}, HIP, ALLOWED, "takes only 3x3 kernels"),
    ("kitchen", {"medium": "clips", "upsample": 2, "fold": True}, HIP, ALLOWED, "takes no upsampling"),
    ("kitchen", {}, HIP, DecodeSettings(), "fp16_accumulation does not allow"),
    ("kitchen", {}, CUDA, ALLOWED, "runs on hip or cpu, not on cuda"),
    ("kitchen", {}, replace(HIP, gfx="gfx1030", family="rdna2"), ALLOWED, "rdna3, rdna3.5, rdna4, not rdna2"),
    ("kitchen", {}, replace(HIP, gfx="gfx942", family="cdna"), ALLOWED, "not cdna"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "device", "chosen", "reason"), REFUSED)
def test_every_refusal_says_why(
    name: str, changes: dict[str, Any], device: Any, chosen: DecodeSettings, reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fake_kitchen.install(monkeypatch)
    if name in TAKEN:
        assert refusals(BACKENDS[name], case(**TAKEN[name]), HIP, ALLOWED) == ()
    found = refusals(BACKENDS[name], case(**changes), device, chosen)
    assert len(found) == 1
    assert reason in found[0]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("kitchen", {"in_channels": 4}),  # filled up to eight by the package
        ("kitchen", {"in_channels": 7}),
        ("kitchen", {"out_channels": 64, "fold": True, "upsample": 2}),
        ("kitchen", {"medium": "clips", "kernel": (3, 3, 3)}),
        ("shifted_gemm", {"dtype": "float32", "layout": "contiguous", "in_channels": 3, "out_channels": 1, "edge": 1}),
        ("shifted_gemm", {"medium": "clips", "kernel": (3, 3, 3), "fold": True, "upsample": 2}),
        ("conv2d_sum", {"medium": "clips", "kernel": (2, 1, 1)}),
        ("conv2d_sum", {"medium": "clips", "kernel": (3, 3, 3), "fold": True, "upsample": 2}),
        ("torch", {"kernel": (1, 1, 1), "dtype": "bfloat16"}),
    ],
)
def test_what_is_taken(name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kitchen.install(monkeypatch)
    assert refusals(BACKENDS[name], case(**changes), HIP, ALLOWED) == ()


def test_all_reasons_are_told_together() -> None:
    found = refusals(KITCHEN, case(dtype="float32", layout="contiguous", out_channels=3), CUDA, DecodeSettings())
    assert len(found) == 5


NORM = Norm(weight="n", bias="b", groups=32, eps=1e-6)


@pytest.mark.parametrize(
    ("op", "fold", "stream", "reason"),
    [
        (conv(norm=NORM, act="silu"), False, "float16", None),
        (conv(norm=NORM), False, "float16", None),
        (conv(upsample=2), True, "float16", None),  # pads only
        (conv(norm=NORM, act="silu"), False, "float32", "stages float16 or bfloat16 out of the same"),
        (conv(act="silu"), False, "float16", "after a norm"),
        (conv(norm=NORM, act="relu"), False, "float16", "not with relu"),
        (conv(in_channels=4), False, "float16", "4 channels are not a multiple of 8"),
        (conv(in_channels=4096, norm=NORM), False, "float16", "up to 2048"),
        (conv(norm=replace(NORM, groups=24)), False, "float16", "24 groups of 64 channels"),
        (conv(upsample=2), False, "float16", "takes no upsampling"),
    ],
)
def test_what_kitchen_stages(op: Conv, fold: bool, stream: str, reason: str | None) -> None:
    found = norm_refusals(KITCHEN, op, fold=fold, stream=stream, dtype="float16")
    assert (found == ()) if reason is None else (len(found) == 1 and reason in found[0])
    assert norm_refusals(BACKENDS["shifted_gemm"], op, fold=fold, stream=stream, dtype="float16")


# -- choice

GRID = TileGrid(n_images=1, height=64, width=64, images_per_call=1, rows=64, cols=64)


@pytest.mark.parametrize(
    ("asked", "device", "dtype", "used"),
    [
        ("auto", profile(convolution="winograd"), "float32", "winograd"),
        ("auto", profile(convolution="winograd"), "bfloat16", "torch"),
        ("auto", profile(), "float32", "torch"),
        ("auto", HIP, "float16", "torch"),  # `kitchen` is never taken unasked
        ("auto", CUDA, "float16", "torch"),
        ("winograd", profile(), "float32", "winograd"),  # though the device would not by itself
        ("torch", profile(convolution="winograd"), "float32", "torch"),
        ("shifted_gemm", profile(convolution="winograd"), "float32", "shifted_gemm"),
        ("kitchen", HIP, "float16", "kitchen"),
        ("kitchen", profile(convolution="winograd"), "float32", "winograd"),  # refused: the device's default
        ("conv2d_sum", HIP, "float16", "torch"),
    ],
)
def test_what_is_asked_for_is_used_where_it_is_taken(
    asked: Any, device: Any, dtype: str, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_kitchen.install(monkeypatch)
    chosen = DecodeSettings(kernel_backend=asked, fp16_accumulation=True)
    made = choose_backend(
        conv(), fold=False, dtype=dtype, layout="channels_last", grid=GRID, profile=device, settings=chosen
    )
    assert made.backend == used
    if asked != "auto":
        assert (made.refusals == ()) == (used == asked)


@pytest.mark.parametrize(
    ("asked", "device", "on", "layout"),
    [
        ("auto", HIP, True, "contiguous"),
        ("shifted_gemm", HIP, True, "contiguous"),
        ("kitchen", HIP, True, "channels_last"),
        ("kitchen", HIP, False, "contiguous"),  # said to be left alone
        ("auto", profile(), True, "channels_last"),
    ],
)
def test_the_layout_follows_the_backend(asked: Any, device: Any, on: bool, layout: str) -> None:
    chosen = DecodeSettings(kernel_backend=asked, tensor_layout_optimization=on)
    found, reason = choose_layout(chosen, device)
    assert found == layout
    assert ("kitchen" in reason) == (asked == "kitchen" and on)


# -- packages


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, fake_kitchen.NAME, raising=False)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == fake_kitchen.NAME else real(name, *rest)
    )


def ask() -> tuple[str, ...]:
    return refusals(KITCHEN, case(), HIP, ALLOWED)


def test_an_absent_package_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    (reason,) = ask()
    assert "not installed" in reason
    assert "comfy-kitchen>=0.2.40" in reason


def test_a_package_that_fails_on_import_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "comfy_kitchen.py").write_text("raise OSError('libamdhip64.so: cannot open\\nmore')\n")
    monkeypatch.delitem(sys.modules, fake_kitchen.NAME, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert ask() == ("the package comfy_kitchen cannot be imported: libamdhip64.so: cannot open",)


@pytest.mark.parametrize("name", [name for name, _ in backends.KITCHEN_PACKAGE.functions])
def test_an_absent_function_is_a_refusal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kitchen.install(monkeypatch)
    assert ask() == ()
    monkeypatch.delattr(sys.modules[fake_kitchen.NAME], name)
    (reason,) = ask()
    assert name in reason


def test_a_function_of_an_older_version_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kitchen.install(monkeypatch)
    monkeypatch.setattr(sys.modules[fake_kitchen.NAME], "group_norm_silu_pad3d", lambda x, weight, bias, pad: x)
    (reason,) = ask()
    assert "group_norm_silu_pad3d" in reason


@pytest.mark.parametrize(
    ("hip", "slow"),
    [
        ({"available": True, "disabled": False, "capabilities": ["fp16_conv3d", "group_norm_silu_pad3d"]}, "stats3d"),
        ({"available": False, "disabled": False, "capabilities": ["fp16_conv3d"]}, "fp16_conv3d"),
        ({"available": True, "disabled": True, "capabilities": ["fp16_conv3d"]}, "fp16_conv3d"),
        ({"available": True, "disabled": False,
          "capabilities": ["fp16_conv3d", "group_norm_silu_pad3d", "group_norm_stats3d"]}, None),
        ({}, None),  # nothing is told
    ],
)  # fmt: skip
def test_what_the_package_would_run_plainly_is_a_refusal(
    hip: dict[str, Any], slow: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_kitchen.install(monkeypatch)
    registry = ModuleType("registry")
    registry.list_backends = lambda: {"hip": hip}  # type: ignore[attr-defined]
    monkeypatch.setattr(sys.modules[fake_kitchen.NAME], "registry", registry, raising=False)
    assert ask() == ()  # this torch is not built for AMD: there is nothing to ask
    monkeypatch.setattr(packages.torch.version, "hip", "7.1")
    found = ask()
    assert (found == ()) if slow is None else ("in plain torch" in found[0] and slow in found[0])


def test_nothing_is_imported_before_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "comfy_kitchen.py").write_text("")
    code = (
        "import sys\n"
        "from halo_vae.tests.optim.helpers import *\n"
        "decode_raw(Engine(profile=PROFILE), small_decoder(), latent(1, 4, 4, 4))\n"
        "assert 'comfy_kitchen' not in sys.modules\n"
        "plan_of(kl_program(64, 32), (1, 4, 8, 8), settings(kernel_backend='kitchen'))\n"
        "assert 'comfy_kitchen' not in sys.modules\n"  # float32 is refused before the package is looked into
    )
    root = tmp_path / "path"
    root.mkdir()
    (root / "halo_vae").symlink_to(Path(halo_vae.__file__).parent, target_is_directory=True)
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(root), str(tmp_path)))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- kitchen's calls


def clip(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    n, c, t, h, w = shape
    return torch.zeros((n, t, h, w, c), dtype=dtype).permute(0, 4, 1, 2, 3)


def test_calls_that_would_fall_back_are_refused() -> None:
    x, weight, out = clip(1, 8, 1, 6, 6), clip(16, 8, 1, 3, 3), clip(1, 16, 1, 4, 4)
    bias, residual = torch.zeros(16, dtype=torch.float16), clip(1, 16, 1, 4, 4)
    assert kitchen.call_refusals(x, weight, bias, residual, out) == []
    assert "dtypes" in kitchen.call_refusals(x, weight, bias.float(), residual, out)[0]
    assert "dtypes" in kitchen.call_refusals(x, weight, bias, residual.float(), out)[0]
    assert "dense" in kitchen.call_refusals(x.contiguous(), weight, None, None, out)[0]
    wider = clip(1, 16, 1, 4, 8)[..., :4]
    assert "dense" in kitchen.call_refusals(x, weight, None, None, wider)[0]
    odd = torch.zeros(x.numel() + 1, dtype=torch.float16)[1:].view(1, 1, 6, 6, 8).permute(0, 4, 1, 2, 3)
    assert "aligned to 16 bytes" in kitchen.call_refusals(odd, weight, None, None, out)[0]
    assert "overwrite" in kitchen.call_refusals(x, weight, None, out, out)[0]
    # rows and frames of one picture's map are written where they lie
    rows = clip(1, 16, 1, 12, 4)[:, :, :, 4:8]
    frames = clip(1, 16, 3, 4, 4)[:, :, 1:2]
    assert kitchen.call_refusals(x, weight, bias, None, rows) == []
    assert kitchen.call_refusals(x, weight, bias, None, frames) == []
    both = clip(2, 16, 1, 12, 4)[:, :, :, 4:8]
    assert "dense" in kitchen.call_refusals(clip(2, 8, 1, 6, 6), weight, None, None, both)[0]


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("tile", [(0, 5, 0, 7), (0, 3, 0, 4), (2, 5, 3, 7), (1, 4, 2, 5)])
def test_a_tile_is_staged_with_its_neighbours_and_given_statistics(
    real: bool, tile: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = fake_kitchen.install(monkeypatch, real=real)
    g = torch.Generator().manual_seed(1)
    x = in_layout(torch.randn((2, 16, 5, 7), generator=g), True)
    weight, bias, norm = torch.randn(16, generator=g), torch.randn(16, generator=g), replace(NORM, groups=4)
    rows = kitchen.map_statistics(x, norm)
    top, bottom, left, right = tile
    place = Tile(
        images=Span(0, 2), rows=Span(top, bottom), cols=Span(left, right), new_rows=Span(top, bottom),
        new_cols=Span(left, right),
    )  # fmt: skip
    out = in_layout(torch.full((2, 16, bottom - top + 2, right - left + 2), torch.nan), True)
    assert kitchen.can_stage(x, out)
    kitchen.stage(x, place, 1, (norm, weight, bias, rows), "silu", out)
    whole = F.pad(F.silu(F.group_norm(x, 4, weight, bias, norm.eps)), (1, 1, 1, 1))
    assert max_diff(out, whole[:, :, top : bottom + 2, left : right + 2]) < 1e-5
    assert [given for _, given in heard.staged] == [True, True]
    kitchen.stage(x, place, 1, None, "none", out)
    assert torch.equal(out, F.pad(x, (1, 1, 1, 1))[:, :, top : bottom + 2, left : right + 2])
    assert not kitchen.can_stage(x, out.to(torch.float16))
    assert not kitchen.can_stage(x.contiguous(), out)
