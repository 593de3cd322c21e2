"""A record as titled rows of words: what every renderer shows, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

from ...optim.events import PHASES, PlanSummary
from ..environment import Environment
from ..metrics import Metrics
from ..parts import DecodeStatus, DtypeMacs, PeakReading, share
from ..record import DecodeRecord
from ..usage import origins_of
from .units import (
    NA,
    format_bytes,
    format_count,
    format_macs,
    format_ns,
    format_rate,
    format_ratio,
    format_seconds,
    format_shape,
    format_share,
)

_MADE = {"tuned": "tuned", "asked": "as asked", "rule": "by rule", "default": "by default"}
_SHOWN = 6
"""Most items of a list that are spelt out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure."""

    label: str
    value: str
    share: float | None = None
    """0 to 1 where a bar helps."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Figures that belong together."""

    title: str
    rows: tuple[Row, ...]


def record_title(record: DecodeRecord) -> str:
    """One line: what was decoded, where, and how it ended."""
    made = format_shape(record.image_shape) if record.image_shape else record.status.value.replace("_", " ")
    who = f"{record.identity.family} on {record.identity.device}"
    return f"{who}: {format_shape(record.request.latent_shape)} {record.request.latent_dtype} → {made}"


def record_sections(record: DecodeRecord) -> tuple[Section, ...]:
    """Everything a person may want to know of a decode; sections that were not recorded are left out."""
    made = (
        _outcome(record),
        _phases(record),
        _plan(record),
        _memory(record),
        _reuse(record),
        _precision(record),
        _work(record),
        _shapes(record),
        _fallbacks(record),
        _slowest(record),
        _boundaries(record),
        _where(record),
    )
    return tuple(s for s in made if s.rows)


def metrics_sections(metrics: Metrics) -> tuple[Section, ...]:
    """The eleven metrics and the counts beside them."""
    m = metrics
    rates = (
        ("cache hits", m.cache_hit_rate),
        ("memory from the pool", m.memory_efficiency),
        ("narrow precision kept", m.precision_efficiency),
        ("batch slots filled", m.batch_efficiency),
        ("prefetched in time", m.prefetch_efficiency),
    )
    return (
        Section(
            title="Decodes",
            rows=(
                Row(label="ended well", value=format_count(m.total_executions)),
                Row(label="cancelled", value=format_count(m.interrupted_executions)),
                Row(label="failed", value=format_count(m.failed_executions)),
                Row(label="average time", value=format_seconds(m.average_execution_time)),
                Row(
                    label="first of their shapes",
                    value=format_seconds(m.average_execution_time_first_of_shape),
                    note=format_count(m.first_of_shape_executions, "decode"),
                ),
                Row(label="shapes seen before", value=format_seconds(m.average_execution_time_repeated)),
            ),
        ),
        Section(title="Rates", rows=tuple(Row(label=k, value=format_share(v), share=v) for k, v in rates)),
        Section(
            title="Totals",
            rows=(
                Row(label="allocations avoided", value=format_count(m.total_memory_saves)),
                Row(label="ops in narrower precision", value=format_count(m.total_precision_optimizations)),
                Row(label="batched decodes", value=format_count(m.total_batch_optimizations)),
                Row(label="prefetch hits", value=format_count(m.total_prefetch_hits)),
            ),
        ),
    )


def _outcome(record: DecodeRecord) -> Section:
    notes = {True: "first run of these shapes", False: "all shapes seen before", None: ""}
    rows = [Row(label="total", value=format_ns(record.wall_ns), note=notes[record.first_of_shape])]
    if record.status is not DecodeStatus.OK:
        rows.append(Row(label=record.status.value.replace("_", " "), value=record.error or NA))
    return Section(title="Outcome", rows=tuple(rows))


def _phases(record: DecodeRecord) -> Section:
    if record.phases is None:
        return Section(title="Phases", rows=())
    times = sorted(((record.phases.of(p), p) for p in PHASES), key=lambda item: -item[0])
    rows = []
    for ns, phase in times:
        part = share(ns, record.phases.total_ns)
        if ns:
            rows.append(Row(label=phase, value=format_ns(ns), share=part, note=format_share(part)))
    return Section(title="Phases", rows=tuple(rows))


def _plan(record: DecodeRecord) -> Section:
    plan = record.plan
    if plan is None:
        return Section(title="Plan", rows=())
    exact = "approximate" if plan.approximate else "equal to an untiled decode"
    grid, size = format_shape(plan.tile_grid), format_shape(plan.tile_px)
    tiles = f"{grid} of at most {size} px" + (f", overlapping {plan.overlap_px} px" if plan.overlap_px else "")
    rows = [
        Row(label="method", value=plan.method, note=exact),
        Row(label="tiles", value=tiles, note=f"{plan.strategy}, {plan.layout}"),
        Row(
            label="batch",
            value=f"{format_count(plan.n_passes, 'pass', 'passes')} of {format_count(plan.images_per_pass, 'image')}",
        ),
        Row(label="work", value=format_macs(plan.macs) if plan.macs else NA),
    ]
    if plan.chunk_frames:
        rows.insert(2, chunks_row(plan))
    rows += [Row(label=c.name, value=c.value, note=c.reason) for c in plan.choices]
    made = origins_of(plan.choices)
    if made:
        counts = ", ".join(f"{len(names)} {_MADE[origin]}" for origin, names in made.items())
        rows.append(Row(label="choices", value=counts, note=f"tuned: {', '.join(made.get('tuned', ('none',)))}"))
    return Section(title="Plan", rows=tuple(rows))


def chunks_row(plan: PlanSummary) -> Row:
    """How the clips of a video are cut in time."""
    chunks, frames = format_count(plan.n_chunks, "chunk"), format_count(plan.chunk_frames, "frame")
    at = ", ".join(map(str, plan.boundaries[:_SHOWN]))
    more = ", …" if len(plan.boundaries) > _SHOWN else ""
    where = f"new chunks at frame {at}{more}" if at else ""
    return Row(label="clip", value=f"{chunks} of at most {frames}", note=where)


def _memory(record: DecodeRecord) -> Section:
    memory = record.memory
    predicted = record.plan.predicted if record.plan else None
    rows = []
    if predicted is not None:
        parts = (
            ("pool", predicted.pool),
            ("scratch", predicted.scratch),
            ("packed weights", predicted.packed),
            ("output", predicted.output),
            ("host memory", predicted.host),
        )
        note = ", ".join(f"{name} {format_bytes(n)}" for name, n in parts if n)
        rows.append(Row(label="predicted peak", value=format_bytes(predicted.total), note=note))
        carried = record.plan.carried_bytes if record.plan else 0
        if carried:
            rows.append(
                Row(label="carried state", value=format_bytes(carried), note="from chunk to chunk, a part of the pool")
            )
    if memory is not None:
        note = f"{format_bytes(memory.measured_bytes)} above the start and what the pool held before"
        note += f"; predicted {format_ratio(record.prediction_ratio)}"
        rows.append(Row(label="measured peak", value=format_bytes(record.used_bytes), note=note))
        rows += [_peak(*pair) for pair in (("allocated", memory.allocated), ("reserved", memory.reserved))]
        rows.append(_peak("process", memory.process))
        rows.append(Row(label="fragmentation", value=format_bytes(memory.fragmentation_bytes)))
        rows.append(Row(label="system available", value=format_bytes(memory.available_bytes), note="at the start"))
    return Section(title="Memory", rows=tuple(rows))


def _peak(label: str, reading: PeakReading) -> Row:
    note = ""
    if reading.peak_bytes is not None:
        note = f"{format_bytes(reading.above_start_bytes)} above the start"
        note += ", peak since process start" if reading.since_process_start else ""
    return Row(label=label, value=format_bytes(reading.peak_bytes), note=note)


def _reuse(record: DecodeRecord) -> Section:
    rows = []
    if (pool := record.pool) is not None:
        note = f"{_of(pool.hits, pool.requests, 'buffer')}, holds {format_bytes(pool.held_bytes)}"
        note += f", at most {format_bytes(pool.high_water_bytes)}"
        rows.append(_rate("pool", pool.served_bytes, pool.requested_bytes, note))
    for cache in record.caches or ():
        rows.append(_rate(f"{cache.name} cache", cache.hits, cache.lookups, _of(cache.hits, cache.lookups, "lookup")))
    if (ahead := record.prefetch) is not None:
        rows.append(_rate("prefetch", ahead.ready, ahead.asked, _of(ahead.ready, ahead.asked, "item")))
    return Section(title="Reuse", rows=tuple(rows))


def _rate(label: str, part: int, whole: int, note: str) -> Row:
    rate = share(part, whole)
    return Row(label=label, value=format_share(rate), share=rate, note=note)


def _of(part: int, whole: int, noun: str) -> str:
    return f"{format_count(part)} of {format_count(whole, noun)}" if whole else f"no {noun} asked for"


def _precision(record: DecodeRecord) -> Section:
    used = record.precision
    if used is None:
        return Section(title="Precision", rows=())
    total = used.kept_macs
    rows = [_macs(d, total) for d in used.kept]
    rows += [Row(label=f"{d.dtype} redone", value=format_macs(d.macs)) for d in used.redone]
    below = format_count(used.ops_below_native, "op run")
    rows.append(Row(label="below the decoder's own", value=below, note=record.identity.loaded_dtype))
    note = f"{format_share(record.conversion_share)} of the bytes moved"
    rows.append(Row(label="conversions", value=format_bytes(used.converted_bytes), note=note))
    return Section(title="Precision", rows=tuple(rows))


def _macs(d: DtypeMacs, total: int) -> Row:
    part = share(d.macs, total)
    note = format_share(part) if part is not None else "work not countable"
    return Row(label=d.dtype, value=format_macs(d.macs) if d.macs else NA, share=part, note=note)


def _work(record: DecodeRecord) -> Section:
    batch = record.batch
    if batch is None:
        return Section(title="Work", rows=())
    filled = format_share(share(batch.images, batch.slots))
    passes = format_count(batch.n_passes, "pass", "passes")
    threads = format_count(record.environment.threads, "thread")
    rows = (
        Row(label="images", value=format_count(batch.images), note=f"{passes}, {filled} of their slots filled"),
        Row(
            label="batching pays",
            value=format_ratio(batch.batch_speedup),
            note="time per image, alone ÷ together",
        ),
        Row(
            label="threads busy",
            value=format_share(record.parallel_efficiency),
            note=f"CPU time ÷ (wall × {threads})",
        ),
        Row(
            label="memory bandwidth",
            value=format_rate(record.bytes_per_s),
            note=f"{format_share(record.bandwidth_share)} of a plain copy",
        ),
        Row(
            label="energy",
            value=NA if record.energy_uj is None else f"{record.energy_uj / 1e6:.1f} J",
            note="of the whole device" if record.energy_from else "",
        ),
    )
    return Section(title="Work", rows=rows)


def _shapes(record: DecodeRecord) -> Section:
    rows = []
    if (convs := record.convs) is not None:
        value = f"{format_count(convs.new)} new, {format_count(convs.seen)} seen before"
        rows.append(Row(label="convolutions", value=value, note=f"{format_count(convs.requests, 'request')}"))
    if (tiles := record.tiles) is not None:
        value = f"{format_count(tiles.count)} in {format_count(tiles.distinct_shapes, 'shape')}"
        rows.append(Row(label="tiles run", value=value, note=f"grid {format_shape(tiles.grid)}"))
        for shape in tiles.shapes[:_SHOWN]:
            rows.append(
                Row(
                    label="", value=f"{format_shape(shape.shape)} {shape.dtype}", note=format_count(shape.count, "tile")
                )
            )
        if tiles.distinct_shapes > _SHOWN:
            rows.append(Row(label="", value=f"and {format_count(tiles.distinct_shapes - _SHOWN, 'shape')} more"))
    return Section(title="Shapes", rows=tuple(rows))


def _fallbacks(record: DecodeRecord) -> Section:
    rows = [
        Row(label=f.kind.replace("_", " "), value=f"{f.given} → {f.used}", note=f"{f.where}: {f.reason}")
        for f in record.fallbacks[:_SHOWN]
    ]
    if (n := record.n_fallbacks) is not None and n > _SHOWN:
        rows.append(Row(label="", value=f"and {format_count(n - _SHOWN)} more"))
    if n == 0:
        rows.append(
            Row(
                label="none",
                value="all went as planned" if record.status is DecodeStatus.OK else "nothing was repaired",
            )
        )
    return Section(title="Fallbacks", rows=tuple(rows))


def _slowest(record: DecodeRecord) -> Section:
    spent: dict[str, int] = {}
    for stage in record.stages:
        spent[stage.op] = spent.get(stage.op, 0) + (stage.host_ns if stage.device_ns is None else stage.device_ns)
    total = sum(spent.values())
    top = sorted(spent.items(), key=lambda item: -item[1])[:_SHOWN]
    rows = [
        Row(label=op, value=format_ns(ns), share=share(ns, total), note=format_share(share(ns, total)))
        for op, ns in top
    ]
    if (n := record.n_stages) is not None and n > len(record.stages):
        rows.append(
            Row(label="", value=f"of the first {format_count(len(record.stages))} of {format_count(n, 'op run')}")
        )
    return Section(title="Slowest ops", rows=tuple(rows))


def _boundaries(record: DecodeRecord) -> Section:
    """Where the chunks of a video meet, the least smooth first."""
    if not record.boundaries:
        return Section(title="Chunk boundaries", rows=())
    n = len(record.boundaries) if record.n_boundaries is None else record.n_boundaries
    worst = sorted(record.boundaries, key=lambda b: (b.smoothness, b.clip, b.frame))[:_SHOWN]
    many_clips = any(b.clip for b in record.boundaries)
    lowest = worst[0].smoothness
    note = f"the least of {format_count(n, 'boundary', 'boundaries')}; 1 is as smooth as the frames around it"
    rows = [Row(label="temporal consistency", value=f"{lowest:.3f}", share=lowest, note=note)]
    for b in worst:
        label = f"clip {b.clip}, frame {b.frame}" if many_clips else f"frame {b.frame}"
        rows.append(Row(label=label, value=f"{b.smoothness:.3f}", share=b.smoothness))
    if n > len(worst):
        rows.append(Row(label="", value=f"and {format_count(n - len(worst))} more"))
    return Section(title="Chunk boundaries", rows=tuple(rows))


def device_note(e: Environment) -> str:
    """Architecture, family and compute units of a device, as far as they are known."""
    units = None if e.compute_units is None else f"{e.compute_units} compute units"
    family = e.device_family if e.device_family not in (e.device, "other") else None
    return ", ".join(part for part in (e.device_arch, family, units) if part)


def built_with(e: Environment) -> list[str]:
    """What torch was built with and runs on, by name and version, as far as it is known."""
    versions = {
        "CUDA": e.cuda, "HIP": e.hip, "ROCm": e.rocm, "MIOpen": e.miopen, "cuDNN": e.cudnn, "driver": e.driver
    }  # fmt: skip
    return [f"{name} {version}" for name, version in versions.items() if version]


def _where(record: DecodeRecord) -> Section:
    e = record.environment
    rows = (
        Row(label="device", value=e.device, note=device_note(e)),
        Row(label="CPU", value=e.cpu or NA, note=f"{format_count(e.threads, 'thread')} of {format_count(e.cpu_count)}"),
        Row(label="torch", value=e.torch, note=", ".join(built_with(e))),
        Row(label="started", value=record.started_at, note=f"environment {record.environment_id}"),
    )
    return Section(title="Where and when", rows=rows)
