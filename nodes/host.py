"""What the nodes ask of the program they run in. One file implements it for ComfyUI; tests have their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

import torch

from ..optim.weights import WeightSource

ShowProgress = Callable[[int, int], None]
"""Takes work done and work in all."""


class Host(Protocol):
    """The running host. A `vae` is its own VAE object, which nobody else looks into."""

    @property
    def name(self) -> str:
        """The host and its version."""

    @property
    def cancel_types(self) -> tuple[type[BaseException], ...]:
        """What `check_interrupt` raises."""

    def weights(self, vae: Any) -> WeightSource:
        """The VAE's weights as the host would compute with them: offloaded, patched or 8-bit ones included."""

    def patch_id(self, vae: Any) -> Hashable:
        """Changes whenever the VAE's weights are patched anew."""

    def load(self, vae: Any, needed_bytes: int) -> None:
        """Bring the VAE onto its device, with that much room left beside its weights."""

    def free_bytes(self, device: torch.device) -> int | None:
        """Memory the device can give now; None where the host cannot tell."""

    def total_bytes(self, device: torch.device) -> int | None:
        """Memory the device could give if the host unloaded everything; None where the host cannot tell."""

    def loaded_bytes(self, device: torch.device) -> int:
        """Memory on the device that the host would take from its models, or from us, for a decode."""

    def make_room(self, needed_bytes: int, device: torch.device) -> None:
        """Unload models until that much more memory of the device is free than now, as far as that goes."""

    def main_device(self) -> torch.device:
        """The device that the host computes on unless it is told otherwise."""

    def output_dtype(self, vae: Any) -> torch.dtype:
        """Dtype the host wants pictures in."""

    def check_interrupt(self) -> None:
        """Raise one of `cancel_types` if the user asked to stop."""

    def progress_bar(self, total: int) -> ShowProgress:
        """A new progress bar of the node that runs now."""

    def prompt_id(self) -> str | None:
        """The host's name for the run of a workflow that is under way; None where there is none."""

    def send(self, event: str, data: Mapping[str, Any]) -> None:
        """Send a JSON-safe message to the page that the run is for. Never waits; may raise."""

    def user_settings(self) -> Mapping[str, Any]:
        """What the host's settings file holds now, by id; empty without such a file. Read anew if it changed."""

    def lend(
        self, held_bytes: Callable[[], int], device: Callable[[], torch.device], release: Callable[[], None]
    ) -> None:
        """Count `held_bytes()` on `device()` as memory in use, and call `release` when the host needs room."""
