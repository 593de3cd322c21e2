"""Exact GroupNorm statistics out of tiles: moments per tile in float32, merged in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from .program import Norm

BAND_ELEMENTS = 1 << 20


class Moments:
    """Mean and squared deviation of groups of channels of [n, C, H, W], merged tile by tile.

    Source: Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    def __init__(self, n_images: int, groups: int, device: torch.device) -> None:
        """No elements seen yet."""
        self.groups = groups
        self.count = torch.zeros(n_images, 1, dtype=torch.float64, device=device)
        self.mean = torch.zeros(n_images, groups, dtype=torch.float64, device=device)
        self.m2 = torch.zeros(n_images, groups, dtype=torch.float64, device=device)

    def merge(self, start: int, stop: int, mean: Tensor, variance: Tensor, count: int) -> None:
        """Add a tile of images [start, stop): mean and variance [stop - start, G] over `count` elements per group."""
        mine, m2, seen = self.mean[start:stop], self.m2[start:stop], self.count[start:stop]
        delta, total = mean.double() - mine, seen + count
        m2 += variance.double() * count + delta * delta * (seen * count / total)
        mine += delta * (count / total)
        seen += count

    def is_finite(self) -> Tensor:
        """Scalar bool tensor: no inf or NaN went in."""
        return torch.isfinite(self.mean).all() & torch.isfinite(self.m2).all()

    def affine(self, norm: Norm, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, shift) float32 [n, C, 1, 1] such that GroupNorm(x) = x * scale + shift."""
        return self.affine_of(norm.eps, weight, bias)

    def affine_of(self, eps: float, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """The same for a bare eps."""
        variance = self.m2 / self.count
        per_group = weight.numel() // self.groups
        rstd = (variance + eps).rsqrt().repeat_interleave(per_group, 1)
        scale = rstd * weight.double()
        shift = bias.double() - self.mean.repeat_interleave(per_group, 1) * scale
        return scale.float()[:, :, None, None], shift.float()[:, :, None, None]

    def rows(self, norm: Norm) -> Tensor:
        """(mean, 1 / deviation) float32 [n, G, 2] of each picture."""
        return torch.stack((self.mean, (self.m2 / self.count + norm.eps).rsqrt()), -1).float()


class MapMoments:
    """Statistics of a whole map that a kernel took in one call, with the norm's eps in them already."""

    def __init__(self, rows: Tensor) -> None:
        """(mean, 1 / deviation) float32 [n, G, 2] of each picture."""
        self._rows = rows

    def is_finite(self) -> Tensor:
        """Scalar bool tensor: no inf or NaN went in, and no square of a value overflowed."""
        return torch.isfinite(self._rows).all() & (self._rows[..., 1] > 0).all()

    def affine(self, norm: Norm, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, shift) float32 [n, C, 1, 1] such that GroupNorm(x) = x * scale + shift."""
        mean, rstd = self._rows.double().repeat_interleave(weight.numel() // norm.groups, 1).unbind(-1)
        scale = rstd * weight.double()
        shift = bias.double() - mean * scale
        return scale.float()[:, :, None, None], shift.float()[:, :, None, None]

    def rows(self, norm: Norm) -> Tensor:
        """(mean, 1 / deviation) float32 [n, G, 2] of each picture."""
        del norm
        return self._rows


def tile_moments(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance [B, groups] of a tile [B, C, h, w], each group over (C / groups, h, w)."""
    b, c, h, w = x.shape
    if x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous(memory_format=torch.channels_last):
        pairs = [_column_moments(x[i : i + 1], groups) for i in range(b)]
        return torch.cat([m for m, _ in pairs]), torch.cat([v for _, v in pairs])
    # a normalised copy comes with these moments: in bands it stays small
    step = max(1, BAND_ELEMENTS // (b * c * w))
    bands = [_band_moments(x[:, :, top : top + step], groups) for top in range(0, h, step)]
    share = torch.tensor([min(step, h - top) / h for top in range(0, h, step)], dtype=torch.float64, device=x.device)
    means, variances = (torch.stack(parts).double() for parts in zip(*bands, strict=True))
    share = share[:, None, None]
    mean = (means * share).sum(0)
    return mean, ((variances + (means - mean) ** 2) * share).sum(0)


def _band_moments(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    b, c, h, w = x.shape
    dense = _dense(x)
    eps = 1e-12
    ones = torch.ones(c, dtype=torch.float32, device=x.device)
    # float32 weights make a 16-bit map report float32 statistics (its own are good to 3e-3 only)
    _, mean, rstd = torch.native_group_norm(dense, ones, torch.zeros_like(ones), b, c, h * w, groups, eps)
    return mean.view(b, groups), (rstd.view(b, groups).double() ** -2 - eps).clamp_(min=0)


def _dense(x: Tensor) -> Tensor:
    """The same without gaps, in a layout that the kernel takes: a GPU's takes one with the channels outside only."""
    b, c, h, w = x.shape
    if x.device.type != "cpu" or x.stride(1) != 1 or c == 1:
        return x.contiguous()
    # the stride over a single picture says nothing, but the kernel tells the layout by it
    return x.contiguous(memory_format=torch.channels_last).as_strided((b, c, h, w), (h * w * c, 1, w * c, c))


def _column_moments(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Moments of one channels_last picture: per (column, channel) over the rows in one kernel, merged in float64.

    One strided reduction over (H, W) is twenty times slower on a CPU, and a plain sum over all pixels loses digits.
    """
    _, c, h, w = x.shape
    columns = x.permute(0, 2, 3, 1).reshape(1, h, 1, w * c).permute(0, 3, 1, 2)
    mean, variance = torch.batch_norm_update_stats(columns, None, None, 0.0)
    mean, variance = mean.double().view(w, groups, -1), variance.double().view(w, groups, -1)
    centre = mean.mean((0, 2))
    spread = (variance + (mean - centre[None, :, None]) ** 2).mean((0, 2))
    return centre[None], spread[None]
