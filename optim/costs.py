"""What an op costs: multiply-accumulates, bytes moved, scratch, convolution shapes. Integers only."""

from __future__ import annotations

from .events import ConvShape
from .kernels import upsample, winograd
from .plan import DtypePlan, Layout, OpPlan
from .program import Attention, Conv, Program, Size, value_size
from .tiling import Tile

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
WIDEN_BYTES = 4 << 20
"""Staging in a 16-bit dtype goes through float32 rows of at most this size, so that they stay in the CPU's caches."""


def conv_out_channels(op: Conv, fold: bool) -> int:
    """Channels the convolution kernel produces."""
    return op.out_channels * (4 if fold else 1)


def kernel_edge(op: Conv, fold: bool) -> int:
    """Edge of the kernel that runs: a folded 3x3 is 2x2."""
    return 2 if fold else op.kernel[1]


def staged_shape(op: Conv, tile: Tile) -> tuple[int, int, int, int]:
    """[B, C, H, W] handed to the convolution, halo included."""
    return tile.images.size, op.in_channels, tile.rows.size + 2 * op.halo, tile.cols.size + 2 * op.halo


def conv_result_shape(op: Conv, fold: bool, tile: Tile) -> tuple[int, int, int, int]:
    """[B, C, H, W] that the convolution gives back."""
    b, _, h, w = staged_shape(op, tile)
    k = kernel_edge(op, fold)
    return b, conv_out_channels(op, fold), h - k + 1, w - k + 1


def needs_staging(op: Conv, dtypes: DtypePlan) -> bool:
    """False for a bare 1x1 convolution, which can read its input where it lies."""
    bare = op.halo == 0 and op.norm is None and op.act == "none" and op.upsample == 1
    return not (bare and dtypes.of(op.name) == dtypes.stream)


def winograd_macs(op: Conv, fold: bool, tiles: tuple[Tile, ...]) -> int:
    """Multiply-accumulates of the matrix products that stand for the convolution over these tiles."""
    if fold:
        products = sum(t.images.size * t.rows.size * t.cols.size * 9 for t in tiles)
    else:
        squares = (t.images.size * -(-t.rows.size // winograd.EDGE) * -(-t.cols.size // winograd.EDGE) for t in tiles)
        products = sum(squares) * winograd.TAPS**2
    return products * op.in_channels * op.out_channels


def winograd_buffers(op: Conv, fold: bool, tile: Tile) -> tuple[int, int]:
    """Bytes of (transformed filter, scratch of one block)."""
    kernel = upsample if fold else winograd
    scratch = kernel.scratch_elements(op.in_channels, op.out_channels, tile.rows.size, tile.cols.size)
    return kernel.filter_elements(op.in_channels, op.out_channels) * 4, scratch * 4


def conv_macs(op: Conv, fold: bool, tiles: tuple[Tile, ...]) -> int:
    """Multiply-accumulates of the kernel over these tiles."""
    per_px = op.in_channels * conv_out_channels(op, fold) * kernel_edge(op, fold) ** 2
    return sum(b * h * w for b, _, h, w in (conv_result_shape(op, fold, t) for t in tiles)) * per_px


def attention_macs(op: Attention, n_images: int, n_pixels: int) -> int:
    """Multiply-accumulates of the projections and of the two products."""
    return n_images * (4 * n_pixels * op.channels**2 + 2 * n_pixels**2 * op.channels)


def conv_shape(op: Conv, fold: bool, tile: Tile, dtype: str, layout: Layout) -> ConvShape:
    """What a backend keys its kernel choice by."""
    k = kernel_edge(op, fold)
    return ConvShape(
        input=staged_shape(op, tile),
        weight=(conv_out_channels(op, fold), op.in_channels, k, k),
        dtype=dtype,
        layout=layout,
    )


def weight_bytes(op: Conv, fold: bool, dtype: str) -> int:
    """Bytes of the kernel's weight in its compute dtype."""
    return conv_out_channels(op, fold) * op.in_channels * kernel_edge(op, fold) ** 2 * ITEMSIZE[dtype]


def step_scratch(
    step: OpPlan, dtypes: DtypePlan, program: Program, latent: Size, *, attention: str, cached: bool
) -> int:
    """Bytes that one sweep's kernels hold besides pooled buffers, at their peak."""
    if isinstance(step.op, Attention):
        return _attention_scratch(step, latent, program, attention)
    if not isinstance(step.op, Conv):
        _, h, w = value_size(program, step.op.output, latent)
        return step.grid.n_images * program.values[step.op.output].channels * h * w * 4
    op, tile = step.op, step.grid.tiles()[0]
    b, c, h, w = conv_result_shape(op, step.folded, tile)
    item = ITEMSIZE[step.dtype]
    doubled = step.fold and not step.folded
    result = b * c * h * w * item * (4 if doubled else 1)
    total = result * (2 if step.folded or op.depth_to_space == 2 else 1)  # phases are brought together in a copy
    if step.dtype != "float32":
        total += result  # statistics of 16-bit maps come with a normalised copy
    if step.dtype != dtypes.stream or program.output == op.output:
        total += b * op.out_channels * h * w * 4 * (4 if step.fold else 1)  # the sum or the picture, in float32
    if step.partner is not None:
        total += b * step.partner.out_channels * tile.rows.size * tile.cols.size * item
    if not needs_staging(op, dtypes) and op.inputs[0] != 0:
        total += b * op.in_channels * tile.rows.size * tile.cols.size * item  # a strided slice is made dense
    # the backend's own re-ordered copy
    weights = weight_bytes(op, step.folded, step.dtype) if step.backend == "torch" else 0
    return total + weights * (1 if cached else 2)


def _attention_scratch(step: OpPlan, latent: Size, program: Program, attention: str) -> int:
    op = step.op
    assert isinstance(op, Attention)
    _, h, w = value_size(program, op.inputs[0], latent)
    rows, item = step.grid.rows, ITEMSIZE[step.dtype]
    maps = rows * op.channels * (4 * 2 + item * 3)  # normalised rows, q, the product, its projection
    scores = rows * h * w * (4 + item) if attention == "matmul" else rows * 4096
    return maps + scores + op.channels**2 * item * 2


def step_bytes(step: OpPlan, dtypes: DtypePlan, program: Program, latent: Size) -> int:
    """Bytes a step reads and writes: source, staging (written and read), result (written and read), output, weights."""
    stored = ITEMSIZE[dtypes.stream]

    def elements(value: int) -> int:
        _, h, w = value_size(program, value, latent)
        return step.grid.n_images * program.values[value].channels * h * w

    total = sum(elements(v) for v in step.op.inputs) * stored + elements(step.op.output) * stored
    if step.partner is not None:
        total += elements(step.partner.output) * stored
    if isinstance(step.op, Conv):
        tiles = step.grid.tiles()
        for tile in tiles:
            for shape in (staged_shape(step.op, tile), conv_result_shape(step.op, step.folded, tile)):
                b, c, h, w = shape
                total += 2 * b * c * h * w * ITEMSIZE[step.dtype]
        total += weight_bytes(step.op, step.folded, step.dtype) * len(tiles)
    elif isinstance(step.op, Attention):
        total += 6 * elements(step.op.output) * ITEMSIZE[step.dtype]
    return total
