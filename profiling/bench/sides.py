"""What decodes in a child process: plain torch, the engine, or ComfyUI; each a function from a latent to pictures."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...optim.decode import Decoder, Engine, open_decoder
from ...optim.errors import HaloError
from ...optim.events import ConvShape, SilentObserver
from ...optim.packing import dtype_name
from ...optim.settings import DecodeSettings
from ...optim.tuning import TuningStore
from ...optim.weights import FileWeights
from .cases import BenchError
from .configurations import OURS, Precision, settings_for
from .protocol import ChildRequest

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DECODER = ("decoder.", "post_quant_conv.", "conv2.")
_WORDS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Side(Protocol):
    """One way to decode, its VAE opened."""

    dtype: str
    """What it decodes in; right after the first decode."""

    def decode(self, latent: Tensor) -> Tensor:
        """[B, C, H, W] or [B, C, T, H, W] float32 on the CPU to pictures [N, H, W, 3], float32 in 0-1 on the CPU."""


def shape_words(shape: ConvShape) -> str:
    """A convolution shape as text that people can compare."""
    given, kernel = ("x".join(map(str, size)) for size in (shape.input, shape.weight))
    return f"{given} * {kernel} {shape.dtype} {shape.layout}"


class Shapes(SilentObserver):
    """Collects convolution shapes, in the order in which they were first asked for."""

    def __init__(self) -> None:
        """None yet."""
        self.seen: dict[str, None] = {}

    def conv_requested(self, shape: ConvShape) -> None:
        """See DecodeObserver."""
        self.seen.setdefault(shape_words(shape))


def open_side(request: ChildRequest, device: torch.device, shapes: Shapes) -> Side:
    """Open the VAE for one configuration. BenchError, WeightsError."""
    if request.configuration in OURS:
        return EngineSide(request, device, shapes)
    if request.configuration == "stock":
        return StockSide(request, device)
    return PlainSide(Path(request.vae), DTYPES[request.precision], device, shapes)


def as_pictures(raw: Tensor) -> Tensor:
    """Raw [B, 3, H, W] or [B, 3, T, H, W], about -1 to 1, to [N, H, W, 3] on the CPU: frames follow clip by clip."""
    finished = raw.float().add_(1.0).div_(2.0).clamp_(0.0, 1.0).movedim(1, -1)
    return finished.reshape(-1, *finished.shape[-3:]).cpu()


class PlainSide:
    """Untiled, module by module, contiguous: torch as anybody would use it."""

    def __init__(self, vae: Path, dtype: torch.dtype, device: torch.device, shapes: Shapes) -> None:
        """BenchError where the file's decoder has other names than the published ones."""
        self.dtype = _WORDS[dtype_name(dtype)]
        self._dtype, self._device, self._shapes = dtype, device, shapes
        self._module = open_plain(vae, dtype).to(device)
        for part in self._module.modules():
            if isinstance(part, nn.Conv2d | nn.Conv3d):
                part.register_forward_pre_hook(self._note)

    def decode(self, latent: Tensor) -> Tensor:
        """See Side."""
        with torch.inference_mode():
            return as_pictures(self._module(latent.to(device=self._device, dtype=self._dtype)))

    def _note(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        given: Tensor = inputs[0]
        weight: Any = module.weight
        self._shapes.conv_requested(
            ConvShape(
                input=tuple(given.shape), weight=tuple(weight.shape), dtype=dtype_name(given.dtype), layout="contiguous"
            )
        )  # fmt: skip


def open_plain(vae: Path, dtype: torch.dtype) -> nn.Module:
    """A plain decoder over a file's weights. BenchError where it is of none that is written plainly here."""
    from .plain.kl import PlainKLDecoder
    from .plain.wan import PlainWanDecoder

    weights = FileWeights(vae)
    tensors = {_short(name): name for name in weights.specs}
    cpu = torch.device("cpu")
    wanted = {short: name for short, name in tensors.items() if short.startswith(_DECODER)}
    found = {short: weights.get(name, dtype, cpu).clone() for short, name in wanted.items()}
    is_wan = "decoder.middle.0.residual.0.gamma" in found
    kind: Callable[..., nn.Module] = PlainWanDecoder.from_weights if is_wan else PlainKLDecoder.from_weights
    try:
        return kind(found, dtype=dtype)
    except ValueError as error:
        raise BenchError(
            f"{vae.name} is not decoded plainly here ({error}); give weights in the published names"
        ) from error


def _short(name: str) -> str:
    """Without the prefix that checkpoints put before a VAE's tensors."""
    for prefix in ("first_stage_model.", "vae."):
        name = name.removeprefix(prefix)
    return name


class EngineSide:
    """The exact engine under the settings of a phase."""

    def __init__(self, request: ChildRequest, device: torch.device, shapes: Shapes) -> None:
        """WeightsError."""
        dtype = DTYPES[request.precision]
        frames = request.latent_shape[2] if len(request.latent_shape) == 5 else 1
        self._engine = Engine(tuning=_tuning())
        self._decoder: Decoder = open_decoder(FileWeights(Path(request.vae)), device=device, loaded_dtype=dtype)
        self._settings: DecodeSettings = settings_for(
            request.configuration, request.precision, frames, plan=request.plan, kernel_backend=request.kernel_backend
        )
        self._shapes = shapes
        plan = self._engine.plan(self._decoder, request.latent_shape, self._settings)
        stream, compute = plan.dtypes.stream, plan.dtypes.compute
        self.dtype = _WORDS[compute] if stream == compute else "mixed"

    def decode(self, latent: Tensor) -> Tensor:
        """See Side."""
        return self._engine.decode(self._decoder, latent, self._settings, observer=self._shapes)


def _tuning() -> TuningStore | None:
    with contextlib.suppress(HaloError):
        return TuningStore()
    return None


class StockSide:
    """ComfyUI's own VAE Decode, in ComfyUI's own Python. Its convolution shapes are not counted."""

    def __init__(self, request: ChildRequest, device: torch.device) -> None:
        """BenchError where the folder holds no ComfyUI."""
        prepare(request, device)
        sd, utils = (importlib.import_module(f"comfy.{name}") for name in ("sd", "utils"))
        self.dtype: str = request.precision
        self._vae = sd.VAE(sd=utils.load_torch_file(request.vae), dtype=DTYPES[request.precision])

    def decode(self, latent: Tensor) -> Tensor:
        """See Side."""
        with torch.inference_mode():
            pictures: Tensor = self._vae.decode(latent)
        return pictures.reshape(-1, *pictures.shape[-3:]).float().cpu()


def prepare(request: ChildRequest, device: torch.device) -> None:
    """Import what decodes, so that no time holds it; the VAE's file is not touched. BenchError as StockSide."""
    if request.configuration != "stock":
        return
    if request.comfyui is None or not (Path(request.comfyui) / "main.py").is_file():
        raise BenchError("there is no ComfyUI to run: its folder has no main.py; give --comfyui DIR=PYTHON")
    folder = str(Path(request.comfyui).resolve())
    if folder in sys.path:
        return
    sys.path.insert(0, folder)
    sys.argv = ["main.py", *(["--cpu"] if device.type == "cpu" else [])]
    # by name: the package imports no host, and here the host is what is measured
    importlib.import_module("comfy.options").enable_args_parsing()
    importlib.import_module("comfy.sd")
