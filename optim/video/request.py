"""What a decode of clips is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..events import DecodeObserver
from ..settings import DecodeSettings
from ..store import Finish
from .plan import ClipShape
from .sink import OnFrames

if TYPE_CHECKING:
    from ..decode import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRequest:
    """What a decode of clips was asked."""

    decoder: Decoder
    latent: Tensor
    """[B, C, T, H, W], finite."""
    settings: DecodeSettings
    observer: DecodeObserver
    finish: Finish
    out_dtype: torch.dtype
    out_device: torch.device
    on_frames: OnFrames | None = None
    """Takes frames as they finish; None collects them in one image."""

    @property
    def shape(self) -> ClipShape:
        """Of the latent."""
        b, c, t, h, w = self.latent.shape
        return b, c, t, h, w
