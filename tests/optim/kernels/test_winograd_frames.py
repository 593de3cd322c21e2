"""Convolutions of separate frames against float64 convolutions written down plainly."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from halo_vae.optim.kernels import upsample, winograd_frames
from halo_vae.optim.kernels.frame_groups import plan_groups, slot_count

TAPS = {
    "two dimensions": [(3,), (0,), (None,), (0,)],
    "two taps": [(0, 1), (1, 2), (None, 3), (3, 3), (None, None)],
    "one output": [(0, 1, 2)],
    "pairs": [(0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 5)],
    "pairs and one": [(0, 1, 2), (1, 2, 3), (2, 3, 4)],
    "zeros before": [(None, None, 0), (None, 0, 1), (0, 1, 2)],
    "zeros after": [(3, 4, 5), (4, 5, None), (5, None, None)],
    "zeros all over": [(None, None, None), (0, None, 1), (None, 2, None), (3, None, None), (3, 1, None)],
    "zeros alone": [(None, None, None), (None, None, None)],
    "first repeated": [(0, 0, 0), (0, 0, 1), (0, 1, 2)],
    "all doubled": [(0, 0, 1), (0, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 3)],
    "out of order": [(5, 0, 3), (0, 3, 1), (4, 4, 2), (2, 5, 4)],
    "the same again": [(0, 1, 2), (0, 1, 2), (0, 1, 0)],
}
SIZES = [(4, 4), (8, 12), (7, 9), (5, 34), (33, 6)]


def frames_of(channels, h, w, n=6, seed=0):
    """Views into the middle of wider pages."""
    g = torch.Generator().manual_seed(seed)
    pages = [torch.randn((h + 5, w + 7, channels), generator=g) for _ in range(n)]
    return [page[1 : h + 3, 3 : w + 5].permute(2, 0, 1) for page in pages]


def weights_of(k, c, kt, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn((k, c, kt, 3, 3), generator=g) / (9 * kt * c) ** 0.5, torch.randn(k, generator=g)


def plain(frames, taps, weight, bias, dtype=torch.float64):
    zeros = torch.zeros_like(frames[0])
    bias = None if bias is None else bias.to(dtype)
    stacks = [torch.stack([zeros if i is None else frames[i] for i in one], 1)[None].to(dtype) for one in taps]
    return [F.conv3d(x, weight.to(dtype), bias)[0, :, 0] for x in stacks]


def grown(frames):
    return [f.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, 1:-1, 1:-1] for f in frames]


def windows(k, h, w, n, fill):
    """Outputs in the middle of wider pages, and the pages."""
    pages = [torch.full((h + 4, w + 3, k), fill) for _ in range(n)]
    return [page[2 : h + 2, 1 : w + 1].permute(2, 0, 1) for page in pages], pages


def nans(n):
    """Whatever is read before it is written shows."""
    return torch.full((n,), torch.nan)


def run(frames, taps, weight, bias, outs, workers=1, accumulate=False):
    (k, c, kt), (h, w) = weight.shape[:3], outs[0].shape[1:]
    filters = winograd_frames.transform_filter(weight, nans(winograd_frames.filter_elements(c, k, kt)), workers)
    scratch = nans(winograd_frames.scratch_elements(c, k, h, w, kt, len(taps), workers))
    winograd_frames.convolve(frames, taps, filters, bias, scratch, outs, workers, accumulate=accumulate)


def run_grown(frames, taps, weight, bias, outs, workers=1):
    (k, c, kt), (h, w) = weight.shape[:3], outs[0].shape[1:]
    filters = upsample.transform_frames_filter(weight, nans(upsample.frames_filter_elements(c, k, kt)), workers)
    scratch = nans(upsample.frames_scratch_elements(c, k, h // 2, w // 2, kt, len(taps), workers))
    upsample.convolve_frames(frames, taps, filters, bias, scratch, outs, workers)


def largest_error(outs, truth):
    return max(float((y - t).abs().max()) for y, t in zip(outs, truth, strict=True))


def nothing_outside_is_written(pages, outs, fill):
    for page, out in zip(pages, outs, strict=True):
        out.fill_(fill)
        assert torch.equal(page, torch.full_like(page, fill))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("h", "w"), SIZES)
@pytest.mark.parametrize("taps", TAPS.values(), ids=TAPS)
def test_every_pattern_of_taps_equals_the_plain_convolution(taps, h, w, workers):
    frames, (weight, bias) = frames_of(32, h, w), weights_of(40, 32, len(taps[0]))
    outs, pages = windows(40, h, w, len(taps), 7.0)
    run(frames, taps, weight, bias, outs, workers)
    assert largest_error(outs, plain(frames, taps, weight, bias)) < 2e-5
    nothing_outside_is_written(pages, outs, 7.0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("h", "w"), SIZES)
@pytest.mark.parametrize("name", ["two dimensions", "two taps", "pairs and one", "zeros all over"])
def test_accumulating_adds_once_to_every_pixel(name, h, w, workers, bias):
    taps = TAPS[name]
    frames, (weight, shift) = frames_of(32, h, w), weights_of(40, 32, len(taps[0]))
    outs, pages = windows(40, h, w, len(taps), 7.0)
    before = torch.randn((len(taps), 40, h, w), generator=torch.Generator().manual_seed(2))
    for out, residual in zip(outs, before, strict=True):
        out.copy_(residual)
    run(frames, taps, weight, shift if bias else None, outs, workers, accumulate=True)
    truth = [y + r for y, r in zip(plain(frames, taps, weight, shift if bias else None), before, strict=True)]
    assert largest_error(outs, truth) < 2e-5
    nothing_outside_is_written(pages, outs, 7.0)


@pytest.mark.parametrize("kt", [1, 2, 3])
def test_several_blocks_with_rests_on_both_axes(kt):
    h, w = 67, 131  # 17 * 33 squares, more than a block holds
    taps = [tuple(range(i, i + kt)) for i in range(3)]
    frames, (weight, bias) = frames_of(32, h, w), weights_of(33, 32, kt)
    for workers in (1, 3):
        outs, pages = windows(33, h, w, 3, 7.0)
        run(frames, taps, weight, bias, outs, workers)
        assert largest_error(outs, plain(frames, taps, weight, bias)) < 2e-5
        nothing_outside_is_written(pages, outs, 7.0)


def test_dense_frames_and_a_batch_in_one_buffer_are_taken():
    frames = [f.permute(1, 2, 0).contiguous().permute(2, 0, 1) for f in frames_of(32, 9, 8)]
    (weight, bias), taps = weights_of(32, 32, 3), TAPS["pairs"]
    batch = torch.full((4, 9, 8, 32), torch.nan).permute(0, 3, 1, 2)
    run(frames, taps, weight, bias, list(batch))
    assert largest_error(batch, plain(frames, taps, weight, bias)) < 2e-5


def test_frames_are_left_as_they_were():
    frames, (weight, bias) = frames_of(32, 7, 9), weights_of(32, 32, 3)
    before = [f.clone() for f in frames]
    run(frames, TAPS["pairs"], weight, bias, windows(32, 7, 9, 4, 0.0)[0])
    run_grown(frames, TAPS["pairs"], weight, bias, windows(32, 14, 18, 4, 0.0)[0])
    assert all(torch.equal(f, b) for f, b in zip(frames, before, strict=True))


def test_outputs_in_one_call_equal_outputs_one_by_one():
    """However many frames a call takes, and whatever comes beside them."""
    frames, (weight, bias) = frames_of(32, 7, 9), weights_of(32, 32, 3)
    taps = TAPS["first repeated"] + TAPS["pairs"]
    together, _ = windows(32, 7, 9, len(taps), 0.0)
    run(frames, taps, weight, bias, together)
    for one, y in zip(taps, together, strict=True):
        alone, _ = windows(32, 7, 9, 1, 0.0)
        run(frames, [one], weight, bias, alone)
        assert torch.allclose(alone[0], y, atol=2e-5)


@pytest.mark.parametrize("channels", [128, 256])
def test_digits_lost_stay_those_of_float32_sums(channels):
    frames, (weight, bias) = frames_of(channels, 12, 12), weights_of(64, channels, 3)
    outs, _ = windows(64, 12, 12, 4, 0.0)
    run(frames, TAPS["pairs"], weight, bias, outs)
    truth = plain(frames, TAPS["pairs"], weight, bias)
    ours = torch.stack([y - t for y, t in zip(outs, truth, strict=True)]).square().mean().sqrt()
    # values of size 1: about fifteen roundings of them (torch's own convolutions lose 3 to 9)
    assert ours < 20 * torch.finfo(torch.float32).eps


def test_scratch_grows_with_neither_picture_nor_clip():
    assert winograd_frames.scratch_elements(96, 96, 4096, 4096, 3, 2, 1) < 2 * (
        winograd_frames.scratch_elements(96, 96, 64, 64, 3, 2, 1)
    )
    for elements in (winograd_frames.scratch_elements, upsample.frames_scratch_elements):
        assert elements(96, 96, 512, 512, 3, 64, 2) == elements(96, 96, 512, 512, 3, 2, 2)


# -- upsampling


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("h", "w"), [(1, 1), (1, 7), (9, 1), (7, 9)])
@pytest.mark.parametrize("taps", TAPS.values(), ids=TAPS)
def test_upsampling_equals_upsampling_then_convolving(taps, h, w, workers):
    frames, (weight, bias) = frames_of(32, h, w), weights_of(40, 32, len(taps[0]))
    outs, pages = windows(40, 2 * h, 2 * w, len(taps), 7.0)
    run_grown(frames, taps, weight, bias, outs, workers)
    assert largest_error(outs, plain(grown(frames), taps, weight, bias)) < 1e-5
    nothing_outside_is_written(pages, outs, 7.0)


@pytest.mark.parametrize("name", ["two dimensions", "two taps", "pairs and one"])
def test_upsampling_in_several_blocks(name):
    frames, (weight, bias) = frames_of(32, 40, 50), weights_of(40, 32, len(TAPS[name][0]))
    for workers in (1, 3):
        outs, pages = windows(40, 80, 100, len(TAPS[name]), 7.0)
        run_grown(frames, TAPS[name], weight, bias, outs, workers)
        assert largest_error(outs, plain(grown(frames), TAPS[name], weight, bias)) < 1e-5
        nothing_outside_is_written(pages, outs, 7.0)


def test_upsampling_without_a_bias():
    frames, (weight, _) = frames_of(32, 6, 5), weights_of(32, 32, 3)
    outs, _ = windows(32, 12, 10, 4, 0.0)
    run_grown(frames, TAPS["pairs"], weight, None, outs)
    assert largest_error(outs, plain(grown(frames), TAPS["pairs"], weight, None)) < 1e-5


# -- plans


def products(taps, n_items=1):
    return sum(len(group.products) * len(group.outputs) for group in plan_groups(taps, n_items))


def loads(taps, n_items=1):
    return sum(len(group.loads) for group in plan_groups(taps, n_items))


COUNTS = [
    ([(i, i + 1, i + 2) for i in range(8)], 16, 10),  # two per output
    ([(i, i + 1, i + 2) for i in range(7)], 15, 9),
    ([(0, 1, 2)], 3, 3),
    ([(None, None, 0)], 1, 1),
    ([(None, None, 0), (None, 0, 1)], 4, 2),
    ([(0, 0, 0)], 1, 1),
    ([(0, 0, 1), (0, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 3)], 9, 4),  # doubled frames share three per pair
    ([(i, i + 1) for i in range(5)], 10, 6),
    ([(i,) for i in range(5)], 5, 5),
]


@pytest.mark.parametrize(("taps", "n_products", "n_loads"), COUNTS)
def test_neighbours_share_products_and_transforms(taps, n_products, n_loads):
    assert products(taps) == n_products
    assert loads(taps) == n_loads


@pytest.mark.parametrize("n_items", [1, 2, 4])
@pytest.mark.parametrize("taps", TAPS.values(), ids=TAPS)
def test_plans_hold_what_they_use_in_the_slots_there_are(taps, n_items):
    n_slots = slot_count(len(taps[0]), n_items, len(taps))
    held, made = {}, []
    for group in plan_groups(taps, n_items):
        for source, slot in group.loads:
            assert 0 <= slot < n_slots
            held[slot] = source
        for output, slots in zip(group.outputs, group.slots, strict=True):
            sources = (*taps[output], taps[output + 1][-1]) if group.pair else taps[output]
            used = {p.first for p in group.products} | {p.second for p in group.products if p.second is not None}
            assert all(held[slots[i]] == sources[i] for i in used)
            made += [output, output + 1] if group.pair else [output]
        assert len(group.outputs) <= n_items
    assert made == list(range(len(taps)))
