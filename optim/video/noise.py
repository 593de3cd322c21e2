"""Noise that a decoder draws, in the order in which its reference draws it, and norms that read the latent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import Tensor

from .ops import ClipNorm
from .stage import LatentRows

if TYPE_CHECKING:
    from .runner import ClipRunner


class NoiseMaps:
    """Drawn from the global generator when an op runs for the first time: ops first run in program order."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Noise is drawn in the decoder's own dtype, in which the same seed gives the reference's numbers."""
        self._dtype, self._device = dtype, device
        self._drawn: dict[int, Tensor] = {}

    def clip(self, index: int, size: tuple[int, int, int, int]) -> Tensor:
        """[C, T, H, W] for the whole clip."""
        if index not in self._drawn:
            self._drawn[index] = torch.randn((1, *size), dtype=self._dtype, device=self._device)[0]
        return self._drawn[index]

    def map(self, index: int, height: int, width: int) -> Tensor:
        """[H, W], the same for all frames."""
        if index not in self._drawn:
            self._drawn[index] = torch.randn((height, width), dtype=self._dtype, device=self._device)
        return self._drawn[index]


def latent_rows(runner: ClipRunner, norm: ClipNorm, v: int) -> LatentRows:
    """Scale and shift out of the latent for rows of frames of value `v`, resized by nearest neighbour."""
    assert norm.latent is not None
    scale, shift = (runner.weights.linear(part, torch.float32) for part in (norm.latent.scale, norm.latent.shift))
    shape, n_frames = runner.plan.layouts.frames[v], runner.driver.counts[v]
    t, height, width = runner.plan.latent_shape[2:]
    grow = shape.width // width

    def rows(top: int, stop: int, frame: int) -> tuple[Tensor, Tensor]:
        z = runner.latent[_latent_frame(frame, n_frames, t)]
        at = torch.arange(top, stop, device=z.device) * height // shape.height
        first, last = int(at[0]), int(at[-1])
        pixels = z[:, first : last + 1].permute(1, 2, 0)
        both = (F.linear(pixels, *linear).permute(2, 0, 1) for linear in (scale, shift))
        a, b = (m.index_select(1, at - first).repeat_interleave(grow, 2) for m in both)
        return a, b

    return rows


def _latent_frame(frame: int, n: int, t: int) -> int:
    """Latent frame that frame `frame` of n reads: nearest, the first one apart where n is odd and above one."""
    if n > 1 and n % 2 == 1:
        return 0 if frame == 0 else 1 + (frame - 1) * (t - 1) // (n - 1)
    return frame * t // n
