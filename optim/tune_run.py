"""One tuning of a decoder on its device, with real decodes and real child processes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from .decode import Decoder, Engine
from .device import DeviceProfile
from .errors import HaloError
from .settings import DecodeSettings
from .tune import CLIP_PROBE_FRAMES, PROBES, DecodeTimer, Report, TuneOptions, candidates, check_options, tune
from .tune_child import survives
from .tune_work import planned_work
from .tuning import Overrides, TunedEntry, TuningStore
from .video.ops import is_video


def tune_decoder(
    decoder: Decoder,
    profile: DeviceProfile,
    options: TuneOptions,
    *,
    store: TuningStore,
    hints: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    report: Report = lambda done, total, text: None,
    before_each: Callable[[], None] = lambda: None,
) -> TunedEntry:
    """Measure, keep and return what was found for this decoder. SettingsError for a budget that allows nothing.

    `hints` are those it was opened with, for the child processes; `environ` stands in for this process's own.
    `report` and `before_each`, which is called before every decode, may raise to cancel: what was measured is kept.
    Weights that were repacked for the candidates are dropped at the end.
    """
    check_options(options)
    timer = DecodeTimer(decoder, profile)

    def timed(overrides: Overrides, probe: int, *, first: bool) -> int:
        before_each()
        return timer(overrides, probe, first=first)

    survive = functools.partial(
        survives, decoder, environ=os.environ if environ is None else environ, hints=dict(hints or {})
    )
    @functools.cache
    def work(overrides: Overrides) -> Any:
        return planned_work(decoder, profile, probe_shape(decoder), overrides)

    def same(one: Overrides, other: Overrides) -> bool:
        return work(one) is not None and bool(work(one) == work(other))

    try:
        return tune(
            decoder, profile, options,
            store=store, timer=timed, check=timer.check, survive=survive, same=same, report=report,
        )  # fmt: skip
    finally:
        timer.close()
        decoder.packed.clear()


def probe_shape(decoder: Decoder) -> tuple[int, ...]:
    """The largest latent that is decoded to tune: [1, C, H, W], or [1, C, T, H, W]."""
    program, edge = decoder.program, PROBES[-1]
    frames = (CLIP_PROBE_FRAMES,) if is_video(program) else ()
    return (1, program.latent_channels, *frames, edge, edge)


def most_bytes(decoder: Decoder, profile: DeviceProfile, options: TuneOptions) -> int:
    """Predicted bytes of the candidate that takes most beside the weights; 0 where no plan fits."""
    tried = (Overrides(), *(c for axis in candidates(decoder, profile, options) for c in axis))
    most = 0
    for overrides in tried:
        settings = overrides.settings(DecodeSettings(advanced_caching=False))
        try:
            plan = Engine(profile=overrides.profile(profile)).plan(decoder, probe_shape(decoder), settings)
        except HaloError:  # its failure is an outcome of tuning
            continue
        most = max(most, plan.summary.predicted.total)
    return most
