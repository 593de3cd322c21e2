"""The rules that keep the package in one piece: who imports whom, what an import costs, how long a file may be."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_FOLDERS = ("nodes", "optim", "profiling")
HOST_MODULES = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "execution", "folder_paths", "nodes", "server"}
ALLOWED = {  # folder -> folders of the package that its files may import
    "optim": {"optim"},
    "profiling": {"profiling", "optim"},
    "nodes": {"nodes", "profiling", "optim"},
    "": {"nodes"},  # the root file, and only inside functions
}
MAX_LINES = 400

# What a bare import may not pull in: hosts, optional packages, and the slow halves of torch.
UNWANTED = (
    "comfy", "comfy_api", "server", "folder_paths", "comfy_kitchen", "PIL", "tqdm", "psutil", "platformdirs",
    "matplotlib", "torchvision", "torchaudio", "scipy", "triton", "torch._dynamo", "torch._inductor", "cProfile",
)  # fmt: skip


def package_files() -> list[Path]:
    """Every Python file of the package, the root file first."""
    return [ROOT / "__init__.py", *(p for folder in PACKAGE_FOLDERS for p in sorted((ROOT / folder).rglob("*.py")))]


def imports_of(source: str, parts: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    """(module, is_ours) for each import of the file at `parts`; a module of ours is its path below the root."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or "", False
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((".".join((*base, name)), True) for name in names)


def broken_rules(source: str, parts: tuple[str, ...]) -> list[str]:
    """Imports of one file that point the wrong way, as sentences."""
    folder = parts[0] if len(parts) > 1 else ""
    where = "/".join(parts)
    broken = []
    for module, is_ours in imports_of(source, parts):
        top = module.split(".")[0]
        if is_ours and top in PACKAGE_FOLDERS and top not in ALLOWED[folder]:
            broken.append(f"{where} imports {module}")
        elif not is_ours and top == "halo_vae":
            broken.append(f"{where} imports {module} by its absolute name")
        elif not is_ours and top in HOST_MODULES and parts != ("nodes", "comfy_host.py"):
            broken.append(f"{where} imports {module}, which only nodes/comfy_host.py may")
    return broken


def test_imports_point_one_way() -> None:
    broken = [b for p in package_files() for b in broken_rules(p.read_text("utf-8"), p.relative_to(ROOT).parts)]
    assert broken == []


@pytest.mark.parametrize(
    ("parts", "source"),
    [
        (("optim", "planner.py"), "from ..profiling.record import DecodeRecord"),  # back to the profiler
        (("optim", "planner.py"), "from ..profiling import record"),
        (("optim", "planner.py"), "from .. import profiling"),  # by way of the root
        (("optim", "families", "kl.py"), "from ...nodes import decode"),  # two folders deep
        (("profiling", "collector.py"), "def f():\n    from ..nodes.decode import Node"),  # inside a function
        (("profiling", "collector.py"), "import comfy.model_management"),
        (("nodes", "decode.py"), "from comfy_api.latest import io"),  # nodes go through comfy_host
        (("optim", "decode.py"), "from halo_vae.optim import errors"),  # ComfyUI knows us by another name
    ],
)
def test_direction_check_sees_wrong_imports(parts: tuple[str, ...], source: str) -> None:
    assert len(broken_rules(source, parts)) == 1


@pytest.mark.parametrize(
    ("parts", "source"),
    [
        (("profiling", "collector.py"), "from ..optim.events import Phase\nimport torch"),
        (("nodes", "comfy_host.py"), "import comfy.sd\nfrom server import PromptServer"),
        (("optim", "decode.py"), "from . import planner\nfrom .kernels.torch_kernels import conv"),
        (("nodes", "decode.py"), "from ..profiling.recorded import decode_recorded"),
    ],
)
def test_direction_check_allows_right_imports(parts: tuple[str, ...], source: str) -> None:
    assert broken_rules(source, parts) == []


def test_root_file_imports_nothing_at_module_level() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text("utf-8"))
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(n) for n in imports if "__future__" not in ast.unparse(n)] == []


def test_files_stay_short() -> None:
    checked = [*package_files(), *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]
    lengths = {str(p.relative_to(ROOT)): len(p.read_text("utf-8").splitlines()) for p in checked}
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


PROBE = textwrap.dedent(
    """
    import json, logging, os, sys, warnings
    import torch, numpy, safetensors  # what the package needs may cost what it costs
    modules = set(sys.modules)

    def state():
        flags = torch.backends.cudnn, torch.backends.cuda.matmul
        return {
            "environment": dict(os.environ),
            "root logger": (logging.root.level, [str(h) for h in logging.root.handlers]),
            "warning filters": [str(f) for f in warnings.filters],
            "path": list(sys.path),
            "threads": torch.get_num_threads(),
            "default dtype": str(torch.get_default_dtype()),
            "cudnn": [flags[0].enabled, flags[0].benchmark, flags[0].deterministic],
            "reduced precision": [flags[1].allow_fp16_reduced_precision_reduction],
        }

    before = state()
    for name in NAMES:
        __import__(name)
    after = state()
    print(json.dumps({
        "new": sorted(set(sys.modules) - modules),
        "changed": [key for key in before if before[key] != after[key]],
        "cuda": torch.cuda.is_initialized(),
    }))
    """
)


def modules_below(package: str) -> list[str]:
    """Every module of the package but those that need a host, the shallow ones first."""
    paths = [p.relative_to(ROOT).with_suffix("").parts for p in package_files()]
    plain = [p[:-1] if p[-1] == "__init__" else p for p in paths if p[0] != "nodes" and p[-1] != "__main__"]
    return sorted((".".join((package, *p)) for p in plain), key=lambda name: name.count("."))


@pytest.mark.parametrize("folder", ["halo_vae", "ComfyUI-HaloVAE"])  # a checkout may have any name
def test_import_is_free(folder: str, tmp_path: Path) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / folder).symlink_to(ROOT, target_is_directory=True)
    empty = tmp_path / "home"
    empty.mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HALO_VAE_", "PYTHONPATH"))}
    homes = ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "HALO_VAE_DATA_DIR", "HALO_VAE_CACHE_DIR")
    env |= {k: str(empty) for k in homes} | {"PYTHONPATH": str(tmp_path / "path"), "PYTHONDONTWRITEBYTECODE": "1"}
    names = modules_below(folder)
    assert {folder, f"{folder}.optim.decode", f"{folder}.profiling.cli.app"} <= set(names)
    code = PROBE.replace("NAMES", repr(names))
    # An empty working folder: nothing but PYTHONPATH can supply the package.
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=empty, env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    unwanted = [m for m in seen["new"] if any(m == u or m.startswith(u + ".") for u in UNWANTED)]
    assert unwanted == []
    assert seen["changed"] == []
    assert seen["cuda"] is False
    assert list(empty.rglob("*")) == []


def test_probe_sees_an_unwanted_import(tmp_path: Path) -> None:
    source = "import os, sys, cProfile\nos.environ['MIOPEN_FIND_MODE'] = '2'\nsys.path.append('x')\n"
    (tmp_path / "greedy.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-c", PROBE.replace("NAMES", "['greedy']")],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    seen = json.loads(done.stdout)
    assert "greedy" in seen["new"]
    assert set(seen["changed"]) == {"environment", "path"}
