"""The page's own code: small modules that set text as text, ask nobody but ComfyUI's server, and import little."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

WEB = Path(__file__).resolve().parent.parent / "web"
MODULES = sorted(WEB.rglob("*.js"))
ENTRY = WEB / "halo_vae.js"
MAX_LINES = 400
# What would take a text for markup or for code.
SINKS = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc"
    r"|\beval\(|new Function"
)
# What would reach past ComfyUI's own `fetchApi`.
NETWORK = re.compile(r"\bfetch\(|XMLHttpRequest|WebSocket|EventSource|sendBeacon|navigator\.|importScripts|\bimport\(")
ADDRESS = re.compile(r"https?://[^\s\"'`]+")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
IMPORT = re.compile(r"^import .*? from \"([^\"]+)\";", re.MULTILINE | re.DOTALL)


def named(path: Path) -> str:
    return path.relative_to(WEB).as_posix()


@pytest.mark.parametrize("module", MODULES, ids=named)
def test_module_keeps_the_rules(module: Path) -> None:
    text = module.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MAX_LINES
    text = COMMENT.sub("", text)
    assert SINKS.findall(text) == []
    assert NETWORK.findall(text) == []
    assert set(ADDRESS.findall(text)) <= {"http://www.w3.org/2000/svg"}
    for target in IMPORT.findall(text):
        if target.startswith("../../scripts/"):
            assert module == ENTRY, "ComfyUI imports every module; only the entry may lean on ComfyUI's own"
        else:
            assert (module.parent / target).resolve() in MODULES


def test_one_module_registers_the_extension() -> None:
    registering = [named(m) for m in MODULES if "registerExtension(" in m.read_text(encoding="utf-8")]
    assert registering == [named(ENTRY)]


def test_styles_load_nothing() -> None:
    text = "".join(sheet.read_text(encoding="utf-8") for sheet in WEB.rglob("*.css"))
    assert re.findall(r"@import|url\(", text) == []
