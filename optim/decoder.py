"""A VAE decoder that the engine can run: its program, its weights, and what they were packed into."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

import torch

from .device import describe_device
from .events import SILENT, DecodeObserver
from .families import lower
from .packing import DTYPES, PackedWeights, dtype_name
from .program import Program
from .weights import WeightSource


class Decoder:
    """One VAE decoder: its program, its weights, and what they were packed into."""

    def __init__(
        self, *, weights: WeightSource, program: Program, loaded_dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        """`loaded_dtype` is what the decoder would compute in by itself; wider is used only where values overflow."""
        self.weights = weights
        self.program = program
        self.loaded_dtype = loaded_dtype
        self.device = torch.device(device)
        self.packed = PackedWeights(weights)

    @property
    def content_hash(self) -> str:
        """Equal for equal weights."""
        return self.weights.content_hash

    @property
    def stored_dtype(self) -> str:
        """Dtype of the bulk of the weights as they lie in the source."""
        first = next(op for op in self.program.ops if hasattr(op, "weight"))
        return dtype_name(self.weights.specs[first.weight].dtype)


class ProgramCache:
    """Lowered programs by the structure of the weights; the latest few."""

    SIZE = 16

    def __init__(self) -> None:
        """Start empty."""
        self._programs: OrderedDict[object, Program] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, weights: WeightSource, observer: DecodeObserver, hints: Mapping[str, str] | None = None) -> Program:
        """The program of these weights, lowered if it is new."""
        specs = weights.specs
        # the dtype too: what some decoders do to their latent follows from it
        shapes = frozenset((name, spec.shape, spec.dtype) for name, spec in specs.items())
        key = shapes, frozenset((hints or {}).items())
        with self._lock:
            program = self._programs.get(key)
        observer.cache_lookup("program", program is not None)
        if program is None:
            program = lower(specs, hints=hints)
            with self._lock:
                self._programs[key] = program
                while len(self._programs) > self.SIZE:
                    self._programs.popitem(last=False)
        return program


PROGRAMS = ProgramCache()


def open_decoder(
    weights: WeightSource,
    *,
    device: torch.device | str = "cpu",
    loaded_dtype: torch.dtype | None = None,
    hints: Mapping[str, str] | None = None,
    observer: DecodeObserver = SILENT,
) -> Decoder:
    """Lower weights to a program. UnknownDecoderError or WeightsError if that cannot be done.

    `hints` are facts that weights cannot tell; None takes the metadata of a file.

    Without `loaded_dtype`, a decoder counts as loaded in float32 on a CPU and elsewhere in the first dtype that its
    family allows and the device multiplies natively, or in float32, as hosts load it.
    """
    dev = torch.device(device)
    observer.mark("lower")
    found = getattr(weights, "metadata", {}) if hints is None else hints
    program = PROGRAMS.get(weights, observer, found)
    if loaded_dtype is None:
        native = ("float32",) if dev.type == "cpu" else describe_device(dev).native_dtypes
        loaded_dtype = DTYPES[next((d for d in program.working_dtypes if d in native), "float32")]
    return Decoder(weights=weights, program=program, loaded_dtype=loaded_dtype, device=dev)
