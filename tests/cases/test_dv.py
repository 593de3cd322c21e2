"""DV: the decode runs where the VAE is, whatever else the machine has."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from halo_vae.optim.decode import Engine
from halo_vae.optim.device import describe_device
from halo_vae.optim.pool import MemoryPool
from halo_vae.optim.settings import DecodeSettings
from halo_vae.profiling.collector import Collector
from halo_vae.profiling.recorded import decode_recorded
from halo_vae.tests.cases.exact import exact_kl
from halo_vae.tests.cases.support import settings
from halo_vae.tests.fixtures import FakeVAE, PointDec, latent
from halo_vae.tests.nodes.support import kl_vae, new_session
from halo_vae.tests.test_architecture import ROOT, package_files

HELPER = ("optim", "accelerator.py")
"""The one file that may touch torch.cuda."""
TOUCHY = (
    "synchronize", "empty_cache", "mem_get_info", "memory_stats", "reset_peak_memory_stats", "memory_allocated",
    "memory_reserved", "max_memory_allocated", "get_device_properties", "current_stream", "init", "_lazy_init",
)  # fmt: skip


# -- DV-1


@pytest.fixture
def gpu_that_must_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, each use of which is an error."""

    def reached(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the GPU was asked, but the VAE is on the CPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in TOUCHY:
        monkeypatch.setattr(torch.cuda, name, reached)


@pytest.mark.usefixtures("gpu_that_must_rest")
@pytest.mark.parametrize("method", ["exact", "blended"])
def test_dv_1_a_vae_on_the_cpu_leaves_the_gpu_alone(method: str) -> None:
    vae = kl_vae() if method == "exact" else FakeVAE(PointDec())
    session = new_session(level="per_op")
    for _ in range(2):  # the second finds a filled pool
        done = session.decode({"samples": latent((1, 4, 16, 16))}, vae, DecodeSettings(method=method))  # type: ignore[arg-type]
        assert done.record.status.value == "ok"
        assert done.record.environment.device == "cpu"
    assert done.images.device.type == "cpu"
    assert done.record.memory is not None
    assert done.record.memory.allocated.peak_bytes is None  # no counter of the GPU's allocator
    session.release()


@pytest.mark.usefixtures("gpu_that_must_rest")
def test_dv_1_nor_does_anything_below_the_nodes() -> None:
    pool = MemoryPool()
    picture, made = decode_recorded(
        Engine(pool=pool), exact_kl(), latent((2, 4, 8, 8)), DecodeSettings(), collector=Collector("per_op")
    )
    assert picture.shape == (2, 64, 64, 3)
    assert made.phases is not None
    assert describe_device("cpu").kind == "cpu"
    pool.clear()
    assert pool.held_bytes == 0


# -- DV-3


def faults(source: str) -> Iterator[str]:
    """Uses of one kind of device where any may be meant."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda"):
            yield f"line {node.lineno}: torch.cuda"
        elif isinstance(node, ast.ImportFrom | ast.Import) and "torch.cuda" in ast.unparse(node):
            yield f"line {node.lineno}: an import of torch.cuda"
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda" and not node.args:
                yield f"line {node.lineno}: .cuda()"
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            takes_device = called in ("device", "to", "empty", "zeros")
            given = [*(node.args if takes_device else []), *(k.value for k in node.keywords if k.arg == "device")]
            if any(_names_cuda(arg) for arg in given):
                yield f"line {node.lineno}: a device named by a literal"
        elif isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            of_type = any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides)
            if of_type and any(_names_cuda(part) for side in sides for part in ast.walk(side)):
                yield f"line {node.lineno}: a device type compared with a literal"


def _names_cuda(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and str(node.value).partition(":")[0] == "cuda"


def test_dv_3_one_file_knows_the_gpu() -> None:
    found = {}
    for path in package_files():
        where = path.relative_to(ROOT).parts
        if where != HELPER:
            found["/".join(where)] = list(faults(path.read_text("utf-8")))
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert list(faults((ROOT / Path(*HELPER)).read_text("utf-8"))) != []


@pytest.mark.parametrize(
    "source",
    [
        "x.cuda()", "torch.cuda.synchronize()", "from torch.cuda import Stream", "import torch.cuda",
        "torch.device('cuda')", "x.to('cuda:1')", "torch.empty(3, device='cuda')", "if x.device.type == 'cuda': pass",
        "device.type in ('cpu', 'cuda')",
    ],
)  # fmt: skip
def test_dv_3_the_search_sees_each_kind(source: str) -> None:
    assert list(faults(source))


@pytest.mark.parametrize(
    "source", ["profile.kind == 'cuda'", "f('cuda')", "x.to(device)", "torch.backends.cuda.matmul"]
)
def test_dv_3_and_leaves_words_alone(source: str) -> None:
    assert list(faults(source)) == []


PROBE = """
import torch
torch.cuda.is_available = lambda: False
torch.version.hip = None
from halo_vae.optim.accelerator import has_gpu, is_gpu, is_hip
from halo_vae.optim.device import describe_device
from halo_vae.optim.device_readers import read_device
assert not has_gpu() and not is_hip() and is_gpu("cuda:0") and not is_gpu("xpu")
assert describe_device("cpu").budget_bytes
for name in ("mps", "xpu", "meta"):
    found = describe_device(name)
    assert (found.kind, found.family, found.budget_bytes) == ("other", "other", None), found
    assert name in found.budget_reason
print("done")
"""


def test_dv_3_a_machine_without_gpu_and_devices_of_other_kinds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=tmp_path, env=_with_package(), capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "done", done.stderr


def test_dv_3_decodes_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    done = new_session().decode({"samples": latent((1, 4, 8, 8))}, FakeVAE(PointDec()), settings())
    assert done.record.status.value == "ok"


def _with_package() -> dict[str, str]:
    """The environment of this process, in which a child finds the package too."""
    import halo_vae

    folder = Path(halo_vae.__path__[0])
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")])}
