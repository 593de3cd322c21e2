"""Decoders of VAE objects: lowered once per object and patch, and gone with it."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from ..optim.decode import Decoder, open_decoder
from ..optim.errors import WeightsError
from ..optim.events import SILENT, DecodeObserver
from ..optim.opaque import OpaqueDecoder
from ..optim.program import Program
from ..optim.video.frames import output_frames
from ..optim.video.latents import BATCH_IS_TIME
from ..optim.video.ops import ClipConv, is_video
from .hints import UnclearModelError, hints_of
from .host import Host
from .module_weights import why_not_plain
from .vae import describe_vae

COMPARED_LENGTHS = (1, 3, 5)
"""Latent frames at which frame counts must agree: odd, as CogVideoX makes more of an even number than its VAE says."""
FRAMES_STATED_FOR_ONE = ("hunyuan_refiner",)
"""Families made for pictures: the host decodes clips with them too, but to more frames than it states."""
SCALES_LATENTS = ("taehv",)
"""Families that take the hint `latent_scale`."""
ONE_RATIO_FOR_ALL = ("taehv",)
"""Families for whose members of different sizes the host states one ratio."""


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
        opaque, model = describe_vae(vae), vae.first_stage_model
        if opaque.latent_dim == 1:
            return Opened(decoder=None, reason=f"{opaque.name} is no decoder of pictures or videos")
        try:
            hints = hints_of(model, opaque.latent_channels)
            weights = self._host.weights(vae)
            decoder = open_decoder(
                weights, device=opaque.device, loaded_dtype=opaque.dtype, hints=hints, observer=observer
            )
        except WeightsError as error:
            return Opened(decoder=None, reason=str(error))
        except UnclearModelError as error:
            return Opened(decoder=None, reason=f"{opaque.name} is not clear: {error}")
        program = decoder.program
        if program.family not in SCALES_LATENTS and float(hints.get("latent_scale", "1")) != 1.0:
            return Opened(decoder=None, reason=f"{opaque.name} scales its latents, which {program.family} VAEs do not")
        changed = why_not_plain(model, borders_of(program))
        if changed is not None:
            return Opened(decoder=None, reason=f"{opaque.name} was changed: {changed}")
        contradiction = contradiction_of(program, opaque) or built_otherwise(program, model)
        if contradiction is not None:
            return Opened(decoder=None, reason=contradiction)
        return Opened(decoder=decoder, reason=f"its weights are those of a {program.family} decoder")


def borders_of(program: Program) -> Mapping[str, str]:
    """The border beyond the picture's edge, by the name of the layer, where the program has another than zeros."""
    convs = (op for op in program.ops if isinstance(op, ClipConv) and op.border != "zero")
    return {op.weight.rpartition(".")[0]: op.border for op in convs}


def contradiction_of(program: Program, opaque: OpaqueDecoder) -> str | None:
    """What the VAE object says otherwise than its weights, in words; None where they agree."""
    stated = opaque.scale if program.family not in ONE_RATIO_FOR_ALL else program.scale[1]
    if program.scale[1:] != (stated, stated) or program.out_channels != opaque.output_channels:
        return (
            f"its weights make x{program.scale[1]} pictures of {program.out_channels} channels, "
            f"but the VAE says x{opaque.scale} and {opaque.output_channels}"
        )
    if opaque.latent_channels not in (None, program.latent_channels):  # HunyuanImage's refiner in older ComfyUI
        return f"its weights take {program.latent_channels} channels, but the VAE says {opaque.latent_channels}"
    if not is_video(program):
        return None if opaque.latent_dim == 2 else f"its weights make pictures, but {opaque.name} decodes videos"
    if (opaque.latent_dim == 2) != (program.family in BATCH_IS_TIME):
        return f"its weights make videos, but {opaque.name} decodes pictures"
    if program.family in ONE_RATIO_FOR_ALL:
        return None
    for n in COMPARED_LENGTHS[: 1 if program.family in FRAMES_STATED_FOR_ONE else None]:
        frames, promised = output_frames(program, n), opaque.frames(n)
        if frames != promised:
            return f"its weights make {frames} frames of {n}, but the VAE says {promised}"
    return None


def built_otherwise(program: Program, model: Any) -> str | None:
    """What an LTX-Video model does otherwise than its program, in words; None where nothing is known to be.

    Its config says whether it is causal, and hosts that keep no config (see `hints_of`) still build it so.
    """
    causal = getattr(getattr(model, "decoder", None), "causal", None)
    if program.family != "ltx" or not isinstance(causal, bool):
        return None
    taken = not any(isinstance(op, ClipConv) and op.back for op in program.ops)
    if causal == taken:
        return None
    return f"it was built {'causal' if causal else 'to look ahead'} in time, which this version does not tell of a VAE"
