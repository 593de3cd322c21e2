"""How many distinct convolution shapes a decoder asks of its backend while pictures of many sizes are decoded in turn.

On backends that search for a kernel per shape (MIOpen, cuDNN's benchmark mode) each new shape costs a search. Nothing
is decoded: stock shapes come from a run on shapes alone (meta tensors), the engine's from its plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from halo_vae.benchmarks.engines import LATENT_CHANNELS, PLANS, SCALE
from halo_vae.benchmarks.plain_kl import PlainKLDecoder, sd_shapes
from halo_vae.optim.decode import Engine, open_decoder
from halo_vae.optim.device import describe_device
from halo_vae.optim.errors import WeightsError
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.weights import TensorSpec, hash_weights

RESOLUTIONS: tuple[tuple[int, int], ...] = (
    # SD 1.5 and 2.1: squares and the usual portraits and landscapes
    (512, 512), (512, 640), (640, 512), (512, 768), (768, 512), (576, 768), (768, 576),
    (640, 640), (768, 768), (256, 256),
    # SDXL's training buckets
    (1024, 1024), (896, 1152), (1152, 896), (832, 1216), (1216, 832), (768, 1344), (1344, 768),
    (640, 1536), (1536, 640), (960, 1088), (1088, 960),
    # Flux: up to two megapixels, film and screen formats
    (720, 1280), (1280, 720), (1080, 1920), (1920, 1080), (1440, 1440), (1024, 1536), (1536, 1024),
    (1344, 1728), (2048, 2048),
)  # fmt: skip
"""(width, height) in pixels of thirty common pictures; none has an edge below 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeCount:
    """Distinct convolution shapes of one engine over a list of resolutions decoded in turn."""

    engine: str
    total: int
    """Distinct shapes over the whole list."""
    new_at_each: tuple[int, ...]
    """Shapes that each resolution brought and none before it had."""


class SpecWeights:
    """Shapes and dtypes of weights that nobody has: enough to lower and plan, not to decode."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        """Every tensor in `dtype`."""
        self.specs: Mapping[str, TensorSpec] = {k: TensorSpec(shape=s, dtype=dtype) for k, s in shapes.items()}

    @property
    def content_hash(self) -> str:
        """See WeightSource."""
        return hash_weights(self.specs, lambda name: b"")

    def get(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Always a WeightsError."""
        raise WeightsError(f"only the shape of {name} is known; give real weights to decode")


def plain_shapes(decoder: nn.Module, size_px: tuple[int, int], batch: int = 1) -> list[tuple[int, ...]]:
    """(input [B, C, H, W] + weight [C_out, C_in, kH, kW]) of every convolution of a decoder on the meta device."""
    seen: list[tuple[int, ...]] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append((*inputs[0].shape, *module.weight.shape))  # type: ignore[union-attr, misc]

    convs = [m for m in decoder.modules() if isinstance(m, nn.Conv2d)]
    hooks = [m.register_forward_pre_hook(note) for m in convs]
    try:
        width, height = size_px
        with torch.no_grad():
            decoder(torch.empty(batch, LATENT_CHANNELS, height // SCALE, width // SCALE, device="meta"))
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def count_shapes(engine: str, resolutions: Sequence[tuple[int, int]] = RESOLUTIONS, ch: int = 128) -> ShapeCount:
    """Count for "plain", "strips" or "tiles", of a decoder of SD's size by default. ValueError for other engines."""
    if engine == "plain":
        with torch.device("meta"):
            decoder = PlainKLDecoder([ch, ch * 2, ch * 4, ch * 4], latent=LATENT_CHANNELS)
        return _count(engine, (plain_shapes(decoder, size) for size in resolutions))
    if engine not in PLANS:
        raise ValueError(f"shapes of {engine!r} are not counted; choose plain, {', '.join(PLANS)}")
    decoder_of_shapes = open_decoder(SpecWeights(sd_shapes(ch=ch)))
    # shapes must not depend on how much memory happens to be free
    halo = Engine(profile=replace(describe_device("cpu"), budget_bytes=None))
    settings = DecodeSettings(plan=engine, precision_mode="fp32")  # type: ignore[arg-type]
    latents = [(1, LATENT_CHANNELS, height // SCALE, width // SCALE) for width, height in resolutions]
    return _count(engine, (halo.plan(decoder_of_shapes, latent, settings).conv_shapes for latent in latents))


def _count(engine: str, per_resolution: Iterable[Iterable[object]]) -> ShapeCount:
    seen: set[object] = set()
    new = []
    for shapes in per_resolution:
        fresh = set(shapes) - seen
        seen |= fresh
        new.append(len(fresh))
    return ShapeCount(engine=engine, total=len(seen), new_at_each=tuple(new))
