"""What a comparison of clip decodes found, the bars it is held to, and both as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from halo_vae.benchmarks.timing import TimedCase, best_ns

MIB = 1 << 20
HOST, OURS = "host", "ours"
SIDES = (HOST, OURS)
BAR_CASE = ("wan21", 256, 17)
"""(family, pixels, frames) that the bars are for."""
BARS = (("time", 0.9), ("working memory without the carried state", 0.5), ("working memory with it", 0.8))
"""(what, most that ours may be as a share of the host's)."""
FLAT_FRAMES = (33, 129)
FLAT_LIMIT = 0.05
PEAK_PROCESSES, PEAK_SPREAD = 3, 0.10
SANE = (0.01, 100.0)
"""Deviation of the raw clip outside of which random weights say little about real ones."""


@dataclass(frozen=True, kw_only=True)
class VideoCase:
    """What was asked."""

    family: str
    size_px: int
    frames: int
    precision: str
    threads: tuple[int, ...]
    runs: int
    processes: int
    """Fresh processes per memory figure; 0 = not measured."""
    versions: str
    """Of the host and of torch."""


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """What both sides made of the latent, and what our plan says."""

    host_frames: int
    our_frames: int
    deviation: float
    """Of the host's raw clip."""
    max_error: float | None
    """Largest difference of ours from the host's decode; None where the shapes differ."""
    max_error_fp32: tuple[float | None, float | None]
    """(host's, ours) largest difference from the host's float32 decode."""
    predicted_bytes: int
    """Peak that our plan promises once weights are packed, output included."""
    carried_bytes: int | None
    """State that our plan carries from chunk to chunk; None where it has one chunk only."""
    same_state: bool
    """Does the host carry the same frames?"""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything measured."""

    case: VideoCase
    decoded: Decoded
    times: tuple[TimedCase, ...]
    peaks_bytes: dict[str, tuple[int, ...]]
    """By side; empty where not measured."""
    doubts: tuple[str, ...]

    def time_ns(self, side: str) -> float | None:
        """Median at the thread count that suits the side best."""
        return best_ns(self.times, side)

    def peak_bytes(self, side: str) -> float | None:
        """Median over the processes."""
        taken = self.peaks_bytes.get(side)
        return statistics.median(taken) if taken else None

    def carried_bytes(self, side: str) -> int | None:
        """The state a side carries; None where it is not known."""
        return self.decoded.carried_bytes if side == OURS or self.decoded.same_state else None

    def without_state_bytes(self, side: str) -> float | None:
        """Peak less the carried state."""
        peak, carried = self.peak_bytes(side), self.carried_bytes(side)
        return None if peak is None or carried is None else peak - carried

    @property
    def bars(self) -> tuple[tuple[str, float, float | None], ...]:
        """(what, most wanted, ratio or None); empty for a case that has none."""
        if (self.case.family, self.case.size_px, self.case.frames) != BAR_CASE:
            return ()
        found = (self.time_ns, self.without_state_bytes, self.peak_bytes)
        return tuple(
            (what, most, ratio(value(OURS), value(HOST))) for (what, most), value in zip(BARS, found, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class Flatness:
    """One size: bytes that ours takes at each of FLAT_FRAMES, output and packed weights taken off."""

    size_px: int
    predicted_bytes: tuple[int, int]
    measured_bytes: tuple[tuple[int, ...], tuple[int, ...]] | None
    """Of each fresh process; None where not measured."""

    @property
    def predicted_change(self) -> float:
        """Growth from the shorter to the longer clip."""
        return self.predicted_bytes[1] / self.predicted_bytes[0] - 1

    @property
    def measured_change(self) -> float | None:
        """The same of the medians."""
        if self.measured_bytes is None:
            return None
        short, long = map(statistics.median, self.measured_bytes)
        return long / short - 1


def ratio(value: float | None, base: float | None) -> float | None:
    """value / base, None where one is missing."""
    return None if value is None or not base else value / base


def memory_doubts(peaks_bytes: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Reasons not to trust the peaks."""
    found = []
    for side, taken in peaks_bytes.items():
        if 0 < len(taken) < PEAK_PROCESSES:
            found.append(f"only {len(taken)} process(es) for the memory of {side}: ask for {PEAK_PROCESSES} or more")
        if taken and max(taken) - min(taken) > PEAK_SPREAD * statistics.median(taken):
            found.append(f"the peaks of {side} are more than {PEAK_SPREAD:.0%} of the median apart")
    return tuple(found)


def clip_doubts(decoded: Decoded) -> tuple[str, ...]:
    """Reasons not to trust the clips."""
    found = []
    if decoded.host_frames != decoded.our_frames:
        found.append(f"the host made {decoded.host_frames} frames and ours made {decoded.our_frames}")
    if not SANE[0] <= decoded.deviation <= SANE[1]:  # and where it is not a number
        found.append(f"the raw clip's deviation is {decoded.deviation:.2g}: these weights are unlike a real decoder's")
    return tuple(found)


# -- text


def render_comparison(found: Comparison) -> str:
    """A markdown report."""
    case, decoded = found.case, found.decoded
    counts = f"{decoded.host_frames} | {decoded.our_frames}"
    same = "equal" if decoded.host_frames == decoded.our_frames else "DIFFER"
    memory = (
        f"Memory: median of {case.processes} fresh process(es), above the level after loading and a small decode."
        if case.processes else "Memory: not measured."
    )  # fmt: skip
    lines = [
        f"# {case.family}, {case.size_px}x{case.size_px} pixels, {case.frames} frames, {case.precision},"
        f" {case.versions}\n",
        f"Time: median of {case.runs} run(s), taken in turn, at the better of {_list(case.threads)} thread(s)."
        f" {memory}\n",
        "| | host | ours | ours ÷ host |",
        "|---|---:|---:|---:|",
        _row("time", [_seconds(found.time_ns(s)) for s in SIDES], ratio(*map(found.time_ns, (OURS, HOST)))),
        _row("peak memory", [_mib(found.peak_bytes(s)) for s in SIDES], ratio(*map(found.peak_bytes, (OURS, HOST)))),
        f"| carried state | {' | '.join(_mib(found.carried_bytes(s)) for s in SIDES)} | |",
        _row(
            "peak less the carried state", [_mib(found.without_state_bytes(s)) for s in SIDES],
            ratio(*map(found.without_state_bytes, (OURS, HOST))),
        ),
        f"| largest difference from the host's decode | – | {_error(decoded.max_error)} | |",
    ]  # fmt: skip
    if case.precision != "fp32":
        each = " | ".join(map(_error, decoded.max_error_fp32))
        lines.append(f"| largest difference from the host's float32 decode | {each} | |")
    lines += [f"| frames | {counts} | {same} |", "", *_notes(found)]
    return "\n".join([*lines, *(f"- doubt: {doubt}" for doubt in found.doubts)])


def _notes(found: Comparison) -> list[str]:
    decoded = found.decoded
    lines = [_bar(*bar) for bar in found.bars]
    if not lines:
        lines.append("- no bars: they are for {} at {} pixels and {} frames".format(*BAR_CASE))
    if decoded.carried_bytes is None:
        lines.append("- our plan takes this clip in one piece, so no state is carried to a next one")
    elif decoded.same_state:
        lines.append("- the host carries the same frames as our plan, so the plan's bytes are taken as its state too")
    else:
        lines.append("- what the host carries is not known here")
    lines.append(f"- ours promised {_mib(decoded.predicted_bytes)} at its peak; the clip's deviation is"
                 f" {decoded.deviation:.2g}")  # fmt: skip
    for timed in found.times:
        taken = ", ".join(f"{ns / 1e9:.2f}" for ns in timed.samples_ns)
        lines.append(f"- {timed.engine} at {timed.threads} thread(s): {taken} s")
    for side, taken in found.peaks_bytes.items():
        if taken:
            lines.append(f"- peaks of {side}: {', '.join(map(_mib, taken))}")
    return lines


def render_flatness(case: VideoCase, found: Sequence[Flatness]) -> str:
    """A markdown report of what a longer clip costs."""
    short, long = FLAT_FRAMES
    lines = [
        f"# {case.family}, {case.precision}: peak memory of ours at {short} and {long} frames, {case.versions}\n",
        "The output tensor is taken off; weights were packed before.\n",
        f"| size | | {short} frames | {long} frames | change |",
        "|---|---|---:|---:|---:|",
    ]
    verdicts = []
    for flat in found:
        size = f"{flat.size_px}x{flat.size_px}"
        rows: list[tuple[str, Sequence[float], float]] = [("predicted", flat.predicted_bytes, flat.predicted_change)]
        if flat.measured_bytes is not None and flat.measured_change is not None:
            medians = [statistics.median(taken) for taken in flat.measured_bytes]
            rows.append((f"measured, {len(flat.measured_bytes[0])} process(es)", medians, flat.measured_change))
        for what, each, change in rows:
            lines.append(f"| {size} | {what} | {' | '.join(map(_mib, each))} | {change:+.1%} |")
            held = "held" if change < FLAT_LIMIT else "MISSED"
            verdicts.append(
                f"- {what.split(',')[0]} at {size}: {change:+.1%}, less than {FLAT_LIMIT:.0%} wanted: {held}"
            )
    return "\n".join([*lines, "", *verdicts])


def _row(what: str, cells: Sequence[str], share: float | None) -> str:
    return f"| {what} | {' | '.join(cells)} | {'n/a' if share is None else f'{share:.2f}'} |"


def _bar(what: str, most: float, share: float | None) -> str:
    if share is None:
        return f"- {what}: not measured"
    return f"- {what}: {share:.2f}, at most {most:.2f} wanted: {'held' if share <= most else 'MISSED'}"


def _seconds(ns: float | None) -> str:
    return "n/a" if ns is None else f"{ns / 1e9:.2f} s"


def _mib(nbytes: float | None) -> str:
    return "n/a" if nbytes is None else f"{nbytes / MIB:.1f} MiB"


def _error(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1e}"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
