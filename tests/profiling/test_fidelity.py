from __future__ import annotations

import json
import math

import pytest
import torch

from halo_vae.profiling.codec import decode, encode
from halo_vae.profiling.fidelity import Fidelity, measure_fidelity


def test_known_distance() -> None:
    reference = torch.zeros(2, 2, 2, 3)
    picture = reference.clone()
    picture[1, 0, 0, 0] = 0.5
    found = measure_fidelity(picture, reference)
    assert found == Fidelity(max_abs=0.5, mean_abs=0.5 / 24, mse=0.25 / 24)
    assert found.psnr_db == pytest.approx(10 * math.log10(24 / 0.25))
    assert picture[1, 0, 0, 0] == 0.5  # read only


def test_identical_pictures() -> None:
    picture = torch.rand(1, 4, 4, 3, generator=torch.Generator().manual_seed(0))
    assert measure_fidelity(picture, picture) == Fidelity(max_abs=0.0, mean_abs=0.0, mse=0.0)
    assert measure_fidelity(picture, picture).psnr_db == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_picture_that_is_not_finite_is_infinitely_far(bad: float) -> None:
    picture = torch.zeros(1, 2, 2, 3)
    picture[0, 1, 1, 2] = bad
    found = measure_fidelity(picture, torch.zeros(1, 2, 2, 3))
    assert found.max_abs == found.mse == math.inf
    assert found.psnr_db == -math.inf
    line = json.dumps(encode(found), allow_nan=False)
    assert decode(Fidelity, json.loads(line)) == found


def test_narrow_pictures_are_summed_wide() -> None:
    picture = torch.full((1, 64, 64, 3), 0.5, dtype=torch.bfloat16)
    assert measure_fidelity(picture, torch.zeros(1, 64, 64, 3)).mean_abs == 0.5


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(1, 2, 2, 3\) and the reference \(1, 2, 3, 3\)"):
        measure_fidelity(torch.zeros(1, 2, 2, 3), torch.zeros(1, 2, 3, 3))
    with pytest.raises(ValueError, match="at least one pixel"):
        measure_fidelity(torch.zeros(0, 2, 2, 3), torch.zeros(0, 2, 2, 3))
    with pytest.raises(ValueError, match="reference holds inf or nan"):
        measure_fidelity(torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1, 1), math.nan))
