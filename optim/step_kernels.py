"""What the kernel of a step does besides convolving, and the memory that it works in. Integers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .arena import Buffer
from .costs import ITEMSIZE, WIDEN_BYTES, kernel_buffers, kernel_macs, needs_staging, phase_bytes, staged_shape
from .device import DeviceProfile
from .kernels.backends import constraints_of, norm_refusals
from .plan import DtypePlan, OpPlan, Slice
from .program import Attention, Conv, Program


def with_kernel(step: OpPlan, op: Conv, dtypes: DtypePlan, profile: DeviceProfile) -> OpPlan:
    """The step with what its backend does besides, and with the arithmetic that it takes."""
    if step.backend == "kitchen":
        rules = constraints_of("kitchen", profile)
        stages = not norm_refusals(rules, op, fold=step.fold, stream=dtypes.stream, dtype=step.dtype)
        adds = op.residual is not None and op.residual_repeat == 1 and not step.fold and dtypes.stream == step.dtype
        step = replace(step, staging="kitchen" if stages else "torch", adds_residual=adds)
    return replace(step, macs=kernel_macs(step, op))


def settled(
    steps: tuple[OpPlan, ...], slices: Mapping[int, Slice], dtypes: DtypePlan, program: Program
) -> tuple[OpPlan, ...]:
    """The steps with what follows from where their values lie."""

    def settle(step: OpPlan) -> OpPlan:
        op, grid = step.op, step.grid
        if step.backend != "kitchen" or not isinstance(op, Conv):
            return step
        # an op that overwrites its source carries the rows that the next tile still needs; a package reads them again
        overwrites = step.in_place not in ("no", "residual")
        step = replace(step, staging="torch" if overwrites else step.staging)
        if op.output == program.output:
            return step
        same = step.dtype == dtypes.stream and step.in_place == "no" and slices[op.output].is_whole
        plain = not step.fold and op.depth_to_space == 1 and (op.residual is None or step.adds_residual)
        dense = grid.is_strips and (grid.images_per_call == 1 or grid.rows == grid.height)
        return replace(step, writes_home=same and plain and dense and grid.is_exact)

    return tuple(settle(step) for step in steps)


def work_buffers(step: OpPlan, dtypes: DtypePlan, workers: int) -> list[Buffer]:
    """Pooled memory that a step uses besides values: staging, filters, scratch, results, keys and values."""
    op, i, item = step.op, step.index, ITEMSIZE[step.dtype]
    if isinstance(op, Attention):
        nbytes = step.grid.height * op.channels * item
        return [Buffer(key=f"{name}{i}", nbytes=nbytes, first=i, last=i) for name in ("keys", "vals")]
    if not isinstance(op, Conv) or not needs_staging(op, dtypes):
        return []
    b, c, h, w = staged_shape(op, step.grid.tiles()[0])
    sizes = {"stage": b * c * h * w * item}
    # float32 maps are normalised straight into the staging buffer, and so is what a package stages
    if step.staging == "torch" and (step.dtype != "float32" or dtypes.stream != "float32"):
        sizes["rows"] = max(WIDEN_BYTES, b * c * w * 4)
    sizes["phases"] = phase_bytes(step, op)
    sizes["filter"], sizes["block"], sizes["result"] = kernel_buffers(step, op, workers)
    return [Buffer(key=f"{name}{i}", nbytes=nbytes, first=i, last=i) for name, nbytes in sizes.items() if nbytes]
