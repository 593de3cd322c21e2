"""The VAE file in the system's page cache: brought in, or dropped and looked for.

Sources: posix_fadvise(2), POSIX_FADV_DONTNEED; mincore(2), which tells truly only of files that the caller may write.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from pathlib import Path
from typing import Literal

PageCache = Literal["dropped", "kept", "unverified"]
_BLOCK_BYTES = 8 << 20


def bring_in(path: Path) -> None:
    """Read a file once, so that it lies in the page cache. OSError."""
    with open(path, "rb", buffering=0) as file:
        while file.read(_BLOCK_BYTES):
            pass


def drop(path: Path) -> PageCache:
    """Drop a file's pages: `dropped` where none is left, `unverified` where some are or nobody can tell. OSError.

    Pages that are mapped by a process, or lie in a file system of memory, stay.
    """
    with open(path, "rb", buffering=0) as file:
        with contextlib.suppress(OSError):  # what was written and not yet on the disk cannot be dropped
            os.fsync(file.fileno())
        advise = getattr(os, "posix_fadvise", None)
        if advise is None:
            return "unverified"
        try:
            advise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            return "unverified"
    return "dropped" if resident_pages(path) == 0 else "unverified"


def resident_pages(path: Path) -> int | None:
    """Pages of a file in memory; None where the system does not tell. OSError for a file that cannot be opened."""
    size = os.stat(path).st_size
    with open(path, "rb") as file:
        if size == 0:
            return 0
        try:
            mincore = ctypes.CDLL(None, use_errno=True).mincore
            # a private mapping: a copy on writing, which nobody does; only so does ctypes give its address
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        except (AttributeError, OSError, TypeError, ValueError):
            return None
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    try:
        start = ctypes.c_char.from_buffer(mapped)
        failed = mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), pages)
        del start  # a mapping that is pointed to cannot be closed
    finally:
        mapped.close()
    return None if failed else sum(page & 1 for page in pages)
