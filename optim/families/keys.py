"""A checkpoint's tensor names under one prefix, and what a family promises to do with them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ..errors import WeightsError
from ..program import Program
from ..weights import TensorSpec

PREFIXES = (
    "", "first_stage_model.", "vae.", "model.first_stage_model.", "model.vae.", "autoencoder.", "ae.", "module.",
)  # fmt: skip
"""Where a decoder sits in the checkpoints seen so far; "" is a file that holds the decoder alone."""


class Keys:
    """Names, shapes and dtypes below one prefix; callers ask by short name and get the source's full name back."""

    def __init__(self, specs: Mapping[str, TensorSpec], prefix: str = "") -> None:
        """Keep only the names that start with the prefix."""
        self.prefix = prefix
        self._specs = {name[len(prefix) :]: spec for name, spec in specs.items() if name.startswith(prefix)}
        self._sorted = sorted(self._specs)

    def __contains__(self, name: str) -> bool:
        """True if a tensor of that short name exists."""
        return name in self._specs

    def __iter__(self) -> Iterator[str]:
        """Short names in the order of the source."""
        return iter(self._specs)

    def full(self, name: str) -> str:
        """The name in the source."""
        return self.prefix + name

    def below(self, scope: str) -> tuple[str, ...]:
        """Short names that start with the scope, sorted."""
        start = stop = bisect_left(self._sorted, scope)
        while stop < len(self._sorted) and self._sorted[stop].startswith(scope):
            stop += 1
        return tuple(self._sorted[start:stop])

    def has(self, scope: str) -> bool:
        """True if any name starts with the scope."""
        i = bisect_left(self._sorted, scope)
        return i < len(self._sorted) and self._sorted[i].startswith(scope)

    def numbers(self, scope: str) -> tuple[int, ...]:
        """The numbers that follow the scope in names such as `scope.3.weight`, sorted, each once."""
        found = {name[len(scope) :].split(".", 1)[0] for name in self.below(scope)}
        return tuple(sorted(int(part) for part in found if part.isdigit()))

    def count(self, scope: str) -> int:
        """One more than the highest number below the scope, 0 if there is none; gaps count as present."""
        return max(self.numbers(scope), default=-1) + 1

    def ndim(self, name: str) -> int:
        """Number of axes of a tensor that exists."""
        return len(self._specs[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor that exists."""
        return self._specs[name].dtype

    def shape(self, name: str, ndim: int | None = None) -> tuple[int, ...]:
        """Shape of a tensor. WeightsError if it is absent or has another number of axes than asked."""
        if name not in self._specs:
            raise WeightsError(f"the weights hold no tensor {self.full(name)!r}; the file is incomplete, get it whole")
        shape = self._specs[name].shape
        if ndim is not None and len(shape) != ndim:
            raise WeightsError(f"{self.full(name)!r} has shape {list(shape)}, but {ndim} axes are expected")
        return shape

    def first_of(self, *names: str) -> str:
        """The first of the names that exists; the first name if none does, so that the error names it."""
        return next((name for name in names if name in self._specs), names[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of decoder."""

    name: str
    """Program.family of what it lowers to."""
    detect: Callable[[Keys], bool]
    """True if the names and shapes are this family's, whole or truncated."""
    lower: Callable[[Keys, Mapping[str, str]], Program]
    """Keys and hints to a Program. WeightsError names the first tensor that is missing or misshapen."""
