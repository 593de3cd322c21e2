"""How far one picture is from another."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Distance of a picture from a reference, both in [0, 1]; inf where the picture holds inf or nan."""

    max_abs: float
    """Largest absolute difference of any channel of any pixel."""
    mean_abs: float
    """Mean absolute difference."""
    mse: float
    """Mean squared difference."""

    @property
    def psnr_db(self) -> float:
        """10 log10(1 / mse), peak value 1; inf for identical pictures, -inf where the picture is not finite."""
        return math.inf if self.mse == 0 else -10 * math.log10(self.mse)


def measure_fidelity(picture: Tensor, reference: Tensor) -> Fidelity:
    """Compare pictures [B, H, W, C] of equal shape on the CPU, summed in float64, one image at a time.

    Example:
        >>> measure_fidelity(torch.zeros(1, 2, 2, 3), torch.full((1, 2, 2, 3), 0.5)).mse
        0.25

    ValueError for different or empty shapes, and for a reference that is not finite.
    """
    if picture.shape != reference.shape or picture.numel() == 0:
        raise ValueError(
            f"the picture is {tuple(picture.shape)} and the reference {tuple(reference.shape)}; "
            "two pictures of one shape with at least one pixel are needed"
        )
    largest = total = squares = 0.0
    for one, other in zip(picture, reference, strict=True):
        truth = other.detach().to("cpu", torch.float64)
        if not bool(torch.isfinite(truth).all()):
            raise ValueError("the reference holds inf or nan; compare with a finite picture")
        difference = one.detach().to("cpu", torch.float64) - truth
        if not bool(torch.isfinite(difference).all()):
            return Fidelity(max_abs=math.inf, mean_abs=math.inf, mse=math.inf)
        absolute = difference.abs_()
        largest = max(largest, float(absolute.max()))
        total += float(absolute.sum())
        squares += float(absolute.square_().sum())
    n = picture.numel()
    return Fidelity(max_abs=largest, mean_abs=total / n, mse=squares / n)
