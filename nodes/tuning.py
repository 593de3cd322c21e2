"""Tunes a host's VAE on its device: loaded by the host, stopped by the host, and no decode of the records."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from ..optim.errors import HaloError
from ..optim.tune import TuneOptions
from ..optim.tune_run import most_bytes, tune_decoder
from ..profiling.render.tuning import miopen_advice, render_entry
from .hints import hints_of
from .host import Host, ShowProgress
from .session import Session
from .vae import describe_vae


def tune_vae(session: Session, vae: Any, options: TuneOptions) -> str:
    """Tune and tell what was found. HaloError where there is nothing to tune or no place to keep it."""
    opaque, opened = describe_vae(vae), session.decoders.of(vae)
    if opened.decoder is None:
        raise HaloError(f"{opaque.name} cannot be tuned, as it is not decoded exactly: {opened.reason}")
    if session.tuning is None:
        raise HaloError("there is no folder to keep what is tuned in; set HALO_VAE_CACHE_DIR to one")
    session.host.check_interrupt()
    profile = session.engine.device_profile(opaque.device)
    session.release()  # the candidates have a pool of their own
    session.host.load(vae, most_bytes(opened.decoder, profile, options))
    shown = _Shown(session.host)
    with torch.no_grad():
        entry = tune_decoder(
            opened.decoder, profile, options, store=session.tuning,
            hints=hints_of(vae.first_stage_model, opaque.latent_channels),
            report=shown.step, before_each=session.host.check_interrupt,
        )  # fmt: skip
    hip = None if profile.versions is None else profile.versions.hip
    advice = miopen_advice(os.environ, hip, "Windows" if sys.platform == "win32" else "Linux")
    return render_entry(entry) + "".join(f"{line}\n" for line in advice)


class _Shown:
    """The host's progress bar, made with the first step; stops where the user asked to."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._bar: ShowProgress | None = None

    def step(self, done: int, total: int, text: str) -> None:
        """See Report."""
        self._host.check_interrupt()
        if self._bar is None:
            self._bar = self._host.progress_bar(total)
        self._bar(done, total)
