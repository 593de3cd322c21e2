"""What holds around an exact decode: the pool to itself, no gradients, no autocast of the caller's, its own flags."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from .accelerator import is_gpu
from .events import DecodeObserver
from .pool import MemoryPool
from .program import Attention, Program
from .scope import BackendFlags, backend_scope, telling
from .video.ops import ClipAttention


@contextmanager
def isolated(
    pool: MemoryPool, device: torch.device, flags: BackendFlags, observer: DecodeObserver
) -> Iterator[DecodeObserver]:
    """For the time of a decode; gives the observer to tell, whose plans name the flags that differ from before."""
    with pool.exclusive(), torch.inference_mode(), _without_autocast(device), backend_scope(flags) as in_force:
        pool.reset_high_water()
        yield telling(observer, in_force)


def widest_head(program: Program) -> int:
    """Channels of the widest attention head; 0 without attention. Each attention of a decoder has one head."""
    return max((op.channels for op in program.ops if isinstance(op, Attention | ClipAttention)), default=0)


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """The plan alone decides where values are rounded, whatever the caller has turned on."""
    return torch.autocast(device.type, enabled=False) if device.type == "cpu" or is_gpu(device) else nullcontext()
