"""Clip program + latent shape + settings + device -> ClipPlan, by rehearsing the decode with integers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..arena import align
from ..costs import ITEMSIZE
from ..device import DeviceProfile
from ..events import Choice, ConvShape, PeakPrediction, PlanSummary
from ..kernels.dispatch import choose_layout
from ..ladder import CLIP_RUNGS, UNSQUEEZED, Squeeze, fit_or_refuse
from ..limits import LARGEST_TENSOR, refuse
from ..plan import DtypePlan
from ..pool import slab_bytes
from ..precision import DtypeDecision
from ..program import Op, Program
from ..settings import DecodeSettings
from ..summary import asked_reason, device_choices, squeezed_choices
from .backends import WINOGRAD, Backends
from .driver import Driver
from .frames import boundaries, output_frames
from .layout import Layouts, make_layouts, norm_of
from .ops import ClipAttention, ClipConv
from .plan import ClipPlan, ClipShape, make_driver
from .steps import Keep, Run

AUTO_FRAMES = 16
"""Output frames per chunk where nobody asked for another number."""
ADVICE = "free memory, choose a narrower precision or decode a smaller or shorter clip"
PORTION_TILES, PAIR = 2, 2
"""A portion's widest frames together take as much as this many tiles; but kernels make two frames at a time in less
time than twice one, so there are at least as many where memory allows."""


def make_clip_plan(
    program: Program,
    latent_shape: ClipShape,
    settings: DecodeSettings,
    profile: DeviceProfile,
    decision: DtypeDecision,
    *,
    stored: str,
) -> ClipPlan:
    """The first plan that fits the budget, going down the ladder's rungs where it must. PlanError if none does."""

    def plan_for(squeeze: Squeeze) -> ClipPlan:
        return clip_plan_with(program, latent_shape, settings, profile, decision, stored=stored, squeeze=squeeze)

    return fit_or_refuse(plan_for, CLIP_RUNGS, profile, describe_clips(latent_shape), ADVICE)


def describe_clips(latent_shape: ClipShape) -> str:
    """A decode of latents [B, C, T, H, W] in words."""
    b, _, t, h, w = latent_shape
    return f"decoding {b} clips of {t} latent frames of {w}x{h}"


def chunk_of(program: Program, settings: DecodeSettings, latent_frames: int) -> int:
    """Latent frames per chunk: as asked, in latent frames or in output frames, else AUTO_FRAMES output frames."""
    rate = program.scale[0]
    frames = settings.chunk_frames or AUTO_FRAMES
    return min(latent_frames, settings.chunk_lat or max(1, frames // rate))


def spans_clip(op: Op) -> bool:
    """True where an op needs the whole clip before it can give its first frame."""
    norm = norm_of(op)
    whole = norm is not None and norm.kind == "group" and norm.scope == 0
    return whole or (isinstance(op, ClipAttention) and op.scope == "clip")


@dataclass(slots=True)
class _Rehearsal:
    """What a decode of one clip comes to."""

    macs: int = 0
    bytes_moved: int = 0
    n_tiles: int = 0
    scratch: int = 0
    shapes: dict[ConvShape, None] = field(default_factory=dict)


def clip_plan_with(
    program: Program,
    latent_shape: ClipShape,
    settings: DecodeSettings,
    profile: DeviceProfile,
    decision: DtypeDecision,
    *,
    stored: str,
    squeeze: Squeeze = UNSQUEEZED,
) -> ClipPlan:
    """The plan that gives up what the squeeze says, whether it fits or not."""
    batch, _, t, h, w = latent_shape
    tile_bytes = max(1, profile.tile_bytes // squeeze.tile_divisor)
    profile = replace(profile, tile_bytes=tile_bytes)
    wanted = chunk_of(program, settings, t)
    chunk = (wanted, max(1, wanted // 4), 1)[squeeze.chunks]
    least = PAIR if squeeze == UNSQUEEZED else 1
    strategy = profile.strategy if settings.plan == "auto" else settings.plan
    layout, _ = choose_layout(settings, profile)
    dtypes = decision.dtypes
    layouts = make_layouts(program, (h, w), dtypes)
    backends = Backends(program, layouts, (h, w), settings, profile, dtypes, strategy, layout, tile_bytes)
    portions = tuple(_portion(program, layouts, op, chunk, tile_bytes, least) for op in program.ops)
    driver = make_driver(program, layouts, backends, t, chunk, portions, dtypes)
    rehearsal = _rehearse(program, layouts, backends, driver)
    starts = list(range(0, t, chunk))
    prefetch = settings.memory_prefetching and len(starts) * batch > 1
    latents = latent_bytes(program, chunk, (h, w), dtypes.stream) * (2 if prefetch else 1)
    pool = slab_bytes(driver.peak_bytes + latents)
    frames = output_frames(program, t)
    predicted = PeakPrediction(
        pool=pool,
        scratch=rehearsal.scratch,
        packed=_packed_bytes(program, backends, dtypes, stored) if settings.advanced_caching else 0,
        output=batch * frames * h * program.scale[1] * w * program.scale[2] * program.out_channels * 4,
    )
    choices = (
        *squeezed_choices(_choices(settings, profile, decision, strategy, layout, backends), squeeze, profile),
        _chunk_choice(settings, program, chunk, wanted, t),
        _state_choice(driver.carried_bytes),
    )
    summary = PlanSummary(
        method="exact",
        approximate=False,
        strategy=strategy,
        layout=layout,
        tile_px=_tile_px(program, backends),
        overlap_px=0,
        n_tiles=rehearsal.n_tiles * batch,
        tile_grid=_tile_grid(program, backends),
        images_per_pass=1,
        n_passes=batch,
        macs=rehearsal.macs * batch,
        bytes_moved=rehearsal.bytes_moved * batch,
        predicted=predicted,
        choices=choices,
        chunk_frames=output_frames(program, chunk) if len(starts) == 1 else chunk * program.scale[0],
        n_chunks=len(starts),
        boundaries=boundaries(program, starts, t),
        carried_bytes=driver.carried_bytes,
    )
    return ClipPlan(
        program=program,
        latent_shape=latent_shape,
        layout=layout,
        strategy="tiles" if strategy == "tiles" else "strips",
        dtypes=dtypes,
        attention=profile.attention,
        layouts=layouts,
        backends=backends,
        chunk_lat=chunk,
        portions=portions,
        prefetch=prefetch,
        cache_weights=settings.advanced_caching,
        workers=profile.workers,
        guard=settings.adaptive_precision,
        pool_bytes=pool,
        conv_shapes=tuple(rehearsal.shapes),
        clip_frames=frames,
        summary=summary,
    )


def latent_bytes(program: Program, frames: int, latent: tuple[int, int], dtype: str) -> int:
    """Bytes of one chunk's latent as it is prepared for the pool."""
    return align(frames * program.latent_channels * latent[0] * latent[1] * ITEMSIZE[dtype])


def _portion(program: Program, layouts: Layouts, op: Op, chunk: int, tile_bytes: int, least: int) -> int:
    """Most conv frames of an op at a time: a chunk's worth, unless they are too wide."""
    source, output = layouts.frames[op.inputs[0]], layouts.frames[op.output]
    rate = program.values[op.inputs[0]].scale[0]
    per_conv = 1
    if isinstance(op, ClipConv):
        rate *= 1 if op.upsample_time == "none" else 2
        per_conv = op.frames_per_conv
    widest = max(source.nbytes, output.nbytes * per_conv)
    most = max(least, PORTION_TILES * tile_bytes // widest)
    return max(1, min(chunk * rate, most - most % PAIR if most > PAIR else most))


def _rehearse(program: Program, layouts: Layouts, backends: Backends, driver: Driver) -> _Rehearsal:
    total = _Rehearsal()
    costs: dict[tuple[int, int], tuple[int, int, int]] = {}
    shaped: set[tuple[int, int]] = set()
    for step in driver.steps():
        if isinstance(step, Keep):
            total.bytes_moved += 2 * len(step.moves) * _kept_bytes(layouts, program, step.index)
        if not isinstance(step, Run):
            continue
        key = step.index, step.stop - step.start
        if key not in costs:
            elements = backends.kernel_elements(*key)
            if elements > LARGEST_TENSOR:
                refuse(program.ops[step.index].name, elements)
            costs[key] = _costs(program, layouts, backends, *key)
        if (convolved := (step.index, backends.convolved(step))) not in shaped:
            shaped.add(convolved)
            total.shapes.update(dict.fromkeys(_shapes(backends, *convolved)))
        moved, tiles, scratch = costs[key]
        total.macs += backends.macs(step)
        total.bytes_moved += moved + _staged_bytes(layouts, program, step)
        total.n_tiles += tiles
        total.scratch = max(total.scratch, scratch)
    return total


def _costs(program: Program, layouts: Layouts, backends: Backends, index: int, n: int) -> tuple[int, int, int]:
    """(bytes moved, tiles, scratch) of a run of `n` frames."""
    op = program.ops[index]
    source, output = layouts.frames[op.inputs[0]], layouts.frames[op.output]
    kt, per_conv = (op.kernel[0], op.frames_per_conv) if isinstance(op, ClipConv) else (1, 1)
    moved = (n + kt - 1) * source.nbytes + n * per_conv * output.nbytes * (2 if len(op.inputs) > 1 else 1)
    return moved, backends.n_tiles(index, n), backends.scratch_bytes(index, n)


def _kept_bytes(layouts: Layouts, program: Program, index: int) -> int:
    """Bytes of one frame of an op's history."""
    return (layouts.staged.get(index) or layouts.frames[program.ops[index].inputs[0]]).nbytes


def _staged_bytes(layouts: Layouts, program: Program, step: Run) -> int:
    """Bytes read and written by staging."""
    if not step.stage:
        return 0
    return 2 * len(step.stage) * layouts.frames[program.ops[step.index].inputs[0]].nbytes


def _shapes(backends: Backends, index: int, n: int) -> list[ConvShape]:
    if not n:
        return []
    sizes = {(tile.rows.size, tile.cols.size) for tile in backends.grid(index, n).tiles()}
    return [backends.conv_shape(index, n, *size) for size in sorted(sizes)]


def _packed_bytes(program: Program, backends: Backends, dtypes: DtypePlan, stored: str) -> int:
    """Bytes of cast or folded weights kept between decodes."""
    total = 0
    for i, op in enumerate(program.ops):
        dtype = dtypes.of(op.name)
        if isinstance(op, ClipConv):
            folded = op.upsample == 2 and backends.plans[i].backend != WINOGRAD
            taps = 16 if folded else op.kernel[1] * op.kernel[2]
            if folded or dtype != stored:
                total += op.in_channels * op.out_channels * op.kernel[0] * taps * ITEMSIZE[dtype]
        elif isinstance(op, ClipAttention) and dtype != stored:
            total += 4 * op.channels**2 * ITEMSIZE[dtype]
    return total


# -- summary


def _tile_px(program: Program, backends: Backends) -> tuple[int, int]:
    """Largest tile in picture pixels."""
    sizes = [
        (plan.rows * k, plan.cols * k)
        for i, plan in backends.plans.items()
        if (op := program.ops[i]) and isinstance(op, ClipConv) and op.halo
        for k in [program.scale[1] // program.values[op.inputs[0]].scale[1]]
    ]
    return max((r for r, _ in sizes), default=0), max((c for _, c in sizes), default=0)


def _tile_grid(program: Program, backends: Backends) -> tuple[int, int]:
    """Fewest tiles (down, across) that any convolution with a halo was cut into."""
    grids = [backends.grid(i, 1) for i in backends.plans if getattr(program.ops[i], "halo", 0)]
    return min((g.n_down for g in grids), default=1), min((g.n_across for g in grids), default=1)


def _choices(
    settings: DecodeSettings, profile: DeviceProfile, decision: DtypeDecision, strategy: str, layout: str, b: Backends
) -> tuple[Choice, ...]:
    counts = [plan.backend for plan in b.plans.values()]
    kernels = ", ".join(f"{name} {counts.count(name)}" for name in sorted(set(counts)))
    reason = (
        f"default: {profile.reasons.convolution}; 3-D kernels run as {profile.convolution3d}, as"
        f" {profile.reasons.convolution3d}"
    )
    if settings.kernel_backend != "auto":
        refused = {b.program.ops[i].name: plan.refusals for i, plan in b.plans.items()}
        reason = asked_reason(settings.kernel_backend, refused)
    return (
        *device_choices(settings, profile, strategy, layout),
        decision.choice,
        Choice(name="convolutions", value=kernels, reason=reason),
    )


def _chunk_choice(settings: DecodeSettings, program: Program, chunk: int, wanted: int, latent_frames: int) -> Choice:
    if chunk < wanted:
        reason = "limited by free memory"
    elif settings.chunk_lat or settings.chunk_frames:
        reason = "asked for"
    else:
        reason = f"{AUTO_FRAMES} output frames, or what the clip has"
    barriers = [op.name for op in program.ops if spans_clip(op)]
    if barriers and chunk < latent_frames:
        reason += f"; {barriers[-1]} and what comes before it wait for the whole clip, as their reference does"
    return Choice(name="chunks", value=f"{chunk} latent frames", reason=reason)


def _state_choice(carried: int) -> Choice:
    return Choice(
        name="state",
        value=f"{carried >> 20} MiB carried" if carried else "none",
        reason="each convolution keeps the frames that its next output reads, and nothing is computed twice",
    )

