"""What a wheel holds and what it asks for: every subpackage, the demo's files, and no version of torch."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PACKAGE_FOLDERS = ("nodes", "optim", "profiling")
SKIPPED_FOLDERS = {"build", "dist", "demo_output", "__pycache__", "node_modules"}
PIN = re.compile(r"\btorch(\[[\w,-]+\])?\s*(==|>=|<=|~=|!=|<|>)\s*[\"']?\d")


def text_files() -> list[Path]:
    """Every text file of the checkout that is ours, build products and environments aside."""
    found = []
    for folder, children, names in os.walk(ROOT):
        here = Path(folder)
        children[:] = [
            c for c in children
            if (not c.startswith(".") or c == ".ci") and c not in SKIPPED_FOLDERS
            and not c.endswith(".egg-info") and not (here / c / "pyvenv.cfg").exists()
        ]  # fmt: skip
        found += [here / n for n in names]
    binary = {".safetensors", ".latent", ".png", ".npy", ".webp", ".jpg", ".pyc", ".gz"}
    return [p for p in found if p.suffix not in binary]


def test_listed_packages_are_the_tree() -> None:
    inits = (p for folder in PACKAGE_FOLDERS for p in (ROOT / folder).rglob("__init__.py"))
    tree = {"halo_vae", *(".".join(("halo_vae", *p.parent.relative_to(ROOT).parts)) for p in inits)}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(tree)


def test_every_folder_with_code_is_a_package() -> None:
    files = [p for folder in PACKAGE_FOLDERS for p in (ROOT / folder).rglob("*.py")]
    assert len(files) > len(PACKAGE_FOLDERS)
    assert [str(p.relative_to(ROOT)) for p in files if not (p.parent / "__init__.py").exists()] == []


@pytest.mark.parametrize("suffix", [".safetensors", ".latent"])
def test_demo_files_are_package_data(suffix: str) -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["halo_vae.profiling"]
    shipped = {p.name for pattern in patterns for p in (ROOT / "profiling").glob(pattern)}
    assert {p.name for p in (ROOT / "profiling" / "demo_data").iterdir()} == shipped
    assert any(name.endswith(suffix) for name in shipped)


def test_version_is_one() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text("utf-8"))
    assigned = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__version__"]
    assert [ast.literal_eval(n.value) for n in assigned] == [PROJECT["project"]["version"]]


def test_torch_is_named_without_version() -> None:
    assert "torch" in PROJECT["project"]["dependencies"]
    asked = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    asked += [d for extra in PROJECT["project"]["optional-dependencies"].values() for d in extra]
    assert [d for d in asked if re.match(r"(torch|rocm|nvidia|triton|pytorch)", d)] == ["torch"]


def test_core_needs_three_packages_only() -> None:
    assert sorted(PROJECT["project"]["dependencies"]) == ["numpy", "safetensors", "torch"]


def test_no_other_file_pins_torch() -> None:
    pinned = {str(p.relative_to(ROOT).as_posix()) for p in text_files() if PIN.search(p.read_text("utf-8", "replace"))}
    assert pinned <= {".ci/run"}


@pytest.mark.parametrize("bound", ["==2.13.0", " >= 2.4", "<3", "[opt]~=2.1", " != 2.9.0"])
def test_pin_check_sees_a_pin(bound: str) -> None:
    assert PIN.search(f'"torch{bound}"')


def test_extras_that_are_named_exist() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"])
    files = [ROOT / name for name in ("Makefile", "README.md", "CONTRIBUTING.md", ".ci/run")]
    named = {
        extra
        for path in (*files, *(ROOT / "docs").glob("*.md"))
        for group in re.findall(r"(?:halo-vae|['\"]\.)\[([a-z,]+)\]", path.read_text("utf-8"))
        for extra in group.split(",")
    }
    assert {"test", "browser", "cli", "kitchen"} <= named
    assert named <= extras


def test_no_requirements_file() -> None:
    assert [p.name for p in text_files() if p.name.startswith("requirements")] == []


def test_makefile_takes_the_users_torch() -> None:
    lines = (ROOT / "Makefile").read_text("utf-8").splitlines()
    assert "TORCH ?= torch" in lines
