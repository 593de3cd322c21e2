"""What is decoded in each installation: small pictures and clips, by plain torch and by the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..bench.cases import SCALE_PX, BenchError, CaseFamily
from ..bench.configurations import Precision

Way = Literal["baseline", "phase3"]
"""Plain torch, module by module; or the engine as `decode` has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareCase:
    """One decode that every installation does."""

    key: str
    """Word for the command line and for results; never changes."""
    title: str
    vae: str
    """As `bench --vae` takes it; equal seeds give every installation the same weights."""
    family: CaseFamily = "kl"
    width_px: int = 128
    height_px: int = 128
    batch: int = 1
    latent_frames: int = 1
    way: Way = "phase3"
    precision: Precision = "fp32"
    iterations: int = 1
    """Decodes in one round, timed together: more for decodes that are over in a blink."""
    is_usual: bool = True
    """False for cases that are run only when they are named."""

    def latent_shape(self, channels: int) -> tuple[int, ...]:
        """[B, C, H, W], of clips [B, C, T, H, W], for a VAE with so many latent channels."""
        size = (self.height_px // SCALE_PX, self.width_px // SCALE_PX)
        frames = (self.latent_frames,) if self.family == "wan21" else ()
        return (self.batch, channels, *frames, *size)


CASES: tuple[CompareCase, ...] = (
    CompareCase(
        key="tiny_plain", title="Tiny VAE, plain torch", vae="tiny", width_px=256, height_px=256, way="baseline",
        iterations=10,
    ),
    CompareCase(key="tiny", title="Tiny VAE", vae="tiny", width_px=256, height_px=256, iterations=10),
    CompareCase(key="sd_plain", title="SD, plain torch", vae="sd", way="baseline"),
    CompareCase(key="sd", title="SD", vae="sd"),
    CompareCase(key="sd_batch", title="SD, 4 at once", vae="sd", width_px=64, height_px=64, batch=4),
    CompareCase(key="sd_bf16_plain", title="SD, plain torch, bf16", vae="sd", way="baseline", precision="bf16"),
    CompareCase(
        key="wan_plain", title="Wan 1/4, plain torch", vae="wan21/4", family="wan21", width_px=64, height_px=64,
        latent_frames=3, way="baseline",
    ),
    CompareCase(
        key="wan", title="Wan 1/4", vae="wan21/4", family="wan21", width_px=64, height_px=64, latent_frames=3,
    ),
    CompareCase(key="tiny_64", title="Tiny VAE, 64", vae="tiny", width_px=64, height_px=64, is_usual=False),
    CompareCase(key="sd_512", title="SD, 512", vae="sd", width_px=512, height_px=512, is_usual=False),
    CompareCase(
        key="sd_512_plain", title="SD, 512, plain torch", vae="sd", width_px=512, height_px=512, way="baseline",
        is_usual=False,
    ),
    CompareCase(key="flux", title="Flux", vae="flux", is_usual=False),
    CompareCase(key="flux_plain", title="Flux, plain torch", vae="flux", way="baseline", is_usual=False),
    CompareCase(
        key="wan_full", title="Wan, full width", vae="wan21", family="wan21", latent_frames=3, is_usual=False,
    ),
    CompareCase(
        key="wan_full_plain", title="Wan, full width, plain torch", vae="wan21", family="wan21", latent_frames=3,
        way="baseline", is_usual=False,
    ),
)  # fmt: skip
"""In the order of every table."""
USUAL: tuple[CompareCase, ...] = tuple(case for case in CASES if case.is_usual)
"""Minutes on two idle cores."""
_BY_KEY = {case.key: case for case in CASES}


def case_of(key: str) -> CompareCase:
    """The case with this key. BenchError names those there are."""
    if key not in _BY_KEY:
        raise BenchError(f"there is no case {key!r}; choose from {', '.join(_BY_KEY)}")
    return _BY_KEY[key]
