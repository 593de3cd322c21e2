"""Reads what lies on disk between processes: our folders, MIOpen's, and packages that could be imported."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ..optim.errors import HaloError
from ..optim.files import user_dir
from ..optim.kernels.backends import KITCHEN_PACKAGE
from ..optim.tuning import FILE_NAME
from .doctor_facts import FolderFacts, KitchenBackend, KitchenFacts, KitchenFunction

MOST_FILES = 100_000
"""Files after which a folder's size is given up."""
_PACKAGE = "comfy-kitchen"


def read_folders(
    environ: Mapping[str, str] | None = None, home: Path | None = None, platform: str = sys.platform
) -> tuple[FolderFacts, ...]:
    """Our folders and MIOpen's databases and kernels: where they are and how large. Creates nothing.

    Of MIOpen's, those that exist; where none does, the place where MIOpen would make it.
    """
    env = os.environ if environ is None else environ
    places: list[tuple[str, Path | None]] = [
        ("history", find_user_dir("data", environ, platform)),
        ("cache", find_user_dir("cache", environ, platform)),
    ]
    places += [("MIOpen user db", path) for path in _miopen_places(env, home, platform, "db")]
    places += [("MIOpen kernel cache", path) for path in _miopen_places(env, home, platform, "cache")]
    return tuple(measure_folder(purpose, path) for purpose, path in places)


def find_user_dir(
    kind: Literal["data", "cache"], environ: Mapping[str, str] | None = None, platform: str = sys.platform
) -> Path | None:
    """Our folder of the history, or of what can be made again; None where there is no place for one."""
    try:
        return user_dir(kind, environ, platform)
    except HaloError:
        return None


def read_history_lines(folder: Path | None) -> int | None:
    """Records in a data folder's history; None where it cannot be read, or there is no place for one."""
    if folder is None:
        return None
    try:
        return sum(path.read_bytes().count(b"\n") for path in folder.glob("history*.jsonl"))
    except OSError:
        return None


def read_tuned_entries(folder: Path | None) -> int | None:
    """Entries in a cache folder's file of tuned choices, 0 without one; None where it cannot be read.

    Only looks: the store itself would set a broken file aside.
    """
    if folder is None:
        return None
    try:
        return len(json.loads((folder / FILE_NAME).read_bytes())["entries"])
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def measure_folder(purpose: str, path: Path | None) -> FolderFacts:
    """Size and number of the files below a folder."""
    if path is None:
        return FolderFacts(purpose=purpose, path=None, exists=None, bytes=None, files=None)
    failed: list[OSError] = []
    size = count = 0
    try:
        exists: bool | None = path.is_dir()
        for folder, _, names in os.walk(path, onerror=failed.append):
            size += sum(os.lstat(os.path.join(folder, name)).st_size for name in names)
            count += len(names)
            if count > MOST_FILES:
                failed.append(OSError("too many files"))
                break
    except OSError as error:
        failed.append(error)
        exists = None
    known = bool(exists) and not failed
    return FolderFacts(
        purpose=purpose, path=str(path), exists=exists, bytes=size if known else None, files=count if known else None
    )  # fmt: skip


def _miopen_places(env: Mapping[str, str], home: Path | None, platform: str, what: str) -> list[Path | None]:
    """Sources: MIOpen's pages on its kernel cache and find database; builds of ROCm 7 keep both under ~/.miopen."""
    variable = {"db": "MIOPEN_USER_DB_PATH", "cache": "MIOPEN_CUSTOM_CACHE_DIR"}[what]
    if env.get(variable):
        return [Path(env[variable])]
    try:
        root = home or Path.home()
    except RuntimeError:  # a user without a home
        return [None]
    unix = root / {"db": ".config", "cache": ".cache"}[what] / "miopen"
    places = [root / ".miopen" / what] if platform == "win32" else [unix, root / ".miopen" / what]
    found: list[Path | None] = [p for p in places if _is_dir(p)]
    return found or [places[0]]


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def read_kitchen(try_import: bool) -> KitchenFacts:
    """What of comfy-kitchen there is. Imports it only where asked to; otherwise looks at it if somebody else has."""
    name = KITCHEN_PACKAGE.module
    wanted = [function for function, _ in KITCHEN_PACKAGE.functions]
    loaded = sys.modules.get(name)
    installed = loaded is not None or find_module(name) is not None
    importable, reason = (True, None) if loaded is not None else (None, "not imported by this process")
    if not installed:
        importable, reason = False, f"not installed (pip install '{KITCHEN_PACKAGE.install}')"
    elif loaded is None and try_import:
        try:
            loaded, importable, reason = importlib.import_module(name), True, None
        except Exception as error:  # a package of native code fails in many ways
            importable, reason = False, next(iter(str(error).splitlines()), "") or type(error).__name__
    return KitchenFacts(
        installed=installed,
        importable=importable,
        reason=reason,
        functions=tuple(
            KitchenFunction(name=f, present=None if loaded is None else callable(getattr(loaded, f, None)))
            for f in wanted
        ),
        backends=_backends(loaded),
    )


def _backends(package: object) -> tuple[KitchenBackend, ...]:
    try:
        listed = package.registry.list_backends()  # type: ignore[attr-defined]
        return tuple(
            KitchenBackend(
                name=str(name),
                available=bool(state.get("available")) and not state.get("disabled"),
                reason=state.get("unavailable_reason") or ("disabled" if state.get("disabled") else None),
            )
            for name, state in sorted(listed.items())
        )
    except Exception:  # not a published interface: what cannot be read is left out
        return ()


def read_kitchen_version() -> str | None:
    """Version of the installed comfy-kitchen."""
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_comfyui_version() -> str | None:
    """Version of the ComfyUI that this process could import, which is read from its file and not imported."""
    loaded = sys.modules.get("comfyui_version")
    if loaded is not None:
        return str(getattr(loaded, "__version__", None) or "") or None
    spec = find_module("comfyui_version")
    if spec is None or not spec.origin:
        return None
    try:
        text = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^__version__\s*=\s*[\"']([\w.+-]{1,40})[\"']", text, re.MULTILINE)
    return None if found is None else found[1]


def find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """A top-level module's spec without importing it; None where there is none, or it is barred."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
