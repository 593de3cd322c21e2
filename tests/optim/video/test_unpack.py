"""Channels to frames and pixels, and what a skipped value becomes, against plain indexing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from halo_vae.optim.video.ops import ClipConv, Skip, Unpack
from halo_vae.optim.video.unpack import first_alone, skip_frame, unpack, unpack_phase
from halo_vae.tests.optim.helpers import latent
from halo_vae.tests.optim.video.reference import haar

ORDERS = ["".join(p) for p in itertools.permutations("cthw")]
H, W = 3, 2


def channel_of(how: Unpack, n: int, c: int, t: int, i: int, j: int) -> int:
    """The packed channel of output channel c of n, phase t, row offset i and column offset j: digits, slowest first."""
    digit, size = {"c": c, "t": t, "h": i, "w": j}, {"c": n, "t": how.t, "h": how.s, "w": how.s}
    index = 0
    for axis in how.order:
        index = index * size[axis] + digit[axis]
    return index


def plain(x: Tensor, how: Unpack) -> Tensor:
    """[t, C, h s, w s], element by element."""
    t, s = how.t, how.s
    n = x.shape[0] // (t * s * s)
    out = torch.empty(t, n, H * s, W * s)
    for phase, c, i, j in itertools.product(range(t), range(n), range(s), range(s)):
        out[phase, c, i::s, j::s] = x[channel_of(how, n, c, phase, i, j)]
    return out


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("t", "s"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 3)])
def test_every_order_of_the_channel_axis(order: str, t: int, s: int) -> None:
    how = Unpack(t=t, s=s, order=order)
    x = latent(3 * t * s * s, H, W)
    expected = plain(x, how)
    for given in (x, x.permute(1, 2, 0).contiguous().permute(2, 0, 1)):
        assert torch.equal(unpack(given, how), expected)
        for phase in range(t):
            assert torch.equal(unpack_phase(given, how, phase), expected[phase])


@pytest.mark.parametrize("levels", [1, 2])
def test_inverse_haar(levels: int) -> None:
    x = latent(2 * 8**levels, H, W)
    how = Unpack(t=2**levels, s=2**levels, haar=levels)
    expected = x[:, None]
    for _ in range(levels):
        expected = haar(expected)
    frames = unpack(x, how)
    assert frames.shape == (2**levels, 2, H * 2**levels, W * 2**levels)
    assert torch.allclose(frames, expected.transpose(0, 1), atol=1e-6)
    assert torch.equal(unpack_phase(x, how, 1), frames[1])


def test_haar_of_the_mean_alone_is_constant() -> None:
    x = torch.zeros(8, 1, 1)
    x[0] = 5.0
    assert torch.equal(unpack(x, Unpack(t=2, s=2, haar=1)), torch.full((2, 1, 2, 2), 5.0))
    x[4] = 1.0  # the difference along time
    assert unpack(x, Unpack(t=2, s=2, haar=1)).flatten(1).unique(dim=1).flatten().tolist() == [6.0, 4.0]


def test_the_first_frame_alone_keeps_the_order() -> None:
    how = Unpack(t=4, s=2, order="thwc")
    assert first_alone(how) == Unpack(t=1, s=2, order="thwc")


# -- skips


def op(upsample: int = 1) -> ClipConv:
    return ClipConv(
        name="x", inputs=(0, 0), output=1, weight="w", bias=None, in_channels=4, out_channels=4, kernel=(1, 1, 1),
        upsample=upsample,
    )  # fmt: skip


def repeats() -> Iterator[tuple[int, bool]]:
    yield from itertools.product((1, 2, 4), (False, True))


@pytest.mark.parametrize(("repeat", "tile"), list(repeats()))
def test_repeated_channels(repeat: int, tile: bool) -> None:
    x = latent(4, H, W)
    order = [*range(4)] * repeat if tile else [c for c in range(4) for _ in range(repeat)]
    assert torch.equal(skip_frame(x, Skip(repeat=repeat, tile=tile), op(), 0, alone=False), x[order])


@pytest.mark.parametrize(("repeat", "tile"), list(repeats()))
@pytest.mark.parametrize("order", ["cthw", "thwc", "tchw"])
def test_unpacked_skips_repeat_before_and_tile_after(repeat: int, tile: bool, order: str) -> None:
    how = Unpack(t=2, s=2, order=order)
    x = latent(16, H, W)
    for phase in range(2):
        got = skip_frame(x, Skip(repeat=repeat, tile=tile, unpack=how), op(), phase, alone=False)
        if tile:
            expected = plain(x, how)[phase].repeat(repeat, 1, 1)
        else:
            expected = plain(x.repeat_interleave(repeat, 0), how)[phase]
        assert torch.equal(got, expected)


def test_a_first_frame_that_stands_alone_is_repeated_as_often_as_its_frames_are_fewer() -> None:
    how = Unpack(t=2, s=2, order="thwc")
    x = latent(8, H, W)
    got = skip_frame(x, Skip(repeat=4, unpack=how), op(), 0, alone=True)
    assert torch.equal(got, plain(x.repeat_interleave(2, 0), Unpack(t=1, s=2, order="thwc"))[0])


@pytest.mark.parametrize("upsample", [1, 2])
def test_upsampled_skips_are_nearest_neighbours(upsample: int) -> None:
    x = latent(4, H, W)
    got = skip_frame(x, Skip(upsampled=True), op(upsample), 0, alone=False)
    assert torch.equal(got, x.repeat_interleave(upsample, 1).repeat_interleave(upsample, 2))
