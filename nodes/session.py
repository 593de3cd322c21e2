"""What lives as long as the host's process: one engine, one collector, the decoders, and the way through a decode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..optim.decode import Decoder, Engine
from ..optim.device import DeviceProfile, describe_device
from ..optim.errors import HaloError
from ..optim.events import SILENT, PlanSummary
from ..optim.opaque import OpaqueDecoder
from ..optim.packing import dtype_name
from ..optim.settings import DecodeSettings
from ..optim.tuning import TuningStore
from ..profiling.collector import CANCEL_TYPES, Collector
from ..profiling.memory import counters_for
from ..profiling.parts import Identity
from ..profiling.record import DecodeRecord, Level
from ..profiling.recorded import identity_of, record_call
from ..profiling.run import Run
from ..profiling.store import MAX_BYTES, HistoryStore, StoreError
from .decode_latent import decode_latent
from .decoders import Decoders
from .host import Host, ShowProgress
from .latents import latent_of
from .live_messages import LiveMessages, send_ended
from .observer import HostObserver
from .panel_data import Panel, Panels
from .stock import TiledOptions
from .user_settings import SettingsReader, UserSettings
from .vae import describe_vae

log = logging.getLogger("halo_vae")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """A picture and what it cost."""

    images: Tensor
    """[B * frames, H, W, C]."""
    record: DecodeRecord
    panel: Panel | None = None
    """What the node's panel shows; None where that could not be made."""


class HostEngine(Engine):
    """An engine that plans for the memory the host can give."""

    def __init__(self, host: Host, tuning: TuningStore | None = None) -> None:
        """With an empty pool."""
        super().__init__(tuning=tuning, make_room=host.make_room)
        self._host = host

    def device_profile(self, device: torch.device) -> DeviceProfile:
        """The device, with a budget no larger than what the host could free on it."""
        profile = describe_device(device)
        budget, reason = profile.budget_bytes, profile.budget_reason
        # a model that leaves an APU's or a CPU's memory goes to memory that is counted already
        models = 0 if profile.unified_memory else self._host.loaded_bytes(device)
        if budget is not None and models:
            budget, reason = budget + models, f"{reason}, and {models / 2**30:.1f} GiB of models that can be unloaded"
        total = self._host.total_bytes(device)
        if total is not None and (budget is None or total < budget):
            budget, reason = total, f"all that {self._host.name} gives of this device"
        return replace(profile, budget_bytes=budget, budget_reason=reason)


class Session:
    """Decodes for the nodes. One per process, as there is one pool and one history."""

    def __init__(
        self,
        host: Host,
        *,
        level: Level | None = None,
        store: HistoryStore | None = None,
        keep_history: bool = True,
        tuning: TuningStore | None = None,
    ) -> None:
        """`level` None asks environment and user; `store` and `tuning` None are the user's own."""
        self.host = host
        self.settings = SettingsReader(host.user_settings)
        self.panels = Panels()
        self.tuning = tuning or _user_tuning()
        self.engine = HostEngine(host, self.tuning)
        self.decoders = Decoders(host)
        self._level = level
        self.collector = Collector(level or "summary", cancel_types=(*CANCEL_TYPES, *host.cancel_types))
        self.store = (store or _user_history()) if keep_history else None
        self._history_bytes = MAX_BYTES
        self._device = torch.device("cpu")
        host.lend(self.held_bytes, lambda: self._device, self.release)

    def held_bytes(self) -> int:
        """Bytes kept between decodes: the pool and repacked weights."""
        return self.engine.pool.held_bytes + self.decoders.packed_bytes

    def release(self) -> None:
        """Give back everything kept between decodes."""
        self.engine.pool.clear()
        self.decoders.clear_packed()

    def at(self, node: str | None) -> AtNode:
        """This session as a node uses it."""
        return AtNode(session=self, node=node)

    def apply_settings(self) -> UserSettings:
        """Read the user's settings and let the next decode go by them."""
        chosen = self.settings.read()
        self.collector.level = self._level or chosen.level
        if self.store is not None and chosen.history_bytes != self._history_bytes:
            self.store = HistoryStore(self.store.path, max_bytes=chosen.history_bytes)
        self._history_bytes = chosen.history_bytes
        return chosen

    def decode(
        self,
        samples: Mapping[str, Any],
        vae: Any,
        settings: DecodeSettings,
        tiled: TiledOptions | None = None,
        *,
        node: str | None = None,
    ) -> Decoded:
        """Decode and record. VaeError or LatentError where there is nothing to decode; the method's errors as they are.

        `tiled` is for the stock method: the host's tiled decode instead of its plain one. `node` is the id of the node
        that asks; the page that shows it hears of the decode's progress and, in any case, of its end.
        """
        opaque, latent = describe_vae(vae), latent_of(samples)
        self._device = opaque.device
        prompt_id, runs = self.host.prompt_id(), list[Run]()
        shown: LiveMessages | None = None
        if self.apply_settings().panel:
            shown = LiveMessages(
                self.host.send, node=node, prompt_id=prompt_id, memory=lambda: _memory_reader(str(opaque.device))
            )

        def call(run: Run) -> Tensor:
            runs.append(run)
            if shown is not None:
                shown.begin()
            return self._call(run, samples, vae, opaque, settings, tiled)

        self.engine.pool.reset_high_water()
        forward = HostObserver(self.host, lambda plan: self._load(vae, opaque, plan), shown or SILENT)
        panel: Panel | None = None
        try:
            with torch.no_grad():
                images, record = record_call(
                    call, _identity_of_opaque(opaque), latent, settings,
                    collector=self.collector, pool=self.engine.pool, forward=forward, store=self.store,
                )  # fmt: skip
        finally:
            if runs and shown is not None:
                shown.finish()
            if runs and runs[0].record is not None:
                panel = self._ended(runs[0].record, opaque.device, node, prompt_id)
        return Decoded(images=images, record=record, panel=panel)

    def decode_apart(
        self,
        samples: Mapping[str, Any],
        vae: Any,
        settings: DecodeSettings,
        *,
        collector: Collector,
        bar: ShowProgress,
    ) -> tuple[Tensor, DecodeRecord]:
        """A decode on the way of all others whose record goes to `collector` alone and its progress to `bar`.

        For measurements: neither history, totals nor panels hear of it.
        """
        opaque = describe_vae(vae)
        self._device = opaque.device
        self.engine.pool.reset_high_water()
        forward = HostObserver(self.host, lambda plan: self._load(vae, opaque, plan), bar=bar)
        with torch.no_grad():
            return record_call(
                lambda run: self._call(run, samples, vae, opaque, settings, None), _identity_of_opaque(opaque),
                latent_of(samples), settings, collector=collector, pool=self.engine.pool, forward=forward,
            )  # fmt: skip

    def _ended(
        self, record: DecodeRecord, device: torch.device, node: str | None, prompt_id: str | None
    ) -> Panel | None:
        """Tell the page how a decode ended, and give its panel. What goes wrong is logged: the decode is done."""
        try:
            panel = self.panels.add(node, record, self.host.free_bytes(device))
        except Exception:
            log.exception("the panel of a decode cannot be made; its record is kept")
            return None
        send_ended(self.host.send, node, prompt_id, panel)
        return panel

    def _call(
        self,
        run: Run,
        samples: Mapping[str, Any],
        vae: Any,
        opaque: OpaqueDecoder,
        settings: DecodeSettings,
        tiled: TiledOptions | None,
    ) -> Tensor:
        decoder: Decoder | None = None
        reason: str | None = None
        if settings.method in ("auto", "exact"):
            run.mark("lower")
            opened = self.decoders.of(vae, run, keep=settings.advanced_caching)
            decoder, reason = opened.decoder, opened.reason
            if decoder is not None:
                run.identify(identity_of(decoder))
        return decode_latent(
            samples, vae, settings, decoder=decoder, no_decoder=reason, engine=self.engine, observer=run,
            profile=self.engine.device_profile(opaque.device), out_dtype=self.host.output_dtype(vae), tiled=tiled,
        )  # fmt: skip

    def _load(self, vae: Any, opaque: OpaqueDecoder, plan: PlanSummary) -> None:
        """Have the host make room for what this plan takes beyond what the pool already holds."""
        self.host.load(vae, needed_bytes(plan, self.engine.pool.held_bytes, opaque.device, vae))


@dataclass(frozen=True, slots=True, kw_only=True)
class AtNode:
    """A session as one node uses it."""

    session: Session
    node: str | None
    """The node's id; None outside of a workflow."""

    def decode(
        self, samples: Mapping[str, Any], vae: Any, settings: DecodeSettings, tiled: TiledOptions | None = None
    ) -> Decoded:
        """See Session.decode."""
        return self.session.decode(samples, vae, settings, tiled, node=self.node)


def needed_bytes(plan: PlanSummary, held_bytes: int, device: torch.device, vae: Any) -> int:
    """Bytes a plan will take on the VAE's device: its true peak, less what is held already or lies elsewhere."""
    predicted = plan.predicted
    elsewhere = torch.device(getattr(vae, "output_device", "cpu")).type != device.type
    output = 0 if elsewhere else predicted.output
    return max(0, predicted.pool - held_bytes) + predicted.scratch + predicted.packed + output


def _memory_reader(device: str) -> Callable[[], int | None]:
    """Reads the memory in use: torch's allocated bytes on a GPU, the process's resident set elsewhere."""
    counters = counters_for(device)
    counter = counters.allocated or counters.process
    return (lambda: None) if counter is None else counter.now_bytes


def _identity_of_opaque(opaque: OpaqueDecoder) -> Identity:
    return Identity(
        vae_hash=opaque.content_hash,
        family=opaque.name,
        loaded_dtype=dtype_name(opaque.dtype),
        device=str(opaque.device),
    )


def _user_tuning() -> TuningStore | None:
    """The user's own tuned choices; None, with a line in the log, where there is no place for them."""
    try:
        return TuningStore()
    except HaloError as error:
        log.warning("nothing that was tuned is used: %s", error)
        return None


def _user_history() -> HistoryStore | None:
    """The user's own history; None, with a line in the log, where there is no place for one."""
    try:
        return HistoryStore()
    except StoreError as error:
        log.warning("decodes are not added to a history: %s", error)
        return None
