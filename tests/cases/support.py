"""What the case tests share: a recorder of events, short forms of a decode, exact decoders of two fixtures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from halo_vae.nodes.decode_latent import decode_latent
from halo_vae.optim.device import DeviceProfile, describe_device
from halo_vae.optim.events import Fallback, OpReport, PlanSummary, SilentObserver
from halo_vae.optim.settings import DecodeSettings
from halo_vae.tests.fixtures import FakeVAE, Logged, to_image

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass
class Recorder(SilentObserver):
    """Keeps what a decode tells, in order; `on_tile` runs at each tile and may raise."""

    on_tile: Callable[[int, int], None] = lambda i, n: None
    plans: list[PlanSummary] = field(default_factory=list)
    tiles: list[tuple[int, int, tuple[int, ...], str]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    ops: list[OpReport] = field(default_factory=list)
    redone: list[tuple[str, str]] = field(default_factory=list)
    passes: list[tuple[int, int]] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)

    def planned(self, plan: PlanSummary) -> None:
        self.plans.append(plan)
        self.ops.clear()  # what a plan that was given up had finished is thrown away
        self.passes.clear()

    def tile_started(self, i: int, n: int, shape: tuple[int, ...], dtype: str) -> None:
        self.on_tile(i, n)
        self.tiles.append((i, n, shape, dtype))

    def progress(self, done: int, total: int) -> None:
        self.steps.append((done, total))

    def op_done(self, report: OpReport) -> None:
        self.ops.append(report)

    def op_redone(self, name: str, dtype: str, macs: int) -> None:
        self.redone.append((name, dtype))

    def pass_done(self, images: int, slots: int) -> None:
        self.passes.append((images, slots))

    def fallback(self, event: Fallback) -> None:
        self.fallbacks.append(event)

    def kinds(self) -> list[str]:
        """The fallbacks by kind."""
        return [event.kind for event in self.fallbacks]

    @property
    def plan(self) -> PlanSummary:
        """The plan that went through."""
        return self.plans[-1]


def settings(tile_px: int = 768, overlap_px: int = 0, **more: Any) -> DecodeSettings:
    """Settings in picture pixels; tiles do not overlap unless said."""
    return DecodeSettings(**{"tile_size": tile_px, "overlap": overlap_px, "method": "blended"} | more)


def decode(model: Logged, z: Tensor, chosen: DecodeSettings | None = None, **vae_options: Any) -> Tensor:
    """The picture of a latent by a stand-in VAE around the model."""
    return decode_latent({"samples": z}, FakeVAE(model, **vae_options), chosen or settings())


def record(
    model: Logged,
    z: Tensor,
    chosen: DecodeSettings | None = None,
    profile: DeviceProfile | None = None,
    **vae_options: Any,
) -> tuple[Tensor, Recorder]:
    """As decode, with what happened."""
    heard = Recorder()
    vae = FakeVAE(model, **vae_options)
    return decode_latent({"samples": z}, vae, chosen or settings(), observer=heard, profile=profile), heard


def capped(n: int) -> DeviceProfile:
    """The CPU with at most n pictures per pass."""
    return replace(describe_device("cpu"), batch_cap=n)


def whole(model: Logged, z: Tensor) -> Tensor:
    """The picture of one untiled call in the latent's dtype, without going through the package."""
    with torch.no_grad():
        return to_image(model.run(z))


def max_diff(a: Tensor, b: Tensor) -> float:
    """Largest difference; the shapes must agree."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a - b).abs().max())


def shapes(model: Logged) -> list[tuple[int, ...]]:
    """Latents that the model was called with."""
    return [call["shape"] for call in model.log]
