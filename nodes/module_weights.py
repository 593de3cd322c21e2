"""Weights of a module that a host holds, casts and patches as it likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..optim.errors import WeightsError
from ..optim.weights import TensorSpec, hash_weights, sample_bytes

Fetch = Callable[[nn.Module, str, torch.dtype, torch.device], Tensor]
"""(layer, name within it, dtype, device) -> the tensor as the host would compute with it."""


class ModuleWeights:
    """A WeightSource over a module's own tensors. Nothing is copied until asked for, and nothing is ever changed."""

    def __init__(self, module: nn.Module, fetch: Fetch, *, patched: bool = False) -> None:
        """`patched`: what is stored is not what is computed with, so the hash is taken of what `fetch` gives."""
        self._layers = {name: (layer, leaf) for name, layer, leaf, _ in _tensors(module)}
        self._specs = {name: TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for name, _, _, t in _tensors(module)}
        self._fetch = fetch
        self._patched = patched
        self._hash: str | None = None

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """See WeightSource."""
        return self._specs

    @property
    def content_hash(self) -> str:
        """See WeightSource; taken once. Tensors that are not there yet count by shape alone."""
        if self._hash is None:
            self._hash = hash_weights(self._specs, self._sample)
        return self._hash

    def get(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See WeightSource."""
        if name not in self._layers:
            raise WeightsError(f"the VAE holds no tensor {name!r}; its file may be incomplete, load it again")
        layer, leaf = self._layers[name]
        return self._fetch(layer, leaf, dtype, device).detach()

    def _sample(self, name: str) -> bytes:
        layer, leaf = self._layers[name]
        tensor: Tensor = getattr(layer, leaf)
        if tensor.is_meta:
            return b""
        return sample_bytes(self.get(name, torch.float32, torch.device("cpu")) if self._patched else tensor)


def why_not_plain(model: Any, borders: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """Why a model may decode otherwise than its weights say, in words; None where nothing speaks for that.

    Other extensions replace a layer's border or a whole method (for seamless textures, say): then only the model's own
    call gives the picture that is meant. `borders` are those that a layer has by its family, by its name.
    """
    if not isinstance(model, nn.Module):
        return "it is no torch module"
    for name, layer in model.named_modules():
        if any(part in ("encoder", "taesd_encoder") for part in name.split(".")):
            continue
        mode, border = getattr(layer, "padding_mode", "zeros"), borders.get(name, "zeros")
        # a layer that pads nothing itself has its border put on before
        if mode != border and (mode != "zeros" or _pads(layer)):
            return f"{name} pads its borders by {mode}"
        if replaced := {"forward", "_conv_forward", "decode"} & set(vars(layer)):
            return f"{name or 'the model'} has its {replaced.pop()} replaced"
        if layer._forward_hooks or layer._forward_pre_hooks:
            return f"{name or 'the model'} has hooks"
    return None


def _pads(layer: nn.Module) -> bool:
    """True for a convolution that widens its pictures itself."""
    padding = getattr(layer, "padding", 0)
    if isinstance(padding, str):
        return padding == "same"
    return any(padding) if isinstance(padding, tuple) else bool(padding)


def _tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(name, layer, name within it, tensor) of parameters and buffers, by the names of the state dict."""
    for prefix, layer in module.named_modules():
        for leaf, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
            yield f"{prefix}.{leaf}" if prefix else leaf, layer, leaf, tensor
