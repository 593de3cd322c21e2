from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from halo_vae.optim.errors import DecodeCancelled
from halo_vae.profiling.memory import MemoryCounters
from halo_vae.profiling.record import ChunkBoundary, DecodeRecord
from halo_vae.profiling.render import markdown, text
from halo_vae.tests.profiling.fakes import (
    GIB,
    MS,
    PLAN,
    FakeClock,
    FakeCounter,
    busy_events,
    make_collector,
    record_events,
    record_failure,
)

LEVELS = ("off", "summary", "per_op")
RENDERERS: dict[str, Callable[[DecodeRecord], str]] = {"text": text.render_record, "markdown": markdown.render_record}


def make_record(level: str = "per_op") -> DecodeRecord:
    clock, resident = FakeClock(), FakeCounter(now=GIB)

    def events(run: Any) -> None:
        busy_events(run)
        run.mark("compute")
        clock.advance(83 * MS)
        run.mark("stitch")
        clock.advance(17 * MS)
        resident.touch(500)
        run.pool_levels(300, 400)

    def memory(device: str) -> MemoryCounters:
        return MemoryCounters(allocated=None, reserved=None, process=resident, available_bytes=4 * GIB)

    record: DecodeRecord = record_events(make_collector(level, clock=clock, memory=memory), events)
    return record


def failed_record() -> DecodeRecord:
    collector = make_collector()
    record_failure(collector, DecodeCancelled("stopped | by <you>"))
    return collector.records()[0]


def line_with(panel: str, label: str) -> str:
    """The one line that begins with a label."""
    (found,) = (line for line in panel.splitlines() if line.strip().startswith(label + "  "))
    return " ".join(found.split())


@pytest.mark.parametrize("label", ["total", "compute", "pool"])
def test_labels_are_unique(label: str) -> None:
    assert line_with(text.render_record(make_record()), label)


# Each row: a label and what its line says, from the events and levels above.
TOLD = [
    ("total", "total 100 ms first run of these shapes"),
    ("compute", "compute 83.0 ms ████████████████▋ 83.0 %"),
    ("stitch", "stitch 17.0 ms ███▍ 17.0 %"),
    ("method", "method exact equal to an untiled decode"),
    ("tiles", "tiles 3×3 of at most 256×256 px tiles, channels_last"),
    ("precision", "precision mixed 512 < edge < 1024"),  # the plan's choice and its reason
    ("predicted peak", "predicted peak 400 B pool 300 B, scratch 60 B, packed weights 30 B, output 10 B"),
    ("measured peak", "measured peak 500 B 500 B above the start and what the pool held before; predicted 0.80 ×"),
    ("allocated", "allocated n/a"),
    ("fragmentation", "fragmentation n/a"),
    ("system available", "system available 4.00 GiB at the start"),
    ("pool", "pool 66.7 % █████████████▍ 1 of 2 buffers, holds 300 B, at most 400 B"),
    ("program cache", "program cache 100 % ████████████████████ 1 of 1 lookup"),
    ("plan cache", "plan cache 0 % 0 of 1 lookup"),
    ("tuning cache", "tuning cache n/a no lookup asked for"),
    ("prefetch", "prefetch 50.0 % ██████████ 1 of 2 items"),
    ("bfloat16", "bfloat16 300 MAC ███████████████ 75.0 %"),
    ("float16 redone", "float16 redone 50 MAC"),
    ("conversions", "conversions 40 B 1.0 % of the bytes moved"),
    ("images", "images 3 2 passes, 75.0 % of their slots filled"),
    ("convolutions", "convolutions 1 new, 0 seen before 1 request"),
    ("tiles run", "tiles run 1 in 1 shape grid 3×3"),
    ("1×4×66×66 float16", "1×4×66×66 float16 1 tile"),
    ("non finite", "non finite float16 → float32 decoder.conv_in: inf"),
    ("decoder.conv_in", "decoder.conv_in 0 ns n/a"),
    ("torch", "torch 2.13.0"),
]


@pytest.mark.parametrize(("label", "said"), TOLD)
def test_text_tells(label: str, said: str) -> None:
    assert line_with(text.render_record(make_record()), label) == said


def test_text_title() -> None:
    first = text.render_record(make_record()).splitlines()[0]
    assert first == "Halo VAE · kl on cpu: 1×4×64×64 float32 → 1×512×512×3"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("renderer", RENDERERS)
def test_every_level_renders(level: str, renderer: str) -> None:
    panel = RENDERERS[renderer](make_record(level))
    assert "100 ms" in panel
    assert "None" not in panel
    assert ("Reuse" in panel) == (level != "off")
    assert ("Slowest ops" in panel) == (level == "per_op")


@pytest.mark.parametrize("renderer", RENDERERS)
def test_failures_render(renderer: str) -> None:
    panel = RENDERERS[renderer](failed_record())
    assert "interrupted" in panel
    assert "None" not in panel


def test_a_peak_that_may_be_older_is_labelled() -> None:
    record = make_record()
    assert record.memory is not None
    older = replace(record.memory.process, since_process_start=True, above_start_bytes=None)
    panel = text.render_record(replace(record, memory=replace(record.memory, process=older)))
    assert line_with(panel, "process") == "process 1.00 GiB n/a above the start, peak since process start"
    assert line_with(panel, "measured peak").startswith("measured peak n/a")


def test_long_lists_are_cut_and_counted() -> None:
    def events(run: Any) -> None:
        for i in range(9):
            run.tile_started(i, 9, (1, 4, i, i), "float32")

    panel = text.render_record(record_events(make_collector(), events))
    assert "and 3 shapes more" in panel
    assert "5×5 float32" in panel
    assert "6×6 float32" not in panel


def test_chunk_boundaries_are_shown() -> None:
    boundaries = (ChunkBoundary(frame=4, smoothness=1.0), ChunkBoundary(frame=8, smoothness=0.5))
    panel = text.render_record(replace(make_record(), boundaries=boundaries, n_boundaries=2))
    shown = line_with(panel, "temporal consistency")
    assert shown == (
        "temporal consistency 0.500 ██████████ the least of 2 boundaries; 1 is as smooth as the frames around it"
    )
    assert line_with(panel, "frame 4").startswith("frame 4 1.000")
    assert panel.index("frame 8") < panel.index("frame 4")  # the least smooth first


def test_many_boundaries_are_cut_and_counted_and_name_their_clip() -> None:
    def events(run: Any) -> None:
        run.planned(replace(PLAN, chunk_frames=4, n_chunks=300))
        for clip in range(2):
            for frame in range(4, 4 * 300, 4):
                run.boundary(clip, frame, 1.0 - 0.5 * (clip == 1 and frame == 40))

    panel = text.render_record(record_events(make_collector(), events))
    assert "0.500" in line_with(panel, "clip 1, frame 40")
    assert "the least of 598 boundaries" in line_with(panel, "temporal consistency")
    assert "and 592 more" in panel


def test_chunks_and_carried_state_of_a_video_are_shown() -> None:
    record = make_record()
    assert record.plan is not None
    plan = replace(record.plan, chunk_frames=8, n_chunks=3, boundaries=(9, 17), carried_bytes=3 << 20, n_passes=1)
    panel = text.render_record(replace(record, plan=plan))
    assert line_with(panel, "clip") == "clip 3 chunks of at most 8 frames new chunks at frame 9, 17"
    assert line_with(panel, "carried state") == "carried state 3.00 MiB from chunk to chunk, a part of the pool"
    assert "carried state" not in text.render_record(record)
    assert "chunks" not in text.render_record(record)
    assert "| clip | 3 chunks of at most 8 frames |" in markdown.render_record(replace(record, plan=plan))


def test_opaque_work_is_not_called_zero() -> None:
    record = make_record()
    assert record.plan is not None
    panel = text.render_record(replace(record, plan=replace(record.plan, macs=0, bytes_moved=0)))
    assert line_with(panel, "work") == "work n/a"
    assert line_with(panel, "memory bandwidth").startswith("memory bandwidth n/a")


def test_one_line() -> None:
    assert text.render_line(make_record()) == "kl on cpu: 1×4×64×64 float32 → 1×512×512×3 in 100 ms"
    assert text.render_line(failed_record()).endswith("→ interrupted in 0 ns: stopped | by <you>")


def test_metrics_panel() -> None:
    collector = make_collector()
    empty = text.render_metrics(collector.metrics())
    assert line_with(empty, "cache hits") == "cache hits n/a"
    record_events(collector, busy_events)
    panel = text.render_metrics(collector.metrics())
    assert line_with(panel, "cache hits") == "cache hits 50.0 % ██████████"
    assert line_with(panel, "memory from the pool") == "memory from the pool 66.7 % █████████████▍"
    assert line_with(panel, "allocations avoided") == "allocations avoided 1"
    assert line_with(panel, "batched decodes") == "batched decodes 1"
    assert "| cache hits | 50.0 % |" in markdown.render_metrics(collector.metrics())


def test_markdown_tables_are_well_formed() -> None:
    for block in markdown.render_record(make_record()).split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1


def test_markdown_text_cannot_break_a_table() -> None:
    panel = markdown.render_history([failed_record()])
    assert panel.splitlines()[2].endswith("| n/a | 0 ns | n/a | interrupted: stopped \\| by &lt;you> |")


def test_markdown_history() -> None:
    rows = markdown.render_history([make_record(), make_record("off")]).splitlines()
    assert rows[2] == ("| 2026-01-02T03:04:05.678+00:00 | kl | cpu | 1×4×64×64 | 1×512×512×3 | 100 ms | 500 B | ok |")
    assert rows[3].endswith("| 100 ms | n/a | ok |")
