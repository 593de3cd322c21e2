"""Winograd convolution and upsampling against float64 convolutions written down plainly."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from halo_vae.optim.device import describe_device
from halo_vae.optim.kernels import upsample, winograd
from halo_vae.optim.kernels.dispatch import MIN_PIXELS, choose_backend
from halo_vae.optim.program import Conv
from halo_vae.optim.tiling import TileGrid


def random_case(c, k, h, w, batch=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn((batch, h + 2, w + 2, c), generator=g).permute(0, 3, 1, 2)
    return x, torch.randn((k, c, 3, 3), generator=g) / (3 * c**0.5), torch.randn(k, generator=g)


def run(kernel, x, weight, bias, workers=1):
    k, c = weight.shape[:2]
    h, w = x.shape[2] - 2, x.shape[3] - 2
    filters = kernel.transform_filter(weight, torch.full((kernel.filter_elements(c, k),), torch.nan), workers)
    scratch = torch.full((kernel.scratch_elements(c, k, h, w, workers),), torch.nan)
    grow = 2 if kernel is upsample else 1
    out = torch.full((x.shape[0], grow * h, grow * w, k), torch.nan).permute(0, 3, 1, 2)
    return kernel.convolve(x, filters, bias, scratch, out, workers)


def plain(x, weight, bias):
    return F.conv2d(x.double(), weight.double(), None if bias is None else bias.double())


CASES = [
    (32, 32, 4, 4),  # one square
    (32, 48, 8, 12),  # whole squares, other outputs than inputs
    (40, 32, 7, 9),  # the last square slides back on both axes
    (32, 32, 5, 130),  # wider than tall
    (33, 35, 41, 4),  # odd channel counts, one square across
    (32, 32, 64, 257),  # several blocks down and across, with a rest
]


@pytest.mark.parametrize(("c", "k", "h", "w"), CASES)
def test_convolution_equals_the_plain_one(c, k, h, w):
    x, weight, bias = random_case(c, k, h, w)
    y = run(winograd, x, weight, bias)
    assert y.shape == (1, k, h, w)
    assert (y - plain(x, weight, bias)).abs().max() < 2e-5


@pytest.mark.parametrize(("c", "k", "h", "w"), [(32, 32, 1, 1), (32, 40, 1, 7), (35, 32, 9, 1), (32, 32, 40, 50)])
def test_upsampling_convolution_equals_upsampling_then_convolving(c, k, h, w):
    x, weight, bias = random_case(c, k, h, w)
    y = run(upsample, x, weight, bias)
    grown = x.repeat_interleave(2, 2).repeat_interleave(2, 3)[:, :, 1:-1, 1:-1]
    assert y.shape == (1, k, 2 * h, 2 * w)
    assert (y - plain(grown, weight, bias)).abs().max() < 1e-5


@pytest.mark.parametrize("kernel", [winograd, upsample])
def test_batches_and_absent_biases_are_taken(kernel):
    x, weight, _ = random_case(32, 32, 8, 9, batch=3)
    y = run(kernel, x, weight, None)
    for i in range(3):
        assert torch.equal(y[i : i + 1], run(kernel, x[i : i + 1], weight, None))


def test_winograd_loses_no_more_digits_than_direct_convolution_may():
    x, weight, bias = random_case(256, 256, 16, 16)
    truth = plain(F.silu(x), weight, bias)
    error = (run(winograd, F.silu(x), weight, bias) - truth).abs().max()
    # a sum of 9 * 256 products in float32 may lose this much by itself: n * eps * typical magnitude
    assert error < 9 * 256 * torch.finfo(torch.float32).eps * truth.abs().mean()


def test_scratch_stays_small_however_large_the_picture():
    small = winograd.scratch_elements(128, 128, 64, 64, 1)
    assert winograd.scratch_elements(128, 128, 4096, 4096, 1) < 2 * small


def conv(**changes):
    fields = {
        "name": "c", "inputs": (0,), "output": 1, "weight": "w", "bias": None, "in_channels": 64, "out_channels": 64,
        "kernel": (1, 3, 3),
    }  # fmt: skip
    return Conv(**{**fields, **changes})


def choice(op=None, fold=False, dtype="float32", layout="channels_last", size=(64, 64), rows=None, slides=True):
    grid = TileGrid(
        n_images=1, height=size[0], width=size[1], images_per_call=1, rows=rows or size[0], cols=size[1], slides=slides
    )
    return choose_backend(
        op or conv(), fold=fold, dtype=dtype, layout=layout, grid=grid, profile=describe_device("cpu")
    )


def test_winograd_is_taken_where_it_pays():
    assert choice().backend == "winograd"
    assert choice(op=conv(upsample=2), fold=True).backend == "winograd"


REFUSALS = [
    ({"dtype": "bfloat16"}, "bfloat16 would round"),
    ({"layout": "contiguous"}, "channels_last"),
    ({"op": conv(kernel=(1, 1, 1))}, "only 3x3"),
    ({"op": conv(upsample=2)}, "only 3x3"),
    ({"op": conv(out_channels=3)}, "channels"),
    ({"size": (4, MIN_PIXELS // 4 - 1)}, "pixels"),
    ({"size": (65, 64), "rows": 16, "slides": False}, "smaller than 4x4"),  # the last strip has one row
]


@pytest.mark.parametrize(("changes", "reason"), REFUSALS)
def test_every_refusal_says_why(changes, reason):
    made = choice(**changes)
    assert made.backend == "torch"
    assert any(reason in refusal for refusal in made.refusals)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("kernel", [winograd, upsample])
@pytest.mark.parametrize(("h", "w"), [(4, 4), (7, 9), (33, 70)])
def test_workers_change_nothing(kernel, workers, h, w):
    x, weight, bias = random_case(32, 40, h, w, batch=2)
    threads, alone = torch.get_num_threads(), run(kernel, x, weight, bias)
    for _ in range(20):  # two workers that write one square at a time would differ now and then
        assert torch.allclose(run(kernel, x, weight, bias, workers), alone, atol=1e-5)
    assert torch.get_num_threads() == threads
