"""What a benchmark asks of a child process and what it hears: one JSON object per line, typed at both ends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from ..codec import decode, encode
from ..environment import Environment
from .cases import Configuration
from .configurations import Precision
from .results import RunFacts

Task = Literal["describe", "reference", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRequest:
    """One task. `describe` needs the device only; `reference` writes the untiled float32 picture to `reference`."""

    task: Task
    device: str
    """As torch spells it, or "auto"."""
    threads: int | None
    vae: str = ""
    """Path of the VAE's file."""
    latent_shape: tuple[int, ...] = ()
    seed: int = 0
    configuration: Configuration = "baseline"
    precision: Precision = "fp32"
    plan: Literal["auto", "strips", "tiles"] = "auto"
    kernel_backend: Literal["auto", "torch", "winograd", "shifted_gemm", "conv2d_sum", "kitchen"] = "auto"
    warm_ups: int = 0
    runs: int = 0
    with_loading: bool = False
    """Opening the VAE's file is a part of each time, and each time opens it anew."""
    reference: str | None = None
    """Path of the picture to compare with; None compares with nothing."""
    comfyui: str | None = None
    """Folder of ComfyUI, for the configuration `stock`."""
    probe: str | None = None
    """A Python file that is run first in the child, see `probe.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A device, as the process that has it sees it."""

    environment: Environment
    device: str
    """As torch spells it."""
    arch: str
    threads: int
    has_fp16: bool
    """It multiplies float16 at full speed."""
    pci: str | None
    """Address of a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run found beside its times. None = not to be found out."""

    dtype: str
    shapes: tuple[str, ...]
    """Distinct convolution shapes of the whole process, as words."""
    n_new: int | None
    """Those that were asked for during the timed decodes first."""
    max_error: float | None
    mean_error: float | None
    psnr_db: float | None
    psnr_infinite: bool
    peak_bytes: int | None
    charges: int | None
    facts: RunFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEvent:
    """One thing that a child tells. A time is positive nanoseconds."""

    event: Literal["described", "warm_up", "sample", "not_finite", "failed", "done"]
    ns: int | None = None
    sentence: str | None = None
    described: Described | None = None
    measured: Measured | None = None


def to_line(value: ChildRequest | ChildEvent) -> bytes:
    """With its line feed."""
    return json.dumps(encode(value), ensure_ascii=True, allow_nan=False).encode() + b"\n"


def request_from(line: bytes) -> ChildRequest:
    """ValueError for anything else."""
    return decode(ChildRequest, json.loads(line), "request")


def event_from(line: bytes) -> ChildEvent:
    """ValueError for anything else."""
    return decode(ChildEvent, json.loads(line), "event")
