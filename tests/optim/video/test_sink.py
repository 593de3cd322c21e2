"""Where finished frames go: tiles into frames, frames to a callback, each once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halo_vae.optim.store import keep_raw, to_unit_range
from halo_vae.optim.video.sink import StreamSink, WholeSink
from halo_vae.tests.optim.helpers import latent

SIZE = (4, 6, 3)


class Taken:
    """Keeps copies of what it is handed."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.frames: list[Tensor] = []
        self.memory: set[int] = set()

    def __call__(self, first: int, frames: Tensor) -> None:
        assert frames.shape[1:] == SIZE
        self.calls.append((first, frames.shape[0]))
        self.frames += [frame.clone() for frame in frames]
        self.memory.add(frames.untyped_storage().data_ptr())


def stream(taken: Taken, dtype: torch.dtype = torch.float32) -> StreamSink:
    return StreamSink(SIZE, keep_raw, taken, dtype, torch.device("cpu"))


def clip(n: int) -> Tensor:
    """[n, C, H, W]."""
    return latent(n, SIZE[2], *SIZE[:2])


def write(sink: StreamSink | WholeSink, frames: Tensor, first: int) -> None:
    """Begin and write frames [n, C, H, W] in four tiles each."""
    sink.begin(first, frames.shape[0])
    for i, frame in enumerate(frames):
        for row in (0, 2):
            for col in (0, 3):
                sink.write(frame[:, row : row + 2, col : col + 3], first + i, row, col)


def give(sink: StreamSink | WholeSink, frames: Tensor, first: int) -> None:
    write(sink, frames, first)
    assert torch.equal(sink.end(), frames.movedim(1, -1))
    sink.deliver()


def test_tiles_are_put_where_they_belong() -> None:
    x = clip(5)
    image = torch.full((5, *SIZE), float("nan"))
    sink = WholeSink(image, keep_raw)
    give(sink, x[:2], 0)
    give(sink, x[2:], 2)
    assert torch.equal(image, x.movedim(1, -1))


def test_frames_are_handed_on_in_order_out_of_the_same_memory() -> None:
    taken = Taken()
    x, sink = clip(7), stream(taken)
    for first, stop in ((0, 3), (3, 5), (5, 6), (6, 7)):
        give(sink, x[first:stop], first)
    assert taken.calls == [(0, 3), (3, 2), (5, 1), (6, 1)]
    assert torch.equal(torch.stack(taken.frames), x.movedim(1, -1))
    assert len(taken.memory) == 1
    assert sink.delivered == 7


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (3, 3, 2), (1,) * 8, (8,), (5, 3)])
@pytest.mark.parametrize("reached", [0, 1, 3, 4, 8])
def test_after_a_restart_each_frame_is_handed_on_once(sizes: tuple[int, ...], reached: int) -> None:
    """The second attempt may cut the clip otherwise; what was handed on stays handed on."""
    taken, x = Taken(), clip(8)
    sink = stream(taken)
    for first in range(0, reached, 2):
        give(sink, x[first : min(first + 2, reached)], first)
    if reached < 8:
        write(sink, x[reached : reached + 1], reached)  # made, but not known to be good: not handed on
    first = 0
    for n in sizes:
        give(sink, x[first : first + n], first)
        first += n
    assert torch.equal(torch.stack(taken.frames), x.movedim(1, -1))
    starts, at = [first for first, _ in taken.calls], 0
    for start, (_, n) in zip(starts, taken.calls, strict=True):
        assert (start, n > 0) == (at, True)
        at += n


def test_a_run_without_frames_hands_on_nothing() -> None:
    taken = Taken()
    sink = stream(taken)
    sink.begin(0, 0)
    sink.deliver()
    give(sink, clip(2), 0)
    assert taken.calls == [(0, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_range_is_finished_in_float32_and_y_is_left_alone(dtype: torch.dtype) -> None:
    x = clip(1).to(torch.bfloat16)
    before = x.clone()
    image = torch.empty(1, *SIZE, dtype=dtype)
    WholeSink(image, to_unit_range).write(x[0], 0, 0, 0)
    expected = ((x.float() + 1) / 2).clamp(0, 1).movedim(1, -1).to(dtype)
    assert torch.equal(image, expected)
    assert torch.equal(x, before)
    plain = clip(1)
    before = plain.clone()
    WholeSink(image, to_unit_range).write(plain[0], 0, 0, 0)
    assert torch.equal(plain, before)


def test_memory_may_be_written_outside_inference_mode() -> None:
    kept: list[Tensor] = []
    sink = StreamSink(SIZE, keep_raw, lambda first, frames: kept.append(frames), torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        give(sink, clip(1), 0)
    kept[0].add_(1.0)
    assert not kept[0].is_inference()
