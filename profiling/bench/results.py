"""Results of benchmarks: one JSON line per run, appended whole, read past torn lines. Samples only, no statistics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from ...optim.files import locked
from ..codec import decode, encode
from ..environment import Environment, environment_id
from ..store_format import upgrade
from ..store_write import append_bytes
from .cases import BenchError, Configuration, Lane, Scenario

SCHEMA_VERSION = 1
"""Of results. History: 1, the first."""
UPGRADES: Mapping[int, Any] = {}
"""Step from format n to n + 1, by n; empty while format 1 is the first."""
RunStatus = Literal["ok", "failed", "timeout", "crashed", "not_finite", "cancelled", "refused"]
STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)
PageCache = Literal["dropped", "kept", "unverified"]
Served = Literal["recomputed", "cached"]
_SHOWN_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeCounts:
    """Convolution shapes that a run asked its backend for."""

    requested: int
    """Distinct shapes."""
    new: int | None = None
    """Those that this process had not asked for before the timed decode; None = not counted."""
    not_in_hot: tuple[str, ...] = ()
    """Those that the hot run did not ask for, as words. A warm run must have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What may make a run's times doubtful. None = not to be found out."""

    load_before: float | None = None
    """Runnable threads over the last minute, before the first sample."""
    load_after: float | None = None
    cores: int | None = None
    wait_policy: str | None = None
    """OMP_WAIT_POLICY of the process that was timed; None = not set."""
    clock_drift_ns: int | None = None
    """How far the wall clock and the monotonic clock moved apart during the run; negative = the wall clock fell."""
    run_ns: int | None = None
    """Length of the whole run by the monotonic clock, which `clock_drift_ns` is compared with."""
    temperature_before_c: float | None = None
    temperature_after_c: float | None = None
    throttled: bool | None = None
    """True where the device or CPU says that it lowered its clock because of heat or power."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """One run: a case in one configuration under one cache condition. ValueError where fields contradict each other.

    A float that is inf or nan is refused: a picture that is not finite is a status, and a perfect one a flag.
    """

    run_id: str
    """32 hex digits."""
    session: str
    """Shared by the runs of one invocation: its start as 20260131T235959Z, which permalinks are named after."""
    lane: Lane
    case: str
    """Key of a BenchCase."""
    configuration: Configuration
    scenario: Scenario
    host: str
    """Label of the machine, which a report shows and `publish` publishes."""
    arch: str
    """Architecture of what decoded: "gfx1151", "sm_90", "x86_64"."""
    device: str
    """torch's type of it: "cpu" or "cuda"."""
    dtype: str
    """What was decoded in: "fp32", "bf16", "fp16", "mixed"."""
    threads: int
    vae: str
    """Which weights: "random:sd", "random:wan21/4", "tiny", or the hash of a file's. Others are other figures."""
    status: RunStatus
    started_at: str
    """UTC, ISO 8601. For people: nothing is sorted or timed by it."""
    environment: Environment
    environment_id: str
    """See `environment_id`; equal for equal environments."""
    samples_ns: tuple[int, ...] = ()
    """Raw times of the timed decodes, in order; those that ended before a run was cancelled or failed included."""
    warm_ups_ns: tuple[int, ...] = ()
    """Raw times of the decodes before them. Never a part of a statistic."""
    asked_samples: int | None = None
    """Samples that were wanted."""
    error: str | None = None
    """One sentence, exactly when the status is not "ok"."""
    seed: int | None = None
    """Of the latent and of random weights."""
    latent_shape: tuple[int, ...] = ()
    decoded_frames: int | None = None
    """Frames that came out, of which the case's `asked_frames` are kept; None for pictures."""
    note: str | None = None
    """What a reader must know to compare: "bf16 in place of fp16", "quarter-width Wan"."""
    max_error: float | None = None
    """Largest difference from the untiled float32 decode, pictures in 0-1; None = not compared."""
    mean_error: float | None = None
    psnr_db: float | None = None
    """None where not compared, and where the pictures are equal (`psnr_infinite`)."""
    psnr_infinite: bool = False
    peak_bytes: int | None = None
    """Peak memory of the run above its level before the first decode."""
    shapes: ShapeCounts | None = None
    cache_charges: int | None = None
    """Kernel searches that a backend's on-disk cache was charged for; None = it does not count them."""
    page_cache: PageCache = "kept"
    """Whether the VAE's file was dropped from memory before a frozen run, and whether that could be verified."""
    served: Served | None = None
    """Of a hot run: computed again, or taken from a cache of results."""
    facts: RunFacts = field(default_factory=RunFacts)
    schema_version: int = SCHEMA_VERSION
    kind: Literal["run"] = "run"

    def __post_init__(self) -> None:
        """See the class."""
        ok = self.status == "ok"
        if ok != (self.error is None):
            raise ValueError(f"status {self.status} contradicts error={self.error!r}; runs that are not ok have one")
        if ok and not self.samples_ns:
            raise ValueError("status ok contradicts a run without a sample")
        if self.samples_ns and self.status in ("not_finite", "refused"):
            raise ValueError(f"status {self.status} contradicts samples: a picture that is not right has no time")
        if min((*self.samples_ns, *self.warm_ups_ns), default=1) < 1:
            raise ValueError("a time is below 1 ns; the clock that times runs must never go back")
        if self.psnr_infinite and self.psnr_db is not None:
            raise ValueError(f"psnr_db={self.psnr_db} contradicts psnr_infinite")
        if self.lane == "nightly" and self.scenario == "frozen":
            raise ValueError("a frozen run contradicts the nightly lane: others use the machine's memory meanwhile")
        if self.threads < 1:
            raise ValueError(f"threads is {self.threads}; at least 1 is needed")
        _refuse_non_finite(self, "run")

    @property
    def is_verified(self) -> bool:
        """False for a frozen run whose file may have been in memory all the same: it is in no ratio."""
        return self.scenario != "frozen" or self.page_cache == "dropped"

    @property
    def scenario_label(self) -> str:
        """The cache condition as shown: `frozen*` where it is not verified."""
        return self.scenario if self.is_verified else f"{self.scenario}*"

    @property
    def counts(self) -> bool:
        """True where its samples are figures: it is ok, or was cancelled after whole samples."""
        return bool(self.samples_ns) and self.status in ("ok", "cancelled")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesLine:
    """Readings of one sensor on one machine throughout an instrumented session. ValueError as RunLine."""

    session: str
    host: str
    name: str
    """What was read: "cpu_share", "rss_bytes", "gpu_busy_share", "gpu_clock_hz", "gpu_power_w", "read_bytes"."""
    unit: str
    """ "share" (0 to 1), "bytes", "bytes/s", "Hz", "W", "°C"."""
    at_ns: tuple[int, ...]
    """When, since the session's start; it never falls."""
    values: tuple[float | None, ...]
    """None where a reading failed."""
    lane: Lane = "instrumented"
    schema_version: int = SCHEMA_VERSION
    kind: Literal["series"] = "series"

    def __post_init__(self) -> None:
        """See the class."""
        if len(self.at_ns) != len(self.values):
            raise ValueError(f"{self.name} has {len(self.at_ns)} times and {len(self.values)} values; give as many")
        if any(later < earlier for earlier, later in zip(self.at_ns, self.at_ns[1:], strict=False)):
            raise ValueError(f"{self.name} was read at times that fall; use the monotonic clock")
        _refuse_non_finite(self, self.name)


Line: TypeAlias = RunLine | SeriesLine
_KINDS: Mapping[str, type[RunLine] | type[SeriesLine]] = {"run": RunLine, "series": SeriesLine}


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What was read, in the order of the file, and what could not be read."""

    runs: tuple[RunLine, ...] = ()
    series: tuple[SeriesLine, ...] = ()
    skipped: int = 0
    """Lines left out: torn, broken, or of a newer format."""
    problems: tuple[str, ...] = ()
    """One sentence per kind of line left out, 20 at most."""


class ResultsFile:
    """A `results.jsonl`: safe with several processes writing at once, and with one killed in the middle of a line."""

    def __init__(self, path: Path) -> None:
        """The file need not exist yet; its folder is made with the first line."""
        self.path = path

    def append(self, line: Line) -> None:
        """Add one line, on the disk when this returns. BenchError if that cannot be done; the file then stays whole."""
        raw = line_of(line)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.with_name(self.path.name + ".lock")):
                append_bytes(self.path, raw, sync=True)
        except OSError as error:
            raise BenchError(
                f"the result was not added to {self.path} ({error.strerror or error}); free space, or name another file"
            ) from error

    def read(self) -> Results:
        """All lines that can be read. BenchError where there is no file, or it cannot be opened."""
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError as error:
            raise BenchError(f"there are no results in {self.path}; run `halo-vae bench` first") from error
        except OSError as error:
            raise BenchError(f"{self.path} cannot be read ({error.strerror or error}); see its permissions") from error
        return parse_lines(raw.split(b"\n"), self.path.name)


def read_all(paths: Iterable[Path]) -> Results:
    """The lines of several files as one, a run that is in two of them once. BenchError as `ResultsFile.read`."""
    runs: dict[str, RunLine] = {}
    series: dict[SeriesLine, None] = {}
    skipped, problems = 0, dict[str, None]()
    for path in paths:
        found = ResultsFile(path).read()
        for run in found.runs:
            runs.setdefault(run.run_id, run)
        series.update(dict.fromkeys(found.series))
        skipped += found.skipped
        problems.update(dict.fromkeys(found.problems))
    return Results(runs=tuple(runs.values()), series=tuple(series), skipped=skipped, problems=tuple(problems))


def parse_lines(lines: Iterable[bytes], name: str) -> Results:
    """Lines that can be read as results, and the reasons why others cannot. `name` is the file's, for those."""
    runs: list[RunLine] = []
    series: list[SeriesLine] = []
    skipped, problems = 0, dict[str, None]()
    for raw in lines:
        if not raw.strip():
            continue
        try:
            line = parse_line(raw)
        except ValueError as error:
            skipped += 1
            if len(problems) < _SHOWN_PROBLEMS:
                problems.setdefault(f"{name}: {error}")
            continue
        if isinstance(line, RunLine):
            runs.append(line)
        else:
            series.append(line)
    return Results(runs=tuple(runs), series=tuple(series), skipped=skipped, problems=tuple(problems))


def line_of(line: Line) -> bytes:
    """A result as its line, line feed included: plain JSON, without inf and nan."""
    text = json.dumps(encode(line), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def parse_line(raw: bytes) -> Line:
    """The result in a line. ValueError with the reason where it cannot be read."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested without end
        raise ValueError("a torn line, left out") from None
    if not isinstance(found, dict) or found.get("kind") not in _KINDS:
        raise ValueError(f"a line is no result; results have one of the kinds {', '.join(_KINDS)}")
    kind = _KINDS[found["kind"]]
    return decode(kind, upgrade(found, UPGRADES, SCHEMA_VERSION), found["kind"])


def fingerprint(environment: Environment) -> dict[str, Any]:
    """`environment` and `environment_id` of a RunLine, for `RunLine(..., **fingerprint(read_environment(device)))`."""
    return {"environment": environment, "environment_id": environment_id(environment)}


def _refuse_non_finite(value: object, where: str) -> None:
    """ValueError where a record, or a tuple or record in it, holds inf or nan."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}; results hold finite numbers, and None where there is none")
    if isinstance(value, tuple):
        for one in value:
            _refuse_non_finite(one, where)
    elif is_dataclass(value):
        for f in fields(value):
            _refuse_non_finite(getattr(value, f.name), f"{where}.{f.name}")
