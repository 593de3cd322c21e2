"""What each op of a plan will do, for pictures and clips alike."""

from __future__ import annotations

from dataclasses import dataclass

from ...optim.plan import OpPlan, Plan
from ...optim.video.ops import ClipAttention, ClipConv
from ...optim.video.plan import ClipPlan
from ...optim.video.steps import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOp:
    """One op over the whole decode of the largest pass, or of one clip."""

    name: str
    kind: str
    frames: int
    """Most frames per run; 1 for pictures."""
    n_tiles: int
    tile: tuple[int, int]
    """(rows, columns)."""
    halo: int
    dtype: str
    backend: str
    in_place: str
    macs: int


def planned_ops(plan: Plan | ClipPlan) -> tuple[PlannedOp, ...]:
    """The ops in the order of the program."""
    if isinstance(plan, ClipPlan):
        return _clip_ops(plan)
    return tuple(_picture_op(op) for op in plan.ops)


def _picture_op(op: OpPlan) -> PlannedOp:
    return PlannedOp(
        name=op.name, kind=op.kind, frames=1, n_tiles=op.n_tiles, tile=op.tile, halo=op.halo, dtype=op.dtype,
        backend=op.backend, in_place=op.in_place, macs=op.macs,
    )  # fmt: skip


def _clip_ops(plan: ClipPlan) -> tuple[PlannedOp, ...]:
    """Rehearses one clip: an op runs as often as its frames come in portions."""
    n_ops = len(plan.program.ops)
    frames, tiles, macs = [0] * n_ops, [0] * n_ops, [0] * n_ops
    for step in plan.driver().steps():
        if isinstance(step, Run):
            n, index = step.stop - step.start, step.index
            frames[index] = max(frames[index], n)
            tiles[index] += plan.backends.grid(index, n).n_tiles if index in plan.backends.plans else 1
            macs[index] += plan.backends.macs(step)
    found = []
    for i, op in enumerate(plan.program.ops):
        how, shape = plan.backends.plans.get(i), plan.layouts.frames[op.output]
        kind = "conv" if isinstance(op, ClipConv) else "attention" if isinstance(op, ClipAttention) else "pointwise"
        found.append(
            PlannedOp(
                name=op.name, kind=kind, frames=frames[i], n_tiles=tiles[i],
                tile=(shape.height, shape.width) if how is None else (how.rows, how.cols),
                halo=op.halo if isinstance(op, ClipConv) else 0, dtype=plan.dtypes.of(op.name),
                backend=how.backend if how is not None else plan.attention if kind == "attention" else "torch",
                in_place="no", macs=macs[i],
            )
        )  # fmt: skip
    return tuple(found)
