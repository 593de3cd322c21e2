"""The monitor's panel: the device, a VAE, what `auto` would choose for it, and what the history advises."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from ..optim.blend_plan import choose_dtype, plan_blend, summarise
from ..optim.device import DeviceProfile
from ..optim.errors import HaloError
from ..optim.events import PlanSummary
from ..optim.opaque import OpaqueDecoder, fit_latent
from ..optim.packing import dtype_name
from ..optim.settings import DecodeSettings
from ..profiling.bandwidth import PROCESS_RATES
from ..profiling.doctor import diagnose
from ..profiling.doctor_read import read_facts
from ..profiling.environment import read_environment
from ..profiling.metrics import metrics_of
from ..profiling.record import DecodeRecord
from ..profiling.render.doctor import warning_rows
from ..profiling.render.sections import Row, Section, built_with, chunks_row, device_note, metrics_sections
from ..profiling.render.text import render_line, render_sections
from ..profiling.render.tuning import tuning_section
from ..profiling.render.units import NA, format_bytes, format_count, format_rate, format_shape
from ..profiling.store import StoreError
from ..profiling.usage import suggest, usage_of
from .advice import advise
from .decoders import Opened
from .latents import latent_of
from .session import Session
from .vae import describe_vae

SIZES = (512, 1024, 2048)
"""Edges of square pictures to plan for where no latent is connected."""
CLIP_SIZE = (480, 832)
"""Height and width of a clip to plan for where none is connected, and below its latent frames: 81 frames of Wan."""
CLIP_LAT = 21
_HISTORY = 200
"""Records of the history that advice is drawn from."""
_SHOWN = 5


def render_monitor(session: Session, vae: Any, samples: Mapping[str, Any] | None) -> str:
    """The panel. VaeError or LatentError for an input that cannot be decoded."""
    opaque = None if vae is None else describe_vae(vae)
    device = torch.device("cpu") if opaque is None else opaque.device
    sections = [_device(session, device), *_warnings(session, device)]
    if opaque is not None:
        opened = session.decoders.of(vae)
        shapes = _shapes(opaque, samples)
        sections += [_vae(opaque, opened), *(_plan(session, opaque, opened, shape) for shape in shapes)]
    sections += [_tuning(session), *_history(session)]
    title = "Halo VAE · monitor" if opaque is None else f"Halo VAE · monitor of {opaque.name}"
    return render_sections(title, sections)


def _device(session: Session, device: torch.device) -> Section:
    profile, seen = session.engine.device_profile(device), read_environment(str(device))
    rows = (
        Row(label="device", value=seen.device, note=device_note(seen)),
        Row(label="host", value=session.host.name),
        Row(label="torch", value=seen.torch, note=", ".join((format_count(seen.threads, "thread"), *built_with(seen)))),
        Row(label="free memory", value=format_bytes(session.host.free_bytes(device)),
            note=f"of {format_bytes(session.host.total_bytes(device))}"),
        Row(label="memory for a decode", value=format_bytes(profile.budget_bytes), note=profile.memory_choice.reason),
        Row(label="kept between decodes", value=format_bytes(session.held_bytes()), note="pool and repacked weights"),
        Row(label="fast dtypes", value=", ".join(profile.native_dtypes), note=profile.reasons.precision),
        Row(label="plain copy", value=format_rate(PROCESS_RATES.measure(str(device))),
            note="read and written; what decodes of this process are held against"),
        Row(label="default plan", value=profile.strategy, note=profile.reasons.strategy),
        Row(label="default layout", value=profile.layout, note=profile.reasons.layout),
        Row(label="pictures per pass", value=f"at most {profile.batch_cap}", note=profile.reasons.batch_cap),
        Row(label="attention", value=profile.attention, note=profile.reasons.attention),
    )  # fmt: skip
    return Section(title="Device", rows=rows)


def _warnings(session: Session, device: torch.device) -> list[Section]:
    """What the doctor warns of, in one line each; its whole report is the command line's."""
    facts = read_facts(
        str(device), held_bytes=session.held_bytes(), profile=session.engine.device_profile(device), disk=False
    )  # fmt: skip
    rows = warning_rows(diagnose(facts, os.environ))
    return [Section(title="Warnings (`halo-vae doctor` has the whole report)", rows=rows)] if rows else []


def _vae(opaque: OpaqueDecoder, opened: Opened) -> Section:
    family = NA if opened.decoder is None else opened.decoder.program.family
    channels = NA if opaque.latent_channels is None else str(opaque.latent_channels)
    rows = (
        Row(label="model", value=opaque.name, note=f"on {opaque.device}"),
        Row(label="family", value=family, note=opened.reason),
        Row(label="latent", value=f"{channels} channels", note=f"{opaque.scale} pixels per latent element"),
        Row(label="loaded dtype", value=dtype_name(opaque.dtype),
            note="works in " + ", ".join(dtype_name(d) for d in opaque.working_dtypes)),
        Row(label="auto chooses", value="blended" if opened.decoder is None else "exact", note=opened.reason),
    )  # fmt: skip
    return Section(title="VAE", rows=rows)


def _shapes(opaque: OpaqueDecoder, samples: Mapping[str, Any] | None) -> list[tuple[int, ...]]:
    """Latents to plan for."""
    if samples is not None:
        return [tuple(fit_latent(opaque, latent_of(samples)).shape)]
    if opaque.latent_channels is None:
        return []
    if opaque.latent_dim == 3:
        lat = (CLIP_LAT, *(side // opaque.scale for side in CLIP_SIZE))
        return [(1, opaque.latent_channels, *lat)]
    return [(1, opaque.latent_channels, edge // opaque.scale, edge // opaque.scale) for edge in SIZES]


def _plan(session: Session, opaque: OpaqueDecoder, opened: Opened, shape: tuple[int, ...]) -> Section:
    pixels = format_shape([side * opaque.scale for side in shape[-2:]])
    title = f"Plan for {format_shape(shape)} ({pixels} px)"
    try:
        plan = _summary(session, opaque, opened, shape)
    except HaloError as error:
        return Section(title=title, rows=(Row(label="none", value=str(error)),))
    estimate = None if opaque.estimate_bytes is None else opaque.estimate_bytes(shape, opaque.dtype)
    rows = [
        Row(label="predicted peak", value=format_bytes(plan.predicted.total),
            note=f"above the weights; the host's own estimate for an untiled decode is {format_bytes(estimate)}"),
        Row(label="tiles", value=format_count(plan.n_tiles), note=f"of at most {format_shape(plan.tile_px)} px"),
    ]  # fmt: skip
    if plan.chunk_frames:
        rows.append(chunks_row(plan))
    rows += [Row(label=c.name, value=c.value, note=c.reason) for c in plan.choices]
    return Section(title=title, rows=tuple(rows))


def _summary(session: Session, opaque: OpaqueDecoder, opened: Opened, shape: tuple[int, ...]) -> PlanSummary:
    """What `auto` with the recommended settings would run."""
    settings = DecodeSettings()
    if opened.decoder is not None:
        return session.engine.plan(opened.decoder, shape, settings).summary
    profile: DeviceProfile = session.engine.device_profile(opaque.device)
    return summarise(plan_blend(opaque, shape, settings, profile), opaque, choose_dtype(opaque, settings))


def _tuning(session: Session) -> Section:
    """What is tuned, and what the history has most of that is not."""
    kept = None if session.tuning is None else len(session.tuning.entries())
    return tuning_section(kept, suggest(usage_of(_read(session)[0])))


def _history(session: Session) -> list[Section]:
    records, problems = _read(session)
    if not records:
        return [Section(title="History", rows=(Row(label="none", value=problems or "nothing was decoded yet"),))]
    last = tuple(Row(label=r.started_at, value=render_line(r)) for r in reversed(records[-_SHOWN:]))
    sentences = advise(records) or ("nothing speaks against going on as before.",)
    return [
        Section(title=f"History of the last {format_count(len(records), 'decode')}", rows=last),
        *metrics_sections(metrics_of(records)),
        Section(title="Advice", rows=tuple(Row(label=f"{i}.", value=s) for i, s in enumerate(sentences, 1))),
    ]


def _read(session: Session) -> tuple[tuple[DecodeRecord, ...], str]:
    if session.store is None:
        return session.collector.records(), ""
    try:
        return session.store.read(limit=_HISTORY).records, ""
    except StoreError as error:
        return session.collector.records(), str(error)
