"""What a plan comes to: its distinct convolution shapes and the summary that records keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from .costs import conv_shape
from .device import DeviceProfile
from .events import Choice, ConvShape, PeakPrediction, PlanSummary
from .kernels.dispatch import choose_layout
from .ladder import Squeeze
from .plan import Layout, OpPlan, PassPlan, is_conv3
from .program import Conv, Program
from .settings import DecodeSettings

FIRST_REFUSALS = 3
"""Different reasons that a record tells, each with the first op it holds for."""


def conv_shapes_of(passes: Iterable[PassPlan], layout: Layout) -> tuple[ConvShape, ...]:
    """Distinct convolution shapes that the passes will request, in order."""
    seen: dict[ConvShape, None] = {}
    for a_pass in passes:
        for step in a_pass.steps:
            for op, fold in ((step.op, step.folds_weight), (step.partner, False)):
                if isinstance(op, Conv):
                    for tile in step.grid.tiles():
                        seen[conv_shape(op, fold, tile, step.dtype, layout)] = None
    return tuple(seen)


def convolution_choice(steps: Iterable[OpPlan], profile: DeviceProfile, settings: DecodeSettings) -> Choice:
    """How many of the 3x3 convolutions run by which algorithm, and why not all by the one that was asked for."""
    steps = [step for step in steps if is_conv3(step.op)]
    backends = [step.backend for step in steps]
    counts = ", ".join(f"{name} {backends.count(name)}" for name in sorted(set(backends)))
    if settings.kernel_backend != "auto":
        reason = asked_reason(settings.kernel_backend, {step.name: step.refusals for step in steps})
    elif "winograd" in backends or profile.convolution != "winograd":
        reason = f"default: {profile.reasons.convolution}"
    else:
        reason = "default: no algorithm of ours takes these"
    return Choice(name="convolutions", value=counts or "none", reason=reason)


def asked_reason(asked: str, refusals: Mapping[str, tuple[str, ...]]) -> str:
    """That a backend was asked for, and which convolutions it refused: `refusals` by op, empty where it took the op."""
    refused = {name: why for name, why in refusals.items() if why}
    if not refused:
        return f"asked for {asked}"
    first: dict[str, str] = {}
    for name, why in refused.items():
        for reason in why:
            first.setdefault(reason, name)
    told = [f"{reason} ({name})" for reason, name in list(first.items())[:FIRST_REFUSALS]]
    rest = len(first) - len(told)
    more = f"; {rest} more reasons" if rest > 1 else "; 1 more reason" if rest else ""
    return f"asked for {asked}; {len(refused)} of {len(refusals)} refused: {'; '.join(told)}{more}"


def device_choices(
    settings: DecodeSettings, profile: DeviceProfile, strategy: str, layout: str
) -> tuple[Choice, ...]:
    """What follows from the device unless it is asked for otherwise: kind of plan, tile, layout, attention."""
    why = profile.reasons
    asked = settings.plan != "auto"
    _, laid = choose_layout(settings, profile)
    return (
        Choice(name="plan", value=strategy, reason="asked for" if asked else f"default: {why.strategy}"),
        Choice(
            name="tile_bytes", value=f"{profile.tile_bytes >> 20} MiB",
            reason=f"default: {why.tile_bytes}",
        ),
        Choice(name="layout", value=layout, reason=laid),
        Choice(name="attention", value=profile.attention, reason=f"default: {why.attention}"),
    )  # fmt: skip


LIMITED = "limited by free memory"
"""The reason of a choice that was made for want of memory."""


def squeezed_choices(choices: Iterable[Choice], squeeze: Squeeze, profile: DeviceProfile) -> tuple[Choice, ...]:
    """The choices of a plan that gives something up for memory: what it gives up is no default."""
    changed = {
        "tile_bytes": (squeeze.tiles, f"{profile.tile_bytes >> 10} KiB"),
        "images_per_pass": (squeeze.batch, "1"),
    }
    told = []
    for choice in choices:
        given_up, value = changed.get(choice.name, (0, choice.value))
        told.append(replace(choice, value=value, reason=LIMITED) if given_up else choice)
    return tuple(told)


def summarise(
    program: Program,
    passes: tuple[PassPlan, ...],
    strategy: str,
    layout: str,
    predicted: PeakPrediction,
    choices: tuple[Choice, ...],
) -> PlanSummary:
    """The summary of passes over one decoder."""
    steps = passes[0].steps
    scaled = [(s.grid, program.scale[1] // max(1, _kernel_scale(program, s))) for s in steps if is_conv3(s.op)]
    return PlanSummary(
        method="exact",
        approximate=False,
        strategy=strategy,
        layout=layout,
        tile_px=(max((g.rows * k for g, k in scaled), default=0), max((g.cols * k for g, k in scaled), default=0)),
        overlap_px=0,
        n_tiles=sum(s.n_tiles for p in passes for s in p.steps),
        tile_grid=(min((g.n_down for g, _ in scaled), default=1), min((g.n_across for g, _ in scaled), default=1)),
        images_per_pass=passes[0].n_images,
        n_passes=len(passes),
        macs=sum(p.macs for p in passes),
        bytes_moved=sum(p.bytes_moved for p in passes),
        predicted=predicted,
        choices=choices,
    )


def with_resident(
    summary: PlanSummary, packed_bytes: int, out_itemsize: int, profile: DeviceProfile
) -> PlanSummary:
    """The summary with what is packed already taken off the prediction, the picture in its own dtype, and the memory
    there is now: a plan may be older than that."""
    predicted = summary.predicted
    now = replace(
        predicted, packed=max(0, predicted.packed - packed_bytes), output=predicted.output // 4 * out_itemsize
    )
    return replace(summary, predicted=now, choices=(*summary.choices, profile.memory_choice))


def _kernel_scale(program: Program, step: OpPlan) -> int:
    """Elements per latent element at the resolution the kernel runs at."""
    up = step.op.upsample if isinstance(step.op, Conv) and not step.fold else 1
    return program.values[step.op.inputs[0]].scale[1] * up
