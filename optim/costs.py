"""What an op costs: multiply-accumulates, bytes moved, scratch, convolution shapes. Integers only."""

from __future__ import annotations

import math

from .events import ConvShape
from .kernels import shifted_gemm, upsample, winograd
from .moments import BAND_ELEMENTS
from .plan import DtypePlan, Layout, OpPlan
from .program import Attention, Conv, Program, Size, norm_groups, value_size
from .tiling import Tile

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
COLUMN_MOMENT_BYTES = 32
"""Statistics of a float32 tile come per column and channel first, in float32 and then in float64."""
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


def kernel_macs(step: OpPlan, op: Conv) -> int:
    """Multiply-accumulates of the step's convolution, as its kernel does them."""
    tiles = step.grid.tiles()
    if step.backend == "winograd":
        return winograd_macs(op, step.fold, tiles)
    if step.backend != "shifted_gemm":
        return conv_macs(op, step.fold, tiles)
    pixels = sum(
        t.images.size * shifted_gemm.products(t.rows.size, t.cols.size, op.out_channels, fold=step.fold) for t in tiles
    )
    return pixels * op.in_channels * op.out_channels


def kernel_buffers(step: OpPlan, op: Conv, workers: int) -> tuple[int, int, int]:
    """Bytes of (laid-out filter, scratch, result) that the step's kernel works in; 0 for what it does not need."""
    tiles, item = step.grid.tiles(), ITEMSIZE[step.dtype]
    if step.backend == "winograd":
        return winograd_buffers(op, step.fold, tiles, workers)
    first = tiles[0]
    if step.backend == "shifted_gemm":
        c, k = op.in_channels, op.out_channels
        # bands of a last, lower strip are no larger
        scratch = shifted_gemm.scratch_bytes(k, first.rows.size, first.cols.size, item)
        result = first.images.size * k * first.rows.size * first.cols.size * (4 if step.fold else 1)
        return shifted_gemm.filter_elements(c, k, fold=step.fold) * item, scratch, result * item
    if step.backend == "kitchen" and not step.writes_home:
        return 0, 0, math.prod(conv_result_shape(op, step.folded, first)) * item
    return 0, 0, 0


def winograd_buffers(op: Conv, fold: bool, tiles: tuple[Tile, ...], workers: int) -> tuple[int, int, int]:
    """Bytes of (transformed filter, scratch of one block per worker, result)."""
    kernel = upsample if fold else winograd
    c, k = op.in_channels, op.out_channels
    # a last, lower strip has blocks of another shape
    sizes = {(tile.rows.size, tile.cols.size) for tile in tiles}
    scratch = max(kernel.scratch_elements(c, k, h, w, workers) for h, w in sizes)
    first = tiles[0]
    result = first.images.size * k * first.rows.size * first.cols.size * (4 if fold else 1)
    return kernel.filter_elements(c, k) * 4, scratch * 4, result * 4


def phase_bytes(step: OpPlan, op: Conv) -> int:
    """Bytes in which the four phases of one tile's result are brought together; 0 where it has none."""
    if not step.folded and op.depth_to_space == 1:
        return 0
    tile = step.grid.tiles()[0]
    channels = conv_out_channels(op, step.folded)
    return tile.images.size * tile.rows.size * tile.cols.size * channels * ITEMSIZE[step.dtype]


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
    step: OpPlan, dtypes: DtypePlan, program: Program, latent: Size, *, attention: str, cached: bool, unfolds: bool
) -> int:
    """Bytes that one sweep's kernels hold besides pooled buffers, at their peak.

    `unfolds`: the framework's convolution may copy its input once per tap, one picture at a time.
    """
    if isinstance(step.op, Attention):
        return _attention_scratch(step, latent, program, attention)
    if not isinstance(step.op, Conv):
        _, h, w = value_size(program, step.op.output, latent)
        return step.grid.n_images * program.values[step.op.output].channels * h * w * 4
    unfolded = unfolded_bytes(step, step.op) if unfolds and step.backend == "torch" else 0
    return _conv_scratch(step, step.op, dtypes, program, cached, unfolded)


def unfolded_bytes(step: OpPlan, op: Conv) -> int:
    """Bytes of one picture's tile copied once per tap (im2col), which a 1x1 convolution does without."""
    edge = kernel_edge(op, step.folded)
    _, _, h, w = conv_result_shape(op, step.folded, step.grid.tiles()[0])
    return op.in_channels * edge**2 * h * w * ITEMSIZE[step.dtype] if edge > 1 else 0


def _conv_scratch(
    step: OpPlan, op: Conv, dtypes: DtypePlan, program: Program, cached: bool, unfolded: int
) -> int:
    """Its result, with the kernel's copies of the weights while it runs, or with what finishing makes after it."""
    tile, item = step.grid.tiles()[0], ITEMSIZE[step.dtype]
    b, c, h, w = conv_result_shape(op, step.folded, tile)
    # other kernels write into the pool
    result = b * c * h * w * item if step.backend == "torch" else 0
    weights = weight_bytes(op, step.folds_weight, step.dtype) if step.backend != "winograd" else 0
    # freed results of other sizes stay resident between what is allocated next
    kept = result if op.halo else 0
    # the weight in the map's layout, unless it is packed so or has no extent, and then in the kernel's own order
    copies = 2 if op.halo and not step.folded else 1
    if step.backend != "torch":  # laid out in the pool, or in the map's layout only
        copies = 0 if step.backend == "shifted_gemm" or step.folded else 1
    kernel = weights * (copies + (0 if cached else 1)) + _kernel_scratch(step, op) + unfolded
    if not needs_staging(op, dtypes) and op.inputs[0] != 0:
        kernel += b * op.in_channels * tile.rows.size * tile.cols.size * item  # a strided slice is made dense
    after = [kernel, _finish_scratch(step, op, dtypes, program)]
    if step.partner is not None:
        beside = b * step.partner.out_channels * tile.rows.size * tile.cols.size * item
        after.append(beside + weight_bytes(step.partner, False, step.dtype))
        after.append(beside + _finish_scratch(step, step.partner, dtypes, program))
    return result + kept + max(after)


def _kernel_scratch(step: OpPlan, op: Conv) -> int:
    """Bytes that a kernel of ours makes beside its buffers, or a package's beside what it is given."""
    tile, item = step.grid.tiles()[0], ITEMSIZE[step.dtype]
    if step.backend == "shifted_gemm" and item < 4:
        # a product is widened before it is added, where the device does not do both at once
        rows = shifted_gemm.band_rows(op.out_channels, tile.rows.size, tile.cols.size)
        return rows * (tile.cols.size + 2) * op.out_channels * 4
    if step.backend != "kitchen":
        return 0
    # few channels are filled up to eight; a residual that is not dense is copied
    filled = math.prod(staged_shape(op, tile)) // op.in_channels * 8 * item if op.in_channels < 8 else 0
    dense = tile.cols.size == step.grid.width and (tile.images.size == 1 or tile.rows.size == step.grid.height)
    residual = 0 if dense or not step.adds_residual else math.prod(conv_result_shape(op, False, tile)) * item
    return filled + residual


def _finish_scratch(step: OpPlan, op: Conv, dtypes: DtypePlan, program: Program) -> int:
    """Bytes that finishing a tile takes beside the kernel's result."""
    tile = step.grid.tiles()[0]
    grow = (2 if step.fold and op is step.op else 1) * op.depth_to_space
    channels = op.out_channels // op.depth_to_space**2
    rows, columns = tile.rows.size * grow, tile.cols.size * grow
    elements = tile.images.size * channels * rows * columns
    wide = elements * 4 if step.dtype != dtypes.stream or program.output == op.output else 0  # the sum, or the picture
    if op.output not in norm_groups(program):
        moments = 0
    elif dtypes.stream == "float32":
        moments = columns * channels * COLUMN_MOMENT_BYTES
    else:
        moments = min(elements, BAND_ELEMENTS) * ITEMSIZE[dtypes.stream]  # a normalised copy comes with them
    return wide + moments


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
        total += weight_bytes(step.op, step.folds_weight, step.dtype) * len(tiles)
    elif isinstance(step.op, Attention):
        total += 6 * elements(step.op.output) * ITEMSIZE[step.dtype]
    return total
