"""Where decodes take their memory from, and how it is given back when it is short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .heap import give_back
from .pool import MemoryPool

if TYPE_CHECKING:
    from .decoder import Decoder

MakeRoom = Callable[[int, torch.device], None]
"""Asks whoever else holds memory of a device to free that many bytes of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The memory of one engine."""

    pool: MemoryPool
    host: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    """Where values live that a device has no room for."""
    make_room: MakeRoom | None = None
    """None where there is nobody to ask."""

    def held_bytes(self, decoder: Decoder) -> int:
        """Bytes kept between decodes that this decoder's device could have back."""
        return self.pool.held_bytes + decoder.packed.nbytes

    def release(self, decoder: Decoder) -> None:
        """Give back everything kept between decodes."""
        self.pool.clear()
        decoder.packed.clear()
        give_back(decoder.device)

    def room_maker(self, device: torch.device) -> Callable[[int], None] | None:
        """`make_room` for one device."""
        ask = self.make_room
        return None if ask is None else lambda nbytes: ask(nbytes, device)
