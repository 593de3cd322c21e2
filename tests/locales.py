"""The texts in other languages: where they are, and what the English ones must say.

`python -m halo_vae.tests.locales` writes `locales/en/nodeDefs.json` anew after a change of nodes/specs.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halo_vae.nodes.specs import SPECS, NodeSpec

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "locales"
LANGUAGES = sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir())
FILES = ("commands", "main", "nodeDefs", "settings")
"""Those that ComfyUI gathers."""
Texts = dict[str, Any]


def read_texts(language: str, file: str) -> Texts:
    return json.loads((FOLDER / language / f"{file}.json").read_text("utf-8"))  # type: ignore[no-any-return]


def english_node(spec: NodeSpec) -> Texts:
    return {
        "display_name": spec.title,
        "description": spec.description,
        "inputs": {i.id: {"name": i.id, "tooltip": i.tooltip} for i in (*spec.links, *spec.widgets)},
        "outputs": {str(n): {"name": out.id, "tooltip": out.tooltip} for n, out in enumerate(spec.outputs)},
    }


def english_nodes() -> Texts:
    return {spec.id: english_node(spec) for spec in SPECS}


def english_settings() -> Texts:
    """The settings as web/host/settings.js has them, by ComfyUI's form of their ids."""
    source = (ROOT / "web/host/settings.js").read_text("utf-8")
    ids = dict(re.findall(r'^export const (\w+) = "([\w.]+)";', source, re.MULTILINE))
    found = {}
    for block in re.findall(r"^    \{\n(.*?)^    \},?\n", source, re.MULTILINE | re.DOTALL):
        fields = dict(re.findall(r'^      (\w+): "?(.*?)"?,$', block, re.MULTILINE))
        options = re.findall(r'\{ text: "([^"]+)"', block)
        texts: Texts = {"name": fields["name"], "tooltip": fields["tooltip"]}
        if options:
            texts["options"] = {option: option for option in options}
        found[key_of(ids[fields["id"]])] = texts
    assert len(found) == source.count("      category: ") == len(ids)
    return found


def english_categories() -> Texts:
    """The headings that the settings stand under; the third part of a category is a name, not a text."""
    source = (ROOT / "web/host/settings.js").read_text("utf-8")
    return {name: name for pair in re.findall(r'category: \["([^"]+)", "([^"]+)"', source) for name in pair}


def english_commands() -> Texts:
    """ComfyUI makes a command of each tab of the sidebar, and names it so."""
    source = (ROOT / "web/halo_vae.js").read_text("utf-8")
    assert "commands:" not in source
    assert source.count("registerSidebarTab(") == 1
    tab, title, tooltip = (
        re.search(pattern, source)[1]  # type: ignore[index]
        for pattern in (r'const TAB = "([^"]+)"', r'  title: "([^"]+)"', r'  tooltip: "([^"]+)"')
    )
    name = key_of(f"Workspace.ToggleSidebarTab.{tab}")
    return {name: {"label": f"Toggle {title} Sidebar", "tooltip": tooltip}}


def key_of(name: str) -> str:
    """An id as ComfyUI looks it up: a dot would lead a level down."""
    return name.replace(".", "_")


def leaves(texts: Texts, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every text with the keys that lead to it."""
    for key, value in texts.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


if __name__ == "__main__":
    text = json.dumps(english_nodes(), ensure_ascii=False, indent=2)
    (FOLDER / "en" / "nodeDefs.json").write_text(text + "\n", "utf-8")
