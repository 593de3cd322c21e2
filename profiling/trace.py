"""A record as a trace that Perfetto and chrome://tracing open: what ran when, nested, and memory below it.

Source of the format: "Trace Event Format", the document of the Chromium project.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..optim.events import PHASES
from .record import DecodeRecord
from .trace_layout import Instant, Slice, lay_out, op_args

PID = 1
DECODE, DEVICE_OPS, DEVICE_PHASES, TOTALS = 1, 2, 3, 4
_MEMORY_NAMES = {"allocated": "memory allocated by torch", "process": "resident set of the process"}
Event = dict[str, Any]


def chrome_trace(record: DecodeRecord) -> dict[str, Any]:
    """The record in the Trace Event Format, JSON object form; times in microseconds since the decode began.

    One thread holds the decode with its ops, their tiles and the phases inside them. On a GPU those are times of the
    host, which hands work out, and two more threads show ops and phases on the device's queue. A record without a trace
    has no such times: its phases are laid end to end on a thread that says that they are totals.
    """
    laid = [*_decode_events(record), *_device_events(record), *_total_events(record)]
    laid += _memory_events(record)
    laid.sort(key=lambda e: (e["ts"], -e.get("dur", 0)))
    shown = {e["tid"] for e in laid}
    return {
        "displayTimeUnit": "ms",
        "otherData": _facts(record),
        "traceEvents": [*_names(record, shown), *laid],
    }


def write_chrome_trace(record: DecodeRecord, path: Path) -> None:
    """Write `chrome_trace(record)` as a JSON file. OSError if the disk refuses."""
    # Perfetto shows escaped characters as they are escaped: names of ours have none, errors of others may
    text = json.dumps(chrome_trace(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    path.write_text(text, encoding="utf-8")


def _facts(record: DecodeRecord) -> dict[str, Any]:
    """What a viewer shows beside the trace; nothing that names a file."""
    trace = record.trace
    return {
        "record_id": record.record_id,
        "started_at": record.started_at,
        "status": record.status.value,
        "error": record.error,
        "level": record.level,
        "vae_hash": record.identity.vae_hash,
        "torch": record.environment.torch,
        "events_left_out": 0 if trace is None else trace.n_left_out,
        "ops_left_out": 0 if record.n_stages is None else record.n_stages - len(record.stages),
    }


def _names(record: DecodeRecord, shown: set[int]) -> Iterator[Event]:
    """Metadata: what process and threads are called, in which order."""
    identity = record.identity
    host = "decode" if identity.device.startswith("cpu") else "decode (host: when work was handed to the device)"
    threads = {
        DECODE: host,
        DEVICE_OPS: "ops on the device's queue",
        DEVICE_PHASES: "phases on the device's queue",
        TOTALS: "phases: totals laid end to end, not when they ran",
    }
    yield _metadata("process_name", 0, name=f"Halo VAE: {identity.family} on {identity.device}")
    for tid, name in threads.items():
        if tid in shown:
            yield _metadata("thread_name", tid, name=name)
            yield _metadata("thread_sort_index", tid, sort_index=tid)


def _metadata(name: str, tid: int, /, **args: Any) -> Event:
    return {"ph": "M", "name": name, "pid": PID, "tid": tid, "ts": 0, "args": args}


def _decode_events(record: DecodeRecord) -> Iterator[Event]:
    """The whole decode, and inside it what the trace says."""
    latent, image = (_shape(s) for s in (record.request.latent_shape, record.image_shape))
    name = f"decode {latent}" if image is None else f"decode {latent} to {image}"
    plan = record.plan
    args = {
        "status": record.status.value,
        "error": record.error,
        "method": None if plan is None else plan.method,
        "strategy": None if plan is None else plan.strategy,
        "fallbacks": record.n_fallbacks,
    }
    yield _slice(Slice(name=name, kind="decode", start_ns=0, end_ns=record.wall_ns, args=args), DECODE)
    if record.trace is None:
        yield from _listed_ops(record)
        return
    slices, instants = lay_out(record, record.trace)
    for found in slices:
        yield _slice(found, DECODE)
    for moment in instants:
        yield _instant(moment)


def _listed_ops(record: DecodeRecord) -> Iterator[Event]:
    """Ops of a record that lists them and has no trace."""
    free_ns = 0
    for stage in record.stages:
        start = min(max(free_ns, stage.start_ns), record.wall_ns)
        free_ns = min(max(start, stage.start_ns + stage.host_ns), record.wall_ns)
        if free_ns > start:
            yield _slice(Slice(name=stage.op, kind="op", start_ns=start, end_ns=free_ns, args=op_args(stage)), DECODE)


def _device_events(record: DecodeRecord) -> Iterator[Event]:
    """Ops and phases by the device's own events: threads of their own, as they run behind the host."""
    free_ns = 0
    for stage in record.stages:
        if stage.device_start_ns is None or stage.device_ns is None:
            continue
        # events give milliseconds as float32: neighbours may overlap by the rounding
        start = max(free_ns, stage.device_start_ns)
        free_ns = max(start, stage.device_start_ns + stage.device_ns)
        if free_ns > start:
            yield _slice(Slice(name=stage.op, kind="op", start_ns=start, end_ns=free_ns), DEVICE_OPS)
    if record.trace is None:
        return
    at_ns = 0
    for phase, ns in zip(record.trace.device_phases, record.trace.device_ns, strict=True):
        if ns:
            yield _slice(Slice(name=PHASES[phase], kind="phase", start_ns=at_ns, end_ns=at_ns + ns), DEVICE_PHASES)
        at_ns += ns


def _total_events(record: DecodeRecord) -> Iterator[Event]:
    """Totals of the phases, for a record that does not know when they ran."""
    if record.trace is not None or record.phases is None:
        return
    at_ns = 0
    for phase in PHASES:
        ns = record.phases.of(phase)
        if ns:
            name = f"{phase} (total)"
            args = {"is_total": True}
            yield _slice(Slice(name=name, kind="total", start_ns=at_ns, end_ns=at_ns + ns, args=args), TOTALS)
        at_ns += ns


def _memory_events(record: DecodeRecord) -> Iterator[Event]:
    """The level of memory as a counter."""
    trace = record.trace
    if trace is None or trace.memory_of is None:
        return
    at_ns = 0
    for after_ns, nbytes in zip(trace.memory_after_ns, trace.memory_bytes, strict=True):
        at_ns += after_ns
        yield {
            "ph": "C", "name": _MEMORY_NAMES[trace.memory_of], "pid": PID, "tid": DECODE, "ts": _us(at_ns),
            "args": {"bytes": nbytes},
        }  # fmt: skip


def _slice(found: Slice, tid: int) -> Event:
    return {
        "ph": "X", "name": found.name, "cat": found.kind, "pid": PID, "tid": tid,
        "ts": _us(found.start_ns), "dur": _us(found.end_ns - found.start_ns), "args": found.args,
    }  # fmt: skip


def _instant(found: Instant) -> Event:
    return {
        "ph": "i", "s": "t", "name": found.name, "cat": found.kind, "pid": PID, "tid": DECODE,
        "ts": _us(found.at_ns), "args": found.args,
    }  # fmt: skip


def _us(ns: int) -> float:
    return ns / 1000


def _shape(shape: tuple[int, ...] | None) -> str | None:
    return None if shape is None else "x".join(map(str, shape))
