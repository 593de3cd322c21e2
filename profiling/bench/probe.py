"""Files that a child process runs before it decodes: kernel backends whose costs are known, and faults, for tests.

Such a file defines `install() -> Callable[[], int] | None`: what it returns tells how many kernel searches its cache
has been charged for so far in this process.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from .cases import BenchError

Charges = Callable[[], int]


def install_probe(path: Path) -> Charges | None:
    """Run a probe. BenchError for a file that is none."""
    spec = importlib.util.spec_from_file_location("halo_vae_bench_probe", path)
    if spec is None or spec.loader is None:
        raise BenchError(f"{path.name} is no Python file; a probe is one that defines install()")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    charges: Charges | None = module.install()
    return charges
