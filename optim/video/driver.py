"""The order in which a clip is decoded, and where every frame lies: integers only, so that planning can rehearse it.

Latent frames are fed in chunks. Of the ops that can make a whole portion of frames, the deepest runs first, so that
what a chunk makes at high resolution leaves before more is made. A frame is freed when no op can read it again; what
is left at the end of a chunk is the state carried to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..arena import align
from ..program import Op, Program
from .frames import (
    conv_taps,
    dropped,
    frame_counts,
    scopes_ready,
    upsampled_count,
    upsampled_ready,
    upsampled_source,
)
from .layout import Layouts, norm_of, readers_of
from .memory import FrameArena
from .ops import ClipAttention, ClipConv
from .steps import Feed, Keep, Page, Run, Step

FOREVER = 1 << 60
WorkBytes = Callable[[int, int], int]
"""(op index, frames of the run) -> bytes of work memory."""

class Driver:
    """Walks one clip. `steps` gives one step after the other; memory is freed when the next is asked for."""

    def __init__(
        self,
        program: Program,
        layouts: Layouts,
        latent_frames: int,
        chunk_lat: int,
        portions: Sequence[int],
        work_bytes: WorkBytes,
        *,
        past_bytes: Mapping[int, int],
        over_skips: bool,
        keep_latent: bool,
    ) -> None:
        """`portions`: most conv frames per run of each op. `over_skips` lets an output take its skip's place."""
        self._program, self._layouts, self._t = program, layouts, latent_frames
        self._chunk, self._portions, self._work_bytes = chunk_lat, portions, work_bytes
        self._over_skips, self._keep_latent = over_skips, keep_latent
        self.counts = frame_counts(program, latent_frames)
        self._totals = [self._conv_total(op) for op in program.ops]
        self._dropped = [self._dropped_of(op) for op in program.ops]
        self._made = [0] * len(program.values)
        self._done = [d // self._rate(op) for d, op in zip(self._dropped, program.ops, strict=True)]
        self._staged_to = [0] * len(program.ops)
        self._pages: list[dict[int, Page]] = [{} for _ in program.values]
        self._copies: dict[int, dict[int, Page]] = {i: {} for i in layouts.staged}
        self._readers = readers_of(program)
        self._cans = list(self._done)
        self.past: dict[int, int] = {}
        """Offsets of the keys and values of attentions that look back over the whole clip."""
        self._slots: dict[int, list[int]] = {}
        self.history_bytes = self._place_history(past_bytes)
        """Bytes at the slab's start in which history lies."""
        self.arena = FrameArena()
        """The rest, for what does not outlive a few runs."""
        self.carried_bytes = 0
        """Most bytes that lived from one chunk into the next."""

    def steps(self) -> Iterator[Step]:
        """Every step of the clip, in order."""
        starts = range(0, self._t, self._chunk)
        for chunk, start in enumerate(starts):
            stop = min(self._t, start + self._chunk)
            if chunk:
                # what is left now is what the clip's future needs of its past
                self.carried_bytes = max(self.carried_bytes, self.history_bytes + self.arena.live_bytes)
            yield self._feed(chunk, len(starts), start, stop)
            while (index := self._next_op()) is not None:
                yield from self._run(index)
        for v in range(len(self._pages)):
            self._free_before(v, FOREVER)

    def dropped(self, index: int) -> int:
        """Raw output frames of an op that are not delivered, from the start."""
        return self._dropped[index]

    @property
    def peak_bytes(self) -> int:
        """Bytes the slab needs."""
        return self.history_bytes + self.arena.peak_bytes

    def _place_history(self, past_bytes: Mapping[int, int]) -> int:
        """Slots for the frames that each convolution reaches back to; the bytes of all of them.

        At fixed places, so that a clip of any length takes the same memory. A clip of one frame has no past.
        """
        end = 0
        for index, op in enumerate(self._program.ops):
            if isinstance(op, ClipConv) and op.kernel[0] > 1 and self._totals[index] > 1:
                size = align(self._kept_bytes(index, op))
                self._slots[index] = [end + i * size for i in range(op.kernel[0] - 1)]
                end += len(self._slots[index]) * size
        for index, size in past_bytes.items():
            self.past[index] = end
            end += align(size)
        return end

    def _kept_bytes(self, index: int, op: ClipConv) -> int:
        """Bytes of a frame as the convolution reads it."""
        return (self._layouts.staged.get(index) or self._layouts.frames[op.inputs[0]]).nbytes

    # -- what can run

    @staticmethod
    def _rate(op: Op) -> int:
        return op.frames_per_conv if isinstance(op, ClipConv) else 1

    def _conv_total(self, op: Op) -> int:
        n = self.counts[op.inputs[0]]
        return upsampled_count(op.upsample_time, n) if isinstance(op, ClipConv) else n

    def _dropped_of(self, op: Op) -> int:
        return dropped(op, self.counts[op.inputs[0]], self._t) if isinstance(op, ClipConv) else 0

    def _can(self, index: int) -> int:
        """Conv frames that could be done by now."""
        op = self._program.ops[index]
        v = op.inputs[0]
        have, n = self._made[v], self.counts[v]
        norm = norm_of(op)
        if norm is not None and norm.kind == "group":
            have = scopes_ready(have, n, norm.scope, norm.scope_offset)
        if isinstance(op, ClipAttention) and op.scope == "clip" and have < n:
            return 0
        if not isinstance(op, ClipConv):
            return have
        up = upsampled_ready(op.upsample_time, have, n)
        c = up if have == n else max(0, up - op.back)
        if op.skip is not None:
            made, done = self._made[op.inputs[1]], self._done[index]
            while c > done and self._skip_frame(index, self._last_out(index, c)) >= made:
                c -= 1
        return c

    def _last_out(self, index: int, c: int) -> int:
        """Last output frame once c conv frames are done."""
        return self._rate(self._program.ops[index]) * c - self._dropped[index] - 1

    def _skip_frame(self, index: int, out: int) -> int:
        """Frame of the skipped value that output frame `out` needs."""
        op = self._program.ops[index]
        assert isinstance(op, ClipConv)
        assert op.skip is not None
        v = op.inputs[1]
        if op.skip.upsampled:
            return upsampled_source(op.upsample_time, out + self._dropped[index], self.counts[v])
        t = 1 if op.skip.unpack is None else op.skip.unpack.t
        lead = t * self.counts[v] - self.counts[op.output]
        return (out + lead) // t

    def _next_op(self) -> int | None:
        """The deepest op that can make a whole portion, or all that is left of the clip.

        Without one, the first that can make anything: so a chunk leaves nothing behind but history, each begins as the
        last one did, and memory does not depend on how many there are.
        """
        for index in range(len(self._program.ops) - 1, -1, -1):
            can, done = self._cans[index], self._done[index]
            if can > done and (can - done >= self._portions[index] or can == self._totals[index]):
                return index
        waiting = (i for i in range(len(self._program.ops)) if self._cans[i] > self._done[i])
        return next(waiting, None)

    def _have(self, v: int, frames: int) -> None:
        """A value has that many frames now: its readers can do more."""
        self._made[v] = frames
        for index in self._readers[v]:
            self._cans[index] = self._can(index)

    # -- steps

    def _feed(self, chunk: int, n_chunks: int, start: int, stop: int) -> Feed:
        pages = tuple(self._new_page(0, f) for f in range(start, stop))
        self._have(0, stop)
        return Feed(chunk=chunk, n_chunks=n_chunks, start=start, stop=stop, pages=pages)

    def _new_page(self, v: int, frame: int) -> Page:
        page = Page(self._take(self._layouts.frames[v].nbytes), frame)
        self._pages[v][frame] = page
        return page

    def _take(self, nbytes: int) -> int:
        return self.history_bytes + self.arena.take(nbytes)

    def _give_back(self, page: Page) -> None:
        if not page.kept:
            self.arena.give_back(page.offset - self.history_bytes)

    def _run(self, index: int) -> Iterator[Run | Keep]:
        op = self._program.ops[index]
        start = self._done[index]
        stop = min(self._can(index), start + self._portions[index])
        if isinstance(op, ClipAttention) and op.scope == "clip":
            stop = self._totals[index]
        stage, taps = self._sources(index, start, stop)
        first = max(0, self._last_out(index, start) + 1)
        outs, skips, over = self._outputs(index, first, self._last_out(index, stop) + 1)
        size = self._work_bytes(index, stop - start)
        work = self._take(size) if size else 0
        yield Run(
            index=index, start=start, stop=stop, stage=stage, taps=taps, first_out=first, outs=outs, skips=skips,
            over_skip=over, work=work,
        )  # fmt: skip
        if size:
            self.arena.give_back(work - self.history_bytes)
        self._done[index] = stop
        self._have(op.output, max(0, self._last_out(index, stop) + 1))
        if index in self._copies:
            self._drop(self._copies[index], self._lowest(index))
        for v in op.inputs:
            self._free_before(v, min(self._needed(v)))
        if moves := self._into_history(index):
            yield Keep(index=index, moves=moves)
            for page, _ in moves:
                self._give_back(page)

    def _into_history(self, index: int) -> tuple[tuple[Page, Page], ...]:
        """Staged frames that the next run reaches back to, each with its free slot.

        A slot whose frame somebody still reads stays as it is, and the new frame where it was.
        """
        slots = self._slots.get(index, [])
        if not slots:
            return ()
        pages = self._copies[index] if index in self._copies else self._pages[self._program.ops[index].inputs[0]]
        used, moves = {page.offset for page in pages.values() if page.kept}, []
        for frame in sorted(f for f in pages if f < self._staged_to[index] and not pages[f].kept)[-len(slots) :]:
            to = slots[frame % len(slots)]
            if to not in used:
                moves.append((pages[frame], Page(to, frame, True)))
                used.add(to)
        for _, page in moves:
            pages[page.frame] = page
        return tuple(moves)

    def _sources(
        self, index: int, start: int, stop: int
    ) -> tuple[tuple[tuple[Page, Page], ...], tuple[tuple[Page | None, ...], ...]]:
        op = self._program.ops[index]
        v = op.inputs[0]
        if not isinstance(op, ClipConv):
            return (), tuple((self._pages[v][f],) for f in range(start, stop))
        n = self.counts[v]
        taps = [self._taps(op, c, n) for c in range(start, stop)]
        mode = self._layouts.modes[index]
        reach = max((f for tap in taps for f in tap if f is not None), default=-1) + 1
        stage: list[tuple[Page, Page]] = []
        if mode != "tiles":
            for f in range(max(self._staged_to[index], self._lowest(index)), reach):
                page = self._pages[v][f]
                if mode == "copies":
                    self._copies[index][f] = Page(self._take(self._layouts.staged[index].nbytes), f)
                    stage.append((page, self._copies[index][f]))
                else:
                    stage.append((page, page))
            self._staged_to[index] = max(self._staged_to[index], reach)
        stored = self._pages[v]
        pages = self._copies[index] if mode == "copies" else stored
        at = [stored if self._is_bypassed(op, c) else pages for c in range(start, stop)]
        return tuple(stage), tuple(
            tuple(None if f is None else of[f] for f in tap) for of, tap in zip(at, taps, strict=True)
        )

    @staticmethod
    def _is_bypassed(op: ClipConv, c: int) -> bool:
        """Conv frame c is the source's, untouched."""
        return op.first_frame == "bypass" and c == 0

    @classmethod
    def _taps(cls, op: ClipConv, c: int, n: int) -> tuple[int | None, ...]:
        """Frames read by conv frame c; a bypassed first frame reads itself alone."""
        if cls._is_bypassed(op, c):
            return (None,) * (op.kernel[0] - 1) + (0,)
        return conv_taps(op, c, n)

    def _outputs(
        self, index: int, first: int, stop: int
    ) -> tuple[tuple[Page, ...], tuple[Page, ...], tuple[bool, ...]]:
        """(frames to write, frames they are added to, whether each takes the other's place)."""
        op = self._program.ops[index]
        skips: list[Page] = []
        if isinstance(op, ClipConv) and op.skip is not None:
            skips = [self._pages[op.inputs[1]][self._skip_frame(index, o)] for o in range(first, stop)]
        elif isinstance(op, ClipAttention):
            skips = [self._pages[op.inputs[0]][o] for o in range(first, stop)]
        if op.output == self._program.output:
            return (), tuple(skips), (False,) * (stop - first)
        # all of a run or none, as a kernel adds to all of its output or writes it
        taken = bool(skips) and all(self._may_take(index, op, o) for o in range(first, stop))
        outs = []
        for o in range(first, stop):
            if taken:
                v = op.inputs[-1]
                page = self._pages[v].pop(o)
                self._pages[op.output][o] = page
                outs.append(page)
            else:
                outs.append(self._new_page(op.output, o))
        return tuple(outs), tuple(skips), (taken,) * (stop - first)

    def _may_take(self, index: int, op: Op, frame: int) -> bool:
        """May output frame `frame` overwrite the same frame of the value it adds?"""
        v = op.inputs[-1]
        if not self._over_skips or v == 0 or self._layouts.frames[v] != self._layouts.frames[op.output]:
            return False
        if isinstance(op, ClipConv):
            skip = op.skip
            if skip is None or skip.upsampled or skip.unpack is not None or skip.repeat != 1 or op.upsample != 1:
                return False
            if op.unpack is not None or op.inputs[0] == v or self._skip_frame(index, frame) != frame:
                return False
        if self._pages[v][frame].kept:
            return False
        others = [self._lowest_of(i, v) for i in self._readers[v] if i != index]
        return all(lowest > frame for lowest in others)

    # -- what may be freed

    def _needed(self, v: int) -> list[int]:
        """Lowest frame of a value that each of its readers may still read."""
        if v == 0 and self._keep_latent and any(d < t for d, t in zip(self._done, self._totals, strict=True)):
            return [0]
        return [self._lowest_of(i, v) for i in self._readers[v]] or [FOREVER]

    def _lowest_of(self, index: int, v: int) -> int:
        op = self._program.ops[index]
        if self._done[index] >= self._totals[index]:
            return FOREVER
        lowest = FOREVER
        if op.inputs[0] == v:
            lowest = self._lowest(index)
            if self._layouts.modes.get(index) == "copies":
                lowest = max(lowest, self._staged_to[index])
        if len(op.inputs) > 1 and op.inputs[1] == v:
            lowest = min(lowest, self._skip_frame(index, max(0, self._last_out(index, self._done[index]) + 1)))
        return lowest

    def _lowest(self, index: int) -> int:
        """Lowest source frame under the taps of conv frames still to be made."""
        op, done = self._program.ops[index], self._done[index]
        if done >= self._totals[index]:
            return FOREVER
        if not isinstance(op, ClipConv):
            return done
        n = self.counts[op.inputs[0]]
        for c in range(done, self._totals[index]):
            frames = [f for f in self._taps(op, c, n) if f is not None]
            if frames:
                return min(frames)
        return FOREVER

    def _free_before(self, v: int, frame: int) -> None:
        self._drop(self._pages[v], frame)

    def _drop(self, pages: dict[int, Page], before: int) -> None:
        for f in [f for f in pages if f < before]:
            self._give_back(pages.pop(f))
