"""One benchmark at a time, on a device that nobody else uses: whoever is refused is told why.

Sources: ComfyUI's GET /queue; amdgpu's gpu_busy_percent of a DRM card.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...optim.files import locked, replace_file

log = logging.getLogger("halo_vae")

LOCK_NAME = "bench.lock"
"""In the user's cache folder."""
COMFYUI_URL = "http://127.0.0.1:8188"
BUSY_PERCENT = 10
"""Use of a GPU, as a median of some looks, from which somebody is computing on it."""
LOOKS, LOOK_PAUSE_S = 5, 0.2
_ASK_S = 3.0
_MOST_BYTES = 64 << 20
Fetch = Callable[[str], bytes]


class BusyError(Exception):
    """Something else uses the device; the text says what. No fault: whoever runs us by the clock comes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that a lock file names."""

    pid: int
    born: str | None
    """When the process began, as its system counts; None where that is not told."""


# -- other benchmarks


@contextlib.contextmanager
def bench_lock(path: Path, is_alive: Callable[[Holder], bool] | None = None) -> Iterator[None]:
    """Hold the lock file while benches run. BusyError where a living process holds it; one left behind is taken over.

    A folder in which no file can be made is warned of, and guards nothing.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(f".{path.name}")):
            _take(path, is_alive or _is_alive)
    except OSError as error:
        log.warning("other benchmarks are not kept away: the lock file %s cannot be written (%s)", path, error)
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError), locked(path.with_name(f".{path.name}")):
            if _read_holder(path) == me():  # it may have been taken over by mistake: not ours any more
                path.unlink()


def _take(path: Path, is_alive: Callable[[Holder], bool]) -> None:
    holder = _read_holder(path)
    if holder is not None and holder != me() and is_alive(holder):
        raise BusyError(f"another benchmark is running (process {holder.pid}); wait for it to end")
    mine = me()
    replace_file(path, json.dumps({"pid": mine.pid, "born": mine.born}).encode())


def _read_holder(path: Path) -> Holder | None:
    """Who holds the lock; None without a file, and for one that nobody of ours wrote."""
    try:
        found = json.loads(path.read_bytes())
        pid, born = found["pid"], found["born"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    known = isinstance(pid, int) and not isinstance(pid, bool) and pid > 0 and (born is None or isinstance(born, str))
    return Holder(pid=pid, born=born) if known else None


def me() -> Holder:
    """This process."""
    return Holder(pid=os.getpid(), born=_born(os.getpid()))


def _is_alive(holder: Holder) -> bool:
    """True while the very process runs: its number may have gone to another one since."""
    if not _runs(holder.pid):
        return False
    born = _born(holder.pid)
    return born is None or holder.born is None or born == holder.born


def _born(pid: int) -> str | None:
    """Boot and clock ticks after it. Source: proc(5), field 22 of stat, and boot_id."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}:{stat.rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return None


def _runs(pid: int) -> bool:
    if sys.platform == "win32":  # os.kill would end it
        return _runs_on_windows(pid)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def _runs_on_windows(pid: int) -> bool:
    import ctypes

    kernel: Any = getattr(ctypes, "windll").kernel32  # noqa: B009 (Windows only)
    handle = kernel.OpenProcess(0x1000, False, pid)  # PROCESS_QUERY_LIMITED_INFORMATION
    if handle:
        kernel.CloseHandle(handle)
    return bool(handle)


# -- ComfyUI


def check_comfyui(url: str | None, fetch: Fetch | None = None) -> None:
    """BusyError while a ComfyUI at that address works on prompts, or has some waiting. None asks nobody."""
    if not url:
        return
    try:
        queue = json.loads((fetch or _fetch)(f"{url.rstrip('/')}/queue"))
        running, waiting = len(queue["queue_running"]), len(queue["queue_pending"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # nobody there, or somebody else
    if running or waiting:
        raise BusyError(f"ComfyUI at {url} has {running} prompt(s) running and {waiting} waiting; wait for its queue")


def _fetch(url: str) -> bytes:
    """Without a proxy: it is this machine that is asked."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=_ASK_S) as answer:
        content: bytes = answer.read(_MOST_BYTES)
    return content


# -- the device


def check_device(
    read_busy: Callable[[], int | None], *, sleep: Callable[[float], None] = time.sleep, looks: int = LOOKS
) -> None:
    """BusyError while a GPU is used by others; `read_busy` gives its use in percent, None where it is not told."""
    seen = []
    for i in range(looks):
        if i:
            sleep(LOOK_PAUSE_S)
        percent = read_busy()
        if percent is None:
            return
        seen.append(percent)
    busy = statistics.median(seen)
    if busy >= BUSY_PERCENT:
        raise BusyError(f"the GPU is {busy:.0f} % busy with other work (under {BUSY_PERCENT} % is wanted); wait for it")
