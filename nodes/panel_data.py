"""What a node's panel shows, as a JSON-safe object: a record, figures derived from it, the node's last decodes."""

from __future__ import annotations

import json
import math
import statistics
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..profiling.parts import share
from ..profiling.record import DecodeRecord, DecodeStatus

SCHEMA_VERSION = 1
"""Format of a panel. History: 1 first version."""
MAX_BYTES = 64 << 10
"""Most bytes of a panel as JSON: it is sent to the browser after each decode and kept in ComfyUI's own history."""
KEEP_NODES = 64
"""Nodes whose decodes are kept; the one used least recently goes first."""
KEEP_DECODES = 32
_CUT_TEXT = 200
"""Characters that are left of a text where lists alone do not make room."""
_LEFT_OUT = ("stages", "trace")
"""Fields of a record with one entry per op or event, which no panel shows."""
_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
Panel = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One decode of a node, as its later panels need it."""

    record_id: str
    wall_ns: int
    status: DecodeStatus
    cold: bool | None
    """True where it may hold a kernel search; None where nothing was counted."""
    key: tuple[str, tuple[int, ...]] | None
    """VAE and latent shape; None for a VAE without a hash, which is never the same as another."""

    @property
    def is_warm(self) -> bool:
        """Whether its time may be compared with that of others."""
        return self.status is DecodeStatus.OK and self.cold is False


@dataclass(slots=True)
class _Node:
    entries: deque[Entry] = field(default_factory=lambda: deque(maxlen=KEEP_DECODES))
    panel: Panel | None = None


class Panels:
    """The last decodes of each node of this process, and each node's last panel. Safe to share between threads."""

    def __init__(self, keep_nodes: int = KEEP_NODES) -> None:
        """Nothing decoded yet."""
        self._keep_nodes = keep_nodes
        self._lock = threading.Lock()
        self._nodes: OrderedDict[str | None, _Node] = OrderedDict()

    def add(self, node: str | None, record: DecodeRecord, free_bytes: int | None = None) -> Panel:
        """The panel of a decode that `node` has just ended or shown; one that it has shown before is not counted again.

        None stands for all callers that are no node. `free_bytes` is what the device could still give afterwards.
        """
        entry = entry_of(record)
        with self._lock:
            kept = self._nodes.setdefault(node, _Node())
            self._nodes.move_to_end(node)
            if not entry.record_id or all(e.record_id != entry.record_id for e in kept.entries):
                kept.entries.append(entry)
            entries = tuple(kept.entries)
            while len(self._nodes) > self._keep_nodes:
                self._nodes.popitem(last=False)
        panel = panel_of(record, entries, free_bytes)
        with self._lock:
            kept.panel = panel
        return panel

    def last(self, node: str) -> Panel | None:
        """The node's last panel; None where it has none in this process."""
        with self._lock:
            kept = self._nodes.get(node)
            return None if kept is None else kept.panel


def entry_of(record: DecodeRecord) -> Entry:
    """What is kept of a record."""
    vae = record.identity.vae_hash
    return Entry(
        record_id=record.record_id, wall_ns=record.wall_ns, status=record.status, cold=record.first_of_shape,
        key=None if vae is None else (vae, record.request.latent_shape),
    )  # fmt: skip


def panel_of(record: DecodeRecord, entries: tuple[Entry, ...], free_bytes: int | None = None) -> Panel:
    """The panel of `record`; `entries` are the node's decodes, oldest first, with this one among them."""
    key = entry_of(record).key
    earlier = [e for e in entries if e.record_id != record.record_id and key is not None and e.key == key]
    warm = [e.wall_ns for e in earlier if e.is_warm]
    slim, left_out = _slim(record)
    panel: Panel = {
        "schema_version": SCHEMA_VERSION,
        "record_id": record.record_id,
        "record": slim,
        "summary": summary_of(record, free_bytes),
        "recent": [_recent(e, key) for e in entries],
        "median_ns": statistics.median(warm) if warm else None,
        "n_median": len(warm),
        "left_out": left_out,
    }
    return _bounded(panel, slim, left_out, MAX_BYTES)


def bounded_record(record: DecodeRecord, limit: int) -> dict[str, Any]:
    """A record as JSON of at most about `limit` bytes; a field `left_out` says which lists were emptied for that."""
    line = record.to_json()
    left_out: dict[str, int] = {}
    _bounded(line, line, left_out, limit)
    return {**line, "left_out": left_out} if left_out else line


def summary_of(record: DecodeRecord, free_bytes: int | None = None) -> dict[str, Any]:
    """Figures that follow from a record and are not in its JSON; None is unknown."""
    pool, memory = record.pool, record.memory
    caches = record.caches or ()
    figures: dict[str, Any] = {
        "used_bytes": record.used_bytes,
        "prediction_ratio": record.prediction_ratio,
        "conversion_share": record.conversion_share,
        "bytes_per_s": record.bytes_per_s,
        "bandwidth_share": record.bandwidth_share,
        "parallel_efficiency": record.parallel_efficiency,
        "temporal_consistency": record.temporal_consistency,
        "fragmentation_bytes": None if memory is None else memory.fragmentation_bytes,
        "free_bytes": free_bytes,
        "cache_hit_rate": share(sum(c.hits for c in caches), sum(c.lookups for c in caches)),
        "cache_hit_rates": {c.name: share(c.hits, c.lookups) for c in caches},
        "pool_hit_rate": None if pool is None else share(pool.hits, pool.requests),
        "mac_shares": _mac_shares(record),
    }
    return {name: _finite(value) for name, value in figures.items()}


def _mac_shares(record: DecodeRecord) -> dict[str, float] | None:
    """Shares of the multiply-accumulates that are in the picture; None where none were counted."""
    if record.precision is None or not record.precision.kept_macs:
        return None
    kept, total = record.precision.kept, record.precision.kept_macs
    return {short: sum(d.macs for d in kept if d.dtype == name) / total for short, name in _SHORT.items()}


def _recent(entry: Entry, key: object) -> dict[str, Any]:
    return {
        "record_id": entry.record_id,
        "wall_ns": entry.wall_ns,
        "status": entry.status.value,
        "cold": entry.cold,
        "same": key is not None and entry.key == key,
    }


def _slim(record: DecodeRecord) -> tuple[dict[str, Any], dict[str, int]]:
    """The record's JSON without what has an entry per op or event, and how many ops that were."""
    names = {f.name for f in fields(record)}
    empty: dict[str, Any] = {name: () if name == "stages" else None for name in _LEFT_OUT if name in names}
    line = replace(record, **empty).to_json()
    for name in empty:
        del line[name]
    return line, {"stages": len(record.stages)} if record.stages else {}


def _bounded(whole: Panel, record: dict[str, Any], left_out: dict[str, int], limit: int) -> Panel:
    """`whole`, whose part `record` has its longest lists emptied, noted in `left_out`, until it is small enough."""
    while _size(whole) > limit:
        found = max(_lists(record, ""), key=lambda item: _size(item[1]), default=None)
        if found is None or _size(found[1]) < 64:
            _cut_texts(record)
            break
        name, values = found
        left_out[name] = len(values)
        values.clear()
    return whole


def _lists(value: Any, name: str) -> list[tuple[str, list[Any]]]:
    """Every list in a JSON object that is not within another list, with its name as "pool.passes"."""
    if isinstance(value, list):
        return [(name, value)] if value else []
    if not isinstance(value, dict):
        return []
    return [found for key, v in value.items() for found in _lists(v, f"{name}.{key}" if name else key)]


def _cut_texts(value: Any) -> None:
    """Shorten every long text in a JSON object, in place."""
    for key, v in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(v, str) and len(v) > _CUT_TEXT:
            value[key] = v[: _CUT_TEXT - 1] + "…"
        elif isinstance(v, (dict, list)):
            _cut_texts(v)


def _size(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":")))


def _finite(value: Any) -> Any:
    """JSON has no infinite number and no NaN: both are unknown here."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
