"""What each configuration asks of a decode, and the sizes that cache conditions decode at."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from .cases import SCALE_PX, Configuration

if TYPE_CHECKING:
    from ...optim.settings import DecodeSettings, KernelBackend, Strategy

Precision = Literal["fp32", "bf16", "fp16"]
"""What a VAE is loaded in."""
OURS: tuple[Configuration, ...] = ("phase1", "phase2", "phase3")
"""Configurations that the exact engine runs."""
SMALLEST_EDGE_PX = 256
"""Pictures with a shorter edge are one tile, whose shape is the picture's."""


def settings_for(
    configuration: Configuration,
    precision: Precision,
    latent_frames: int,
    *,
    plan: Strategy = "auto",
    kernel_backend: KernelBackend = "auto",
) -> DecodeSettings:
    """Settings of a phase. ValueError for configurations that the engine does not run.

    `phase1`: pool, tiles, layout and caches, in the loaded dtype, one picture at a time and a clip as a whole; `phase2`
    adds the choice of precision, batches and prefetching; `phase3` adds chunks of clips and repair of what is not
    finite: the defaults.
    """
    from ...optim.settings import DecodeSettings

    if configuration not in OURS:
        raise ValueError(f"{configuration} is not the engine's; it runs {', '.join(OURS)}")
    everything = DecodeSettings(method="exact", plan=plan, kernel_backend=kernel_backend)
    if configuration == "phase3":
        return everything
    second = replace(everything, chunk_lat=latent_frames, adaptive_precision=False)
    if configuration == "phase2":
        return second
    return replace(second, precision_mode=precision, batch_optimization=False, memory_prefetching=False)


def warm_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A latent of another size for nearly the same work: an eighth less high and an eighth wider, 1.6 % fewer pixels.

    Where that would make it lower than 256 pixels, an eighth wider only. ValueError for a latent below 8 elements.
    """
    *front, height, width = shape
    eighth_down, eighth_across = height // 8, width // 8
    if not eighth_down or not eighth_across:
        raise ValueError(f"a latent of {width}x{height} is too small to be changed by an eighth; give 8x8 or more")
    if (height - eighth_down) * SCALE_PX < SMALLEST_EDGE_PX:
        eighth_down = 0
    return (*front, height - eighth_down, width + eighth_across)
