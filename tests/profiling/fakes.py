"""Clocks, devices and counters that tests turn by hand, and small events to feed a recording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from halo_vae.optim.events import Choice, ConvShape, Fallback, OpReport, PeakPrediction, PlanSummary
from halo_vae.optim.settings import DecodeSettings
from halo_vae.profiling.collector import Collector
from halo_vae.profiling.environment import Environment, EnvVariable
from halo_vae.profiling.memory import MemoryCounters
from halo_vae.profiling.record import Identity, Request
from halo_vae.profiling.run import Run
from halo_vae.profiling.tally import SeenShapes

MS = 1_000_000
SECOND = 1_000_000_000
GIB = 1 << 30

IDENTITY = Identity(vae_hash="0123456789abcdef", family="kl", loaded_dtype="float32", device="cpu")
ON_GPU = Identity(vae_hash="0123456789abcdef", family="kl", loaded_dtype="float32", device="cuda:0")
REQUEST = Request(settings=DecodeSettings(), latent_shape=(1, 4, 64, 64), latent_dtype="float32")
PREDICTED = PeakPrediction(pool=300, scratch=60, packed=30, output=10)
PLAN = PlanSummary(
    method="exact",
    approximate=False,
    strategy="tiles",
    layout="channels_last",
    tile_px=(256, 256),
    overlap_px=0,
    n_tiles=9,
    tile_grid=(3, 3),
    images_per_pass=2,
    n_passes=1,
    macs=1_000_000,
    bytes_moved=4_000,
    predicted=PREDICTED,
    choices=(Choice(name="precision", value="mixed", reason="512 < edge < 1024"),),
)
ENVIRONMENT = Environment(
    python="3.11.7", torch="2.13.0", cuda=None, hip=None, miopen=None, cudnn=None, os="Linux 6.8.0", machine="x86_64",
    cpu="Some CPU", cpu_count=4, threads=2, device="cpu", device_arch=None,
    variables=(EnvVariable(name="OMP_NUM_THREADS", value="2"),),
)  # fmt: skip
CONV = ConvShape(input=(1, 4, 66, 66), weight=(8, 4, 3, 3), dtype="float32", layout="channels_last")
FALLBACK = Fallback(kind="non_finite", where="decoder.conv_in", given="float16", used="float32", reason="inf")


RECORD_ID = "00112233445566778899aabbccddeeff"


class FakeClock:
    """Stands still until it is moved."""

    def __init__(self, now_ns: int = 5 * SECOND) -> None:
        self.ns = now_ns

    def now_ns(self) -> int:
        return self.ns

    def advance(self, ns: int) -> None:
        self.ns += ns


class FakeDevice:
    """Runs behind the host: work that is `launch`ed passes on its queue, and on the host's clock only in `sync`."""

    def __init__(self, clock: FakeClock, *, has_events: bool = True) -> None:
        self.clock = clock
        self.has_events = has_events
        self.queue_ns = 0
        self.done_ns = 0
        self.syncs = 0
        self.made: list[int] = []
        self.recycled = 0

    def launch(self, ns: int) -> None:
        self.queue_ns += ns

    def sync(self) -> None:
        self.syncs += 1
        self.clock.advance(self.queue_ns - self.done_ns)
        self.done_ns = self.queue_ns

    def event(self) -> Any:
        self.made.append(self.queue_ns)
        return len(self.made) - 1

    def reached(self, event: Any) -> bool:
        return self.made[event] <= self.done_ns

    def elapsed_ns(self, start: Any, end: Any) -> int:
        if not self.reached(end):
            raise RuntimeError("the device has not passed this event")
        return self.made[end] - self.made[start]

    def recycle(self, event: Any) -> None:
        self.recycled += 1


@dataclass
class FakeCounter:
    """A memory level with a peak, in bytes."""

    now: int = 0
    resettable: bool = True
    peak: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.peak = self.now

    def touch(self, nbytes: int) -> None:
        """Rise by `nbytes` and fall back."""
        self.peak = max(self.peak, self.now + nbytes)

    def now_bytes(self) -> int | None:
        return self.now

    def peak_bytes(self) -> int | None:
        return self.peak

    def reset_peak(self) -> bool:
        if self.resettable:
            self.peak = self.now
        return self.resettable


def no_counters(device: str) -> MemoryCounters:
    return MemoryCounters(allocated=None, reserved=None, process=None, available_bytes=None)


class CpuTime:
    """CPU time of the process, moved by hand."""

    def __init__(self) -> None:
        self.ns = 7 * SECOND

    def __call__(self) -> int:
        return self.ns


def make_collector(level: Any = "summary", *, clock: FakeClock | None = None, **given: Any) -> Collector:
    """A collector that touches nothing real."""
    plain: dict[str, Any] = {
        "clock": clock or FakeClock(),
        "timer": lambda device: None,
        "memory": no_counters,
        "environment": lambda device: ENVIRONMENT,
        "utc_now": lambda: datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=timezone.utc),
        "cpu_time_ns": CpuTime(),
        "seen": SeenShapes(),
        "new_id": lambda: RECORD_ID,
        "energy": lambda device: None,
    }
    return Collector(level, **(plain | given))


def record_events(collector: Collector, events: Callable[[Run], None], identity: Identity = IDENTITY) -> Any:
    """The record of a decode that reports `events` and ends well."""
    with collector.recording(identity, REQUEST) as run:
        events(run)
        run.delivered((1, 512, 512, 3))
    return run.record


def record_failure(
    collector: Collector,
    error: BaseException,
    events: Callable[[Run], Any] = lambda run: None,
    identity: Identity = IDENTITY,
) -> BaseException:
    """What leaves a recording in which a decode reports `events` and then raises `error`."""
    try:
        with collector.recording(identity, REQUEST) as run:
            events(run)
            raise error
    except BaseException as caught:
        return caught


def report(name: str = "decoder.conv_in", macs: int = 100, dtype: str = "float32", native: str = "float32") -> OpReport:
    return OpReport(name=name, kind="conv", n_tiles=9, macs=macs, dtype=dtype, native_dtype=native, backend="torch")


def busy_events(run: Run) -> None:
    """One of every event."""
    run.mark("plan")
    run.cache_lookup("program", True)
    run.cache_lookup("plan", False)
    run.planned(PLAN)
    run.pool_request(1000, True)
    run.pool_request(500, False)
    run.op_started(0, 1, "decoder.conv_in", 9)
    run.tile_started(0, 9, (1, 4, 66, 66), "float16")
    run.conv_requested(CONV)
    run.op_redone("decoder.conv_in", "float16", 50)
    run.fallback(FALLBACK)
    run.op_done(report(macs=100))
    run.op_done(report("decoder.conv_out", macs=300, dtype="bfloat16"))
    run.converted(40)
    run.chunk_started(0, 2)
    run.chunk_started(1, 2)
    run.boundary(0, 4, 0.75)
    run.prefetch_asked(True)
    run.prefetch_asked(False)
    run.pass_done(2, 2)
    run.pass_done(1, 2)
    run.progress(1000, 1000)
