"""How far our picture is from the host's, and from which distance on it is wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..fidelity import measure_fidelity


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Most that two right pictures may differ, both in 0 to 1. None = any."""

    max_error: float | None
    mean_error: float
    reason: str
    """What they are for."""


EXACT = Limits(max_error=0.01, mean_error=0.001, reason="both sides in float32 and untiled")
NARROW = Limits(max_error=0.25, mean_error=0.01, reason="a side computes in 16 bits, which rounds")
APPROXIMATE = Limits(max_error=None, mean_error=0.02, reason="a side blends tiles, which differ where they meet")
"""Chosen by us. A picture with wrong colours, or moved by a pixel, is beyond all three; rounding is far within them:
float32 decodes of one picture differ by less than 1e-4, bfloat16 ones by less than 0.01 on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the error is measured against: always the host's own picture."""

    dtype: str
    """What the host computes in."""
    untiled: bool | None
    """False where the host was asked to tile; None where it said that it had to."""

    @property
    def is_true(self) -> bool:
        """Whether it is an untiled float32 decode, against which an error is ours alone."""
        return bool(self.untiled) and self.dtype == "float32"

    @property
    def sentence(self) -> str:
        """What the error means."""
        how = {True: "an untiled {} decode", False: "a tiled {} decode", None: "a {} decode that the host had to tile"}
        what = f"the error is the distance from stock's own picture, {how[self.untiled].format(self.dtype)}"
        if self.is_true:
            return f"{what}: an error is Halo's"
        whose = [w for w, there in (("tiling", not self.untiled), ("rounding", self.dtype != "float32")) if there]
        return f"{what}; {' and '.join(whose)} of stock's own {'are' if len(whose) > 1 else 'is'} part of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The distance of one picture from another. None is not measurable; every number is finite."""

    max_error: float | None
    mean_error: float | None
    psnr_db: float | None
    """Peak value 1; None where it is infinite (`identical`) or was not measured."""
    identical: bool
    worst_picture: int | None
    """Index of the picture, or frame, with the largest difference."""
    problem: str | None
    """Why there is no distance."""
    limits: Limits

    @property
    def is_wrong(self) -> bool:
        """True where our picture cannot be called the same."""
        if self.max_error is None or self.mean_error is None:
            return True
        most = self.limits.max_error
        return self.mean_error > self.limits.mean_error or (most is not None and self.max_error > most)


def limits_for(dtypes: set[str], *, approximate: bool) -> Limits:
    """The limits for two sides that compute in these dtypes; `approximate` where one of them blends tiles."""
    if approximate:
        return APPROXIMATE
    return EXACT if dtypes <= {"float32", "float64"} else NARROW


def measure_quality(picture: Tensor, reference: Tensor, limits: Limits) -> Quality:
    """Compare pictures [B, H, W, C] in 0 to 1. A picture that is not finite, or of another size, has a `problem`.

    ValueError where the reference is not finite: then there is nothing to compare with.
    """
    if picture.shape != reference.shape:
        return _without(f"the picture is {_shape(picture)} and stock's {_shape(reference)}", limits)
    found = measure_fidelity(picture, reference)
    if not math.isfinite(found.mse):
        return _without("the picture holds inf or nan", limits)
    worst = max(range(len(picture)), key=lambda i: float(_difference(picture[i], reference[i]).max()))
    return Quality(
        max_error=found.max_abs,
        mean_error=found.mean_abs,
        psnr_db=found.psnr_db if math.isfinite(found.psnr_db) else None,
        identical=found.mse == 0,
        worst_picture=worst,
        problem=None,
        limits=limits,
    )


def _without(problem: str, limits: Limits) -> Quality:
    return Quality(
        max_error=None, mean_error=None, psnr_db=None, identical=False, worst_picture=None, problem=problem,
        limits=limits,
    )  # fmt: skip


def _difference(one: Tensor, other: Tensor) -> Tensor:
    return (one.detach().to("cpu", torch.float32) - other.detach().to("cpu", torch.float32)).abs()


def _shape(picture: Tensor) -> str:
    return "×".join(map(str, picture.shape))
