"""The user's folders and files that several processes share: where they are, locks, whole replacements."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from .errors import HaloError

APP = "halo-vae"
_LOCK_TRIES = 200
_LOCK_PAUSE_S = 0.01
Kind = Literal["data", "cache"]


def user_dir(kind: Kind, environ: Mapping[str, str] | None = None, platform: str = sys.platform) -> Path:
    """The user's data or cache folder for this package; creates nothing.

    $HALO_VAE_DATA_DIR or $HALO_VAE_CACHE_DIR, else the platform's under `halo-vae`: the same folder with and without
    platformdirs installed. HaloError where the user has no home folder.
    """
    env, variable = os.environ if environ is None else environ, f"HALO_VAE_{kind.upper()}_DIR"
    if env.get(variable):
        return Path(env[variable])
    if environ is None and platform == sys.platform:
        with contextlib.suppress(ImportError):
            import platformdirs

            find = platformdirs.user_data_dir if kind == "data" else platformdirs.user_cache_dir
            return Path(find(APP, appauthor=False))
    try:
        return _platform_dir(kind, env, platform)
    except RuntimeError as error:
        raise HaloError(f"there is no home folder ({error}); set {variable} to a folder") from error


def _platform_dir(kind: Kind, env: Mapping[str, str], platform: str) -> Path:
    """What platformdirs says too. Source: its documentation."""
    if platform == "win32":
        base = Path(env.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / APP
        return base / "Cache" if kind == "cache" else base
    if platform == "darwin":
        library = Path.home() / "Library"
        return library / "Caches" / APP if kind == "cache" else library / "Application Support" / APP
    if kind == "cache":
        return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / APP
    return Path(env.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / APP


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the system lets go of it if the process dies. OSError if it stays taken for two seconds."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(fd, path)
        try:
            yield
        finally:
            _let_go(fd)
    finally:
        os.close(fd)


def _take(fd: int, path: Path) -> None:
    for _ in range(_LOCK_TRIES):
        if _try_lock(fd):
            return
        time.sleep(_LOCK_PAUSE_S)
    raise OSError(f"another process holds the lock {path.name}")


if sys.platform == "win32":
    import msvcrt

    def _try_lock(fd: int) -> bool:
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _let_go(fd: int) -> None:
        os.lseek(fd, 0, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _try_lock(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _let_go(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: readers see the old content or the new. OSError leaves the old one."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
