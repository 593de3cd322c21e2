"""What the registry's archive of the pack holds: what git tracks, without what .comfyignore names."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def archived() -> list[Path]:
    """The files, relative to the root; git reads the list as it would a .gitignore, which has the same rules."""
    return sorted(tracked() - _listed("--cached", "--ignored", "--exclude-from=.comfyignore"))


def tracked() -> set[Path]:
    return _listed("--cached")


def is_checkout() -> bool:
    """False for a copy without git, which cannot tell what is tracked."""
    return (ROOT / ".git").exists() and shutil.which("git") is not None


def unpack(folder: Path) -> None:
    """The archive's files in this folder, as the registry's users get them."""
    for path in archived():
        if (ROOT / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)


def _listed(*flags: str) -> set[Path]:
    done = subprocess.run(["git", "ls-files", "-z", *flags], cwd=ROOT, capture_output=True, text=True, check=True)
    return {Path(name) for name in done.stdout.split("\0") if name}
