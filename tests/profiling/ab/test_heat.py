"""The difference as a picture."""

from __future__ import annotations

import math

import pytest
import torch

from halo_vae.profiling.ab.heat import BROKEN, COLOURS, DECADES, colour, heat_map, legend


def test_equal_pictures_are_black() -> None:
    truth = torch.rand(2, 5, 7, 3)
    made = heat_map(truth, truth.clone())
    assert made.shape == (2, 5, 7, 3)
    assert made.dtype == torch.float32
    assert torch.equal(made, torch.zeros(2, 5, 7, 3))


def test_each_decade_has_its_colour_and_is_brighter() -> None:
    made = colour(torch.tensor([10.0**power for power in DECADES], dtype=torch.float64))
    assert torch.allclose(made.double(), torch.tensor([rgb for _, rgb in COLOURS], dtype=torch.float64), atol=1e-5)
    between = colour(torch.logspace(-6, 0, 200))
    brightness = between @ torch.tensor([0.2126, 0.7152, 0.0722])
    assert bool((brightness.diff() > 0).all())
    assert torch.equal(colour(torch.tensor([0.0, 1e-9, 5.0])), torch.tensor([[0.0] * 3, [0.0] * 3, [1.0] * 3]))


def test_colours_are_of_the_largest_channel_and_of_each_frame_alone() -> None:
    truth = torch.zeros(3, 2, 2, 3)
    ours = truth.clone()
    ours[1, 0, 1] = torch.tensor([0.0, -0.01, 0.001])
    made = heat_map(ours, truth)
    assert torch.allclose(made[1, 0, 1], torch.tensor(COLOURS[4][1]), atol=1e-4)
    assert float(made[[0, 2]].abs().max()) == 0
    assert float(made[1].sum(-1).count_nonzero()) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stands_out(bad: float) -> None:
    ours = torch.zeros(1, 2, 2, 1)
    ours[0, 1, 1] = bad
    made = heat_map(ours, torch.zeros(1, 2, 2, 1))
    assert torch.allclose(made[0, 1, 1], torch.tensor(BROKEN[1]))
    assert float(made[0, 0].abs().max()) == 0
    assert bool(torch.isfinite(made).all())


def test_halves_are_compared_in_full() -> None:
    made = heat_map(torch.full((1, 2, 2, 3), 0.5, dtype=torch.float16), torch.full((1, 2, 2, 3), 0.51))
    assert torch.allclose(made[0, 0, 0], torch.tensor(COLOURS[4][1]), atol=0.01)


def test_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="equal shapes"):
        heat_map(torch.zeros(1, 2, 2, 3), torch.zeros(1, 2, 3, 3))


def test_the_legend_names_every_colour_in_order() -> None:
    assert [name for name, _ in legend()] == [name for name, _ in COLOURS] + [BROKEN[0]]
    assert [meaning.split(":")[0] for _, meaning in legend()][1:-1] == ["1e-5", "1e-4", "1e-3", "1e-2", "1e-1", "1"]
