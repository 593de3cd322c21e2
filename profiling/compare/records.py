"""What is asked of an installation, what it tells, and all of it together: frozen records, JSON by the codec."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..bench.cases import BenchError, Configuration
from ..bench.configurations import Precision
from ..bench.results import RunFacts, RunStatus
from ..environment import Environment, EnvVariable
from .cases import USUAL, CompareCase

SCHEMA_VERSION = 1
MIN_ROUNDS = 5
TIME_LIMIT_S = 300.0
"""Default for one process."""
DeviceKind: TypeAlias = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """A Python that has torch, numpy and safetensors, and what it is called."""

    name: str
    python: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """Installations by cases by rounds. BenchError where they do not go together."""

    installations: tuple[Installation, ...]
    reference: str = ""
    """Name of the installation that the others are measured by; empty = the first."""
    cases: tuple[CompareCase, ...] = USUAL
    rounds: int = MIN_ROUNDS
    """Processes per case and installation."""
    threads: int | None = None
    """None = as many as each torch takes."""
    devices: tuple[DeviceKind, ...] | None = None
    """None = the CPU, and the GPU where any installation has one."""
    seed: int = 0
    time_limit_s: float = TIME_LIMIT_S
    host: str = "unnamed"
    """What results call the machine."""

    def __post_init__(self) -> None:
        """See the class."""
        names = [one.name for one in self.installations]
        if not names:
            raise BenchError("there is nothing to compare; name an installation with --env NAME=PYTHON")
        if len(set(names)) != len(names):
            raise BenchError(f"two installations are called {_twice(names)}; give each --env a name of its own")
        if self.reference and self.reference not in names:
            raise BenchError(f"--reference {self.reference} is no installation; choose from {', '.join(names)}")
        if not self.cases:
            raise BenchError("there is nothing to run; name at least one case")
        if self.rounds < 1:
            raise BenchError(f"--runs is {self.rounds}; give {MIN_ROUNDS} or more")
        if self.threads is not None and self.threads < 1:
            raise BenchError(f"--threads is {self.threads}; give 1 or more")
        if not self.time_limit_s > 0:
            raise BenchError(f"--time-limit is {self.time_limit_s:g} seconds; give more than 0")
        if not 0 <= self.seed < 2**63:
            raise BenchError(f"--seed is {self.seed}; give 0 to 2**63 - 1")

    @property
    def reference_name(self) -> str:
        """The installation that is 100 %."""
        return self.reference or self.installations[0].name


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One task for a child process. `set_up` tells what is installed and decodes nothing."""

    task: Literal["set_up", "round"]
    device: str = "cpu"
    """As torch spells it."""
    threads: int | None = None
    vae: str = ""
    latent_shape: tuple[int, ...] = ()
    seed: int = 0
    configuration: Configuration = "baseline"
    precision: Precision = "fp32"
    iterations: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What an installation is made of and how it is set. None = not there, or not to be found out."""

    environment: Environment
    numpy: str
    safetensors: str
    build: str
    """`torch.__config__.show()`."""
    parallel: str
    """`torch.__config__.parallel_info()`."""
    has_gpu: bool
    gpus: tuple[str, ...] = ()
    blas: str | None = None
    lapack: str | None = None
    mkl: str | None = None
    onednn: str | None = None
    has_mkl: bool | None = None
    has_onednn: bool | None = None
    """Built in and on: what torch's own check says."""
    has_openmp: bool | None = None
    build_type: str | None = None
    compiler: str | None = None
    cpu_capability: str | None = None
    """Widest vectors that torch's own kernels use: "AVX512", "DEFAULT"."""
    interop_threads: int | None = None
    gpu_library_on: bool | None = None
    """`torch.backends.cudnn.enabled`, which on ROCm is MIOpen's switch; None without a GPU."""
    allocator: str | None = None
    """Backend of the GPU's allocator; None without a GPU."""
    float32_matmul: str | None = None
    deterministic: bool | None = None
    variables: tuple[EnvVariable, ...] = ()
    """Those of the environment that matter, further ones than a record has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One round in one process."""

    ns: int
    """All iterations together."""
    cpu_ns: int
    """CPU time of the process meanwhile, all threads."""
    iterations: int
    warm_up_ns: int
    """The first decode of the process, which is in no figure."""
    dtype: str
    threads: int
    peak_bytes: int | None = None
    """Highest resident set of the whole process, libraries included."""
    gpu_peak_bytes: int | None = None
    """Most that torch's allocator took from the GPU; None on a CPU."""
    look: tuple[float, ...] = ()
    """Some values of the pictures, spread evenly, to compare installations by."""
    facts: RunFacts = field(default_factory=RunFacts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a child tells at its end."""

    status: Literal["ok", "failed", "not_finite"] = "ok"
    error: str | None = None
    setup: Setup | None = None
    measured: Measured | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One process of one installation: what it measured, or why not."""

    installation: str
    case: str
    device: DeviceKind
    round: int
    """From 0."""
    status: RunStatus
    started_at: str
    """UTC, ISO 8601."""
    error: str | None = None
    latent_shape: tuple[int, ...] = ()
    process_ns: int | None = None
    """From start to end of the process."""
    measured: Measured | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupRead:
    """An installation's setup, or why there is none."""

    installation: str
    setup: Setup | None = None
    status: RunStatus = "ok"
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that was measured, in order."""

    host: str
    started_at: str
    reference: str
    installations: tuple[str, ...]
    """Names; where their Pythons lie is nobody's business."""
    cases: tuple[CompareCase, ...]
    devices: tuple[DeviceKind, ...]
    rounds_asked: int
    setups: tuple[SetupRead, ...]
    rounds: tuple[Round, ...]
    load_before: float | None = None
    """Runnable threads over the last minute, before anything was started; later loads are our own processes' too."""
    cancelled: bool = False
    schema_version: int = SCHEMA_VERSION
    kind: Literal["comparison"] = "comparison"

    def setup_of(self, name: str) -> Setup | None:
        """What an installation is made of."""
        return next((read.setup for read in self.setups if read.installation == name), None)


def _twice(names: list[str]) -> str:
    return next(name for name in names if names.count(name) > 1)
