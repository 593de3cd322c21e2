"""What to bench, checked before anything is done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .cases import CASES, BenchCase, BenchError, Configuration, Lane, Scenario

SMOKE_CASES: tuple[BenchCase, ...] = (
    BenchCase(key="smoke_image", title="Smoke Image", family="kl", width_px=256, height_px=256),
    BenchCase(
        key="smoke_video", title="Smoke Video", family="wan21", width_px=256, height_px=256, asked_frames=5
    ),
)
"""A picture and a clip that tiny VAEs decode in a blink: whether everything works, not how fast it is."""
TIME_LIMIT_S = 1800.0
"""Default for one process. A cold decode may hold a kernel search for each shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComfyUI:
    """A ComfyUI checkout and the Python that runs it."""

    folder: Path
    python: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """Cases by configurations by cache conditions. BenchError where they do not go together."""

    host: str
    """Label of the machine."""
    cases: tuple[BenchCase, ...] = CASES
    configurations: tuple[Configuration, ...] = ("baseline", "phase1", "phase2", "phase3")
    scenarios: tuple[Scenario, ...] = ("hot",)
    runs: int = 5
    warm_ups: int = 1
    """Decodes before the timed ones of a hot run."""
    threads: int | None = None
    """None = as many as torch takes."""
    device: str = "auto"
    seed: int = 0
    lane: Lane = "single"
    vaes: tuple[str, ...] = ()
    """Files, and names as in vaes.py; full-size random weights where none fits."""
    plan: Literal["auto", "strips", "tiles"] = "auto"
    kernel_backend: Literal["auto", "torch", "winograd", "shifted_gemm", "conv2d_sum", "kitchen"] = "auto"
    comfyui: ComfyUI | None = None
    time_limit_s: float = TIME_LIMIT_S
    purge_real_caches: bool = False
    """Empty the user's own kernel caches before every cold run."""
    probe: Path | None = None
    """See probe.py."""

    def __post_init__(self) -> None:
        """See the class."""
        if not self.cases or not self.configurations or not self.scenarios:
            raise BenchError("there is nothing to run; name at least one case, configuration and cache condition")
        if "stock" in self.configurations and self.comfyui is None:
            raise BenchError("the configuration stock needs a ComfyUI; give --comfyui DIR=PYTHON")
        if self.lane == "nightly" and "frozen" in self.scenarios:
            raise BenchError("frozen runs are not for the nightly lane; leave them out, or choose another lane")
        if self.runs < 1:
            raise BenchError(f"--runs is {self.runs}; give 1 or more")
        if self.warm_ups < 1:
            raise BenchError(f"--warm-ups is {self.warm_ups}; give 1 or more: no first decode is hot")
        if self.threads is not None and self.threads < 1:
            raise BenchError(f"--threads is {self.threads}; give 1 or more")
        if not self.time_limit_s > 0:
            raise BenchError(f"--time-limit is {self.time_limit_s:g} seconds; give more than 0")
        if not 0 <= self.seed < 2**63:
            raise BenchError(f"--seed is {self.seed}; give 0 to 2**63 - 1")
