"""The eight named cases, and the words for configurations, cache conditions and lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ...optim.errors import HaloError

CaseFamily = Literal["kl", "wan21"]
Configuration = Literal["baseline", "phase1", "phase2", "phase3", "stock"]
Scenario = Literal["frozen", "cold", "warm", "hot"]
Lane = Literal["single", "instrumented", "nightly"]

CONFIGURATIONS: tuple[Configuration, ...] = get_args(Configuration)
"""Plain untiled torch; pool, tiles, layout and caching; + precision, batch and prefetch; + streaming and adapting;
ComfyUI's own decode, where there is one."""
SCENARIOS: tuple[Scenario, ...] = get_args(Scenario)
"""From no cache to all of them: frozen, cold, warm, hot."""
SCENARIO_GROUPS: dict[str, tuple[Scenario, ...]] = {"all": SCENARIOS[1:], "everything": SCENARIOS}
"""Words that stand for several cache conditions."""
LANES: tuple[Lane, ...] = get_args(Lane)
"""Kinds of measurement that are never mixed: one case at a time, the whole suite with sampling, the nightly run."""

SCALE_PX = 8
"""Picture pixels per latent element, along height and width, of both families."""
LATENT_CHANNELS: dict[CaseFamily, int] = {"kl": 4, "wan21": 16}
"""Channels of a case's own latent: those of SD 1.5 and SDXL, and of Wan 2.1."""


class BenchError(HaloError):
    """A benchmark cannot be run, kept, read, reported or published as asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCase:
    """One decode that is timed. ValueError where sizes do not fit together."""

    key: str
    """Word for the command line and for results; never changes."""
    title: str
    family: CaseFamily
    width_px: int
    height_px: int
    batch: int = 1
    asked_frames: int = 1
    """Frames wanted of each clip; 1 for pictures."""
    precision: Literal["fp32", "fp16"] = "fp32"
    """What the case asks for. A device that lacks it may replace it, and the run then says so."""

    def __post_init__(self) -> None:
        """See the class."""
        if min(self.width_px, self.height_px, self.batch, self.asked_frames) < 1:
            raise ValueError(f"{self.key}: sizes, batch and frames must be at least 1")
        if self.width_px % SCALE_PX or self.height_px % SCALE_PX:
            raise ValueError(f"{self.key}: {self.width_px}x{self.height_px} is no multiple of {SCALE_PX} pixels")
        if self.family == "kl" and self.asked_frames != 1:
            raise ValueError(f"{self.key}: a picture decoder gives 1 frame, not {self.asked_frames}")

    @property
    def is_video(self) -> bool:
        """True where clips are decoded."""
        return self.family == "wan21"

    @property
    def latent_frames(self) -> int:
        """Latent frames that give `asked_frames` or the next more."""
        return 1 + (self.asked_frames + 2) // 4 if self.is_video else 1

    @property
    def decoded_frames(self) -> int:
        """Frames that come out: Wan gives 1 + 4 n, of which the first `asked_frames` are kept."""
        return 1 + 4 * (self.latent_frames - 1) if self.is_video else 1

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """[B, C, H, W], of clips [B, C, T, H, W], with the channels of `LATENT_CHANNELS`."""
        return self.shape_for(LATENT_CHANNELS[self.family])

    def shape_for(self, channels: int) -> tuple[int, ...]:
        """The same for a VAE whose latent has other channels (16 for Flux)."""
        size = (self.height_px // SCALE_PX, self.width_px // SCALE_PX)
        return (self.batch, channels, self.latent_frames, *size) if self.is_video else (self.batch, channels, *size)


CASES: tuple[BenchCase, ...] = (
    BenchCase(key="small_image", title="Small Image", family="kl", width_px=256, height_px=256),
    BenchCase(key="medium_image", title="Medium Image", family="kl", width_px=512, height_px=512),
    BenchCase(key="large_image", title="Large Image", family="kl", width_px=1024, height_px=1024),
    BenchCase(key="batch_processing", title="Batch Processing", family="kl", width_px=256, height_px=256, batch=4),
    BenchCase(
        key="precision_test", title="Precision Test", family="kl", width_px=512, height_px=512, precision="fp16"
    ),
    BenchCase(
        key="memory_optimization_test", title="Memory Optimization Test", family="kl", width_px=1024, height_px=1024
    ),
    BenchCase(
        key="video_processing", title="Video Processing", family="wan21", width_px=256, height_px=256, asked_frames=16
    ),
    BenchCase(
        key="batch_video", title="Batch Video", family="wan21", width_px=512, height_px=512, batch=4, asked_frames=8
    ),
)
"""In the order of every table."""
_BY_KEY = {case.key: case for case in CASES}


def case_of(key: str) -> BenchCase:
    """The case with this key. BenchError names those there are."""
    if key not in _BY_KEY:
        raise BenchError(f"there is no case {key!r}; choose from {', '.join(_BY_KEY)}")
    return _BY_KEY[key]


def title_of(key: str) -> str:
    """The case's title, or the key itself where it is not one of `CASES` (a smoke run's)."""
    return _BY_KEY[key].title if key in _BY_KEY else key


def scenarios_of(word: str) -> tuple[Scenario, ...]:
    """What a cache condition or a group of them stands for. BenchError for another word."""
    if word in SCENARIO_GROUPS:
        return SCENARIO_GROUPS[word]
    for scenario in SCENARIOS:
        if word == scenario:
            return (scenario,)
    raise BenchError(f"there is no cache condition {word!r}; choose from {', '.join((*SCENARIOS, *SCENARIO_GROUPS))}")
