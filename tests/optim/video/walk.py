"""Walks a driver with a model of memory: which bytes hold which frame, so that every read is checked. No tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from halo_vae.optim.arena import align
from halo_vae.optim.precision import WidenedOps, choose_dtypes
from halo_vae.optim.program import Op, Program
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.video.driver import Driver
from halo_vae.optim.video.frames import (
    conv_taps,
    dropped,
    frame_counts,
    scope_of,
    upsampled_count,
    upsampled_source,
)
from halo_vae.optim.video.memory import FrameArena
from halo_vae.optim.video.ops import ClipAttention, ClipConv
from halo_vae.optim.video.plan import ClipPlan
from halo_vae.optim.video.planner import make_clip_plan
from halo_vae.optim.video.steps import Feed, Keep, Page, Run
from halo_vae.tests.optim.helpers import PROFILE, settings

Label = tuple[str, int, int]
"""("value", value, frame), ("staged", op, frame), ("past", op, 0), or ("work", op, 0)."""


def plan_clip(
    program: Program, shape: tuple[int, int, int, int, int], device: Any = PROFILE, **given: Any
) -> ClipPlan:
    """A plan without weights."""
    chosen: DecodeSettings = settings(**given)
    edge = max(shape[3] * program.scale[1], shape[4] * program.scale[2])
    decision = choose_dtypes(chosen.precision_mode, program, "float32", device, edge, WidenedOps(), "")
    return make_clip_plan(program, shape, chosen, device, decision, stored="float32")


@dataclass
class Memory:
    """Ranges of bytes and what was last written to them; a write destroys what it touches."""

    held: dict[tuple[int, int], Label] = field(default_factory=dict)
    end: int = 0

    def write(self, start: int, nbytes: int, label: Label) -> None:
        stop = start + nbytes
        for span in [s for s in self.held if s[0] < stop and start < s[1]]:
            del self.held[span]
        self.held[start, stop] = label
        self.end = max(self.end, stop)

    def expect(self, start: int, nbytes: int, label: Label) -> None:
        assert self.held.get((start, start + nbytes)) == label, (label, self.held.get((start, start + nbytes)))


class WatchedArena(FrameArena):
    """Checks that what is handed out is nobody's, and lies within what the arena says it spans."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}

    def take(self, nbytes: int) -> int:
        start = super().take(nbytes)
        size = align(max(1, nbytes))
        assert start % align(1) == 0
        assert all(stop <= start or start + size <= begin for begin, stop in self.live.items())
        self.live[start] = start + size
        assert max(self.live.values()) <= self.peak_bytes
        assert sum(stop - begin for begin, stop in self.live.items()) == self.live_bytes
        return start

    def give_back(self, start: int) -> None:
        super().give_back(start)
        del self.live[start]


@dataclass
class Walk:
    """One walk over one clip."""

    plan: ClipPlan
    memory: Memory = field(default_factory=Memory)
    made: dict[int, int] = field(default_factory=dict)
    """Frames of each value that were made so far."""
    done: dict[int, int] = field(default_factory=dict)
    """Conv frames of each op."""
    runs: dict[int, list[int]] = field(default_factory=dict)
    """Frames of each run of each op."""
    overs: int = 0
    kept: int = 0

    def __post_init__(self) -> None:
        self.program: Program = self.plan.program
        self.t = self.plan.latent_shape[2]
        self.counts = frame_counts(self.program, self.t)
        self.driver: Driver = self.plan.driver()
        self.arena = WatchedArena()
        self.driver.arena = self.arena
        self.fed = 0

    def walk(self) -> Walk:
        """Every step, then what must hold at the end."""
        for step in self.driver.steps():
            if isinstance(step, Feed):
                self._feed(step)
            elif isinstance(step, Keep):
                self._keep(step)
            else:
                self._run(step)
        assert self.fed == self.t
        for op in self.program.ops:
            assert self.made.get(op.output, 0) == self.counts[op.output], op.name
        assert self.arena.live_bytes == 0
        assert self.arena.live == {}
        assert self.memory.end <= self.driver.peak_bytes
        assert self.driver.history_bytes <= self.driver.carried_bytes or self.driver.carried_bytes == 0
        return self

    # -- steps

    def _feed(self, step: Feed) -> None:
        assert [page.frame for page in step.pages] == list(range(self.fed, step.stop))
        assert step.start == self.fed
        for page in step.pages:
            self._write(page, 0)
        self.fed = self.made[0] = step.stop

    def _keep(self, step: Keep) -> None:
        nbytes = self._staged_bytes(step.index)
        slots = [to.offset for _, to in step.moves]
        assert len(set(slots)) == len(slots) > 0
        for page, to in step.moves:
            assert to.kept
            assert page.frame == to.frame
            assert to.offset + nbytes <= self.driver.history_bytes
            self.memory.expect(page.offset, nbytes, self._staged_label(step.index, page.frame))
            self.memory.write(to.offset, nbytes, self._staged_label(step.index, page.frame))
            self.kept += 1

    def _run(self, run: Run) -> None:
        op, index = self.program.ops[run.index], run.index
        start = self.done.get(index, dropped(op, self._n(op), self.t) // op.frames_per_conv if self._conv(op) else 0)
        assert run.start == start < run.stop, op.name
        self._scopes_are_complete(op, run)
        for source, target in run.stage:
            self._read(source, op.inputs[0])
            self.memory.write(target.offset, self._staged_bytes(index), self._staged_label(index, target.frame))
        nbytes = self.plan.backends.work_bytes(index, run.stop - run.start)
        if nbytes:
            self.memory.write(run.work, nbytes, ("work", index, 0))
        if index in self.driver.past:
            self._past(index, run)
        self._taps(op, run)
        self._outputs(op, run)
        if nbytes:
            self.memory.expect(run.work, nbytes, ("work", index, 0))
        self._taps(op, run)  # a tile is convolved after another was written
        self.done[index] = run.stop
        self.runs.setdefault(index, []).append(run.stop - run.start)

    def _taps(self, op: Op, run: Run) -> None:
        for c, tap in zip(range(run.start, run.stop), run.taps, strict=True):
            wanted = self._wanted(op, c)
            assert [None if page is None else page.frame for page in tap] == list(wanted), op.name
            if isinstance(op, ClipAttention) and run.over_skip[c - run.start] and self.made.get(op.output, 0) > c:
                continue  # it was its own source
            for page in tap:
                if page is None:
                    continue
                if self._reads_staged(run.index, c):
                    label = self._staged_label(run.index, page.frame)
                    self.memory.expect(page.offset, self._staged_bytes(run.index), label)
                else:
                    self._read(page, op.inputs[0])

    def _outputs(self, op: Op, run: Run) -> None:
        n_out = len(run.over_skip)
        assert run.first_out == self.made.get(op.output, 0), op.name
        last = op.output == self.program.output
        assert [page.frame for page in run.outs] == ([] if last else list(range(run.first_out, run.first_out + n_out)))
        for o, page in enumerate(run.skips):
            assert page.frame == self._skipped(op, run.first_out + o), op.name
            self._read(page, op.inputs[-1])
        for o, page in enumerate(run.outs):
            assert run.over_skip[o] == (bool(run.skips) and page.offset == run.skips[o].offset)
            self.overs += run.over_skip[o]
            self._write(page, op.output)
        for o, page in enumerate(run.skips):
            if not run.over_skip[o]:
                self._read(page, op.inputs[-1])
        self.made[op.output] = run.first_out + n_out

    def _past(self, index: int, run: Run) -> None:
        nbytes = self.plan.backends.past_bytes(dict(enumerate(self.counts)))[index]
        at = self.driver.past[index]
        assert at + nbytes <= self.driver.history_bytes
        if run.start:
            self.memory.expect(at, nbytes, ("past", index, 0))
        self.memory.write(at, nbytes, ("past", index, 0))

    def _scopes_are_complete(self, op: Op, run: Run) -> None:
        v = op.inputs[0]
        if isinstance(op, ClipAttention) and op.scope == "clip":
            assert (run.start, run.stop) == (0, self.counts[v])
        norm = op.norm if isinstance(op, (ClipConv, ClipAttention)) else None
        if norm is None or norm.kind != "group":
            return
        reached = [page.frame for tap in run.taps for page in tap if page is not None]
        scopes = {scope_of(f, norm.scope, norm.scope_offset) for f in reached}
        for f in range(self.counts[v]):
            if scope_of(f, norm.scope, norm.scope_offset) in scopes:
                assert f < self.made[v], (op.name, f)

    # -- what is where

    @staticmethod
    def _conv(op: Op) -> bool:
        return isinstance(op, ClipConv)

    def _n(self, op: Op) -> int:
        return self.counts[op.inputs[0]]

    def _wanted(self, op: Op, c: int) -> tuple[int | None, ...]:
        if not isinstance(op, ClipConv):
            return (c,)
        if op.first_frame == "bypass" and c == 0:
            return (*[None] * (op.kernel[0] - 1), 0)
        assert c < upsampled_count(op.upsample_time, self._n(op))
        return conv_taps(op, c, self._n(op))

    def _skipped(self, op: Op, out: int) -> int:
        """The frame of the added value that output frame `out` needs."""
        if not isinstance(op, ClipConv):
            return out
        assert op.skip is not None
        if op.skip.upsampled:
            return upsampled_source(op.upsample_time, out + dropped(op, self._n(op), self.t), self._n(op))
        t = op.skip.unpack.t if op.skip.unpack else 1
        return (out + t * self.counts[op.inputs[1]] - self.counts[op.output]) // t

    def _mode(self, index: int) -> str:
        return self.plan.layouts.modes.get(index, "tiles")

    def _reads_staged(self, index: int, c: int) -> bool:
        op = self.program.ops[index]
        bypassed = isinstance(op, ClipConv) and op.first_frame == "bypass" and c == 0
        return self._mode(index) != "tiles" and not bypassed

    def _staged_label(self, index: int, frame: int) -> Label:
        if self._mode(index) == "frames":
            return "value", self.program.ops[index].inputs[0], frame
        return "staged", index, frame

    def _staged_bytes(self, index: int) -> int:
        layouts = self.plan.layouts
        return (layouts.staged.get(index) or layouts.frames[self.program.ops[index].inputs[0]]).nbytes

    def _read(self, page: Page, v: int) -> None:
        self.memory.expect(page.offset, self.plan.layouts.frames[v].nbytes, ("value", v, page.frame))

    def _write(self, page: Page, v: int) -> None:
        self.memory.write(page.offset, self.plan.layouts.frames[v].nbytes, ("value", v, page.frame))
