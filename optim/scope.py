"""Torch's process-wide switches for the time of one decode: which, why, and back again however it ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

from .device import DeviceProfile
from .events import Choice, DecodeObserver, PlanSummary
from .settings import DecodeSettings, Use
from .torch_flags import SDPA_KERNELS, SWITCHES, Float32Backend, SdpaKernel, Undo, Value, put_back

log = logging.getLogger(__name__)

SAFE_HEAD = 256
"""Widest attention head that AOTriton's kernels (HIP) are given: for heads of 512 they may return NaN and no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFlags:
    """What a decode wants of torch's process-wide switches; a switch it has no opinion of stays as it is."""

    cudnn: Use = "leave"
    """cuDNN, which on ROCm is MIOpen."""
    benchmark: Use = "leave"
    """Search for the fastest kernel of each new shape: on ROCm exhaustively, for minutes."""
    benchmark_is_slow: bool = False
    """Warn, once per process, of a benchmark mode that the user has switched on."""
    float32: tuple[Float32Backend, ...] = ()
    """Backends whose float32 products and convolutions must not be rounded to TF32 or bfloat16 on the way."""
    fp16_accumulation: Use = "leave"
    """Sums of float16 products in float16."""
    reduced_sums: Use = "leave"
    """Partial sums of float16 and bfloat16 products in their own dtype."""
    sdpa: tuple[SdpaKernel, ...] | None = None
    """Kernels that torch's attention may choose from; None leaves the choice."""
    reasons: tuple[Choice, ...] = ()
    """One for each of the above but the warning, under its name."""

    def wanted(self) -> dict[str, Value]:
        """By switch (torch_flags.SWITCHES)."""
        found: dict[str, Value] = {}
        uses = {
            "cudnn": self.cudnn, "benchmark": self.benchmark, "fp16_accumulation": self.fp16_accumulation,
            "fp16_reduced_sums": self.reduced_sums, "bf16_reduced_sums": self.reduced_sums,
            "sdpa_reduced_sums": self.reduced_sums,
        }  # fmt: skip
        found.update({name: use == "on" for name, use in uses.items() if use != "leave"})
        if self.float32:
            found["float32"] = frozenset(self.float32)
        if self.sdpa is not None:
            found.update({f"sdpa_{kernel}": kernel in self.sdpa for kernel in SDPA_KERNELS})
        return found


# -- which


def flags_for(
    profile: DeviceProfile, settings: DecodeSettings, *, head_dim: int | None = None, opaque: bool = False
) -> BackendFlags:
    """The switches of one decode, each with its reason.

    `head_dim` is the widest attention head (0 without attention, None where it is not known). An `opaque` decoder's
    arithmetic is its host's: only what would break it is switched.
    """
    float32, float32_reason = _float32(profile, settings, opaque)
    accumulation, accumulation_reason = _fp16_accumulation(profile, settings, opaque)
    sums, sums_reason = _reduced_sums(profile)
    sdpa, sdpa_reason = _sdpa(profile, head_dim)
    hip = profile.kind == "hip"
    as_it_is = "as the host has it; only a request or a tuned choice moves it"
    reasons = {
        "cudnn": (settings.cudnn, as_it_is if settings.cudnn == "leave" else "as asked"),
        "benchmark": ("leave", "a search of minutes for each shape; never switched on here" if hip else "the user's"),
        "float32": (", ".join(float32) or "leave", float32_reason),
        "fp16_accumulation": (accumulation, accumulation_reason),
        "reduced_sums": (sums, sums_reason),
        "sdpa": ("leave" if sdpa is None else ", ".join(sdpa), sdpa_reason),
    }  # fmt: skip
    return BackendFlags(
        cudnn=settings.cudnn, benchmark_is_slow=hip, float32=float32, fp16_accumulation=accumulation,
        reduced_sums=sums, sdpa=sdpa,
        reasons=tuple(Choice(name=name, value=value, reason=reason) for name, (value, reason) in reasons.items()),
    )  # fmt: skip


def _float32(profile: DeviceProfile, settings: DecodeSettings, opaque: bool) -> tuple[tuple[Float32Backend, ...], str]:
    backend: Float32Backend = "mkldnn" if profile.kind == "cpu" else "cuda"
    if opaque:
        return (), "the decoder's own arithmetic"
    if profile.kind == "other" or (profile.kind == "hip" and profile.family != "cdna"):
        return (), f"no TF32 on {profile.gfx or profile.kind}"
    if "winograd" in (profile.convolution, settings.kernel_backend):
        return (backend,), "Winograd's convolutions lose more digits than the products they are made of"
    if settings.precision_mode == "fp32":
        return (backend,), "float32 was asked for"
    return (), "as the user has it"


def _fp16_accumulation(profile: DeviceProfile, settings: DecodeSettings, opaque: bool) -> tuple[Use, str]:
    if profile.kind == "hip":
        return "off", f"float16 sums overflow; on {profile.gfx or 'HIP'} a kernel that makes them is chosen op by op"
    if profile.kind != "cuda":
        return "leave", f"no such kernels on {profile.kind}"
    if opaque:
        return "leave", "the decoder's own arithmetic"
    return ("on", "as asked") if settings.fp16_accumulation else ("off", "float16 sums lose digits; not asked for")


def _reduced_sums(profile: DeviceProfile) -> tuple[Use, str]:
    if profile.kind == "hip":
        return "off", f"sums in float32, whichever library multiplies on {profile.gfx or 'HIP'}"
    return "leave", "as the user has it"


def _sdpa(profile: DeviceProfile, head_dim: int | None) -> tuple[tuple[SdpaKernel, ...] | None, str]:
    if profile.kind != "hip":
        return None, f"all kernels are right on {profile.kind}"
    if head_dim is not None and head_dim <= SAFE_HEAD:
        return None, "no attention" if head_dim == 0 else f"a head of {head_dim} is safe with every kernel"
    what = "a head of unknown width" if head_dim is None else f"a head of {head_dim}"
    return ("math",), f"{what}: AOTriton's kernels may return NaN for 512"


# -- for the time of a decode


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagChange:
    """One switch that is not as it was before the outermost scope."""

    name: str
    before: str
    now: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagsInForce:
    """What a scope found when it began."""

    changes: tuple[FlagChange, ...]
    unreadable: tuple[str, ...]
    """Switches that could not be read or set, and so were left alone, each with torch's word."""
    flags: BackendFlags

    def choice(self) -> Choice | None:
        """For a record; None where nothing differs and everything could be read."""
        if not self.changes and not self.unreadable:
            return None
        value = "; ".join(f"{c.name} {c.now} (was {c.before})" for c in self.changes) or "unchanged"
        own = self.flags.wanted()
        names = {_flag_of(c.name) for c in self.changes if c.name in own}
        why = [f"{r.name}: {r.reason}" for r in self.flags.reasons if r.name in names]
        why += [f"{c.name}: for another decode that is running" for c in self.changes if c.name not in own]
        why += [f"left alone, as it cannot be read or set: {text}" for text in self.unreadable]
        return Choice(name="flags", value=value, reason="; ".join(why))


def _flag_of(switch: str) -> str:
    """The field of BackendFlags that a switch belongs to."""
    if switch.endswith("_reduced_sums"):
        return "reduced_sums"
    return "sdpa" if switch.startswith("sdpa_") else switch


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    thread: int
    wanted: dict[str, Value]


@dataclass(slots=True, kw_only=True)
class _Applied:
    value: Value
    before: str | None
    """In words; None where it was so already."""
    undo: Undo


@dataclass(slots=True, kw_only=True)
class _Registry:
    """The scopes that are open in this process. The first saves, the last puts back."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    entries: list[_Entry] = field(default_factory=list)
    applied: dict[str, _Applied] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    has_warned: bool = False

    def enter(self, flags: BackendFlags) -> tuple[_Entry, FlagsInForce]:
        entry = _Entry(thread=threading.get_ident(), wanted=flags.wanted())
        with self.lock:
            self.entries.append(entry)
            try:
                self._settle()
                self._warn(flags)
            except BaseException:
                self._remove(entry)
                raise
            changes = tuple(
                FlagChange(name=name, before=a.before, now=_now(a.value))
                for name, a in self.applied.items()
                if a.before is not None
            )
            unreadable = tuple(f"{name} ({self.unreadable[name]})" for name in entry.wanted if name in self.unreadable)
        return entry, FlagsInForce(changes=changes, unreadable=unreadable, flags=flags)

    def leave(self, entry: _Entry) -> None:
        with self.lock:
            self._remove(entry)

    def _remove(self, entry: _Entry) -> None:
        self.entries.remove(entry)
        self._settle()

    def _settle(self) -> None:
        """Make the switches what the open scopes want; what none of them wants goes back to what it was."""
        wanted = self._wanted()
        stop: BaseException | None = None
        for name in [n for n, a in self.applied.items() if wanted.get(n) != a.value]:
            try:
                failures = put_back(self.applied.pop(name).undo)
            except BaseException as error:  # asked to stop: not before everything is put back
                stop, failures = error, []
            if failures:
                log.warning("the flag %s could not be put back: %s", name, "; ".join(failures))
        if stop is not None:
            raise stop
        for name in [n for n in self.unreadable if n not in wanted]:
            del self.unreadable[name]
        for name, value in wanted.items():
            if name not in self.applied and name not in self.unreadable:
                self._apply(name, value)

    def _wanted(self) -> dict[str, Value]:
        """One value per switch: of the thread that came first, and of its scopes the innermost with an opinion."""
        found: dict[str, Value] = {}
        threads = dict.fromkeys(entry.thread for entry in self.entries)
        for entry in (e for thread in threads for e in reversed(self.entries) if e.thread == thread):
            for name, value in entry.wanted.items():
                if isinstance(value, frozenset):  # more backends in full contradict nobody
                    value = value | cast("frozenset[Float32Backend]", found.get(name, frozenset()))
                    found[name] = value
                found.setdefault(name, value)
        return found

    def _apply(self, name: str, value: Value) -> None:
        undo: Undo = []
        try:
            before = SWITCHES[name].apply(value, undo)
        except AttributeError:
            put_back(undo)  # this torch has no such switch, so nothing can be wrong with it
        except Exception as error:
            put_back(undo)
            self.unreadable[name] = next(iter(str(error).splitlines()), type(error).__name__)
        except BaseException:
            put_back(undo)
            raise
        else:
            self.applied[name] = _Applied(value=value, before=before, undo=undo)

    def _warn(self, flags: BackendFlags) -> None:
        if self.has_warned or not flags.benchmark_is_slow or flags.benchmark != "leave":
            return
        if SWITCHES["cudnn"].read() and SWITCHES["benchmark"].read():
            self.has_warned = True
            log.warning(
                "torch.backends.cudnn.benchmark is on, as you or another program has set it: under ROCm each new shape"
                " is searched for exhaustively, which can take minutes. It is left on."
            )


def _now(value: Value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"in full on {', '.join(sorted(value))}"


_REGISTRY = _Registry()


@contextmanager
def backend_scope(flags: BackendFlags) -> Iterator[FlagsInForce]:
    """Torch's switches as `flags` want them, for the time of the block, and as they were before afterwards.

    However the block ends. Scopes nest, and may be open in several threads at once: then the switches, of which a
    process has one set, are as the thread that came first wants them, and go back when the last has left.
    """
    entry, in_force = _REGISTRY.enter(flags)
    try:
        yield in_force
    finally:
        _REGISTRY.leave(entry)


# -- for the record


def telling(observer: DecodeObserver, in_force: FlagsInForce) -> DecodeObserver:
    """The observer, told with each plan which flags differ from before; itself where none does."""
    choice = in_force.choice()
    return observer if choice is None else cast(DecodeObserver, _TellsFlags(observer, choice))


class _TellsFlags:
    """Adds one choice to plans; everything else goes straight to the observer."""

    def __init__(self, observer: DecodeObserver, choice: Choice) -> None:
        self._observer, self._choice = observer, choice

    def __getattr__(self, name: str) -> object:
        return getattr(self._observer, name)

    def planned(self, plan: PlanSummary) -> None:
        if all(choice.name != self._choice.name for choice in plan.choices):  # a scope within one has told already
            plan = replace(plan, choices=(*plan.choices, self._choice))
        self._observer.planned(plan)
