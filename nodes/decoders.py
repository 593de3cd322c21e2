"""Decoders of VAE objects: lowered once per object and patch, and gone with it."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from ..optim.decode import Decoder, open_decoder
from ..optim.errors import WeightsError
from ..optim.events import SILENT, DecodeObserver
from .host import Host
from .module_weights import why_not_plain
from .vae import describe_vae


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What came of a VAE: a decoder, or the reason why there is none."""

    decoder: Decoder | None
    reason: str
    """Why it can be decoded exactly, or why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    model: Any
    patch_id: Hashable
    opened: Opened


class Decoders:
    """Weak by VAE object, so that no VAE lives longer for it and a new one is never taken for an old one."""

    def __init__(self, host: Host) -> None:
        """Empty."""
        self._host = host
        self._entries: WeakKeyDictionary[Any, _Entry] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, vae: Any, observer: DecodeObserver = SILENT, *, keep: bool = True) -> Opened:
        """The decoder of a VAE as it is patched now; without `keep` a fresh one. VaeError where there is no VAE in it.

        Reads names, shapes and dtypes only: the VAE need not be loaded.
        """
        if not keep:
            return self._open(vae, observer)
        model, patch_id = getattr(vae, "first_stage_model", None), self._host.patch_id(vae)
        with self._lock:
            entry = self._entries.get(vae)
        if entry is None or entry.model is not model or entry.patch_id != patch_id:
            opened = self._open(vae, observer)
            entry = _Entry(model=model, patch_id=patch_id, opened=opened)
            with self._lock:
                self._entries[vae] = entry
        else:
            observer.cache_lookup("program", True)
        return entry.opened

    @property
    def packed_bytes(self) -> int:
        """Bytes of repacked weights that are kept."""
        return sum(d.packed.nbytes for d in self._open_decoders())

    def clear_packed(self) -> None:
        """Drop repacked weights; the decoders stay and pack again when they run."""
        for decoder in self._open_decoders():
            decoder.packed.clear()

    def _open_decoders(self) -> list[Decoder]:
        with self._lock:
            return [e.opened.decoder for e in self._entries.values() if e.opened.decoder is not None]

    def _open(self, vae: Any, observer: DecodeObserver) -> Opened:
        opaque = describe_vae(vae)
        if opaque.latent_dim != 2:
            return Opened(decoder=None, reason=f"{opaque.name} is not a picture decoder")
        changed = why_not_plain(vae.first_stage_model)
        if changed is not None:
            return Opened(decoder=None, reason=f"{opaque.name} was changed: {changed}")
        try:
            decoder = open_decoder(
                self._host.weights(vae), device=opaque.device, loaded_dtype=opaque.dtype, observer=observer
            )
        except WeightsError as error:
            return Opened(decoder=None, reason=str(error))
        program = decoder.program
        if program.scale != (1, opaque.scale, opaque.scale) or program.out_channels != opaque.output_channels:
            return Opened(
                decoder=None,
                reason=f"its weights make x{program.scale[1]} pictures of {program.out_channels} channels, "
                f"but the VAE says x{opaque.scale} and {opaque.output_channels}",
            )
        return Opened(decoder=decoder, reason=f"its weights are those of a {program.family} decoder")
