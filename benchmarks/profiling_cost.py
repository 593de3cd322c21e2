"""What recording costs: events of one decode x the cost of each, as a share of the decode, at each profile level.

    python benchmarks/profiling_cost.py --size 512 --runs 3
    python benchmarks/profiling_cost.py --json cost.json

The events of one real decode are kept and told again to a recording, without the decode between them: that is what
they cost, measured many times over. Reading memory is counted apart, as its samples depend on time that a repetition
does not take. Two decodes side by side would not do: their times differ by more than the share that is looked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halo_vae.profiling.record import DecodeRecord, Level

SCHEMA_VERSION = 1
LIMITS: dict[Level, float] = {"off": 0.001, "summary": 0.01, "per_op": 0.05}
"""Largest share of a decode's time that each level may take."""
REPEATS = 30
Told = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelCost:
    """One level."""

    level: Level
    events_ns: float
    """All events of the decode, told once."""
    samples: int
    samples_ns: float
    """Reading memory inside the decode."""
    begin_and_end_ns: float
    """Opening and closing a recording without events: counters, environment, the record of nothing."""
    record_bytes: int
    """The decode's record as a line of JSON."""
    share: float
    """All of it ÷ the decode's wall time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventCost:
    """One kind of event at one level."""

    level: Level
    event: str
    count: int
    ns_each: float


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="profiling_cost.py", description="What recording a decode costs.")
    parser.add_argument("--size", type=int, default=512, help="edge of the square picture in pixels")
    parser.add_argument("--ch", type=int, default=128, help="channels of the widest map (128: SD's size)")
    parser.add_argument("--plan", choices=("strips", "tiles"), default="strips", help="plan of the decode")
    parser.add_argument("--runs", type=int, default=3, help="timed decodes without recording; the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to a new file")
    return parser.parse_args(argv)


class Keeper:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.told: list[Told] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Any event."""
        told = self.told

        def keep(*args: Any) -> None:
            told.append((name, args))

        return keep


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and say by the exit code whether every level keeps its limit."""
    args = parse_arguments(argv)
    from halo_vae.benchmarks.engines import HaloSide, random_latent
    from halo_vae.benchmarks.plain_kl import random_sd_weights
    from halo_vae.profiling.collector import Collector
    from halo_vae.profiling.recorded import decode_recorded

    side, latent = HaloSide(args.plan, random_sd_weights(ch=args.ch)), random_latent(args.size)
    side.decode(latent)  # packs weights and starts threads
    wall_ns = _median([_timed(lambda: side.decode(latent)) for _ in range(args.runs)])
    keeper = Keeper()
    side.engine.decode(side.decoder, latent, side.settings, observer=keeper)  # type: ignore[arg-type]
    records = {}
    for level in LIMITS:
        collector = Collector(level)
        _, records[level] = decode_recorded(side.engine, side.decoder, latent, side.settings, collector=collector)
    bench = Repeater(records["per_op"])
    levels = [bench.level_cost(keeper.told, record, wall_ns) for record in records.values()]
    events = [cost for level in LIMITS for cost in bench.event_costs(level, keeper.told)]
    _print(args, wall_ns, levels, events, records["per_op"])
    if args.json is not None:
        found = {"schema_version": SCHEMA_VERSION, "size_px": args.size, "plan": args.plan, "wall_ns": wall_ns,
                 "levels": [asdict(c) for c in levels], "events": [asdict(c) for c in events]}  # fmt: skip
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(cost.share > LIMITS[cost.level] for cost in levels))


class Repeater:
    """Tells events to recordings of the decode that another recording was of, again and again."""

    def __init__(self, like: DecodeRecord) -> None:
        """Recordings are named as `like` is."""
        self._like = like

    def level_cost(self, told: Sequence[Told], record: DecodeRecord, wall_ns: float) -> LevelCost:
        """A recording with all events, less one without, and what is left of it."""
        level = record.level
        empty = _median([self._recording_ns(level, ()) for _ in range(REPEATS)])
        full = _median([self._recording_ns(level, told) for _ in range(REPEATS)])
        samples = 0 if record.trace is None else len(record.trace.memory_bytes)
        samples_ns = samples * _sample_ns()
        line = json.dumps(record.to_json(), ensure_ascii=False, separators=(",", ":"))
        return LevelCost(
            level=level, events_ns=max(0.0, full - empty), samples=samples, samples_ns=samples_ns,
            begin_and_end_ns=empty, record_bytes=len(line.encode()), share=(full + samples_ns) / wall_ns,
        )  # fmt: skip

    def event_costs(self, level: Level, told: Sequence[Told]) -> list[EventCost]:
        """Each kind of event by itself, with the arguments it came with."""
        by_name: dict[str, list[Told]] = {}
        for event in told:
            by_name.setdefault(event[0], []).append(event)
        costs = []
        for name, events in by_name.items():
            taken = [self._recording_ns(level, events, inside=True) for _ in range(REPEATS)]
            costs.append(EventCost(level=level, event=name, count=len(events), ns_each=_median(taken) / len(events)))
        return costs

    def _recording_ns(self, level: Level, told: Sequence[Told], *, inside: bool = False) -> int:
        """Time of a recording in which these events are told; `inside`: of the events alone."""
        from halo_vae.profiling.collector import Collector

        collector = Collector(level)
        start = time.perf_counter_ns()
        with collector.recording(self._like.identity, self._like.request) as run:
            binding = time.perf_counter_ns()
            calls = [(getattr(run, name), args) for name, args in told]
            first = time.perf_counter_ns()
            for call, args in calls:
                call(*args)
            last = time.perf_counter_ns()
            run.delivered((1, 8, 8, 3))
        whole = time.perf_counter_ns() - start
        return last - first if inside else whole - (first - binding)


def _sample_ns() -> float:
    from halo_vae.profiling.memory import counters_for

    counter = counters_for("cpu").process
    return 0.0 if counter is None else _median([_timed(counter.now_bytes) for _ in range(200)])


def _timed(call: Callable[[], object]) -> int:
    start = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - start


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def _print(
    args: argparse.Namespace,
    wall_ns: float,
    levels: Sequence[LevelCost],
    events: Sequence[EventCost],
    record: DecodeRecord,
) -> None:
    print(f"{args.size}² in {args.plan}: {wall_ns / 1e9:.2f} s without recording (median of {args.runs})")
    for cost in levels:
        verdict = "ok" if cost.share <= LIMITS[cost.level] else "TOO MUCH"
        print(
            f"{cost.level:8} {cost.share:8.3%} of the decode, at most {LIMITS[cost.level]:.1%}: {verdict};"
            f" events {cost.events_ns / 1e6:.2f} ms, {cost.samples} memory samples {cost.samples_ns / 1e6:.2f} ms,"
            f" begin and end {cost.begin_and_end_ns / 1e6:.2f} ms, record {cost.record_bytes / 1024:.0f} KiB"
        )
    n = Counter(e.event for e in events for _ in range(e.count) if e.level == "off")
    print(f"events: {sum(n.values())}")
    for name, count in n.most_common():
        each = {e.level: e.ns_each for e in events if e.event == name}
        print(f"  {name:16} {count:6}  " + "  ".join(f"{level} {ns:6.0f} ns" for level, ns in each.items()))
    phases, wall = record.phases, record.wall_ns
    if phases is not None:
        print(f"phase other: {phases.other_ns / wall:.2%} of the wall time")


if __name__ == "__main__":
    # The checkout is the package and may have any name: benchmarks see it as an installed one does.
    sys.exit(main())
