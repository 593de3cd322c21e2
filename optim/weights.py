"""Where weights come from: a mapping, or a safetensors file read tensor by tensor."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .errors import WeightsError

_SAMPLE_BYTES = 2048
_ENCODES = re.compile(r"(^|\.)((\w+_)?encoder|quant_conv)\.|^conv1\.")
"""Names of what only encodes, in ldm's, diffusers' and Wan's (`conv1`) naming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and dtype of a tensor that need not be loaded."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightSource(Protocol):
    """Gives tensors by name, whatever lies behind: a file, a mapping, a host that casts and patches."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor's shape and stored dtype; lowering sees nothing else."""

    @property
    def content_hash(self) -> str:
        """Names, shapes and sampled bytes, as 16 hex digits; equal for equal weights."""

    def get(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor in that dtype on that device; may share memory with the source. WeightsError if absent."""


def hash_weights(specs: Mapping[str, TensorSpec], sample: Callable[[str], bytes]) -> str:
    """16 hex digits over names, shapes, dtypes and sampled bytes of everything but what only encodes.

    A file without an encoder is the same decoder, and a host that fills in the missing half fills it with chance.
    """
    digest = hashlib.sha256()
    for name in sorted(specs):
        if _ENCODES.search(name):
            continue
        spec = specs[name]
        digest.update(f"{name}{spec.shape}{spec.dtype}".encode())
        digest.update(sample(name))
    return digest.hexdigest()[:16]


def sample_bytes(tensor: Tensor) -> bytes:
    """A few bytes from the front, the end and evenly between, as stored."""
    flat = tensor.detach().reshape(-1)
    n = max(1, _SAMPLE_BYTES // max(1, flat.element_size()))
    if flat.numel() > 3 * n:
        flat = torch.cat([flat[:n], flat[:: flat.numel() // n][:n], flat[-n:]])
    return flat.contiguous().cpu().view(torch.uint8).numpy().tobytes()


class MappingWeights:
    """Weights held in a mapping of tensors, e.g. a module's state dict. Nothing is copied."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the mapping itself; its shapes and dtypes are read once."""
        self._tensors = tensors
        self._specs = {k: TensorSpec(shape=tuple(t.shape), dtype=t.dtype) for k, t in tensors.items()}
        self._hash: str | None = None

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """See WeightSource."""
        return self._specs

    @property
    def content_hash(self) -> str:
        """See WeightSource; taken once."""
        if self._hash is None:
            self._hash = hash_weights(self.specs, lambda name: sample_bytes(self._tensors[name]))
        return self._hash

    def get(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See WeightSource."""
        if name not in self._tensors:
            raise WeightsError(f"the weights hold no tensor {name!r}; the file may be incomplete")
        return self._tensors[name].detach().to(device=device, dtype=dtype)


class FileWeights:
    """A safetensors file, opened lazily: a tensor is read when it is asked for and not kept."""

    def __init__(self, path: str | Path) -> None:
        """Read the header. WeightsError if the file is missing, truncated or not safetensors."""
        from safetensors import SafetensorError, safe_open

        self.path = Path(path)
        if not self.path.is_file():
            raise WeightsError(f"{self.path} does not exist or is not a file; give a .safetensors file")
        try:
            opener: Any = safe_open
            self._file: Any = opener(str(self.path), framework="pt", device="cpu")
            self._specs = {k: self._spec(k) for k in self._file.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError, ValueError, KeyError) as e:
            raise WeightsError(
                f"{self.path} is not a readable safetensors file ({e}); it may be truncated, download it again"
            ) from e
        self.metadata: Mapping[str, str] = dict(self._file.metadata() or {})
        self._hash: str | None = None

    def _spec(self, name: str) -> TensorSpec:
        piece = self._file.get_slice(name)
        names = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        names |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
        return TensorSpec(shape=tuple(piece.get_shape()), dtype=names.get(piece.get_dtype(), torch.int64))

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """See WeightSource."""
        return self._specs

    @property
    def content_hash(self) -> str:
        """See WeightSource; reads a sample of each tensor once."""
        if self._hash is None:
            self._hash = hash_weights(self._specs, lambda name: sample_bytes(self._file.get_tensor(name)))
        return self._hash

    def get(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See WeightSource."""
        if name not in self._specs:
            raise WeightsError(f"{self.path} holds no tensor {name!r}; the file may be incomplete")
        tensor: Tensor = self._file.get_tensor(name)
        return tensor.to(device=device, dtype=dtype)
