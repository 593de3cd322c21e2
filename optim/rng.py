"""Random state for decoders that add noise: one seed gives one picture, and the caller's state is left as it was."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor


class RandomScope:
    """Restores the global generators of the CPU and of one device on leaving, whatever happens inside."""

    def __init__(self, device: torch.device, seed: int = -1) -> None:
        """Watch the CPU and `device`; `seed` >= 0 seeds both on entry, -1 goes on from the state they have."""
        module: Any = None if device.type == "cpu" else getattr(torch, device.type, None)
        self._module = module if hasattr(module, "get_rng_state") else None
        self._args: tuple[torch.device, ...] = () if device.type == "mps" else (device,)
        self._device = device
        self._seed = seed
        self._before: tuple[Tensor, ...] = ()
        self._start: tuple[Tensor, ...] = ()

    def __enter__(self) -> RandomScope:
        """Take the state, then seed."""
        self._before = self.state()
        self._start = self._before
        if self._seed >= 0:
            torch.default_generator.manual_seed(self._seed)  # torch.manual_seed would reach every device
            if self._module is not None:
                seeded = torch.Generator(self._device).manual_seed(self._seed).get_state()
                self._module.set_rng_state(seeded, *self._args)
            self._start = self.state()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Put the state back."""
        self.restore(self._before)

    def state(self) -> tuple[Tensor, ...]:
        """The state as it is now."""
        if self._module is None:
            return (torch.get_rng_state(),)
        return torch.get_rng_state(), self._module.get_rng_state(*self._args)

    def restore(self, state: tuple[Tensor, ...]) -> None:
        """Set a state taken before."""
        torch.set_rng_state(state[0])
        if self._module is not None:
            self._module.set_rng_state(state[1], *self._args)

    def rewind(self) -> None:
        """Back to the state that the decode began with, so that a decode that restarts draws the same noise."""
        self.restore(self._start)
