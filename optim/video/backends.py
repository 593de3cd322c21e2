"""Which kernel runs a convolution of frames, in which tiles, and what memory it works in. Integers and names only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ..costs import ITEMSIZE
from ..device import DeviceProfile
from ..events import ConvShape
from ..kernels import shifted_gemm, upsample, winograd, winograd_frames
from ..kernels.backends import ConvCase, constraints_of, refusals
from ..kernels.frame_groups import plan_groups
from ..plan import DtypePlan, Layout
from ..planner import ATTENTION_ROWS, BASE_TILE_LAT
from ..program import Program
from ..settings import DecodeSettings
from ..tiling import TileGrid, even_strip
from .layout import Layouts
from .ops import ClipAttention, ClipConv, ClipScale
from .steps import Page, Run

WINOGRAD, SUM_2D, CONV_3D, CONV_2D = "winograd", "conv2d_sum", "conv3d", "torch"
"""Sums and matrix products; one 2-D convolution per tap, added up; the framework's 3-D convolution; one 2-D
convolution where a single frame is read."""
SHIFTED, KITCHEN = "shifted_gemm", "kitchen"
"""One matrix product per tap; an optional package's 3-D convolution. What each takes: kernels/backends.py."""


SMALL_MAP = {True: 256, False: 16}
"""Pixels of a tile, in float32 or not, up to which a CPU's 3-D convolution is faster than one 2-D convolution per tap:
laying out a weight three times costs more there than the products do (measured: 5 times at 4x4, 2 at 16x16; at
32x32 it is the slower one)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvPlan:
    """How one op runs for any number of frames."""

    backend: str
    rows: int
    """Tile rows at the resolution the kernel reads."""
    cols: int
    slides: bool
    direct: bool
    """The kernel writes straight into the output frames where a tile is whole."""
    refusals: tuple[str, ...] = ()
    """Why the backend that was asked for was not taken; empty where none was asked for."""


class Backends:
    """Kernel, tiles and work memory of every op of a program at one latent size."""

    def __init__(
        self,
        program: Program,
        layouts: Layouts,
        latent: tuple[int, int],
        settings: DecodeSettings,
        profile: DeviceProfile,
        dtypes: DtypePlan,
        strategy: str,
        layout: Layout,
        tile_bytes: int,
    ) -> None:
        """`latent` is (H, W)."""
        self.program, self.layouts, self.latent, self.profile = program, layouts, latent, profile
        self._settings, self._dtypes, self._strategy, self._layout = settings, dtypes, strategy, layout
        self._tile_bytes = tile_bytes
        self.plans = {i: self._plan(i, op) for i, op in enumerate(program.ops) if isinstance(op, ClipConv)}

    # -- choices

    def _plan(self, index: int, op: ClipConv) -> ConvPlan:
        rows, cols, slides = self._tile(op)
        backend, why = self._backend(op, rows, cols, slides)
        bare = op.unpack is None and op.post_act == "none" and op.gain is None and op.noise is None
        plain = bare and op.out_gain == 1.0 and op.out_offset == 0.0 and op.first_frame == "same" and not op.last_of_one
        inside = op.output != self.program.output and self._dtypes.stream == "float32"
        return ConvPlan(
            backend=backend, rows=rows, cols=cols, slides=slides,
            direct=backend == WINOGRAD and plain and inside, refusals=why,
        )  # fmt: skip

    def _tile(self, op: ClipConv) -> tuple[int, int, bool]:
        """(rows, columns, slides) of a tile of one frame, at the source's resolution."""
        shape = self.layouts.frames[op.inputs[0]]
        h, w = shape.height, shape.width
        item = max(ITEMSIZE[self._dtypes.of(op.name)], ITEMSIZE[self._dtypes.stream])
        widest = max(op.in_channels, op.out_channels * op.upsample**2) * item
        area = max(1, self._tile_bytes // widest)
        scale, out_scale = self.program.values[op.inputs[0]].scale[1], self.program.scale[1]
        size = self._settings.tile_size
        if self._strategy == "tiles":
            edge_lat = size // out_scale if size else BASE_TILE_LAT
            edge = max(1, min(edge_lat, BASE_TILE_LAT)) * scale
            while edge > 8 and edge * edge > area:
                edge = -(-edge // 2)
            return min(edge, h), min(edge, w), True
        if size:
            area = min(area, max(1, size * size * scale * scale // (out_scale * out_scale)))
        rows = h if h * w <= area else even_strip(h, area // w)
        # a strip of whole squares leaves nothing to do twice
        whole = -(-rows // winograd.EDGE) * winograd.EDGE
        return (whole if rows < h and whole < h else rows), w, False

    def _backend(self, op: ClipConv, rows: int, cols: int, slides: bool) -> tuple[str, tuple[str, ...]]:
        """What was asked for where it takes the op, else the device's default; and why it does not."""
        case, asked = self._case(op, rows, cols, slides), self._settings.kernel_backend
        if asked == "auto":
            return self._default(op, case), ()
        why = self._refusals(asked, case)
        if why:
            return self._default(op, case), why
        return (CONV_3D if asked == CONV_2D and op.kernel[0] > 1 else asked), ()

    def _default(self, op: ClipConv, case: ConvCase) -> str:
        if self.profile.convolution == WINOGRAD and not self._refusals(WINOGRAD, case):
            return WINOGRAD
        if op.kernel[0] == 1:
            return CONV_2D
        # shifted frames as 2-D convolutions; a folded upsampling exists in 2-D only
        most = SMALL_MAP[case.dtype == "float32"] if self.profile.kind == "cpu" else 0
        small = case.tile <= most * op.kernel[0]
        return CONV_3D if (small or self.profile.convolution3d == "conv3d") and op.upsample == 1 else SUM_2D

    def _refusals(self, name: str, case: ConvCase) -> tuple[str, ...]:
        why = refusals(constraints_of(name, self.profile), case, self.profile, self._settings)
        if name == WINOGRAD and self._dtypes.stream != "float32":
            why = (*why, f"reads frames where they lie, and they are stored in {self._dtypes.stream}")
        return why

    def _case(self, op: ClipConv, rows: int, cols: int, slides: bool) -> ConvCase:
        shape = self.layouts.frames[op.inputs[0]]
        fold = op.upsample == 2 and op.kernel[1] == 3
        last = shape.height % rows or rows if not slides else rows
        return ConvCase(
            medium="clips", kernel=op.kernel, in_channels=op.in_channels,
            out_channels=op.out_channels * (4 if fold else 1), upsample=op.upsample, fold=fold,
            dtype=self._dtypes.of(op.name), layout=self._layout, edge=min(last, cols),
            tile=rows * cols * op.kernel[0], pixels=shape.height * shape.width * op.kernel[0],
        )  # fmt: skip

    # -- tiles

    def grid(self, index: int, n: int) -> TileGrid:
        """Tiles of a run of `n` frames, all frames in each tile."""
        op, plan = self.program.ops[index], self.plans[index]
        shape = self.layouts.frames[op.inputs[0]]
        return TileGrid(
            n_images=n, height=shape.height, width=shape.width, images_per_call=n, rows=plan.rows, cols=plan.cols,
            slides=plan.slides,
        )  # fmt: skip

    def bands(self, index: int, n: int) -> list[tuple[int, int]]:
        """Rows [first, last) of a frame whose queries an attention takes at a time, so that scores stay small."""
        op = self.program.ops[index]
        assert isinstance(op, ClipAttention)
        shape = self.layouts.frames[op.inputs[0]]
        if op.scope == "past":
            return [(0, shape.height)]
        tokens = shape.height * shape.width * (n if op.scope == "clip" else 1)
        rows = even_strip(shape.height, max(1, self.attention_rows(op, tokens) // shape.width))
        return [(top, min(top + rows, shape.height)) for top in range(0, shape.height, rows)]

    def n_tiles(self, index: int, n: int) -> int:
        """Tiles of a run of `n` frames, as they are told."""
        op = self.program.ops[index]
        if isinstance(op, ClipConv):
            return self.grid(index, n).n_tiles
        return n * len(self.bands(index, n)) if isinstance(op, ClipAttention) else 1

    # -- costs

    def work_bytes(self, index: int, n: int) -> int:
        """Bytes of slab memory that a run of `n` frames works in."""
        return sum(self.work_parts(index, n).values())

    def work_parts(self, index: int, n: int) -> Mapping[str, int]:
        """The same, by use, in the order in which they lie."""
        op = self.program.ops[index]
        if isinstance(op, ClipConv):
            return self._conv_parts(index, op, n)
        if isinstance(op, ClipAttention) and op.scope != "past":
            shape = self.layouts.frames[op.inputs[0]]
            frames = n if op.scope == "clip" else 1
            one = align4(frames * shape.height * shape.width * op.channels * ITEMSIZE[self._dtypes.of(op.name)])
            return {"keys": one, "vals": one}
        return {}

    def _conv_parts(self, index: int, op: ClipConv, n: int) -> Mapping[str, int]:
        plan, item = self.plans[index], ITEMSIZE[self._dtypes.of(op.name)]
        kt, c, k = op.kernel[0], op.in_channels, op.out_channels
        parts: dict[str, int] = {}
        if plan.backend == WINOGRAD:
            grow = 4 if op.upsample == 2 else 1
            if op.upsample == 2:
                parts["filter"] = upsample.frames_filter_elements(c, k, kt) * 4
            else:
                parts["filter"] = winograd_frames.filter_elements(c, k, kt) * 4
            parts["scratch"] = max(self._scratch(op, r, plan.cols, n) for r in self._tile_rows(op, plan)) * 4
            if not plan.direct or plan.slides:
                parts["result"] = n * k * plan.rows * plan.cols * grow * 4
        else:
            halo = op.halo
            frames = n + kt - 1
            parts["window"] = frames * c * (plan.rows + 2 * halo) * (plan.cols + 2 * halo) * item
        if plan.backend == SHIFTED:
            parts["filter"] = kt * shifted_gemm.filter_elements(c, k, fold=op.upsample == 2) * item
            parts["scratch"] = shifted_gemm.scratch_bytes(k, plan.rows, plan.cols, item)
        if plan.backend in (SHIFTED, KITCHEN):
            parts["result"] = n * k * plan.rows * plan.cols * op.upsample**2 * item
        return {name: align4(nbytes) for name, nbytes in parts.items()}

    def _tile_rows(self, op: ClipConv, plan: ConvPlan) -> set[int]:
        height = self.layouts.frames[op.inputs[0]].height
        return {plan.rows} if plan.slides else {plan.rows, height % plan.rows or plan.rows}

    def _scratch(self, op: ClipConv, rows: int, cols: int, n: int) -> int:
        c, k, workers = op.in_channels, op.out_channels, self.profile.workers
        if op.upsample == 2:
            return upsample.frames_scratch_elements(c, k, rows, cols, op.kernel[0], n, workers)
        return winograd_frames.scratch_elements(c, k, rows, cols, op.kernel[0], n, workers)

    def scratch_bytes(self, index: int, n: int) -> int:
        """Bytes that the framework allocates beside the slab during a run."""
        op = self.program.ops[index]
        if isinstance(op, ClipScale):
            shape = self.layouts.frames[op.output]
            return 4 * n * shape.elements
        if isinstance(op, ClipAttention):
            return self._attention_scratch(op, n)
        assert isinstance(op, ClipConv)
        plan, item = self.plans[index], ITEMSIZE[self._dtypes.of(op.name)]
        grow = op.upsample**2
        result = n * op.out_channels * plan.rows * plan.cols * grow * item
        weights = op.in_channels * op.out_channels * math.prod(op.kernel) * item
        finish = 0 if plan.direct else 4 * op.out_channels * plan.rows * plan.cols * grow * 2
        if plan.backend == WINOGRAD:
            return weights + finish
        if plan.backend == SHIFTED:
            rows = shifted_gemm.band_rows(op.out_channels, plan.rows, plan.cols)
            return weights + finish + (rows * (plan.cols + 2) * op.out_channels * 4 if item < 4 else 0)
        if plan.backend == KITCHEN:
            # few channels are filled up to eight
            filled = (n + op.kernel[0] - 1) * 8 * (plan.rows + 2) * (plan.cols + 2) * item if op.in_channels < 8 else 0
            return weights + finish + filled
        return 2 * result + 2 * weights + finish + (self._unfolded(op, plan, n) if self.profile.unfolds else 0)

    def _unfolded(self, op: ClipConv, plan: ConvPlan, n: int) -> int:
        """Bytes of a tile copied once per tap (im2col), of one frame, or of all where the kernel is a 3-D one."""
        taps = 4 if op.upsample == 2 and op.halo else op.kernel[1] * op.kernel[2]
        frames = n * op.kernel[0] if plan.backend == CONV_3D else 1
        item = ITEMSIZE[self._dtypes.of(op.name)]
        return frames * taps * op.in_channels * plan.rows * plan.cols * item if taps > 1 else 0

    def kernel_elements(self, index: int, n: int) -> int:
        """Elements of the largest tensor that a run of `n` frames gives to one kernel."""
        op = self.program.ops[index]
        shape = self.layouts.frames[op.inputs[0]]
        if isinstance(op, ClipConv):
            item = ITEMSIZE[self._dtypes.of(op.name)]
            plan, parts = self.plans[index], self._conv_parts(index, op, n).values()
            result = n * op.out_channels * plan.rows * plan.cols * op.upsample**2
            return max(result, *(nbytes // item for nbytes in parts))
        if isinstance(op, ClipAttention) and op.scope != "past":
            tokens = shape.height * shape.width * (n if op.scope == "clip" else 1)
            return tokens * max(op.channels, self.attention_rows(op, tokens))
        return max(shape.elements, self.layouts.frames[op.output].elements)

    def _attention_scratch(self, op: ClipAttention, n: int) -> int:
        shape = self.layouts.frames[op.inputs[0]]
        item = ITEMSIZE[self._dtypes.of(op.name)]
        tokens = shape.height * shape.width * (n if op.scope == "clip" else 1)
        rows = self.attention_rows(op, tokens)
        scores = rows * tokens * (4 + item) if self.profile.attention == "matmul" else rows * 4096
        return rows * op.channels * (8 + 3 * item) + scores + op.channels**2 * item * 2

    def attention_rows(self, op: ClipAttention, tokens: int) -> int:
        """Query pixels per call."""
        item = ITEMSIZE[self._dtypes.of(op.name)]
        per_row = tokens * 4 if self.profile.attention == "matmul" else op.channels * item
        return max(1, min(ATTENTION_ROWS, self._tile_bytes // per_row))

    def past_bytes(self, frames: Mapping[int, int]) -> dict[int, int]:
        """Bytes of the keys and values that attentions over the past keep; `frames` by value."""
        past = {i: op for i, op in enumerate(self.program.ops) if isinstance(op, ClipAttention) and op.scope == "past"}
        return {i: 2 * frames[op.inputs[0]] * self._key_bytes(op) for i, op in past.items()}

    def _key_bytes(self, op: ClipAttention) -> int:
        """Bytes of one frame of keys."""
        return self.layouts.frames[op.inputs[0]].elements * ITEMSIZE[self._dtypes.of(op.name)]

    def convolved(self, run: Run) -> int:
        """Conv frames of a run that a kernel makes: all but a bypassed first one."""
        op, n = self.program.ops[run.index], run.stop - run.start
        if not isinstance(op, ClipConv):
            return 0
        return n - 1 if op.first_frame == "bypass" and run.start == 0 else n

    def macs(self, run: Run) -> int:
        """Multiply-accumulates of a run, as its kernel does them."""
        index, n = run.index, run.stop - run.start
        op = self.program.ops[index]
        shape = self.layouts.frames[op.inputs[0]]
        px = shape.height * shape.width
        if isinstance(op, ClipAttention):
            # of each pixel, the others that it attends to
            others = {"frame": n * px, "clip": n * n * px, "past": sum(range(run.start + 1, run.stop + 1))}[op.scope]
            inner = 2 * px * others
            return 4 * n * px * op.channels**2 + inner * op.channels
        if not isinstance(op, ClipConv):
            return 0
        plan, taps = self.plans[index], run.taps[n - self.convolved(run) :]
        if not taps:
            return 0
        maps = products_of(taps) if plan.backend == WINOGRAD else op.kernel[0] * len(taps)
        pairs = op.in_channels * op.out_channels * maps
        tiles = self.grid(index, n).tiles()
        if plan.backend == WINOGRAD and op.upsample == 1:
            squares = sum(-(-t.rows.size // winograd.EDGE) * -(-t.cols.size // winograd.EDGE) for t in tiles)
            return squares * winograd.TAPS**2 * pairs
        if plan.backend == SHIFTED:
            fold, k = op.upsample == 2, op.out_channels
            return sum(shifted_gemm.products(t.rows.size, t.cols.size, k, fold=fold) for t in tiles) * pairs
        computed = sum(t.rows.size * t.cols.size for t in tiles)
        if op.upsample == 2:
            return computed * pairs * (9 if plan.backend == WINOGRAD else 16 if op.halo else 4)
        return computed * pairs * op.kernel[1] * op.kernel[2]

    def conv_shape(self, index: int, n: int, rows: int, cols: int) -> ConvShape:
        """What a backend keys its kernel choice by."""
        op, plan = self.program.ops[index], self.plans[index]
        assert isinstance(op, ClipConv)
        kt, kh, kw = op.kernel
        h, w = rows + 2 * op.halo, cols + 2 * op.halo
        folded = op.upsample == 2 and plan.backend != WINOGRAD
        out, k2 = (4 * op.out_channels, (2, 2)) if folded and op.halo else (op.out_channels, (kh, kw))
        size: tuple[int, ...] = (n, op.in_channels, h, w)
        weight: tuple[int, ...] = (out, op.in_channels, *k2)
        if plan.backend in (CONV_3D, KITCHEN):
            size, weight = (1, op.in_channels, n + kt - 1, h, w), (out, op.in_channels, kt, *k2)
        return ConvShape(input=size, weight=weight, dtype=self._dtypes.of(op.name), layout=self._layout)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Distinct kernels in use."""
        return tuple(sorted({plan.backend for plan in self.plans.values()}))


def products_of(taps: Sequence[Sequence[Page | None]]) -> int:
    """Products of whole frames that the kernels over separate frames take for these taps."""
    at: dict[Page, int] = {}
    return _products(tuple(tuple(None if p is None else at.setdefault(p, len(at)) for p in tap) for tap in taps))


@lru_cache(maxsize=1024)
def _products(taps: tuple[tuple[int | None, ...], ...]) -> int:
    return sum(len(group.products) * len(group.outputs) for group in plan_groups(taps, 1))


def align4(nbytes: int) -> int:
    """Round up so that parts of a work area stay aligned for any dtype."""
    return -(-nbytes // 256) * 256
