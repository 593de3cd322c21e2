"""Strix Halo alone: what MIOpen searches for and keeps, and what the driver says beside torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halo_vae.optim.device import profile_from
from halo_vae.optim.device_readers import Readings, read_device
from halo_vae.optim.rocm_env import child_environment
from halo_vae.tests.gpu.support import DEVICE, ON_CPU
from halo_vae.tests.optim.profiles import GFX1151_CARVE_OUT

pytestmark = [pytest.mark.gpu, pytest.mark.gfx1151]
Note = Callable[[str, Any], None]
CHILD_S = 150
"""Three decodes of a tiny decoder; a search that takes longer is a finding of its own."""

CHILD = """
import json, os, sys, time
from pathlib import Path
import torch
from halo_vae.optim.accelerator import wait_for
from halo_vae.optim.decode import Engine
from halo_vae.optim.settings import DecodeSettings
from halo_vae.tests.goldens import golden
from halo_vae.tests.optim.helpers import golden_decoder

def kept():
    files = [p for root in sys.argv[2:] for p in Path(root).rglob("*") if p.is_file()]
    return {"files": len(files), "bytes": sum(p.stat().st_size for p in files)}

decoder, engine = golden_decoder("kl_sd"), Engine()
decoder.device = torch.device(sys.argv[1])
found = []
for edges in ((9, 7), (9, 7), (11, 13)):
    z = torch.randn(1, 4, *edges, generator=torch.Generator().manual_seed(0))
    wait_for(decoder.device)
    start = time.perf_counter_ns()
    settings = DecodeSettings(method="exact", plan="tiles", tile_size=32, cudnn="on", precision_mode="fp32")
    image = engine.decode(decoder, z, settings)
    wait_for(decoder.device)
    ns, finite = time.perf_counter_ns() - start, bool(image.isfinite().all())
    found.append({"latent": edges, "ns": ns, "finite": finite, **kept()})
print(json.dumps(found))
"""


def decodes_in_a_child(tmp_path: Path, mode: str) -> list[dict[str, Any]]:
    """Three decodes with MIOpen on and empty databases: a size, the same again, another with the same tiles."""
    folders = [tmp_path / "db", tmp_path / "cache"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    env = child_environment({k: v for k, v in os.environ.items() if not k.startswith("MIOPEN_")})
    env |= {
        "MIOPEN_FIND_MODE": mode, "MIOPEN_USER_DB_PATH": str(folders[0]), "MIOPEN_CUSTOM_CACHE_DIR": str(folders[1]),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(DEVICE), *map(str, folders)], env=env, cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=CHILD_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_kept(first: dict[str, Any], again: dict[str, Any], other: dict[str, Any]) -> None:
    """What the first decode left on disk is all there is for its size."""
    assert all(d["finite"] for d in (first, again, other))
    assert (again["files"], again["bytes"]) == (first["files"], first["bytes"])


def test_miopen_without_a_search(tmp_path: Path, record_property: Note) -> None:
    first, again, other = decodes_in_a_child(tmp_path, "FAST")
    record_property("decodes", [first, again, other])
    record_property("other_size_added_bytes", other["bytes"] - first["bytes"])
    check_kept(first, again, other)


def test_miopen_searches_once(tmp_path: Path, record_property: Note) -> None:
    """A new process that may not search starts from what the first one found."""
    first, again, other = decodes_in_a_child(tmp_path, "NORMAL")
    record_property("decodes", [first, again, other])
    record_property("other_size_added_bytes", other["bytes"] - first["bytes"])
    check_kept(first, again, other)
    new, *_ = decodes_in_a_child(tmp_path, "FAST")
    record_property("new_process", new)
    assert new["finite"]
    assert new["bytes"] - other["bytes"] <= first["bytes"]  # it may note what it takes; it does not search again


def readings() -> Readings:
    """Of this chip; those of a test's where the CPU stands in for it."""
    return GFX1151_CARVE_OUT if ON_CPU else read_device(DEVICE)


def test_the_driver_and_torch_tell_the_same_chip(record_property: Note) -> None:
    found = readings()
    profile = profile_from(found)
    record_property("arch", found.arch)
    record_property("driver_gfx", found.driver_gfx)
    record_property("compute_units", found.compute_units)
    record_property("integrated", found.integrated)
    assert profile.gfx == "gfx1151"
    assert profile.family == "rdna3.5"
    assert profile.unified_memory
    assert found.driver_gfx in (None, "gfx1151")
    assert profile.compute_units is None or 8 <= profile.compute_units <= 40


def test_memory_by_the_driver_beside_torch(record_property: Note) -> None:
    found = readings()
    profile = profile_from(found)
    for name in ("device_pool", "carve_out", "gtt", "host"):
        pool = getattr(found, name)
        record_property(name, None if pool is None else {"free": pool.free_bytes, "total": pool.total_bytes})
    record_property("budget_bytes", profile.budget_bytes)
    record_property("budget_reason", profile.budget_reason)
    record_property("invalid_readings", list(profile.invalid_readings))
    assert profile.invalid_readings == ()
    assert profile.budget_bytes is not None
    pools = [p.free_bytes for p in (found.device_pool, found.carve_out, found.gtt) if p is not None and p.free_bytes]
    assert 0 < profile.budget_bytes <= sum(pools)
    if found.device_pool is not None and found.device_pool.free_bytes is not None:
        assert profile.budget_bytes <= found.device_pool.free_bytes + (found.cached_bytes or 0)


def test_defaults_of_the_chip() -> None:
    profile = profile_from(readings())
    assert profile.strategy == "tiles"
    assert profile.batch_cap == 8
    assert profile.attention == "matmul"
    assert {"float16", "bfloat16"} <= set(profile.native_dtypes)
