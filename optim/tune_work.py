"""What a choice changes: two candidates that are planned alike would only be told apart by chance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .decode import Decoder, Engine
from .device import DeviceProfile
from .errors import HaloError
from .plan import Plan
from .settings import DecodeSettings
from .tuning import Overrides


def planned_work(decoder: Decoder, profile: DeviceProfile, shape: tuple[int, ...], overrides: Overrides) -> Any:
    """What a latent of this shape is planned to do with these choices, to be compared; None where nothing fits."""
    settings = overrides.settings(DecodeSettings(seed=0))
    try:
        plan = Engine(profile=overrides.profile(profile)).plan(decoder, shape, settings)
    except HaloError:
        return None
    common = (
        plan.strategy, plan.layout, plan.attention, plan.dtypes, plan.workers, plan.pool_bytes, plan.conv_shapes,
        settings.fp16_accumulation,
    )  # fmt: skip
    if isinstance(plan, Plan):
        # a step is the same whatever was refused on the way to it
        passes = {id(p): replace(p, steps=tuple(replace(s, refusals=()) for s in p.steps)) for p in plan.passes}
        return (*common, tuple(passes[id(p)] for p in plan.passes))
    steps = {i: replace(step, refusals=()) for i, step in plan.backends.plans.items()}
    return (*common, plan.chunk_lat, plan.portions, steps)
