from __future__ import annotations

import pytest
import torch

from halo_vae.optim.video.consistency import FLOOR, ConsistencyMeter, boundary_scores, clip_score


def clip(n: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, 6, 5, 3, generator=torch.Generator().manual_seed(seed))


def fed(frames: torch.Tensor, sizes: tuple[int, ...]) -> ConsistencyMeter:
    meter = ConsistencyMeter()
    for part in frames.split(list(sizes)):
        meter.feed(part)
    return meter


def true_steps(frames: torch.Tensor) -> list[float]:
    x = frames.double()
    steps: list[float] = (x[1:] - x[:-1]).abs().mean(dim=(1, 2, 3)).tolist()
    return steps


@pytest.mark.parametrize("sizes", [(12,), (1,) * 12, (5, 4, 3), (0, 7, 0, 5)])
def test_steps_do_not_depend_on_how_frames_arrive(sizes: tuple[int, ...]) -> None:
    frames = clip()
    steps = fed(frames, sizes).steps()
    assert steps == fed(frames, (12,)).steps()
    assert steps == pytest.approx(true_steps(frames), rel=1e-7)  # each difference is rounded to float32, the sum is not


def test_steps_of_a_large_frame_lose_nothing() -> None:
    frames = torch.zeros(2, 1024, 1024, 3)
    frames[1] = 1 / 255
    (step,) = fed(frames, (2,)).steps()
    assert step == torch.tensor(1 / 255).double().item()  # a float32 sum of 3 million would be off in the sixth figure


def test_memory_of_frames_may_be_reused_and_is_not_touched() -> None:
    frames, meter = clip(), ConsistencyMeter()
    memory = torch.empty(1, 6, 5, 3)
    for frame in frames:
        memory[0] = frame
        meter.feed(memory)
        assert torch.equal(memory[0], frame)
        memory.fill_(7.0)
    assert meter.steps() == fed(frames, (12,)).steps()


def test_narrow_frames_are_compared_as_they_are() -> None:
    frames = clip().bfloat16()
    assert fed(frames, (12,)).steps() == pytest.approx(true_steps(frames), rel=1e-7)


def test_only_one_frame_is_held() -> None:
    meter = fed(clip(40), (40,))
    held = [v for v in vars(meter).values() if isinstance(v, torch.Tensor)]
    assert [tuple(v.shape) for v in held] == [(6, 5, 3)]
    assert all(s.ndim == 0 for s in meter._sums)


def test_another_clip_begins_anew() -> None:
    meter = fed(clip(), (12,))
    meter.start_clip()
    assert meter.steps() == ()
    meter.feed(clip(3, seed=1))
    assert meter.steps() == fed(clip(3, seed=1), (3,)).steps()


@pytest.mark.parametrize("shape", [(2, 6, 5), (2, 6, 6, 3)])
def test_frames_of_another_size_are_refused(shape: tuple[int, ...]) -> None:
    meter = fed(clip(), (12,))
    with pytest.raises(ValueError, match=r"after frames of \[6, 5, 3\]; give \[n, H, W, C\] of one size"):
        meter.feed(torch.zeros(shape))


def test_a_constant_clip_with_a_jump_at_a_boundary_scores_low() -> None:
    frames = torch.full((16, 4, 4, 3), 0.4)
    frames[8:] += 0.1
    (score,) = fed(frames, (16,)).scores((8,))
    assert score == (8, pytest.approx(FLOOR / (0.1 + FLOOR), rel=1e-5))
    assert score[1] < 0.1


def test_a_clip_that_moves_evenly_is_smooth() -> None:
    frames = (torch.arange(17) / 20).view(17, 1, 1, 1).expand(17, 4, 4, 3)
    scores = fed(frames, (17,)).scores((4, 8, 12))
    assert [frame for frame, _ in scores] == [4, 8, 12]
    assert clip_score(scores) == pytest.approx(1.0, abs=1e-5)


def test_a_boundary_calmer_than_its_surroundings_scores_one() -> None:
    assert boundary_scores([0.1] * 4 + [0.0] + [0.1] * 4, (5,)) == ((5, 1.0),)


# Each row: steps d_1…, boundaries, the steps that boundary 0 of the list is compared with.
NEIGHBOURHOODS = [
    ([0.01, 0.02, 0.03, 0.04, 0.05, 0.9, 0.06, 0.07, 0.08, 0.09, 0.5], (6,), 0.055),  # 4 on each side, not the 5th
    ([0.9, 0.02, 0.04, 0.06, 0.08, 0.5], (1,), 0.05),  # nothing before it
    ([0.5, 0.02, 0.04, 0.9], (4,), 0.04),  # nothing after it: 3 steps, one odd
    ([0.02, 0.9, 0.9, 0.9, 0.04], (3, 2, 4), 0.03),  # its neighbours are boundaries themselves
    ([0.01, 0.02, 0.03, 0.04, 0.7, 0.9, 0.01, 0.02, 0.03, 0.04], (6, 5), 0.025),  # looks past the other boundary
]


@pytest.mark.parametrize(("steps", "boundaries", "median"), NEIGHBOURHOODS)
def test_which_steps_a_boundary_is_compared_with(
    steps: list[float], boundaries: tuple[int, ...], median: float
) -> None:
    (frame, score), *rest = boundary_scores(steps, boundaries)
    assert frame == boundaries[0]
    assert score == pytest.approx((median + FLOOR) / (steps[frame - 1] + FLOOR))
    assert len(rest) == len(boundaries) - 1


def test_a_boundary_among_boundaries_only_has_no_score() -> None:
    assert boundary_scores([0.1, 0.2], (1, 2)) == ()
    assert clip_score(()) is None
    assert boundary_scores([], ()) == ()


@pytest.mark.parametrize("wrong", [0, 3, -1])
def test_a_boundary_outside_the_clip_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"boundary {wrong} is not between frames of a clip of 3; give 1 to 2"):
        boundary_scores([0.1, 0.2], (1, wrong))


def test_a_clip_scores_its_least_smooth_boundary() -> None:
    assert clip_score(((4, 0.9), (8, 0.2), (12, 1.0))) == 0.2
