"""Measures on this device which choices make a decoder fast, and keeps them (`tuning.py`).

One axis at a time from the rules' own choice: every candidate is timed in turn with the best so far, on a small latent
and, where it wins there, on a large one. It replaces the best only if it is more than 3 % faster both times. Shapes of
tiles are the same at every resolution, so what is found (and what MIOpen searched for meanwhile) holds for all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Protocol

import torch
from torch import Tensor

from .accelerator import wait_for
from .decode import Decoder, Engine
from .device import DeviceProfile
from .errors import HaloError, SettingsError
from .errors_oom import is_out_of_memory
from .packing import dtype_name
from .settings import DecodeSettings
from .tuning import Measured, Outcome, Overrides, TunedEntry, TuningKey, TuningStore, key_of
from .video.ops import is_video

GAIN = 0.03
"""A candidate must save more than this share of the time, twice."""
RUNS = 3
"""Timed runs of a candidate per probe, each beside one of the best so far; the first of a shape is not timed."""
PROBES = (12, 32)
"""Edges of the probes in latent pixels: small to sort out, and one tile of the default plan."""
CLIP_PROBE_FRAMES = 3
MAX_ERROR = {"fp32": 2e-3, "float32": 2e-3}
"""Largest distance from the float32 picture in 0-1 that a candidate may have, by its arithmetic: beyond it something is
wrong."""
NARROW_ERROR = 0.25
"""The same for any narrower arithmetic, a decoder's own too."""


class Timer(Protocol):
    """Times one decode."""

    def __call__(self, overrides: Overrides, probe: int, *, first: bool) -> int:
        """Nanoseconds of one decode with these choices on probe `probe`; `first`: not counted, shapes are new."""


Check = Callable[[Overrides, int], float]
"""Largest distance of a candidate's picture from the float32 one."""
Try = Callable[[Overrides], Outcome]
"""Whether a risky candidate survives in a process of its own."""
Same = Callable[[Overrides, Overrides], bool]
"""Whether two candidates do the same work."""
Report = Callable[[int, int, str], None]
"""(candidates done, in all, what is going on); may raise to cancel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What tuning may spend and try."""

    budget_s: float = 60.0
    """After so many seconds nothing more is timed; a decode that runs is finished, and so are those of the rules."""
    precisions: bool = False
    """Try narrower arithmetic too: it changes the picture, by the error that is kept with it."""
    fp16_accumulation: bool = False
    """Try kernels that add up in float16."""


@dataclass(slots=True)
class _State:
    """The best so far, and all that was measured."""

    best: Overrides = Overrides()  # noqa: RUF009 (frozen)
    best_ns: int = 0
    best_error: float | None = None
    measured: list[Measured] = field(default_factory=list)
    complete: bool = True
    loaded: str = "float32"


class _TimeIsUp(Exception):  # noqa: N818 (an outcome)
    """The budget is spent in the middle of a candidate, which then counts as not tried."""


def candidates(decoder: Decoder, profile: DeviceProfile, options: TuneOptions) -> list[list[Overrides]]:
    """What to try, axis by axis; each axis varies the best of those before it."""
    video = is_video(decoder.program)
    on_cpu = profile.kind == "cpu"
    backends = ["torch", "conv2d_sum"] if video else ["torch", "shifted_gemm"]
    if on_cpu:
        backends.append("winograd")
    axes = [[Overrides(kernel_backend=name) for name in backends]]
    if options.fp16_accumulation:
        axes[0].append(Overrides(kernel_backend="kitchen", fp16_accumulation=True))
    if video:
        axes.append([Overrides(convolution3d="conv3d"), Overrides(convolution3d="conv2d_sum")])
    axes.append([Overrides(layout="channels_last"), Overrides(layout="contiguous")])
    axes.append([Overrides(strategy="strips"), Overrides(strategy="tiles")])
    axes.append([Overrides(tile_bytes=profile.tile_bytes * k // 4) for k in (1, 2, 8, 16)])
    axes.append([Overrides(attention="sdpa"), Overrides(attention="matmul")])
    if video:
        axes.append([Overrides(chunk_lat=n) for n in (1, 2, 4, 8)])
    if options.precisions:
        allowed = {"float16": "fp16", "bfloat16": "bf16"}
        native = [d for d in profile.native_dtypes if d in allowed]
        modes = ["mixed"] * bool(native) + [allowed[d] for d in native if d in decoder.program.working_dtypes]
        axes.append([Overrides(precision_mode=mode) for mode in modes])
    return [axis for axis in axes if axis]


def is_risky(overrides: Overrides, profile: DeviceProfile) -> bool:
    """True where a candidate may take its process with it: anything that is not the device's rule, on a HIP device."""
    return profile.kind == "hip" and overrides != Overrides()


def tune(
    decoder: Decoder,
    profile: DeviceProfile,
    options: TuneOptions = TuneOptions(),
    *,
    store: TuningStore,
    timer: Timer,
    check: Check,
    survive: Try,
    same: Same = lambda one, other: False,
    report: Report = lambda done, total, text: None,
    clock: Callable[[], float] = time.monotonic,
    now: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
) -> TunedEntry:
    """Measure, keep and return what was found. What the report raises leaves what was measured so far in the store.

    A candidate that does the `same` work as the best so far, or as the one its axis began with, is not timed.
    """
    key = key_of(decoder.program, dtype_name(decoder.loaded_dtype), profile)
    known = store.get(key)
    state, begun = _State(loaded=key.dtype), clock()
    axes = candidates(decoder, profile, options)
    total, done = sum(map(len, axes)), 0
    report(0, total, "timing the rules' own choice")
    rule_ns = _time_alone(timer, Overrides(), len(PROBES) - 1)

    def in_time(overrides: Overrides, probe: int, *, first: bool) -> int:
        if clock() - begun >= options.budget_s:
            raise _TimeIsUp
        return timer(overrides, probe, first=first)

    state.best_ns = rule_ns
    bad = known.bad if known is not None else frozenset[Overrides]()
    state.measured += [m for m in (known.measured if known is not None else ()) if m.overrides in bad]
    try:
        for axis in axes:
            start = state.best
            for candidate in axis:
                merged = _merge(start, candidate)
                report(done, total, merged.text)
                if clock() - begun >= options.budget_s:
                    state.complete = False
                elif merged not in bad and not any(merged == o or same(merged, o) for o in (state.best, start)):
                    try:
                        _try_candidate(state, merged, profile, in_time, check, survive)
                    except _TimeIsUp:
                        state.complete = False
                done += 1
        report(total, total, f"best: {state.best.text}")
    except BaseException:
        state.complete = False
        _keep(store, key, state, rule_ns, now(), known)
        raise
    return _keep(store, key, state, rule_ns, now(), known)


def _keep(
    store: TuningStore, key: TuningKey, state: _State, rule_ns: int, now: datetime, known: TunedEntry | None
) -> TunedEntry:
    """What was found. A run that was cut short does not take the place of an earlier one that had found more."""
    entry = TunedEntry(
        key=key, best=state.best, rule_ns=rule_ns, best_ns=state.best_ns, max_error=state.best_error,
        complete=state.complete, measured=tuple(state.measured), created=now.isoformat(timespec="seconds"),
    )  # fmt: skip
    if known is not None and not entry.complete and entry.gain < known.gain:
        new = tuple(m for m in entry.measured if m.overrides in entry.bad - known.bad)
        if known.best not in entry.bad:
            store.put(replace(known, measured=known.measured + new))
            return entry
    store.put(entry)
    return entry


def _merge(base: Overrides, change: Overrides) -> Overrides:
    return replace(base, **{f: v for f in change.__slots__ if (v := getattr(change, f)) is not None})


def _try_candidate(
    state: _State, candidate: Overrides, profile: DeviceProfile, timer: Timer, check: Check, survive: Try
) -> None:
    """Time a candidate beside the best so far, small probe first; keep it as the best if it wins twice."""
    outcome: Outcome = survive(candidate) if is_risky(candidate, profile) else "ok"
    if outcome != "ok":
        state.measured.append(Measured(overrides=candidate, outcome=outcome, note="in a process of its own"))
        return
    times: tuple[int, int] = (0, 0)
    error: float | None = None
    for probe in range(len(PROBES)):
        try:
            times = _time_in_turn(timer, state.best, candidate, probe)
            error = check(candidate, probe)
        except (HaloError, RuntimeError, NotImplementedError, MemoryError) as e:
            note = "out of memory" if is_out_of_memory(e) else (str(e).split("\n")[0] or type(e).__name__)
            state.measured.append(Measured(overrides=candidate, outcome="failed", note=note))
            return
        limit = MAX_ERROR.get(candidate.precision_mode or state.loaded, NARROW_ERROR)
        inexact = not error <= limit  # also where it is NaN
        state.measured.append(
            Measured(
                overrides=candidate, outcome="inexact" if inexact else "ok", ns=times[1], beside_ns=times[0], runs=RUNS,
                probe=(PROBES[probe],), max_error=error if error == error else None,
            )
        )  # fmt: skip
        if inexact or times[1] >= times[0] * (1 - GAIN):
            return
    state.best, state.best_ns, state.best_error = candidate, times[1], error


def _time_alone(timer: Timer, overrides: Overrides, probe: int) -> int:
    timer(overrides, probe, first=True)
    return int(statistics.median(timer(overrides, probe, first=False) for _ in range(RUNS)))


def _time_in_turn(timer: Timer, best: Overrides, candidate: Overrides, probe: int) -> tuple[int, int]:
    """Medians of both, interleaved, so that a slow moment of the machine hits both."""
    for overrides in (best, candidate):
        timer(overrides, probe, first=True)
    pairs = [(timer(best, probe, first=False), timer(candidate, probe, first=False)) for _ in range(RUNS)]
    return int(statistics.median(a for a, _ in pairs)), int(statistics.median(b for _, b in pairs))


class DecodeTimer:
    """Times real decodes of random latents with one engine's pool; also compares pictures."""

    def __init__(self, decoder: Decoder, profile: DeviceProfile, *, seed: int = 0) -> None:
        """Nothing runs yet."""
        self._decoder, self._profile = decoder, profile
        self._engine = Engine(profile=profile)
        self._latents = [self._latent(edge, seed) for edge in PROBES]
        self._reference: dict[int, Tensor] = {}

    def _latent(self, edge: int, seed: int) -> Tensor:
        program = self._decoder.program
        frames = (CLIP_PROBE_FRAMES,) if is_video(program) else ()
        generator = torch.Generator().manual_seed(seed)
        return torch.randn((1, program.latent_channels, *frames, edge, edge), generator=generator)

    def __call__(self, overrides: Overrides, probe: int, *, first: bool) -> int:
        """See Timer. Synchronises a device before and after."""
        del first
        self._synchronise()
        start = time.perf_counter_ns()
        self._decode(overrides, probe)
        self._synchronise()
        return time.perf_counter_ns() - start

    def check(self, overrides: Overrides, probe: int) -> float:
        """See Check."""
        if probe not in self._reference:
            self._reference[probe] = self._decode(Overrides(precision_mode="fp32"), probe)
        return float((self._decode(overrides, probe) - self._reference[probe]).abs().max())

    def close(self) -> None:
        """Give the memory back."""
        self._engine.pool.clear()

    def _decode(self, overrides: Overrides, probe: int) -> Tensor:
        engine = Engine(profile=overrides.profile(self._profile), pool=self._engine.pool)
        settings = overrides.settings(DecodeSettings(seed=0))
        return engine.decode(self._decoder, self._latents[probe], settings)

    def _synchronise(self) -> None:
        wait_for(self._decoder.device)


def check_options(options: TuneOptions) -> None:
    """SettingsError for a budget that allows nothing."""
    if not options.budget_s > 0:
        raise SettingsError(f"the budget is {options.budget_s} s; give more than 0")
