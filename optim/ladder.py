"""What a decode gives up, step by step, when memory is short, and the one loop that runs decodes of every kind.

The rungs are data: planning climbs down them until a plan fits what is free, and a failed allocation while running goes
to the next rung that takes less. Every rung but the last is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, Protocol, TypeVar

from .device import DeviceProfile
from .errors import PlanError
from .errors_oom import DecodeOutOfMemoryError, first_line, forget_frames, is_out_of_memory
from .events import DecodeObserver, Fallback, PlanSummary
from .executor import Progress, RestartDecode
from .precision import DtypeDecision

MAX_ATTEMPTS = 8
"""Most times a decode begins for want of memory, the first included."""

RungName = Literal["make_room", "smaller_tiles", "smaller_batch", "shorter_chunks", "offload", "blended"]
Given = Literal["", "tiles", "batch", "chunks", "offload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Squeeze:
    """What a plan gives up to take less memory; by default nothing."""

    tiles: int = 0
    """Times that the bytes of a tile are quartered."""
    batch: int = 0
    """1: one picture per pass."""
    chunks: int = 0
    """Of clips. 1: chunks of a quarter; 2: of one latent frame."""
    offload: int = 0
    """1: the widest values live in host memory, until half of the device's pool is left; 2: all that can."""

    @property
    def tile_divisor(self) -> int:
        """What the bytes of a tile are divided by."""
        return int(4**self.tiles)


UNSQUEEZED = Squeeze()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One way to take less memory."""

    name: RungName
    words: str
    """What records call it."""
    gives_up: Given = ""
    """The field of Squeeze that it raises; "" where the plan stays as it is."""
    steps: int = 1
    """Most times it is taken."""


MAKE_ROOM = Rung(name="make_room", words="kept memory given back")
SMALLER_TILES = Rung(name="smaller_tiles", words="smaller tiles", gives_up="tiles", steps=2)
SMALLER_BATCH = Rung(name="smaller_batch", words="one picture per pass", gives_up="batch")
SHORTER_CHUNKS = Rung(name="shorter_chunks", words="shorter chunks", gives_up="chunks", steps=2)
OFFLOAD = Rung(name="offload", words="widest values in host memory", gives_up="offload", steps=2)
BLENDED = Rung(name="blended", words="blended tiles")

PICTURE_RUNGS = (MAKE_ROOM, SMALLER_TILES, SMALLER_BATCH, OFFLOAD, BLENDED)
CLIP_RUNGS = (MAKE_ROOM, SMALLER_TILES, SHORTER_CHUNKS, BLENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A rung and all that has been given up once it is taken."""

    rung: Rung
    squeeze: Squeeze


def steps_of(rungs: Sequence[Rung]) -> tuple[Step, ...]:
    """The plans to try after the first one, in order; each gives up what those before it gave up."""
    steps, squeeze = [], UNSQUEEZED
    for rung in rungs:
        for level in range(1, rung.steps + 1):
            if rung.gives_up:
                squeeze = replace(squeeze, **{rung.gives_up: level})
                steps.append(Step(rung=rung, squeeze=squeeze))
    return tuple(steps)


class AnyPlan(Protocol):
    """What a plan of pictures and one of clips have in common."""

    @property
    def summary(self) -> PlanSummary:
        """What it comes to."""


P = TypeVar("P", bound=AnyPlan)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted(Generic[P]):
    """The first plan that fits, or the smallest of all."""

    plan: P
    taken: tuple[tuple[int, P], ...]
    """Positions in the steps that were taken, each with its plan."""
    fits: bool


def fit(
    first: P, start: int, steps: Sequence[Step], plan_for: Callable[[Squeeze], P], profile: DeviceProfile
) -> Fitted[P]:
    """Step down from `first` until a plan fits; steps that take no less than what came before are left out."""
    plan, taken = first, []
    for i in range(start, len(steps)):
        if profile.fits(plan.summary.predicted):
            break
        smaller = plan_for(steps[i].squeeze)
        if _needed(smaller, profile) < _needed(plan, profile):
            plan = smaller
            taken.append((i, plan))
    return Fitted(plan=plan, taken=tuple(taken), fits=profile.fits(plan.summary.predicted))


def _needed(plan: AnyPlan, profile: DeviceProfile) -> int:
    return profile.needed_bytes(plan.summary.predicted)


def fit_or_refuse(
    plan_for: Callable[[Squeeze], P], rungs: Sequence[Rung], profile: DeviceProfile, what: str, advice: str
) -> P:
    """The first plan that fits. PlanError if none does: `what` and `advice` are its words."""
    steps = steps_of(rungs)
    found = fit(plan_for(UNSQUEEZED), 0, steps, plan_for, profile)
    if not found.fits:
        tried = [steps[i].rung.words for i, _ in found.taken]
        raise _plan_error(what, _needed(found.plan, profile), profile, advice, tried)
    return found.plan


def _plan_error(what: str, need: int, profile: DeviceProfile, advice: str, tried: Sequence[str]) -> PlanError:
    free = profile.budget_bytes or 0
    told = f"; tried: {', '.join(dict.fromkeys(tried))}" if tried else ""
    limit = f" ({profile.budget_reason})" if profile.budget_reason else ""
    return PlanError(
        f"{what} takes {need >> 20} MiB but {free >> 20} MiB are free{limit}{told}; {advice}",
        need_bytes=need, free_bytes=free,
    )  # fmt: skip


def size_text(summary: PlanSummary) -> str:
    """The size of a plan in words."""
    height, width = summary.tile_px
    per_pass = f"{summary.images_per_pass} per pass"
    if summary.chunk_frames:
        per_pass = f"{summary.chunk_frames} frames at a time"
    predicted = summary.predicted
    beside = f" and {predicted.host >> 20} MiB of the host's" if predicted.host else ""
    return f"{summary.n_tiles} tiles of at most {height}x{width} px, {per_pass}, {predicted.working >> 20} MiB{beside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Why a decode could not go on."""

    reason: str
    need_bytes: int | None
    error: BaseException | None
    """What an allocator raised, without the frames that held memory; None where planning said no."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """What the last rung is told."""

    shortage: PlanError | DecodeOutOfMemoryError
    attempts: int
    """Attempts that are left."""
    ran: bool
    """True where memory ran out in a running decode, so that plans cannot be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[P, T]):
    """One decode as the loop sees it: what to call, and when."""

    observer: DecodeObserver
    what: str
    """The decode in words, for errors."""
    advice: str
    """What to do where nothing helps, for errors."""
    rungs: Sequence[Rung]
    profile: Callable[[], DeviceProfile]
    """The device as it is now."""
    plan: Callable[[Squeeze, DeviceProfile], tuple[P, DtypeDecision]]
    run: Callable[[P, Progress, bool], T]
    """One attempt; the flag asks it to look at each op's finiteness at once."""
    release: Callable[[], None]
    """Gives back all that is kept between decodes."""
    held: Callable[[], int]
    """Bytes that are kept between decodes."""
    make_room: Callable[[int], None] | None = None
    """Asks the host for that many bytes; None where there is nobody to ask."""
    blend: Callable[[Last], T] | None = None
    """The last rung; None where there is no way, or where it is not wanted."""
    attempts: int = MAX_ATTEMPTS


def run_ladder(job: Job[P, T]) -> T:
    """Run a decode to its end, however often it must begin again.

    Wider where an op overwrote its input with values that are not finite, and on the next rung where memory is short.
    PlanError where planning says that nothing fits, DecodeOutOfMemoryError where allocations went on failing; any other
    error leaves as it is.
    """
    return _Descent(job, steps_of(job.rungs)).to_end()


@dataclass(frozen=True, slots=True)
class _Done(Generic[T]):
    value: T


@dataclass(slots=True)
class _Descent(Generic[P, T]):
    """Where a decode stands on the ladder."""

    job: Job[P, T]
    steps: tuple[Step, ...]
    position: int = -1
    """Of the last step taken; -1 before the first."""
    attempts: int = 0
    restarts: int = 0
    room_made: bool = False
    dtype_told: bool = False
    tried: list[str] = field(default_factory=list)
    progress: Progress | None = None

    def to_end(self) -> T:
        """The result of the first attempt that goes through."""
        job = self.job
        while True:
            job.observer.mark("plan")
            found = self._planned_or_refused()
            if isinstance(found, Shortage | PlanError):
                return self._last_rung(found)
            outcome = self._attempt(found)
            if isinstance(outcome, _Done):
                return outcome.value
            if outcome is None:
                continue
            job.release()
            if self.attempts >= job.attempts:
                return self._last_rung(outcome)
            if not self.room_made:
                self._make_room(found, outcome.reason)
            elif not self._step_down(found, outcome.reason):
                return self._last_rung(outcome)

    # -- planning

    def _plan(self, squeeze: Squeeze, profile: DeviceProfile) -> P:
        plan, decision = self.job.plan(squeeze, profile)
        if decision.fallback is not None and not self.dtype_told:
            self.job.observer.fallback(decision.fallback)
        self.dtype_told = True
        return plan

    def _planned_or_refused(self) -> P | Shortage | PlanError:
        """The first plan from here on that fits, how much is missing, or why there is none at any size."""
        try:
            return self._planned(self.job.profile())
        except PlanError as error:
            return error

    def _planned(self, profile: DeviceProfile) -> P | Shortage:
        """The first plan from here on that fits; tells every rung on the way."""
        squeeze = self.steps[self.position].squeeze if self.position >= 0 else UNSQUEEZED
        plan = self._plan(squeeze, profile)
        if not profile.fits(plan.summary.predicted) and not self.room_made and (self.job.make_room or self.job.held()):
            self._make_room(plan, _too_large(plan, profile))
            profile = self.job.profile()
            plan = self._plan(squeeze, profile)
        found = fit(plan, self.position + 1, self.steps, lambda squeeze: self._plan(squeeze, profile), profile)
        for i, smaller in found.taken:
            self._tell(self.steps[i].rung, plan, size_text(smaller.summary), _too_large(plan, profile))
            plan, self.position = smaller, i
        if found.fits:
            return plan
        return Shortage(reason=_too_large(plan, profile), need_bytes=_needed(plan, profile), error=None)

    # -- running

    def _attempt(self, plan: P) -> _Done[T] | Shortage | None:
        """Run a plan: its result, why memory ran out, or None where it must begin again wider."""
        job, failure = self.job, None
        self.progress = self.progress or Progress(job.observer, plan.summary.macs)
        self.progress.restart()
        try:
            job.observer.planned(plan.summary)
            return _Done(job.run(plan, self.progress, self.restarts > 0))
        except RestartDecode:
            self.restarts += 1  # the widened op is remembered, so the next plan has it
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = forget_frames(error)
        # past the except clause, where the traceback would keep the failed attempt's tensors alive
        if failure is None:
            return None
        self.attempts += 1
        need = _needed(plan, job.profile())
        return Shortage(reason=first_line(failure), need_bytes=need, error=failure)

    # -- rungs

    def _make_room(self, plan: P, reason: str) -> None:
        self.room_made = True
        self.job.release()
        if self.job.make_room is not None:
            self.job.make_room(plan.summary.predicted.working)
        self._tell(MAKE_ROOM, plan, size_text(plan.summary), reason)

    def _step_down(self, plan: P, reason: str) -> bool:
        """Go to the next step that may take less of the device. False where there is none."""
        profile = self.job.profile()
        for i in range(self.position + 1, len(self.steps)):
            smaller = self._plan(self.steps[i].squeeze, profile)
            if _is_smaller(smaller.summary, plan.summary):
                self._tell(self.steps[i].rung, plan, size_text(smaller.summary), reason)
                self.position = i
                return True
        return False

    def _tell(self, rung: Rung, plan: P, used: str, reason: str) -> None:
        self.tried.append(rung.words)
        self.job.observer.fallback(
            Fallback(
                kind="out_of_memory", where="decode", given=size_text(plan.summary), used=f"{rung.words}: {used}",
                reason=reason,
            )
        )  # fmt: skip

    # -- the end

    def _last_rung(self, shortage: Shortage | PlanError) -> T:
        """Blended where that may be, else the error with all figures."""
        job, ran = self.job, False
        if isinstance(shortage, PlanError):
            error: PlanError | DecodeOutOfMemoryError = shortage
        else:
            error, ran = self._error(shortage), shortage.error is not None
        if job.blend is None:
            raise error
        failure = None
        last = Last(shortage=error, attempts=max(1, job.attempts - self.attempts), ran=ran)
        try:
            return job.blend(last)
        except Exception as raised:
            if raised is error or not is_out_of_memory(raised):
                raise
            failure = forget_frames(raised)
        job.release()
        self.tried.append(BLENDED.words)
        raise self._error(Shortage(reason=first_line(failure), need_bytes=error.need_bytes, error=failure))

    def _error(self, shortage: Shortage) -> PlanError | DecodeOutOfMemoryError:
        profile, tried = self.job.profile(), tuple(dict.fromkeys(self.tried))
        need, free = shortage.need_bytes, profile.budget_bytes
        if shortage.error is None:
            return _plan_error(self.job.what, need or 0, profile, self.job.advice, tried)
        told = f"; tried: {', '.join(tried)}" if tried else ""
        error = DecodeOutOfMemoryError(
            f"{self.job.what} ran out of memory: {_mebibytes(need)} planned, {_mebibytes(free)} free{told}; the last"
            f" allocator said: {shortage.reason}; {self.job.advice}",
            need_bytes=need, free_bytes=free, tried=tried,
        )  # fmt: skip
        error.__cause__ = shortage.error
        return error


def _mebibytes(nbytes: int | None) -> str:
    return "an unknown size" if nbytes is None else f"{nbytes >> 20} MiB"


def _is_smaller(a: PlanSummary, b: PlanSummary) -> bool:
    """Does `a` take less, or do its kernels, of whose own workspace no plan knows?"""
    return a.predicted.working < b.predicted.working or a.n_tiles > b.n_tiles


def _too_large(plan: AnyPlan, profile: DeviceProfile) -> str:
    free = profile.budget_bytes
    assert free is not None
    return f"{_needed(plan, profile) >> 20} MiB are needed and {free >> 20} MiB are free"
