"""A strict reader of the Trace Event Format: what a viewer needs, and that slices are nested as they say."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

KEYS = {
    "M": {"ph", "name", "pid", "tid", "ts", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "i": {"ph", "s", "name", "cat", "pid", "tid", "ts", "args"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
}
METADATA = {"process_name": str, "thread_name": str, "thread_sort_index": int}
PARENTS: dict[str, set[str | None]] = {
    "decode": {None},
    "op": {"decode", None},  # None: on the device's own thread
    "tile": {"op", "decode"},
    "phase": {"decode", "op", "tile", None},
    "total": {None},
}


@dataclass
class Node:
    """A slice and those inside it."""

    name: str
    kind: str
    start: int
    """ns."""
    end: int
    args: dict[str, Any]
    children: list[Node] = field(default_factory=list)

    def walk(self) -> list[Node]:
        """This slice and all below it, parents first."""
        return [self, *(n for c in self.children for n in c.walk())]

    def of(self, kind: str) -> list[Node]:
        """The slices of one kind at any depth."""
        return [n for n in self.walk() if n.kind == kind]


@dataclass(frozen=True)
class Read:
    """A trace that passed."""

    threads: dict[str, list[Node]]
    """Outermost slices by the thread's name."""
    instants: list[dict[str, Any]]
    counters: list[dict[str, Any]]

    @property
    def decode(self) -> Node:
        """The slice of the whole decode."""
        (found,) = (n for roots in self.threads.values() for n in roots if n.kind == "decode")
        return found


def read_trace(trace: dict[str, Any]) -> Read:
    """Check everything, AssertionError where it is not so; then the slices as trees."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace  # JSON-safe: no tuple, no nan, no other keys
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    for event in events:
        _check_event(event)
    phases = [e["ph"] for e in events]
    n_meta = phases.count("M")
    assert phases[:n_meta] == ["M"] * n_meta
    timed = events[n_meta:]
    order = [(_ns(e["ts"]), -_ns(e.get("dur", 0))) for e in timed]
    assert order == sorted(order)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(set(names.values())) == len(names)
    assert {e["tid"] for e in timed} <= set(names)
    assert sum(e["name"] == "process_name" for e in events) == 1
    slices: dict[int, list[dict[str, Any]]] = {}
    for event in timed:
        if event["ph"] == "X":
            slices.setdefault(event["tid"], []).append(event)
    return Read(
        threads={names[tid]: _trees(found) for tid, found in slices.items()},
        instants=[e for e in timed if e["ph"] == "i"],
        counters=[e for e in timed if e["ph"] == "C"],
    )


def _check_event(event: dict[str, Any]) -> None:
    assert set(event) == KEYS[event["ph"]], event
    assert isinstance(event["name"], str)
    assert event["name"]
    assert type(event["pid"]) is type(event["tid"]) is int
    for key in ("ts", "dur"):
        if key in event:
            assert type(event[key]) in (int, float), event
            assert math.isfinite(event[key]), event
            assert event[key] >= 0, event
    assert isinstance(event["args"], dict)
    if event["ph"] == "M":
        (value,) = event["args"].values()
        assert type(value) is METADATA[event["name"]], event
    elif event["ph"] == "i":
        assert event["s"] in ("t", "p", "g")
    elif event["ph"] == "C":
        assert event["args"]
        assert all(type(v) in (int, float) for v in event["args"].values()), event


def _trees(events: list[dict[str, Any]]) -> list[Node]:
    """Slices of one thread, in order: each lies inside the one that is open, or after it."""
    roots: list[Node] = []
    open_: list[Node] = []
    for e in events:
        start = _ns(e["ts"])
        node = Node(e["name"], e["cat"], start, start + _ns(e["dur"]), e["args"])
        assert node.end > start or node.kind == "decode", node  # or nobody could tell what lies inside what
        while open_ and open_[-1].end <= start:
            open_.pop()
        parent = open_[-1] if open_ else None
        assert parent is None or node.end <= parent.end, (parent, node)
        assert (None if parent is None else parent.kind) in PARENTS[node.kind], (parent, node)
        (roots if parent is None else parent.children).append(node)
        open_.append(node)
    return roots


def _ns(us: float) -> int:
    ns = round(us * 1000)
    assert abs(us * 1000 - ns) < 0.01, us  # whole nanoseconds went in
    return ns
