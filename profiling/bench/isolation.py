"""Cache folders of a run's own: what a decode leaves on disk for the next process, kept apart from the user's.

Sources: MIOpen's pages on its find database and kernel cache; torch's on TORCHINDUCTOR_CACHE_DIR,
PYTORCH_KERNEL_CACHE_PATH and TunableOp; Triton's cache manager (TRITON_CACHE_DIR, TRITON_REDIS_KEY_FORMAT); ROCm's on
AMD_COMGR_CACHE_DIR; CUDA's on CUDA_CACHE_PATH.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...optim.rocm_env import child_environment
from ..doctor_folders import read_folders

FOLDERS: Mapping[str, str] = {
    "AMD_COMGR_CACHE_DIR": "comgr",
    "CUDA_CACHE_PATH": "cuda",
    "HALO_VAE_CACHE_DIR": "halo-vae",
    "HALO_VAE_DATA_DIR": "history",
    "MIOPEN_CUSTOM_CACHE_DIR": "miopen-kernels",
    "MIOPEN_USER_DB_PATH": "miopen-db",
    "PYTORCH_KERNEL_CACHE_PATH": "torch-kernels",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch-extensions",
    "TRITON_CACHE_DIR": "triton",
}
"""Folder of each variable, below the run's own. HALO_VAE_CACHE_DIR holds the tuning store."""
PREFIX = "halo-vae-bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSet:
    """The disk caches that processes of one run share."""

    root: Path
    prefix: str
    """Starts the keys of caches that may lie on another machine, so that nothing put there before is found."""

    def variables(self) -> dict[str, str]:
        """Environment variables that lead every cache here."""
        found = {name: str(self.root / folder) for name, folder in FOLDERS.items()}
        found["PYTORCH_TUNABLEOP_FILENAME"] = str(self.root / "tunableop.csv")
        found["TRITON_REDIS_KEY_FORMAT"] = f"{self.prefix}:{{key}}:{{filename}}"
        found["TORCHINDUCTOR_FX_GRAPH_REMOTE_CACHE"] = "0"
        found["TORCHINDUCTOR_AUTOTUNE_REMOTE_CACHE"] = "0"
        return found

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """An environment for a child process that benches with these caches."""
        passive = {"OMP_WAIT_POLICY": "passive"}  # threads that spin while they wait distort times
        return {**passive, **child_environment(environ, "bench"), **self.variables()}

    def copy(self, root: Path) -> CacheSet:
        """The same content in another place, under the same keys. OSError."""
        shutil.copytree(self.root, root, symlinks=True)
        return CacheSet(root=root, prefix=self.prefix)

    def remove(self) -> None:
        """Give the space back; what cannot be removed stays."""
        shutil.rmtree(self.root, ignore_errors=True)


def empty_caches(root: Path) -> CacheSet:
    """New, empty caches in a folder that does not exist yet. OSError."""
    for folder in FOLDERS.values():
        (root / folder).mkdir(parents=True)
    return CacheSet(root=root, prefix=f"{PREFIX}-{uuid.uuid4().hex[:12]}")


def real_caches(environ: Mapping[str, str] | None = None, platform: str = sys.platform) -> tuple[Path, ...]:
    """Where the user's own kernel caches and tuned choices lie, those that exist: what `--purge-real-caches` empties.

    Never the history.
    """
    env = os.environ if environ is None else environ
    wanted = ("cache", "MIOpen user db", "MIOpen kernel cache")
    found = [Path(f.path) for f in read_folders(environ, platform=platform) if f.purpose in wanted and f.path]
    with contextlib.suppress(RuntimeError):  # a user without a home
        found.append(Path(env.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"))
    inductor = Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
    found.append(Path(env.get("TORCHINDUCTOR_CACHE_DIR") or inductor))
    return tuple(dict.fromkeys(path for path in found if path.is_dir() and not path.is_symlink()))


def purge(folders: tuple[Path, ...], spare: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Empty these folders and keep the folders themselves; sentences about what could not be removed.

    Files called as in `spare` stay.
    """
    failed = []
    for folder in folders:
        try:
            children = sorted(folder.iterdir())
        except OSError as error:
            failed.append(f"{folder}: {error}")
            continue
        for child in children:
            if child.name in spare:
                continue
            try:
                if child.is_dir() and not child.is_symlink():
                    shutil.rmtree(child)
                else:
                    child.unlink()
            except OSError as error:
                failed.append(f"{child}: {error}")
    return tuple(failed)


def _user() -> str:
    try:
        import getpass

        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user id without a name
        return ""
