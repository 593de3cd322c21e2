"""Where values live: homes by liveness, and which outputs may overwrite an input that dies. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .arena import Buffer, align
from .plan import InPlace, OpPlan, Slice
from .program import Attention, Conv, Op, Program, Size, value_size
from .tiling import Tile


@dataclass(slots=True)
class _Tenant:
    """A value in a home, from the step that writes it to the last that reads it."""

    offset: int
    channels: int
    first: int
    last: int


@dataclass(slots=True)
class _Home:
    """A buffer [n, H, W, channels] (or [n, channels, H, W]) and the values that live in it."""

    key: str
    channels: int
    size: Size
    first: int
    last: int
    tail_of: str | None = None
    tenants: list[_Tenant] = field(default_factory=list)

    def free_offset(self, channels: int, first: int, last: int) -> int | None:
        """First channel from which `channels` are free between two steps, or None."""
        busy = [t for t in self.tenants if t.first <= last and first <= t.last]
        starts = [0] + [t.offset + t.channels for t in busy]
        for start in sorted(starts):
            fits = start + channels <= self.channels
            if fits and not any(t.offset < start + channels and start < t.offset + t.channels for t in busy):
                return start
        return None

    def add(self, offset: int, channels: int, first: int, last: int) -> None:
        self.tenants.append(_Tenant(offset, channels, first, last))
        self.last = max(self.last, last)


class Placer:
    """Walks the steps once and gives every value a home."""

    def __init__(
        self,
        program: Program,
        steps: Sequence[OpPlan],
        n_images: int,
        latent: Size,
        itemsize: int,
        *,
        channels_last: bool,
        reuse: bool,
    ) -> None:
        """`itemsize` is that of the stored dtype; `reuse` allows outputs over dying inputs."""
        self._program, self._steps, self._n, self._latent = program, steps, n_images, latent
        self._itemsize, self._channels_last, self._reuse = itemsize, channels_last, reuse
        self._homes: dict[str, _Home] = {}
        self.slices: dict[int, Slice] = {}
        self._last = self._last_steps()
        self.modes: list[InPlace] = []

    def run(self) -> None:
        """Place all values. Results: `slices`, `modes` and `buffers()`."""
        self._new_home(0, -1)
        for step in self._steps:
            self.modes.append(self._place(step))

    def buffers(self) -> list[Buffer]:
        """One buffer per home but the latent's, which outlives the pass."""
        return [
            Buffer(key=h.key, nbytes=self._home_bytes(h), first=h.first, last=h.last, tail_of=h.tail_of)
            for h in self._homes.values()
            if h.key != "value0"
        ]

    # -- liveness

    def _last_steps(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for step in self._steps:
            for op in (step.op, step.partner):
                if op is not None:
                    for v in op.inputs:
                        last[v] = step.index
                    last.setdefault(op.output, step.index)
        return last

    def _home_bytes(self, home: _Home) -> int:
        _, h, w = home.size
        return self._n * home.channels * h * w * self._itemsize

    # -- placing

    def _place(self, step: OpPlan) -> InPlace:
        op, i = step.op, step.index
        if op.output == self._program.output:
            return "no"
        reuse = self._reuse and step.dtype != "float16"
        if step.partner is not None:
            self._narrow(step)
            return "narrow"
        if reuse and (r := self._into_residual(op, i)) is not None:
            self._share(op.output, r)
            return "residual"
        if reuse and isinstance(op, Conv) and self._overwrites_pixels(op, i):
            self._share(op.output, op.inputs[0])
            return "pixel"
        if self._into_free_slice(op, i):
            return "no"
        home = self._new_home(op.output, i)
        if reuse and isinstance(op, Conv) and self._nests_in_tail(op, step, home):
            return "tail"
        return "no"

    def _new_home(self, value: int, first: int) -> _Home:
        channels = self._program.values[value].channels
        home = _Home(f"value{value}", channels, value_size(self._program, value, self._latent), first, first)
        self._homes[home.key] = home
        self._settle(value, home, 0, first)
        return home

    def _settle(self, value: int, home: _Home, offset: int, first: int) -> None:
        channels = self._program.values[value].channels
        home.add(offset, channels, first, self._last.get(value, first))
        self.slices[value] = Slice(home=home.key, channels=channels, offset=offset, home_channels=home.channels)

    def _share(self, value: int, other: int) -> None:
        """Put a value on the channels of one that dies as it is written."""
        place = self.slices[other]
        home = self._homes[place.home]
        # the shared channels change hands after the step: the new value's life starts one later
        self._settle(value, home, place.offset, self._last[other] + 1)

    def _into_residual(self, op: Op, i: int) -> int | None:
        if isinstance(op, Attention):
            return op.inputs[0] if self._dies(op.inputs[0], i) else None
        if not isinstance(op, Conv) or op.residual is None or op.residual in op.inputs[:1] or op.residual == 0:
            return None
        same = op.residual_repeat == 1 and op.depth_to_space == 1 and op.upsample == 1
        return op.residual if same and self._dies(op.residual, i) else None

    def _dies(self, value: int, i: int) -> bool:
        return value != 0 and self._last[value] == i

    def _overwrites_pixels(self, op: Conv, i: int) -> bool:
        """A 1x1 convolution reads just the pixel it writes."""
        src = op.inputs[0]
        fits = self._program.values[op.output].channels <= self._program.values[src].channels
        plain = op.halo == 0 and op.upsample == 1 and op.depth_to_space == 1 and op.residual is None
        return plain and fits and self._dies(src, i)

    def _narrow(self, step: OpPlan) -> None:
        """Both outputs share the channels of the input they overwrite row by row."""
        place = self.slices[step.op.inputs[0]]
        home = self._homes[place.home]
        assert step.partner is not None
        self._settle(step.op.output, home, place.offset, step.index + 1)
        first = self._program.values[step.op.output].channels
        self._settle(step.partner.output, home, place.offset + first, step.index + 1)

    def _into_free_slice(self, op: Op, i: int) -> bool:
        """Use channels that a wider home has to spare, if that does not prolong its life."""
        channels, last = self._program.values[op.output].channels, self._last[op.output]
        size = value_size(self._program, op.output, self._latent)
        for home in self._homes.values():
            if home.key != "value0" and home.size == size and home.first <= i and last <= home.last:
                offset = home.free_offset(channels, i, last)
                if offset is not None:
                    self._settle(op.output, home, offset, i)
                    return True
        return False

    def _nests_in_tail(self, op: Conv, step: OpPlan, home: _Home) -> bool:
        src = op.inputs[0]
        inner = self._homes[self.slices[src].home]
        # a folded upsampling or a depth-to-space turns source row r into output rows 2r and 2r + 1
        doubles = (op.upsample == 2 and step.fold) or (op.upsample == 1 and op.depth_to_space == 2)
        sweeps = self._channels_last and step.grid.is_strips and step.grid.is_exact
        if not (doubles and sweeps and self._dies(src, step.index)):
            return False
        if inner.last != step.index or inner.tail_of is not None or self._home_bytes(inner) > self._home_bytes(home):
            return False
        if not all(self._tail_is_safe(tile, op, step, inner, home) for tile in step.grid.tiles()):
            return False
        inner.tail_of = home.key
        return True

    def _tail_is_safe(self, tile: Tile, op: Conv, step: OpPlan, inner: _Home, home: _Home) -> bool:
        """After this tile is written, is every row that a later tile stages still whole?"""
        _, h, w = inner.size
        end_image, row = tile.images.stop - 1, tile.rows.stop
        written = ((end_image * 2 * h + 2 * row) * 2 * w) * home.channels * self._itemsize
        # the halo row below was staged with this tile and is carried; a residual is read without halo
        next_row = row if op.residual is not None else row + op.halo
        if row >= h:
            end_image, next_row = tile.images.stop, 0
        read = ((end_image * h + next_row) * w) * inner.channels * self._itemsize
        if end_image >= self._n:
            return True
        start = align(self._home_bytes(home)) - align(self._home_bytes(inner))  # as the arena puts it
        return written <= start + read


def with_modes(steps: Sequence[OpPlan], modes: Sequence[InPlace]) -> tuple[OpPlan, ...]:
    """The steps with what the placer decided."""
    return tuple(replace(step, in_place=mode) for step, mode in zip(steps, modes, strict=True))
