"""Choices measured on a device, and the file that keeps them. Pure data: nothing here measures.

One JSON file in the user's cache folder. A key holds everything that a measurement depends on, so a changed driver,
library or decoder finds no entry and the rules decide again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from .device import DeviceProfile
from .errors import HaloError
from .events import Choice
from .files import locked, replace_file, user_dir
from .program import Program
from .settings import DecodeSettings

log = logging.getLogger("halo_vae")

SCHEMA_VERSION = 1
FILE_NAME = "tuning.json"
"""In the user's cache folder."""
MAX_BYTES = 8 << 20
"""A store larger than this was not written by us."""
Outcome = Literal["ok", "failed", "crashed", "timeout", "inexact"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningKey:
    """What a measurement holds for."""

    device: str
    """Chip and its size, e.g. "hip gfx1151 40cu"."""
    versions: str
    """Driver and library versions."""
    structure: str
    """16 hex digits over the program: equal for all decoders of one structure, whatever their weights."""
    dtype: str
    """Dtype the decoder is loaded in."""

    @property
    def digest(self) -> str:
        """16 hex digits: the key's name in the file."""
        return hashlib.sha256(repr((self.device, self.versions, self.structure, self.dtype)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What is done otherwise than the device's rules say; None = by rule."""

    strategy: str | None = None
    layout: str | None = None
    tile_bytes: int | None = None
    attention: str | None = None
    convolution3d: str | None = None
    kernel_backend: str | None = None
    precision_mode: str | None = None
    chunk_lat: int | None = None
    fp16_accumulation: bool | None = None
    """Allowed by whoever tuned, and kept with its measured error."""

    @property
    def text(self) -> str:
        """In words, for logs and tables."""
        set_to = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return ", ".join(f"{name} {value}" for name, value in set_to.items()) or "the rules"

    def profile(self, profile: DeviceProfile) -> DeviceProfile:
        """The device with these defaults; what the settings have to add, see `settings`."""
        names = ("strategy", "layout", "tile_bytes", "attention", "convolution3d")
        changed: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(profile, **changed) if changed else profile

    def settings(self, settings: DecodeSettings) -> DecodeSettings:
        """The settings with what they leave open filled in: nothing that was asked for is changed."""
        changed: dict[str, Any] = {}
        if self.kernel_backend is not None and settings.kernel_backend == "auto":
            changed["kernel_backend"] = self.kernel_backend
            changed["fp16_accumulation"] = bool(self.fp16_accumulation) or settings.fp16_accumulation
        if self.precision_mode is not None and settings.precision_mode == "auto":
            changed["precision_mode"] = self.precision_mode
        if self.chunk_lat is not None and settings.chunk_lat == 0 and settings.chunk_frames == 0:
            changed["chunk_lat"] = self.chunk_lat
        return replace(settings, **changed) if changed else settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One candidate, tried."""

    overrides: Overrides
    outcome: Outcome
    ns: int | None = None
    """Median of its runs; None where it gave none."""
    beside_ns: int | None = None
    """Median of the best before it, timed in turn with it."""
    runs: int = 0
    probe: tuple[int, ...] = ()
    """Shape of the latent it was timed on."""
    max_error: float | None = None
    """Largest distance from the float32 picture in 0-1; None where it was not compared."""
    note: str = ""

    @property
    def change(self) -> float | None:
        """Its time ÷ that of the best before it, less 1: below 0 is faster."""
        return None if self.ns is None or not self.beside_ns else self.ns / self.beside_ns - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedEntry:
    """What tuning found for one key."""

    key: TuningKey
    best: Overrides
    rule_ns: int
    """What the rules took on the largest probe, in nanoseconds."""
    best_ns: int
    max_error: float | None
    """Of the best candidate."""
    complete: bool
    """False where the time ran out before all candidates were tried."""
    measured: tuple[Measured, ...]
    created: str
    """ISO 8601, UTC."""

    @property
    def gain(self) -> float:
        """Share of the rules' time that is saved."""
        return 1.0 - self.best_ns / self.rule_ns if self.rule_ns else 0.0

    @property
    def bad(self) -> frozenset[Overrides]:
        """Candidates that crashed or hung: never tried again on this key."""
        return frozenset(m.overrides for m in self.measured if m.outcome in ("crashed", "timeout"))


def key_of(program: Program, dtype: str, profile: DeviceProfile) -> TuningKey:
    """The key of a decoder's structure on a device."""
    chip = profile.gfx or profile.name.partition(":")[0]
    units = "" if profile.compute_units is None else f" {profile.compute_units}cu"
    threads = f" {profile.workers} workers" if profile.kind == "cpu" else ""
    versions = profile.versions
    known = {} if versions is None else {k: v for k, v in asdict(versions).items() if v is not None}
    return TuningKey(
        device=f"{profile.kind} {chip}{units}{threads}",
        versions=", ".join(f"{k} {v}" for k, v in sorted(known.items())),
        structure=structure_of(program),
        dtype=dtype,
    )


def structure_of(program: Program) -> str:
    """16 hex digits over a program without the names of its tensors and ops."""
    digest = hashlib.sha256(f"{program.family}{program.values}".encode())
    for op in program.ops:
        facts = {f.name: getattr(op, f.name) for f in fields(op)}
        shape = {k: v for k, v in facts.items() if isinstance(v, (int, float, tuple)) or v is None}
        digest.update(f"{type(op).__name__}{sorted(shape.items())}".encode())
    return digest.hexdigest()[:16]


def mark_choices(choices: Iterable[Choice], entry: TunedEntry | None, settings: DecodeSettings) -> tuple[Choice, ...]:
    """A plan's choices, each saying whether it was tuned, asked for, or made by rule or default."""
    best = entry.best if entry is not None else Overrides()
    tuned = {
        "plan": best.strategy is not None and settings.plan == "auto",
        "layout": best.layout is not None and settings.tensor_layout_optimization,
        "attention": best.attention is not None,
        "convolutions": best.convolution3d is not None
        or (best.kernel_backend is not None and settings.kernel_backend == "auto"),
        "precision": best.precision_mode is not None and settings.precision_mode == "auto",
        "chunks": best.chunk_lat is not None and settings.chunk_lat == settings.chunk_frames == 0,
    }
    if entry is None:
        return tuple(choices)
    why = f"tuned: {entry.gain:.0%} faster than the rules, measured {entry.created[:10]}"
    return tuple(replace(c, reason=why + _refused(c)) if tuned.get(c.name, False) else c for c in choices)


def _refused(choice: Choice) -> str:
    """What a choice says of ops that refused it; a tuned backend may be refused as one that was asked for."""
    _, found, refused = choice.reason.partition("; ")
    return found + refused if choice.name == "convolutions" and " refused: " in refused else ""


def tuned_profile(profile: DeviceProfile, store: TuningStore | None, program: Program, dtype: str) -> DeviceProfile:
    """The device with what was measured on it for decoders of this structure, if anything was."""
    entry = store.get(key_of(program, dtype, profile)) if store is not None else None
    return profile if entry is None else replace(entry.best.profile(profile), tuned=entry)


def filled_in(settings: DecodeSettings, profile: DeviceProfile) -> DecodeSettings:
    """The settings with what they leave open as it was tuned."""
    entry = profile.tuned
    if entry is None:
        return settings
    # sums in float16 need an error that was measured
    best = entry.best if entry.max_error is not None else replace(entry.best, fp16_accumulation=None)
    return best.settings(settings)


class TuningStore:
    """`tuning.json`: read once, and again when it changes; written whole, safe with several processes."""

    def __init__(self, path: Path | None = None) -> None:
        """`path` is the file, by default in the user's cache folder. Reads and creates nothing yet."""
        self.path = path or user_dir("cache") / FILE_NAME
        self._seen: tuple[int, int] | None = None
        self._entries: dict[str, TunedEntry] = {}

    def get(self, key: TuningKey) -> TunedEntry | None:
        """What is known for a key; a store that cannot be read knows nothing, and says so once."""
        entry = self._read().get(key.digest)
        return entry if entry is not None and entry.key == key else None

    def entries(self) -> tuple[TunedEntry, ...]:
        """Everything known, newest last."""
        return tuple(sorted(self._read().values(), key=lambda e: e.created))

    def put(self, entry: TunedEntry) -> None:
        """Keep an entry beside those of other processes. HaloError where the file cannot be written."""
        self._change({entry.key.digest: entry})

    def remove(self, key: TuningKey) -> None:
        """Forget a key."""
        self._change({key.digest: None})

    def _change(self, changes: Mapping[str, TunedEntry | None]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.with_name(self.path.name + ".lock")):
                entries = dict(self._read(fresh=True))
                for digest, entry in changes.items():
                    entries.pop(digest, None)
                    if entry is not None:
                        entries[digest] = entry
                lines = {digest: asdict(entry) for digest, entry in entries.items()}
                content = json.dumps({"schema_version": SCHEMA_VERSION, "entries": lines}, indent=1)
                replace_file(self.path, content.encode())
        except OSError as error:
            raise HaloError(
                f"{self.path} cannot be written ({error.strerror or error}); free space or set HALO_VAE_CACHE_DIR"
            ) from error

    def _read(self, *, fresh: bool = False) -> dict[str, TunedEntry]:
        try:
            status = self.path.stat()
        except OSError:
            self._seen, self._entries = None, {}
            return {}
        stamp = status.st_mtime_ns, status.st_size
        if stamp != self._seen or fresh:
            self._seen, self._entries = stamp, self._load(status.st_size)
        return self._entries

    def _load(self, size: int) -> dict[str, TunedEntry]:
        try:
            if size > MAX_BYTES:
                raise ValueError(f"it has {size} bytes, more than {MAX_BYTES}")
            content = json.loads(self.path.read_bytes())
            if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
                raise ValueError(f"its format is not {SCHEMA_VERSION}")
            return {str(digest): _entry(line) for digest, line in content["entries"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._set_aside(error)
            return {}

    def _set_aside(self, error: Exception) -> None:
        """Keep a file that cannot be read under another name, so that tuning can begin anew."""
        aside = self.path.with_name(self.path.name + ".unreadable")
        log.warning("tuned choices cannot be read (%s); the file is kept as %s and rules decide", error, aside.name)
        try:
            self.path.replace(aside)
        except OSError:
            return
        self._seen = None


def _entry(line: dict[str, Any]) -> TunedEntry:
    """A checked entry. ValueError, KeyError or TypeError for anything else."""
    entry = TunedEntry(
        key=TuningKey(**{k: str(v) for k, v in line["key"].items()}),
        best=_overrides(line["best"]),
        rule_ns=int(line["rule_ns"]),
        best_ns=int(line["best_ns"]),
        max_error=None if line["max_error"] is None else float(line["max_error"]),
        complete=bool(line["complete"]),
        measured=tuple(_measured(m) for m in line["measured"]),
        created=str(line["created"]),
    )
    if entry.rule_ns <= 0 or entry.best_ns <= 0:
        raise ValueError("a time is not above zero")
    return entry


def _measured(line: dict[str, Any]) -> Measured:
    return Measured(**{**line, "overrides": _overrides(line["overrides"]), "probe": tuple(map(int, line["probe"]))})


_ALLOWED: Mapping[str, tuple[str, ...]] = {
    "strategy": ("strips", "tiles"),
    "layout": ("channels_last", "contiguous"),
    "attention": ("sdpa", "matmul"),
    "convolution3d": ("conv2d_sum", "conv3d"),
    "kernel_backend": ("torch", "winograd", "shifted_gemm", "conv2d_sum", "kitchen"),
    "precision_mode": ("fp32", "bf16", "fp16", "mixed"),
}


def _overrides(line: dict[str, Any]) -> Overrides:
    for name, value in line.items():
        if value is None:
            continue
        if name == "fp16_accumulation" and isinstance(value, bool):
            continue
        allowed = _ALLOWED.get(name)
        if allowed is not None and value not in allowed:
            raise ValueError(f"{name} is {value!r}")
        if allowed is None and not (isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40):
            raise ValueError(f"{name} is {value!r}")
    return Overrides(**line)
