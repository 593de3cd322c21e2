"""What the registry and ComfyUI read of the pack, and that its archive has all that the nodes need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from halo_vae.tests.archive import archived, is_checkout, tracked, unpack
from halo_vae.tests.test_packaging import PROJECT

ROOT = Path(__file__).resolve().parent.parent
COMFY: dict[str, Any] = PROJECT["tool"]["comfy"]
ACCELERATORS = {
    "GPU :: NVIDIA CUDA", "GPU :: AMD ROCm", "GPU :: Intel Arc", "NPU :: Huawei Ascend", "GPU :: Apple Metal",
}  # fmt: skip
NEEDED = ("__init__.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "docs/nodes.md", "web/icon.svg")
MAX_ICON = (800, 400)
"""Pixels that the registry takes."""
in_checkout = pytest.mark.skipif(not is_checkout(), reason="no git here that tells which files are tracked")


def test_name_and_version_are_as_the_registry_wants_them() -> None:
    name = PROJECT["project"]["name"]
    assert re.fullmatch(r"[a-z]+(?:[-_.][a-z0-9]+)*", name)
    assert len(name) < 100
    assert "comfyui" not in name
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["project"]["version"])
    assert re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)*", COMFY["PublisherId"])
    assert COMFY["DisplayName"]
    assert COMFY["requires-comfyui"] == ">=0.3.64"
    assert "web" not in COMFY  # the root file names the folder; twice would load the page's code twice


def test_accelerators_are_those_that_comfyui_knows() -> None:
    classifiers = PROJECT["project"]["classifiers"]
    accelerators = [c.removeprefix("Environment :: ") for c in classifiers if c.startswith("Environment :: ")]
    assert "GPU :: AMD ROCm" in accelerators
    assert set(accelerators) <= ACCELERATORS  # one that is unknown, and ComfyUI drops them all
    assert "Operating System :: OS Independent" in classifiers
    assert len(set(classifiers)) == len(classifiers)
    pythons = [c.rpartition(" ")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)]
    assert PROJECT["project"]["requires-python"] == f">={pythons[0]}"
    assert [int(v.partition(".")[2]) for v in pythons] == list(range(10, 10 + len(pythons)))


def test_addresses_are_nobody_elses() -> None:
    """All on one host, which is one that can belong to nobody until somebody publishes the pack."""
    addresses = [*PROJECT["project"]["urls"].values(), COMFY["Icon"]]
    assert {"Repository", "Documentation", "Issues"} <= PROJECT["project"]["urls"].keys()
    assert {urlsplit(address).scheme for address in addresses} == {"https"}
    assert len({urlsplit(address).hostname for address in addresses}) == 1
    home = PROJECT["project"]["urls"]["Repository"]
    for address in (COMFY["Icon"], PROJECT["project"]["urls"]["Changelog"]):
        assert (ROOT / address.removeprefix(home).lstrip("/")).is_file()


def test_icon_is_a_small_drawing_that_loads_nothing() -> None:
    path = ROOT / "web" / "icon.svg"
    text = path.read_text("utf-8")
    assert len(text) < 8 * 1024
    drawing = ET.fromstring(text)
    assert 0 < int(drawing.attrib["width"]) <= MAX_ICON[0]
    assert 0 < int(drawing.attrib["height"]) <= MAX_ICON[1]
    assert drawing.attrib["aria-label"]
    assert not re.search(r"<(script|image|use|foreignObject|style)\b|href=|url\(|\bon\w+=", text)


@in_checkout
def test_archive_has_what_users_need_and_no_more() -> None:
    files = {path.as_posix() for path in archived()}
    assert set(NEEDED) <= files
    folders = {name.partition("/")[0] for name in files if "/" in name}
    assert folders == {"docs", "example_workflows", "locales", "nodes", "optim", "profiling", "web"}
    assert not [name for name in files if name.startswith("docs/") and not name.endswith(".md")]
    for folder in COMFY["includes"]:
        assert {p.as_posix() for p in tracked() if p.parts[0] == folder} <= files
    sizes = [(ROOT / name).stat().st_size for name in files]
    assert sum(sizes) < 12 * 2**20


@in_checkout
def test_archive_has_every_code_file_of_the_package() -> None:
    code = {path for path in tracked() if path.parts[0] in ("nodes", "optim", "profiling")}
    assert len(code) > 100
    assert code - set(archived()) == set()


@pytest.mark.slow
@in_checkout
def test_archive_decodes_by_itself(tmp_path: Path) -> None:
    """Every module can be imported and the demo's picture decoded where there is nothing but the archive."""
    unpack(tmp_path / "halo_vae")
    program = """if True:
        import importlib, sys
        from pathlib import Path
        root = Path(sys.argv[1])
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            if path.name not in ("__main__.py", "comfy_host.py", "extension.py"):
                importlib.import_module(".".join(parts).removesuffix(".__init__"))
        from halo_vae.profiling.cli import main
        sys.exit(main(["demo", "-o", str(root.parent / "out")]))
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HALO_VAE_"))}
    env |= {"PYTHONPATH": str(tmp_path), "HALO_VAE_DATA_DIR": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"}
    env |= {"HALO_VAE_CACHE_DIR": str(tmp_path / "data")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(tmp_path / "halo_vae")],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(list((tmp_path / "out").glob("*.png"))) == 4


def test_changelog_tells_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    kinds = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    version = PROJECT["project"]["version"]
    assert version in text.partition("\n### ")[0] if len(headings) == 1 else f"[{version}]" in headings[1]
