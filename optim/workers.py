"""Threads that each run torch single-threaded: many small kernels side by side, where splitting each would cost more.

A block of sums and products takes well under a millisecond, about what waking a second thread for each of its kernels
takes. Whole blocks on their own threads scale instead (measured: 1.3 to 1.9 times faster on two cores, against none).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

MAX_WORKERS = 8
"""Each worker needs scratch of its own."""
Task = Callable[[int], object]
"""Gets the number of the worker that runs it, to use that worker's scratch."""
_STARTING = threading.Lock()


def worker_count() -> int:
    """Workers that the calling thread's torch setting is worth."""
    return max(1, min(MAX_WORKERS, torch.get_num_threads()))


@functools.cache
def _executor(n: int) -> ThreadPoolExecutor:
    """`n` threads that have started, each with one torch thread; the caller's own setting stays as it was."""
    ready = threading.Barrier(n + 1)

    def begin() -> None:
        torch.get_num_threads()  # a thread takes the global setting at its first look, which must not come later
        torch.set_num_threads(1)
        ready.wait()

    with _STARTING:
        before = torch.get_num_threads()
        pool = ThreadPoolExecutor(n, thread_name_prefix="halo-vae-worker", initializer=begin)
        for _ in range(n):
            pool.submit(lambda: None)
        ready.wait()
        # the setting is kept per thread, but threads started later take the last one that anybody made
        torch.set_num_threads(before)
    return pool


def run_tasks(tasks: Sequence[Task], workers: int) -> None:
    """Run all tasks, worker i every `workers`-th one; with one worker, here. Errors are raised when all ended."""
    if workers == 1:
        for task in tasks:
            task(0)
        return

    def share(i: int) -> None:
        with torch.inference_mode():
            for task in tasks[i::workers]:
                task(i)

    futures: list[Future[None]] = [_executor(workers).submit(share, i) for i in range(min(workers, len(tasks)))]
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error
