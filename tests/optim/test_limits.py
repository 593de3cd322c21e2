"""No kernel gets more elements than 32 bits can index."""

from __future__ import annotations

import pytest
import torch

from halo_vae.optim import limits
from halo_vae.optim.errors import PlanError
from halo_vae.optim.limits import LARGEST_TENSOR, check_kernels, kernel_elements, oversized
from halo_vae.optim.video import stage
from halo_vae.tests.optim.helpers import kl_program, plan_of, profile, settings

SMALL = kl_program(64, 32, n_res=1)
SHAPE = (2, 4, 24, 20)


def test_the_limit_is_what_32_bits_with_a_sign_hold() -> None:
    assert LARGEST_TENSOR == 2147483647


def test_elements_of_a_kernel_are_those_of_its_largest_tensor() -> None:
    plan = plan_of(SMALL, SHAPE, settings(), profile(tile_bytes=1 << 30))
    by_name = {step.name: step for step in plan.ops}
    latent = plan.passes[0].latent
    first = kernel_elements(by_name["decoder.conv_in"], SMALL, latent)
    assert first == 2 * 64 * 24 * 20  # both pictures' result is larger than their four channels with a halo
    last = kernel_elements(by_name["decoder.conv_out"], SMALL, latent)
    assert last == 2 * 32 * (48 + 2) * (40 + 2)
    attention = by_name["decoder.mid.attn_1"]
    assert kernel_elements(attention, SMALL, latent) == 24 * 20 * max(64, attention.grid.rows)


def test_a_step_beyond_the_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(SMALL, SHAPE, settings(), profile(tile_bytes=1 << 30))
    steps, latent = plan.ops, plan.passes[0].latent
    most = max(kernel_elements(step, SMALL, latent) for step in steps)
    monkeypatch.setattr(limits, "LARGEST_TENSOR", most)
    assert oversized(steps, SMALL, latent) is None
    check_kernels(steps, SMALL, latent)
    monkeypatch.setattr(limits, "LARGEST_TENSOR", most - 1)
    found = oversized(steps, SMALL, latent)
    assert found is not None
    with pytest.raises(PlanError, match=rf"{found.name} would give one kernel {most} elements.*at most {most - 1}"):
        check_kernels(steps, SMALL, latent)


def test_frames_are_copied_in_bands_where_they_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = torch.randn(3, 7, 5)
    monkeypatch.setattr(stage, "LARGEST_TENSOR", 3 * 5 * 2)
    counted: list[int] = []

    class Counting(torch.Tensor):
        def copy_(self, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            counted.append(other.numel())
            return super().copy_(other)  # type: ignore[no-any-return]

    copy = torch.zeros(3, 7, 5).as_subclass(Counting)
    stage.copy_frame(frame, copy)
    assert torch.equal(copy.as_subclass(torch.Tensor), frame)
    assert counted == [30, 30, 30, 15]
