"""A plan as words and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...optim.decode import Decoder
from ...optim.video.frames import output_frames
from ...optim.video.ops import is_video
from ..codec import encode
from ..record import SCHEMA_VERSION
from ..render.sections import Row, Section, chunks_row
from ..render.text import render_sections
from ..render.units import NA, format_bytes, format_count, format_macs, format_shape
from .plan_ops import PlannedOp
from .session import PlannedDecode


def plan_line(decoder: Decoder, shape: tuple[int, ...], planned: PlannedDecode) -> dict[str, Any]:
    """The plan as a JSON-safe object."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "plan",
        "family": decoder.program.family,
        "vae_hash": decoder.content_hash,
        "device": str(decoder.device),
        "latent_shape": list(shape),
        "image_shape": list(image_shape(decoder, shape)),
        "plan": encode(planned.summary),
        "predicted_bytes": planned.summary.predicted.total,
        "ops": [
            {
                "name": op.name, "kind": op.kind, "frames": op.frames, "n_tiles": op.n_tiles, "tile": list(op.tile),
                "halo": op.halo, "dtype": op.dtype, "backend": op.backend, "in_place": op.in_place, "macs": op.macs,
            }
            for op in planned.ops
        ],
        "conv_shapes": [encode(s) for s in planned.conv_shapes],
    }  # fmt: skip


def image_shape(decoder: Decoder, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """[B, H, W, C] of the pictures; the frames of all clips make B."""
    program = decoder.program
    n = shape[0] * output_frames(program, shape[2]) if is_video(program) else shape[0]
    return n, shape[-2] * program.scale[1], shape[-1] * program.scale[2], program.out_channels


def render_plan(decoder: Decoder, shape: tuple[int, ...], planned: PlannedDecode) -> str:
    """The plan as a panel: the whole, each op, each convolution shape."""
    made = format_shape(image_shape(decoder, shape))
    title = f"Halo VAE · plan of a {decoder.program.family} decode on {decoder.device}: {format_shape(shape)} → {made}"
    text = render_sections(title, _sections(planned))
    return text + "\n" + _op_table(planned.ops) + "\n" + _shape_list(planned)


def _sections(planned: PlannedDecode) -> list[Section]:
    plan = planned.summary
    peak = plan.predicted
    approximate = "approximate" if plan.approximate else "equal to an untiled decode"
    parts = [("pool", peak.pool), ("scratch", peak.scratch), ("packed weights", peak.packed), ("output", peak.output)]
    if peak.host:
        parts.append(("host memory", peak.host))
    images = format_count(plan.images_per_pass, "clip" if plan.chunk_frames else "picture")
    chunks = (chunks_row(plan),) if plan.chunk_frames else ()
    state = Row(label="carried state", value=format_bytes(plan.carried_bytes), note="a part of the pool")
    carried = (state,) if plan.carried_bytes else ()
    macs = plan.macs or None  # unknown where tiles of the decoder are blended
    return [
        Section(
            title="Plan",
            rows=(
                Row(label="method", value=plan.method, note=approximate),
                Row(label="tiles", value=format_count(plan.n_tiles), note=f"{plan.strategy}, {plan.layout}"),
                Row(label="largest tile", value=f"{format_shape(plan.tile_px)} px", note=_overlap(plan.overlap_px)),
                *chunks,
                Row(label="passes", value=format_count(plan.n_passes), note=f"of {images} at most"),
                Row(label="arithmetic", value=format_macs(macs)),
                Row(label="bytes moved", value=format_bytes(plan.bytes_moved or None)),
                *(Row(label=c.name, value=c.value, note=c.reason) for c in plan.choices),
            ),
        ),
        Section(
            title="Predicted peak above the weights",
            rows=(
                *(Row(label=name, value=format_bytes(n)) for name, n in parts),
                Row(label="total", value=format_bytes(peak.total)),
                *carried,
            ),
        ),
    ]


def _overlap(px: int) -> str:
    return f"overlapping {px} px" if px else ""


def _op_table(ops: Sequence[PlannedOp]) -> str:
    head = ("Op", "kind", "frames", "tiles", "rows×columns", "dtype", "backend", "in place", "arithmetic")
    rows = [
        (op.name, op.kind, str(op.frames), str(op.n_tiles), format_shape(op.tile), op.dtype, op.backend, op.in_place,
         format_macs(op.macs) if op.macs else NA)
        for op in ops
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) for row in (head, *rows))
    return "".join(line.rstrip() + "\n" for line in lines)


def _shape_list(planned: PlannedDecode) -> str:
    lines = [format_count(len(planned.conv_shapes), "convolution shape")]
    for s in planned.conv_shapes:
        lines.append(f"  {format_shape(s.input)} by {format_shape(s.weight)}, {s.dtype}, {s.layout}")
    return "\n".join(lines) + "\n"
