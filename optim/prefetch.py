"""Prepares the next pass's latent while this pass computes: a worker thread on the CPU, a side stream on a GPU."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from .accelerator import SideStream
from .events import DecodeObserver


class LatentFeeder:
    """Hands out each pass's latent in stored dtype and layout, one pass ahead where prefetching is on."""

    def __init__(
        self, latent: Tensor, parts: list[tuple[int, int]], buffers: list[Tensor], observer: DecodeObserver
    ) -> None:
        """`parts` are the passes' [start, stop) images of `latent`; `buffers` one destination, or two to prefetch."""
        self._latent, self._parts, self._buffers, self._observer = latent, parts, buffers, observer
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="halo-vae-prefetch") if len(buffers) > 1 else None
        self._stream = SideStream(buffers[0].device)
        self._pending: Future[None] | None = None

    def get(self, i: int) -> Tensor:
        """Latent of pass `i` [n, C, H, W]; the next one's preparation begins."""
        dst = self._destination(i)
        if self._pending is None:
            self._copy(i, dst)
        else:
            self._observer.prefetch_asked(self._pending.done() and self._stream.is_done())
            self._pending.result()
            self._stream.join()
            self._pending = None
        if self._worker is not None and i + 1 < len(self._parts):
            self._pending = self._worker.submit(self._copy_aside, i + 1)
        return dst

    def close(self) -> None:
        """Wait for what is under way, so that nothing writes to returned memory."""
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
        self._stream.join()

    def _destination(self, i: int) -> Tensor:
        start, stop = self._parts[i]
        return self._buffers[i % len(self._buffers)][: stop - start]

    def _copy(self, i: int, dst: Tensor) -> None:
        start, stop = self._parts[i]
        dst.copy_(self._latent[start:stop], non_blocking=True)

    def _copy_aside(self, i: int) -> None:
        with torch.inference_mode(), self._stream.active():
            self._copy(i, self._destination(i))
