"""Each eager op against plain Python loops over single elements."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from halo_vae.optim.errors import LatentError
from halo_vae.optim.kernels.eager import activate, depth_to_space, run_eager
from halo_vae.optim.program import Attention, Conv, Linear, Norm, Op, Pointwise, Program, Rearrange, Value
from halo_vae.optim.weights import MappingWeights


def _rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _run(op: Op, channels: int, out: int, scale: int, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    values = (Value(channels=channels, scale=(1, 1, 1)), Value(channels=out, scale=(1, scale, scale)))
    program = Program(family="kl", ops=(op,), values=values, working_dtypes=("float32",))
    return run_eager(program, MappingWeights(weights), x, dtype=torch.float64)


def _act(value: float, act: str) -> float:
    table = {
        "none": lambda v: v,
        "relu": lambda v: max(v, 0.0),
        "silu": lambda v: v / (1 + math.exp(-v)),
        "tanh3": lambda v: 3 * math.tanh(v / 3),
    }
    return table[act](value)


def _naive_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    y = torch.empty_like(x)
    size = x.shape[1] // groups
    for b in range(x.shape[0]):
        for g in range(groups):
            part = x[b, g * size : (g + 1) * size]
            values = part.flatten().tolist()
            mean = sum(values) / len(values)
            variance = sum((v - mean) ** 2 for v in values) / len(values)
            for c in range(g * size, (g + 1) * size):
                y[b, c] = (x[b, c] - mean) / math.sqrt(variance + eps) * weight[c] + bias[c]
    return y


def _naive_conv(x: Tensor, weight: Tensor, bias: Tensor | None, up: int) -> Tensor:
    b, _, h, w = x.shape
    out, _, k, _ = weight.shape
    y = torch.zeros(b, out, h * up, w * up, dtype=x.dtype)
    for n in range(b):
        for o in range(out):
            for i in range(h * up):
                for j in range(w * up):
                    total = bias[o].item() if bias is not None else 0.0
                    for di in range(k):
                        for dj in range(k):
                            r, s = i + di - k // 2, j + dj - k // 2
                            if 0 <= r < h * up and 0 <= s < w * up:
                                total += (x[n, :, r // up, s // up] * weight[o, :, di, dj]).sum().item()
                    y[n, o, i, j] = total
    return y


CONVS = [
    # norm, act, kernel, upsample, residual repeat, post act, depth to space, bias
    (True, "silu", 3, 1, 1, "none", 1, True),  # the KL convolution with its residual
    (False, "none", 3, 2, 0, "none", 1, True),  # upsampling: padding is one picture pixel, not one source pixel
    (False, "tanh3", 3, 1, 0, "relu", 1, False),  # TAESD's first
    (False, "relu", 1, 1, 2, "relu", 1, True),  # the activation after the sum
    (False, "none", 3, 1, 2, "none", 2, True),  # the residual is repeated before the depth-to-space
]


@pytest.mark.parametrize(("norm", "act", "k", "up", "repeat", "post", "d2s", "bias"), CONVS)
def test_conv_equals_loops(
    norm: bool, act: str, k: int, up: int, repeat: int, post: str, d2s: int, bias: bool
) -> None:  # fmt: skip
    x = _rand(2, 4, 3, 2, seed=1)
    out = 4 * (repeat or 1)
    weights = {"w": _rand(out, 4, k, k, seed=2), "n.w": _rand(4, seed=4), "n.b": _rand(4, seed=5)}
    if bias:
        weights["b"] = _rand(out, seed=3)
    op = Conv(
        name="c", inputs=(0, 0) if repeat else (0,), output=1, weight="w", bias="b" if bias else None, in_channels=4,
        out_channels=out, kernel=(1, k, k), act=act, upsample=up, residual_repeat=repeat or 1, post_act=post,
        norm=Norm(weight="n.w", bias="n.b", groups=2, eps=1e-6) if norm else None, depth_to_space=d2s,
        gain=2.0, offset=-1.0,
    )  # fmt: skip
    source = _naive_norm(x, 2, weights["n.w"], weights["n.b"], 1e-6) if norm else x
    y = _naive_conv(source.clone().apply_(lambda v: _act(v, act)), weights["w"], weights.get("b"), up)
    if repeat:
        for o in range(out):
            y[:, o] += x[:, o // repeat]
    y = y.apply_(lambda v: _act(v, post))
    if d2s == 2:
        n, (b, _, h, w) = out // 4, y.shape
        wide = torch.empty(b, n, 2 * h, 2 * w, dtype=y.dtype)
        for c in range(n):
            for i in range(2):
                for j in range(2):
                    wide[:, c, i::2, j::2] = y[:, (i * 2 + j) * n + c]
        y = wide
    got = _run(op, 4, out // d2s**2, up * d2s, weights, x)
    assert (got - (y * 2 - 1)).abs().max().item() < 1e-10


@pytest.mark.parametrize("square", [True, False])
def test_attention_equals_loops(square: bool) -> None:
    """The projections as [C, C] and as [C, C, 1, 1]."""
    x = _rand(2, 4, 2, 3, seed=1)
    names = ("q", "k", "v", "proj")
    matrices = {name: _rand(4, 4, seed=i) for i, name in enumerate(names, 2)}
    weights = {f"{n}.weight": m if square else m[:, :, None, None] for n, m in matrices.items()}
    weights |= {f"{n}.bias": _rand(4, seed=10 + i) for i, n in enumerate(names)}
    weights |= {"n.weight": _rand(4, seed=20), "n.bias": _rand(4, seed=21)}
    q, k, v, proj = (Linear(weight=f"{n}.weight", bias=f"{n}.bias") for n in names)
    norm = Norm(weight="n.weight", bias="n.bias", groups=2, eps=1e-6)
    op = Attention(name="a", inputs=(0,), output=1, norm=norm, q=q, k=k, v=v, proj=proj, channels=4)
    rows = _naive_norm(x, 2, weights["n.weight"], weights["n.bias"], 1e-6).flatten(2)
    expected = x.clone()
    for b in range(2):
        at = {n: [matrices[n] @ rows[b, :, p] + weights[f"{n}.bias"] for p in range(6)] for n in ("q", "k", "v")}
        for p in range(6):
            scores = [math.exp(torch.dot(at["q"][p], at["k"][r]).item() / math.sqrt(4)) for r in range(6)]
            mixed = sum(s / sum(scores) * at["v"][r] for r, s in enumerate(scores))
            expected[b, :, p // 3, p % 3] += matrices["proj"] @ mixed + weights["proj.bias"]
    assert (_run(op, 4, 4, 1, weights, x) - expected).abs().max().item() < 1e-10


def test_denormalize_scales_by_the_deviation_of_each_channel() -> None:
    x = _rand(2, 3, 2, 2, seed=1)
    weights = {"mean": _rand(3, seed=2), "var": _rand(3, seed=3).abs()}
    op = Pointwise(name="bn", inputs=(0,), output=1, kind="denormalize", weights=("mean", "var"), eps=0.25)
    got = _run(op, 3, 3, 1, weights, x)
    for c in range(3):
        deviation = math.sqrt(weights["var"][c].item() + 0.25)
        assert torch.allclose(got[:, c], x[:, c] * deviation + weights["mean"][c].item())


@pytest.mark.parametrize("shape", [(), (1,)])
def test_shift_comes_before_scale(shape: tuple[int, ...]) -> None:
    x = _rand(1, 2, 2, 2, seed=1)
    weights = {"shift": torch.full(shape, 0.5), "scale": torch.full(shape, 3.0)}
    op = Pointwise(name="s", inputs=(0,), output=1, kind="shift_scale", weights=("shift", "scale"))
    assert torch.allclose(_run(op, 2, 2, 1, weights, x), (x - 0.5) * 3.0)


@pytest.mark.parametrize("order", ["channel_major", "block_major"])
def test_rearrange_puts_each_channel_where_its_order_says(order: str) -> None:
    """With C = 2: channel_major reads c * 4 + i * 2 + j, block_major (i * 2 + j) * C + c."""
    x = torch.arange(8.0, dtype=torch.float64).view(1, 8, 1, 1)
    op = Rearrange(name="r", inputs=(0,), output=1, factor=2, order=order)
    y = _run(op, 8, 2, 2, {}, x)
    for c in range(2):
        for i in range(2):
            for j in range(2):
                expected = c * 4 + i * 2 + j if order == "channel_major" else (i * 2 + j) * 2 + c
                assert y[0, c, i, j].item() == expected


def test_depth_to_space_by_one_changes_nothing() -> None:
    x = _rand(1, 3, 2, 2, seed=1)
    assert torch.equal(depth_to_space(x, 1, "block_major"), x)


@pytest.mark.parametrize("act", ["none", "silu", "relu", "tanh3"])
def test_activation_maps_zero_to_zero_so_that_padding_commutes(act: str) -> None:
    assert activate(torch.zeros(1), act).item() == 0.0
    assert activate(torch.tensor([1.7]), act).item() == pytest.approx(_act(1.7, act), rel=1e-6)


def _pass_through() -> Program:
    op = Rearrange(name="r", inputs=(0,), output=1, factor=1, order="block_major")
    value = Value(channels=4, scale=(1, 1, 1))
    return Program(family="kl", ops=(op,), values=(value, value), working_dtypes=("float32",))


@pytest.mark.parametrize("shape", [(1, 16, 4, 4), (4, 4, 4), (1, 4, 1, 4, 4), (0, 4, 4, 4), (1, 4, 0, 4)])
def test_latent_that_does_not_fit_is_refused_with_its_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(LatentError, match=r"takes \[batch, 4, height, width\]") as caught:
        run_eager(_pass_through(), MappingWeights({}), torch.zeros(shape))
    assert str(list(shape)) in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_everything_runs_in_the_dtype_asked_for(dtype: torch.dtype) -> None:
    latent = torch.zeros(1, 4, 2, 2, dtype=torch.float16, requires_grad=True)
    picture = run_eager(_pass_through(), MappingWeights({}), latent, dtype=dtype)
    assert picture.dtype == dtype
    assert not picture.requires_grad
