"""The most elements that one kernel may be given: many index with 32 bits, and give black areas or fail beyond."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .costs import ITEMSIZE, conv_result_shape, kernel_buffers, staged_shape
from .errors import PlanError
from .plan import OpPlan
from .program import Attention, Conv, Program, Size, value_size

LARGEST_TENSOR = 2**31 - 1
"""Whole maps in the pool may be larger: kernels see tiles of them."""


def kernel_elements(step: OpPlan, program: Program, latent: Size, workers: int = 1) -> int:
    """Elements of the largest tensor that a step gives to one kernel, or gets from it."""
    op = step.op
    if isinstance(op, Attention):
        pixels, rows = step.grid.height, step.grid.rows
        return max(pixels * op.channels, rows * pixels)  # keys or values; scores
    if not isinstance(op, Conv):
        return max(
            step.grid.n_images * program.values[v].channels * math.prod(value_size(program, v, latent))
            for v in (*op.inputs, op.output)
        )
    sizes = [buffer // ITEMSIZE[step.dtype] for buffer in kernel_buffers(step, op, workers)]
    for tile in step.grid.tiles()[:1]:  # the others are no larger
        sizes += [math.prod(staged_shape(op, tile)), math.prod(conv_result_shape(op, step.folded, tile))]
        if step.partner is not None:
            sizes.append(math.prod(conv_result_shape(step.partner, False, tile)))
    return max(sizes)


def oversized(steps: Iterable[OpPlan], program: Program, latent: Size, workers: int = 1) -> OpPlan | None:
    """The first step that gives a kernel too many elements."""
    return next((s for s in steps if kernel_elements(s, program, latent, workers) > LARGEST_TENSOR), None)


def check_kernels(steps: Iterable[OpPlan], program: Program, latent: Size, workers: int = 1) -> None:
    """PlanError where a kernel would get more than LARGEST_TENSOR elements."""
    step = oversized(steps, program, latent, workers)
    if step is not None:
        refuse(step.name, kernel_elements(step, program, latent, workers))


def refuse(op_name: str, elements: int) -> None:
    """Raise PlanError for an op whose kernel would get that many elements."""
    raise PlanError(
        f"{op_name} would give one kernel {elements} elements, but kernels index at most {LARGEST_TENSOR};"
        " decode a smaller picture"
    )
