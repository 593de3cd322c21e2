"""Program + latent shape + settings + device -> Plan. Integers only: nothing is allocated, nothing runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from .arena import align
from .costs import ITEMSIZE, attention_macs, conv_macs, conv_out_channels, step_bytes, step_scratch, weight_bytes
from .device import DeviceProfile
from .events import Choice, PeakPrediction
from .kernels.dispatch import BackendChoice, choose_backend, choose_layout
from .ladder import PICTURE_RUNGS, UNSQUEEZED, Squeeze, fit_or_refuse
from .limits import LARGEST_TENSOR, check_kernels, oversized, refuse
from .offload import fetched_bytes, offload_choice, split_buffers
from .placement import Placer, with_modes
from .plan import DtypePlan, Layout, OpPlan, PassPlan, Plan, kind_of
from .pool import slab_bytes
from .precision import DtypeDecision
from .program import Attention, Conv, Op, Program, Size, last_reader, value_size
from .settings import DecodeSettings
from .step_kernels import settled, with_kernel, work_buffers
from .summary import LIMITED, conv_shapes_of, convolution_choice, device_choices, squeezed_choices, summarise
from .tiling import TileGrid, even_strip, largest_divisor

ADVICE = "free memory, choose a narrower precision or decode a smaller picture"
BASE_TILE_LAT = 32
"""Edge in latent pixels of the default 2-D tile: 256 pixels of a x8 decoder, which every common resolution exceeds."""
ATTENTION_ROWS = 1024


def make_plan(
    program: Program,
    latent_shape: tuple[int, int, int, int],
    settings: DecodeSettings,
    profile: DeviceProfile,
    decision: DtypeDecision,
    *,
    out_bytes: int,
    stored: str,
) -> Plan:
    """The first plan that fits the budget, going down the ladder's rungs where it must. PlanError if none does.

    `stored` is the dtype the weights lie in; `out_bytes` the size of the image.
    """

    def plan_for(squeeze: Squeeze) -> Plan:
        return plan_with(
            program, latent_shape, settings, profile, decision, out_bytes=out_bytes, stored=stored, squeeze=squeeze
        )

    return fit_or_refuse(plan_for, PICTURE_RUNGS, profile, describe_pictures(latent_shape), ADVICE)


def is_for_now(plan: Plan) -> bool:
    """True where a plan follows from what is free now, so that it is not the best one at another time."""
    return any(c.name == "images_per_pass" and c.reason == LIMITED for c in plan.summary.choices)


def describe_pictures(latent_shape: tuple[int, ...]) -> str:
    """A decode of latents [B, C, H, W] in words."""
    batch, _, height, width = latent_shape
    return f"decoding {batch} latents of {width}x{height}"


def plan_with(
    program: Program,
    latent_shape: tuple[int, int, int, int],
    settings: DecodeSettings,
    profile: DeviceProfile,
    decision: DtypeDecision,
    *,
    out_bytes: int,
    stored: str,
    squeeze: Squeeze = UNSQUEEZED,
) -> Plan:
    """The plan that gives up what the squeeze says, whether it fits or not."""
    batch, _, height, width = latent_shape
    profile = replace(profile, tile_bytes=max(1, profile.tile_bytes // squeeze.tile_divisor))
    if squeeze.batch:
        profile = replace(profile, batch_cap=1)
    if squeeze.offload and settings.kernel_backend == "kitchen":
        settings = replace(settings, kernel_backend="auto")  # it reads and writes whole values where they live
    strategy = profile.strategy if settings.plan == "auto" else settings.plan
    layout, _ = choose_layout(settings, profile)
    maker = _PassMaker(program, settings, profile, decision.dtypes, strategy, layout, (1, height, width), stored)
    maker.offload = squeeze.offload
    n, batch_choice = _images_per_pass(maker, program, batch, settings, profile, (height, width))
    sizes = [n] * (batch // n) + ([batch % n] if batch % n else [])
    prefetch = settings.memory_prefetching and len(sizes) > 1
    by_size = {size: maker.make(size) for size in dict.fromkeys(sizes)}
    for made in by_size.values():
        check_kernels(made.steps, program, made.latent, profile.workers)
    passes = tuple(by_size[size] for size in sizes)
    latents = latent_buffer_bytes(program, n, (1, height, width), decision.dtypes.stream) * (2 if prefetch else 1)
    pool = slab_bytes(max(p.arena.nbytes for p in by_size.values()) + latents)
    host = slab_bytes(max(p.offload.host.nbytes for p in by_size.values()))
    predicted = PeakPrediction(
        pool=pool,
        scratch=max(p.scratch_bytes for p in by_size.values()),
        packed=max(p.packed_bytes for p in by_size.values()) if settings.advanced_caching else 0,
        output=out_bytes,
        host=host,
    )
    choices = (
        *device_choices(settings, profile, strategy, layout),
        decision.choice,
        batch_choice,
        convolution_choice(passes[0].steps, profile, settings),
        *offload_choice(passes[0], pool),
    )
    choices = squeezed_choices(choices, squeeze, profile)
    shapes = conv_shapes_of(by_size.values(), layout)
    return Plan(
        program=program,
        latent_shape=latent_shape,
        layout=layout,
        strategy=strategy,
        dtypes=decision.dtypes,
        attention=profile.attention,
        passes=passes,
        prefetch=prefetch,
        cache_weights=settings.advanced_caching,
        workers=profile.workers,
        guard=settings.adaptive_precision,
        pool_bytes=pool,
        conv_shapes=shapes,
        summary=summarise(program, passes, strategy, layout, predicted, choices),
        host_bytes=host,
    )


def latent_buffer_bytes(program: Program, n_images: int, latent: Size, dtype: str) -> int:
    """Bytes of one pass's latents in the pool."""
    return align(n_images * program.latent_channels * math.prod(latent) * ITEMSIZE[dtype])


def _images_per_pass(
    maker: _PassMaker,
    program: Program,
    batch: int,
    settings: DecodeSettings,
    profile: DeviceProfile,
    size: tuple[int, int],
) -> tuple[int, Choice]:
    """Pictures per pass: as many as still pay, fit the budget, and keep kernels within 32-bit indexing."""
    if not settings.batch_optimization or batch == 1:
        why = "one picture" if batch == 1 else "batch optimisation is off"
        return 1, Choice(name="images_per_pass", value="1", reason=why)
    pixels = size[0] * size[1] * math.prod(program.scale)
    n = max(1, min(batch, profile.batch_cap, profile.pass_pixels // pixels))
    reason = (
        f"default: at most {profile.batch_cap} pictures ({profile.reasons.batch_cap})"
        f" and {profile.pass_pixels} pixels per pass ({profile.reasons.pass_pixels})"
    )
    while n > 1 and profile.budget_bytes is not None and maker.make(n).arena.nbytes > profile.budget_bytes // 2:
        n, reason = n - 1, LIMITED
    while n > 1 and oversized(maker.make(n).steps, program, (1, *size), profile.workers) is not None:
        n, reason = n - 1, f"no kernel gets more than {LARGEST_TENSOR} elements"
    return n, Choice(name="images_per_pass", value=str(n), reason=reason)


class _PassMaker:
    """Builds the plan of one pass for any number of images."""

    def __init__(
        self,
        program: Program,
        settings: DecodeSettings,
        profile: DeviceProfile,
        dtypes: DtypePlan,
        strategy: str,
        layout: Layout,
        latent: Size,
        stored: str,
    ) -> None:
        self._program, self._settings, self._profile, self._dtypes = program, settings, profile, dtypes
        self._strategy, self._layout, self._latent, self._stored = strategy, layout, latent, stored
        self._last = last_reader(program)
        self.offload = 0
        """How much of the values lives in the host's memory, as Squeeze has it."""

    def make(self, n: int) -> PassPlan:
        """The pass over `n` images."""
        steps = self._steps(n)
        reuse = "float16" not in (self._dtypes.stream, self._dtypes.compute)
        placer = Placer(
            self._program,
            steps,
            n,
            self._latent,
            ITEMSIZE[self._dtypes.stream],
            channels_last=self._layout == "channels_last",
            reuse=reuse,
        )
        placer.run()
        homes = placer.buffers()
        steps = settled(with_modes(steps, placer.modes), placer.slices, self._dtypes, self._program)
        work = [work_buffers(step, self._dtypes, self._profile.workers) for step in steps]
        steps = tuple(replace(s, buffers=tuple(b.key for b in bufs)) for s, bufs in zip(steps, work, strict=True))
        arena, offload = split_buffers(homes, [b for bufs in work for b in bufs], self.offload)
        stored = ITEMSIZE[self._dtypes.stream]
        scratch = [
            step_scratch(
                s,
                self._dtypes,
                self._program,
                self._latent,
                attention=self._profile.attention,
                cached=not self._converts(s),
                unfolds=self._profile.unfolds,
            )
            + fetched_bytes(s, placer.slices, offload.homes, stored)
            for s in steps
        ]
        return PassPlan(
            n_images=n,
            latent=self._latent,
            steps=steps,
            slices=placer.slices,
            buffer_bytes={b.key: b.nbytes for bufs in (homes, *work) for b in bufs},
            arena=arena,
            scratch_bytes=max(scratch),
            packed_bytes=self._packed(steps),
            macs=sum(s.macs for s in steps),
            bytes_moved=sum(step_bytes(s, self._dtypes, self._program, self._latent) for s in steps),
            offload=offload,
        )

    # -- steps

    def _steps(self, n: int) -> tuple[OpPlan, ...]:
        steps: list[OpPlan] = []
        ops = list(self._program.ops)
        i = 0
        while i < len(ops):
            step = self._step(ops[i], len(steps), n)
            partner = ops[i + 1] if i + 1 < len(ops) else None
            if isinstance(partner, Conv) and self._narrows(step, partner, i + 1):
                macs = step.macs + conv_macs(partner, False, step.grid.tiles())
                step = replace(step, partner=partner, macs=macs)
                i += 1
            steps.append(step)
            i += 1
        return tuple(steps)

    def _step(self, op: Op, index: int, n: int) -> OpPlan:
        _, h, w = value_size(self._program, op.inputs[0], self._latent)
        fold, macs = False, 0
        chosen = BackendChoice(backend="torch", refusals=())
        if isinstance(op, Conv):
            fold = op.upsample == 2 and op.kernel[1] == 3
            grow = 1 if fold else op.upsample
            grid = self._conv_grid(op, fold, n, h * grow, w * grow)
            chosen = self._backend(op, fold, grid)
        elif isinstance(op, Attention):
            grid = self._attention_grid(op, n, h * w)
            macs = attention_macs(op, n, h * w)
        else:
            grid = TileGrid(n_images=n, height=h, width=w, images_per_call=n, rows=h, cols=w)
        step = OpPlan(
            index=index,
            op=op,
            partner=None,
            kind=kind_of(op),
            grid=grid,
            fold=fold,
            backend=chosen.backend,
            dtype=self._dtypes.of(op.name),
            in_place="no",
            buffers=(),
            macs=macs,
            refusals=chosen.refusals if self._settings.kernel_backend != "auto" else (),
        )
        return with_kernel(step, op, self._dtypes, self._profile) if isinstance(op, Conv) else step

    def _backend(self, op: Conv, fold: bool, grid: TileGrid) -> BackendChoice:
        if op.name in self._dtypes.widened and self._dtypes.stream == "float16":
            # its result lies in another dtype than the others'
            return BackendChoice(backend="torch", refusals=("runs in float32, as float16 was not finite",))
        return choose_backend(
            op,
            fold=fold,
            dtype=self._dtypes.of(op.name),
            layout=self._layout,
            grid=grid,
            profile=self._profile,
            settings=self._settings,
        )

    def _conv_grid(self, op: Conv, fold: bool, n: int, h: int, w: int) -> TileGrid:
        # a result is added up in the stored dtype, which may be the wider one
        item = max(ITEMSIZE[self._dtypes.of(op.name)], ITEMSIZE[self._dtypes.stream])
        channels = max(op.in_channels, conv_out_channels(op, fold))
        area, most = max(1, self._profile.tile_bytes // (channels * item)), LARGEST_TENSOR // channels
        # at the resolution the kernel runs at, tile_size picture pixels are this many elements
        out_scale = self._program.scale[1]
        scale = self._program.values[op.inputs[0]].scale[1] * (1 if fold else op.upsample)
        tile_size = self._settings.tile_size
        if self._strategy == "tiles":
            lat = tile_size // out_scale if tile_size else BASE_TILE_LAT
            return self._tile_grid(n, h, w, area, most, scale, lat)
        if tile_size:
            area = min(area, max(1, tile_size * tile_size * scale * scale // (out_scale * out_scale)))
        # with its halo a tile is two rows and columns larger
        whole = min(area // (h * w), most // ((h + 2) * (w + 2)))
        if whole > 0:
            per_call = largest_divisor(n, whole)
            return TileGrid(
                n_images=n, height=h, width=w, images_per_call=per_call, rows=h, cols=w, slides=False
            )  # fmt: skip
        rows = even_strip(h, min(area // w, most // (w + 2) - 2))
        return TileGrid(n_images=n, height=h, width=w, images_per_call=1, rows=rows, cols=w, slides=False)

    def _tile_grid(self, n: int, h: int, w: int, area: int, most: int, scale: int, edge_lat: int) -> TileGrid:
        edge = max(1, min(edge_lat, BASE_TILE_LAT)) * scale
        while edge > 8 and (edge * edge > area or (edge + 2) ** 2 > most):
            edge = -(-edge // 2)
        per_call = largest_divisor(n, max(1, min(area // (edge * edge), most // (edge + 2) ** 2)))
        return TileGrid(n_images=n, height=h, width=w, images_per_call=per_call, rows=min(edge, h), cols=min(edge, w))

    def _attention_grid(self, op: Attention, n: int, pixels: int) -> TileGrid:
        if pixels * op.channels > LARGEST_TENSOR:  # keys cannot be cut
            refuse(op.name, pixels * op.channels)
        item = ITEMSIZE[self._dtypes.of(op.name)]
        per_row = pixels * 4 if self._profile.attention == "matmul" else op.channels * item
        rows = even_strip(pixels, max(1, min(ATTENTION_ROWS, self._profile.tile_bytes // per_row)))
        return TileGrid(n_images=n, height=pixels, width=1, images_per_call=1, rows=rows, cols=1, slides=False)

    def _narrows(self, step: OpPlan, partner: Conv, partner_index: int) -> bool:
        """May `step` and its shortcut overwrite their common, wider input in one sweep?"""
        op = step.op
        if not isinstance(op, Conv) or op.inputs[0] != partner.inputs[0] or op.inputs[0] == 0:
            return False
        bare = partner.halo == 0 and partner.norm is None and partner.act == "none" and partner.post_act == "none"
        simple = len(op.inputs) == len(partner.inputs) == 1 and op.upsample == op.depth_to_space == 1
        simple = simple and partner.upsample == partner.depth_to_space == 1
        channels = self._program.values
        fits = channels[op.output].channels + channels[partner.output].channels <= channels[op.inputs[0]].channels
        dies = self._last[op.inputs[0]] == partner_index
        safe = "float16" not in (self._dtypes.stream, self._dtypes.of(op.name), self._dtypes.of(partner.name))
        same = self._dtypes.of(op.name) == self._dtypes.of(partner.name)
        sweeps = step.grid.is_strips and step.grid.is_exact
        return bare and simple and fits and dies and safe and same and sweeps

    def _converts(self, step: OpPlan) -> bool:
        """Does the step's weight have to be folded or cast, and is that not kept?"""
        return (step.folds_weight or self._stored != step.dtype) and not self._settings.advanced_caching

    def _packed(self, steps: Sequence[OpPlan]) -> int:
        """Bytes of folded or cast weights kept between decodes."""
        total = 0
        for step in steps:
            for op, fold in ((step.op, step.folds_weight), (step.partner, False)):
                if isinstance(op, Conv) and (fold or self._stored != step.dtype):
                    total += weight_bytes(op, fold, step.dtype)
                elif isinstance(op, Attention) and self._stored != step.dtype:
                    total += 4 * op.channels**2 * ITEMSIZE[step.dtype]
        return total
