"""Describes a VAE object of the host by what it can do, without importing the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..optim.errors import HaloError
from ..optim.opaque import Decode, OpaqueDecoder, PrecisionMemory
from ..optim.weights import MappingWeights

_NEEDED = ("vae_dtype", "process_output", "upscale_ratio")
_MEMORIES: WeakKeyDictionary[Any, PrecisionMemory] = WeakKeyDictionary()
_HASHES: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Both by the model object itself: what was learnt of one model dies with it and is never taken for another's."""


class VaeError(HaloError, ValueError):
    """The VAE object is missing, empty, or not of a kind that decodes latents."""


def describe_vae(vae: Any) -> OpaqueDecoder:
    """The opaque decoder inside a VAE object. VaeError, in plain words, where there is none.

    Nothing is loaded or called; the model's own parameters are never changed. Weights stored in 8 bits are widened for
    the call only.
    """
    model = _model_of(vae)
    own = _compute_dtype(vae)
    scale, frames = _scale(vae), _frames(vae)
    stored_small = own != getattr(vae, "vae_dtype", own) or any(t.element_size() == 1 for _, t in _castable(model))
    return OpaqueDecoder(
        name=type(model).__name__,
        decode=_cast_call(model, own) if stored_small else _plain_call(model),
        decode_as=lambda dtype: _cast_call(model, dtype),
        latent_dim=1 if getattr(vae, "extra_1d_channel", None) is not None else getattr(vae, "latent_dim", 2),
        latent_channels=getattr(vae, "latent_channels", None),
        output_channels=getattr(vae, "output_channels", 3),
        scale=scale,
        time_ratio=frames(9) - frames(8),  # past the first frame, which has a rule of its own
        frames=frames,
        dtype=own,
        working_dtypes=tuple(getattr(vae, "working_dtypes", None) or (own,)),
        device=torch.device(getattr(vae, "device", "cpu")),
        content_hash=_hash_of(model),
        estimate_bytes=_estimate(vae),
        memory=_MEMORIES.setdefault(model, PrecisionMemory()),
    )


def finish_of(vae: Any) -> Callable[[Tensor], Tensor]:
    """The VAE's own way from raw values to picture range, whether it works in place or returns a new tensor."""
    process = vae.process_output

    def finish(raw: Tensor) -> Tensor:
        result = process(raw)
        return raw if result is None else result

    return finish


def _model_of(vae: Any) -> Any:
    """The inner model. VaeError where the VAE is no VAE, or an empty one."""
    if vae is None:
        raise VaeError("there is no VAE: no valid VAE in this checkpoint, so load one with the Load VAE node")
    model = getattr(vae, "first_stage_model", None)
    if model is None:
        raise VaeError("the VAE is empty: no valid VAE in this checkpoint, so load one with the Load VAE node")
    check = getattr(vae, "throw_exception_if_invalid", None)
    if check is not None:
        check()
    missing = [name for name in _NEEDED if not hasattr(vae, name)]
    if missing or not callable(getattr(model, "decode", None)):
        lacks = ", ".join(missing) or "a decode method"
        raise VaeError(f"the {type(vae).__name__} object does not work as a VAE (it lacks {lacks}); connect a VAE")
    return model


def _compute_dtype(vae: Any) -> torch.dtype:
    """The VAE's own dtype; float32 where that is an 8-bit storage format, in which nothing can be computed."""
    own = vae.vae_dtype
    if not isinstance(own, torch.dtype):
        raise VaeError(f"the VAE's dtype is {own!r}; a torch dtype is needed, so load the VAE again")
    return own if own.is_floating_point and own.itemsize > 1 else torch.float32


def _scale(vae: Any) -> int:
    """Picture pixels per latent element."""
    ask = getattr(vae, "spacial_compression_decode", None)
    ratio = ask() if ask is not None else vae.upscale_ratio
    scale = ratio[-1] if isinstance(ratio, tuple | list) else ratio
    if not isinstance(scale, int | float) or scale < 1 or not math.isclose(scale, round(scale)):
        raise VaeError(f"the VAE's upscale ratio is {scale!r}; a whole number of pixels per latent element is needed")
    return round(scale)


def _frames(vae: Any) -> Callable[[int], int]:
    """Output frames of a clip of n latent frames, by the VAE's own formula."""
    ratio = vae.upscale_ratio
    if not isinstance(ratio, tuple | list):
        return lambda n: n
    in_time = ratio[0]
    return (lambda n: int(in_time(n))) if callable(in_time) else (lambda n: n * int(in_time))


def _estimate(vae: Any) -> Callable[[tuple[int, ...], torch.dtype], int] | None:
    """The VAE's own memory estimate, where it has one."""
    ask = getattr(vae, "memory_used_decode", None)
    return None if ask is None else lambda shape, dtype: int(ask(shape, dtype))


def _hash_of(model: Any) -> str | None:
    """Hash of the weights, taken once per model; None where there is nothing to read."""
    known = _HASHES.get(model)
    if known is None and isinstance(model, nn.Module):
        tensors = model.state_dict()
        if any(t.is_meta for t in tensors.values() if isinstance(t, Tensor)):
            return None
        known = MappingWeights({k: t for k, t in tensors.items() if isinstance(t, Tensor)}).content_hash
        _HASHES[model] = known
    return known


def _plain_call(model: Any) -> Decode:
    """The model's own decode, with its weights as they are."""

    def decode(latent: Tensor) -> Tensor:
        result: Tensor = model.decode(latent)
        return result

    return decode


def _cast_call(model: Any, dtype: torch.dtype) -> Decode:
    """The model's decode with copies of its weights in `dtype`, freed with the returned function."""
    if not isinstance(model, nn.Module):
        return _plain_call(model)
    wrapper = _DecodeModule(model)
    made: dict[str, Tensor] = {}

    def decode(latent: Tensor) -> Tensor:
        if not made:  # at the first call: the host may still be bringing the weights to their device
            made.update({f"model.{name}": t.detach().to(dtype) for name, t in _castable(model) if t.dtype != dtype})
        result: Tensor = torch.func.functional_call(wrapper, made, (latent,))
        return result

    return decode


class _DecodeModule(nn.Module):
    """Gives torch.func.functional_call a forward that is the model's decode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, latent: Tensor) -> Tensor:
        result: Tensor = self.model.decode(latent)  # type: ignore[operator]
        return result


def _castable(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Floating parameters and buffers by name, without those of layers that cast their weights themselves."""
    if not isinstance(model, nn.Module):
        return
    for prefix, layer in model.named_modules():
        if getattr(layer, "comfy_cast_weights", False):
            continue
        for name, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
            if tensor.is_floating_point():
                yield f"{prefix}.{name}" if prefix else name, tensor
