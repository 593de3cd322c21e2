"""Plans that keep their widest values in the host's memory: which ones, and the way of a tile from there and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .arena import Arena, Buffer, pack_buffers
from .events import Choice
from .plan import Offload, OpPlan, PassPlan, Slice
from .program import Attention, Conv
from .tiling import Span, Tile

SHARES = (1.0, 0.5, 0.0)
"""By level: at most this much of the device's pool is left, if so much can go."""


def split_buffers(homes: Sequence[Buffer], work: Sequence[Buffer], level: int) -> tuple[Arena, Offload]:
    """(what lies on the device, what in the host's memory).

    Sends homes of values to the host, the widest first, until the share of the level is left on the device. Homes that
    share bytes go together; `work` buffers stay, as kernels read and write them.
    """
    device = pack_buffers([*homes, *work])
    goal = int(device.nbytes * SHARES[level])
    gone: set[str] = set()
    for group in _groups(homes):
        if device.nbytes <= goal:
            break
        gone |= group
        device = pack_buffers([*(b for b in homes if b.key not in gone), *work])
    host = pack_buffers([b for b in homes if b.key in gone])
    return device, Offload(homes=frozenset(gone), host=host)


def _groups(homes: Sequence[Buffer]) -> list[set[str]]:
    """Keys of homes that share bytes, the widest groups first."""
    by_key = {b.key: b for b in homes}
    groups: dict[str, set[str]] = {}
    for b in homes:
        root = b
        while root.tail_of is not None:
            root = by_key[root.tail_of]
        groups.setdefault(root.key, set()).add(b.key)
    return sorted(groups.values(), key=lambda keys: -max(by_key[k].nbytes for k in keys))


def fetched_bytes(step: OpPlan, slices: Mapping[int, Slice], homes: Collection[str], itemsize: int) -> int:
    """Bytes of the copies that a tile of a step makes of what it reads in the host's memory."""
    tile, op, total = step.grid.tiles()[0], step.op, 0
    for i, v in enumerate(op.inputs):
        if v not in slices or slices[v].home not in homes:
            continue
        rows, cols, n = tile.rows.size, tile.cols.size, tile.images.size
        if isinstance(op, Attention):
            cols = 1
        elif isinstance(op, Conv) and i == 0:
            rows, cols = rows + 2 * op.halo, cols + 2 * op.halo
        # a shortcut in the same sweep reads the rows once more
        total += n * slices[v].channels * rows * cols * itemsize * (2 if step.partner is not None else 1)
    return total


def offload_choice(a_pass: PassPlan, device_bytes: int) -> tuple[Choice, ...]:
    """The line of a plan that tells what lives in the host's memory; none where nothing does."""
    offload = a_pass.offload
    if not offload.homes:
        return ()
    n = sum(place.home in offload.homes for place in a_pass.slices.values())
    value = f"{n} values in {offload.host.nbytes >> 20} MiB of host memory, {device_bytes >> 20} MiB left on the device"
    return (Choice(name="offload", value=value, reason="the device has no room for the widest values"),)


def fetch(part: Tensor, device: torch.device) -> Tensor:
    """A copy of a part of a value on the device, in the same layout."""
    return part.to(device, copy=True)


def fetch_window(
    src: Tensor, tile: Tile, halo: int, carried: int, grow: int, device: torch.device
) -> tuple[Tensor, Tile]:
    """What a tile [.., rows, cols] and its halo read of `src` [B, C, H, W], and the tile as that window sees it.

    The first `carried` rows are not read. `grow` is 2 where the tile is in elements of the source upsampled twice.
    Borders of the picture stay borders of the window, so that kernels pad as they would.
    """
    height, width = src.shape[2] * grow, src.shape[3] * grow
    top, bottom = _reach(tile.rows, halo, carried, height, grow)
    left, right = _reach(tile.cols, halo, 0, width, grow)
    window = fetch(src[:, :, top:bottom, left:right], device)
    moved = replace(tile, rows=_moved(tile.rows, top * grow), cols=_moved(tile.cols, left * grow))
    return window, moved


def _reach(span: Span, halo: int, carried: int, extent: int, grow: int) -> tuple[int, int]:
    """[first, last) elements of the source that a span of the tile reads."""
    first = max(0, span.start - halo + carried)
    last = max(first, min(extent, span.stop + halo))
    return first // grow, -(-last // grow)


def _moved(span: Span, by: int) -> Span:
    return Span(span.start - by, span.stop - by)
