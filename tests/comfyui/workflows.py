"""Workflows as the frontend saves them, and the prompt that it would make of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from halo_vae.tests.comfyui.server import ROOT, Prompt

FOLDER = ROOT / "example_workflows"
FRONTEND_ONLY = {"Note", "MarkdownNote"}
"""Nodes that live in the browser alone."""


def example_workflows() -> list[Path]:
    return sorted(FOLDER.glob("*.json"))


def read_workflow(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))  # type: ignore[no-any-return]


def to_prompt(workflow: dict[str, Any], object_info: dict[str, Any]) -> Prompt:
    """Widget values by position and links by number, as inputs by name."""
    links = {link[0]: link for link in workflow["links"]}
    prompt: Prompt = {}
    for node in workflow["nodes"]:
        if node["type"] in FRONTEND_ONLY:
            continue
        described = object_info[node["type"]]
        order = [name for part in ("required", "optional") for name in described["input_order"].get(part, [])]
        described_inputs = {**described["input"].get("required", {}), **described["input"].get("optional", {})}
        widgets = [name for name in order if is_widget(described_inputs[name])]
        assert len(widgets) == len(node["widgets_values"]), (node["type"], widgets)
        inputs: dict[str, Any] = dict(zip(widgets, node["widgets_values"], strict=True))
        for socket in node["inputs"]:
            if socket["link"] is not None:
                _, source, slot, target, _, _ = links[socket["link"]]
                assert target == node["id"]
                inputs[socket["name"]] = [str(source), slot]
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def is_widget(described: list[Any]) -> bool:
    """True for an input that the frontend draws a widget for."""
    return isinstance(described[0], list) or described[0] in ("INT", "FLOAT", "BOOLEAN", "STRING", "COMBO")
