"""Workers run every task, each on its own scratch, and leave torch's settings as they were."""

import threading

import pytest
import torch

from halo_vae.optim.workers import MAX_WORKERS, run_tasks, worker_count


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_task_runs_once_on_the_worker_it_is_given(workers):
    seen, lock = [], threading.Lock()

    def task(number):
        def run(worker):
            with lock:
                seen.append((number, worker, torch.get_num_threads()))

        return run

    run_tasks([task(n) for n in range(7)], workers)
    assert sorted(n for n, _, _ in seen) == list(range(7))
    assert all(worker == number % workers for number, worker, _ in seen)
    if workers > 1:
        assert {threads for _, _, threads in seen} == {1}


def test_threads_of_torch_stay_as_they_were():
    before = torch.get_num_threads()
    run_tasks([lambda _: None] * 4, 2)
    found = []
    fresh = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    fresh.start()
    fresh.join()
    assert torch.get_num_threads() == before
    assert found == [before]


def test_an_error_is_raised_after_all_have_ended():
    ended = []

    def good(_):
        ended.append(1)

    def bad(_):
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        run_tasks([bad, good, good, good], 2)
    assert len(ended) == 2  # the other worker's share; the failed one stops at its error
    run_tasks([good], 2)


def test_tasks_compute_in_inference_mode():
    modes = []
    with torch.inference_mode():
        run_tasks([lambda _: modes.append(torch.is_inference_mode_enabled())] * 4, 2)
    assert modes == [True] * 4


def test_count_follows_torch_and_is_bounded():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert worker_count() == 1
        torch.set_num_threads(MAX_WORKERS + 3)
        assert worker_count() == MAX_WORKERS
    finally:
        torch.set_num_threads(before)
