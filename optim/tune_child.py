"""Tries a candidate in a process of its own, so that a crash or a hang costs a note and not the user's session.

The child decodes random weights of the decoder's shapes: which kernels run depends on shapes alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .decode import Decoder, Engine, open_decoder
from .device import describe_device
from .packing import dtype_name
from .rocm_env import child_environment
from .settings import DecodeSettings
from .tuning import Outcome, Overrides
from .video.ops import is_video
from .weights import TensorSpec

CHILD_EDGE, CHILD_FRAMES = 12, 2
TIMEOUT_S = 300.0
"""A kernel search at a few shapes takes minutes; longer is a hang."""
_PROGRAM = """
import importlib.util, sys
root = sys.argv[1]
spec = importlib.util.spec_from_file_location("halo_vae", root + "/__init__.py", submodule_search_locations=[root])
package = importlib.util.module_from_spec(spec)
sys.modules["halo_vae"] = package
spec.loader.exec_module(package)
from halo_vae.optim.tune_child import main
main()
"""
"""The package by its folder, whatever that is called and whether or not it is installed."""


def survives(
    decoder: Decoder, overrides: Overrides, environ: Mapping[str, str], *, hints: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Outcome:  # fmt: skip
    """How a decode with these choices ends in a child: `ok`, `failed` (an error), `crashed`, or `timeout`."""
    request = {
        "specs": {k: [list(s.shape), dtype_name(s.dtype)] for k, s in decoder.weights.specs.items()},
        "hints": dict(hints or {}),
        "device": str(decoder.device),
        "dtype": dtype_name(decoder.loaded_dtype),
        "overrides": asdict(overrides),
    }
    command = [sys.executable, "-c", _PROGRAM, str(Path(__file__).resolve().parents[1])]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=timeout_s, check=False,
            env=dict(child_environment(environ)),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "timeout"
    if done.returncode == 0 and done.stdout.strip().endswith("ok"):
        return "ok"
    # an error ends the child with 3; anything else ended it
    return "failed" if done.returncode == 3 else "crashed"


def main() -> None:
    """The child: one decode of random weights. Writes `ok`, or ends with 3 after an error."""
    request = json.loads(sys.stdin.read())
    try:
        _decode(request)
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(3) from error
    sys.stdout.write("ok\n")


def _decode(request: dict[str, Any]) -> None:
    specs = {
        name: TensorSpec(shape=tuple(shape), dtype=getattr(torch, dtype))
        for name, (shape, dtype) in request["specs"].items()
    }
    decoder = open_decoder(
        _RandomWeights(specs), device=request["device"], loaded_dtype=getattr(torch, request["dtype"]),
        hints=request["hints"],
    )  # fmt: skip
    overrides = Overrides(**request["overrides"])
    frames = (CHILD_FRAMES,) if is_video(decoder.program) else ()
    latent = torch.randn((1, decoder.program.latent_channels, *frames, CHILD_EDGE, CHILD_EDGE))
    engine = Engine(profile=overrides.profile(describe_device(decoder.device)))
    engine.decode(decoder, latent, overrides.settings(DecodeSettings()))


class _RandomWeights:
    """Weights of given shapes with small random values; each tensor is made when it is asked for."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self._specs = specs

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """See WeightSource."""
        return self._specs

    @property
    def content_hash(self) -> str:
        """See WeightSource."""
        return "random"

    def get(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See WeightSource: scaled by fan-in, so that activations stay in range."""
        shape = self._specs[name].shape
        made = torch.randn(shape)
        if len(shape) > 1:
            made *= (1.0 / max(1, made[0].numel())) ** 0.5
        return made.to(device=device, dtype=dtype)
