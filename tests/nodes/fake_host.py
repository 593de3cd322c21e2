"""A host without ComfyUI: remembers what it was asked, and interrupts when told to."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from halo_vae.nodes.host import ShowProgress
from halo_vae.nodes.module_weights import ModuleWeights
from halo_vae.optim.weights import WeightSource

GIB = 1 << 30


class Interrupted(BaseException):
    """As newer hosts have it: no Exception, so that nothing swallows it by the way."""


@dataclass
class FakeHost:
    name: str = "a test"
    cancel_types: tuple[type[BaseException], ...] = (Interrupted,)
    free: int | None = 8 * GIB
    total: int | None = 8 * GIB
    loaded: int = 0
    dtype: torch.dtype = torch.float32
    interrupt_after: int | None = None
    """Checks that pass before one raises."""
    patches: Hashable = 0
    checks: int = 0
    loads: list[int] = field(default_factory=list)
    rooms: list[tuple[int, torch.device]] = field(default_factory=list)
    """What it was asked to free."""
    bars: list[list[tuple[int, int]]] = field(default_factory=list)
    sent: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    """Messages to the page."""
    refuses: bool = False
    """Whether sending fails."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the user has set."""
    held: Callable[[], int] = lambda: 0
    release: Callable[[], None] = lambda: None

    def weights(self, vae: Any) -> WeightSource:
        return ModuleWeights(
            vae.first_stage_model, lambda layer, leaf, dtype, device: getattr(layer, leaf).to(device, dtype)
        )

    def patch_id(self, vae: Any) -> Hashable:
        return self.patches

    def load(self, vae: Any, needed_bytes: int) -> None:
        self.loads.append(needed_bytes)

    def free_bytes(self, device: torch.device) -> int | None:
        return self.free

    def total_bytes(self, device: torch.device) -> int | None:
        return self.total

    def loaded_bytes(self, device: torch.device) -> int:
        return self.loaded

    def make_room(self, needed_bytes: int, device: torch.device) -> None:
        self.rooms.append((needed_bytes, device))

    def main_device(self) -> torch.device:
        return torch.device("cpu")

    def output_dtype(self, vae: Any) -> torch.dtype:
        return self.dtype

    def check_interrupt(self) -> None:
        self.checks += 1
        if self.interrupt_after is not None and self.checks > self.interrupt_after:
            raise Interrupted

    def progress_bar(self, total: int) -> ShowProgress:
        steps: list[tuple[int, int]] = []
        self.bars.append(steps)
        return lambda done, total: steps.append((done, total))

    def prompt_id(self) -> str | None:
        return "a prompt"

    def send(self, event: str, data: Mapping[str, Any]) -> None:
        if self.refuses:
            raise RuntimeError("Event loop is closed")
        self.sent.append((event, json.loads(json.dumps(data, allow_nan=False))))

    def user_settings(self) -> Mapping[str, Any]:
        return self.settings

    def heard(self, event: str) -> list[Mapping[str, Any]]:
        return [data for name, data in self.sent if name == event]

    def lend(
        self, held_bytes: Callable[[], int], device: Callable[[], torch.device], release: Callable[[], None]
    ) -> None:
        self.held, self.release = held_bytes, release
