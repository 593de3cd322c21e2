"""Which dtype an op is stored and multiplied in, and what is remembered of ops that needed a wider one."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from .costs import ITEMSIZE
from .device import DeviceProfile
from .events import Choice, Fallback
from .plan import DtypePlan
from .program import Program
from .settings import PrecisionMode

NAMES: dict[PrecisionMode, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MEDIUM_PX, LARGE_PX = 512, 1024
"""`auto`: up to MEDIUM_PX on the longer edge the loaded dtype, from LARGE_PX on the narrowest, `mixed` between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeDecision:
    """The dtypes, why, and whether what was asked had to be replaced."""

    dtypes: DtypePlan
    choice: Choice
    fallback: Fallback | None


class WidenedOps:
    """Ops that were not finite in their dtype, by the weights' content hash; lives as long as the process."""

    def __init__(self) -> None:
        """Start empty."""
        self._ops: dict[tuple[str, str], frozenset[str]] = {}
        self._lock = threading.Lock()

    def of(self, content_hash: str, compute: str) -> frozenset[str]:
        """Names of ops to widen when computing in that dtype."""
        with self._lock:
            return self._ops.get((content_hash, compute), frozenset())

    def remember(self, content_hash: str, compute: str, op_name: str) -> None:
        """Widen this op from now on."""
        with self._lock:
            key = (content_hash, compute)
            self._ops[key] = self._ops.get(key, frozenset()) | {op_name}

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._ops.clear()


def choose_dtypes(
    mode: PrecisionMode,
    program: Program,
    native: str,
    profile: DeviceProfile,
    longer_edge_px: int,
    widened: WidenedOps,
    content_hash: str,
) -> DtypeDecision:
    """Dtypes of a decode in a precision mode for a decoder loaded in `native`."""
    stream, compute, reason = _resolve(mode, program, native, profile, longer_edge_px)
    fallback = None
    if mode == "fp16" and compute != "float16":
        fallback = Fallback(kind="dtype", where="decode", given="float16", used=compute, reason=reason)
    dtypes = DtypePlan(native=native, stream=stream, compute=compute, widened=widened.of(content_hash, compute))
    text = compute if stream == compute else f"{compute} convolutions over a {stream} stream"
    return DtypeDecision(dtypes=dtypes, choice=Choice(name="precision", value=text, reason=reason), fallback=fallback)


def _resolve(
    mode: PrecisionMode, program: Program, native: str, profile: DeviceProfile, edge: int
) -> tuple[str, str, str]:
    allowed = program.working_dtypes
    if mode == "fp16" and "float16" not in allowed:
        used = next((d for d in allowed if d != "float32"), "float32")
        return (
            used,
            used,
            f"{program.family} decoders are not known to survive float16 (they take {', '.join(allowed)})",
        )
    if mode in NAMES:
        return NAMES[mode], NAMES[mode], "asked for"
    fast = profile.native_dtypes[0]
    narrow = fast if ITEMSIZE[fast] < ITEMSIZE[native] else native
    if mode == "mixed":
        return native, narrow, f"asked for; {profile.name} multiplies {fast} natively"
    if ITEMSIZE[fast] == ITEMSIZE["float32"]:
        return native, native, f"default: {profile.name} has no faster dtype than the loaded one"
    if edge <= MEDIUM_PX:
        return native, native, f"default: a picture of up to {MEDIUM_PX} px keeps the loaded dtype"
    if edge < LARGE_PX:
        return (
            native,
            narrow,
            f"default: a picture between {MEDIUM_PX} and {LARGE_PX} px keeps the loaded dtype between convolutions;"
            f" {profile.reasons.precision}",
        )
    both = [d for d in profile.native_dtypes if d in allowed and ITEMSIZE[d] <= ITEMSIZE[native]]
    used = both[0] if both and ITEMSIZE[both[0]] < ITEMSIZE[native] else native
    why = f"a picture of {LARGE_PX} px or more takes the narrowest dtype that decoder and device allow"
    return used, used, f"default: {why}; {profile.reasons.precision}"
