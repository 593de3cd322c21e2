"""Every widget of every node against the server: types, defaults, bounds, and what happens at each."""

from __future__ import annotations

from typing import Any

import pytest

from halo_vae.nodes.specs import SPECS, NodeSpec, Widget
from halo_vae.tests.comfyui.installs import Install
from halo_vae.tests.comfyui.prompts import decoding, sources, write_latent
from halo_vae.tests.comfyui.server import Prompt, PromptRefusedError, Server

WIDGETS = [pytest.param(spec, widget, id=f"{spec.id}-{widget.id}") for spec in SPECS for widget in spec.widgets]
TYPES = {"int": "INT", "bool": "BOOLEAN", "choice": "COMBO"}


def values_of(widget: Widget) -> list[Any]:
    """What the widget must take: its default, its bounds, a step from them, every choice."""
    if widget.kind == "bool":
        return [True, False]
    if widget.kind == "choice":
        return list(widget.options)
    low, high, step = widget.minimum or 0, widget.maximum or 0, widget.step or 1
    return [low, low + step, widget.default, high]


def refused_of(widget: Widget) -> list[tuple[Any, str]]:
    """What it must not take, and the error's type."""
    if widget.kind == "choice":
        return [("nonsense", "value_not_in_list")]
    if widget.kind == "bool":
        return []
    return [
        ((widget.minimum or 0) - 1, "value_smaller_than_min"),
        ((widget.maximum or 0) + 1, "value_bigger_than_max"),
        ("nonsense", "invalid_input_type"),
    ]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
def test_ui_6_nodes_as_described(server: Server, install: Install, spec: NodeSpec) -> None:
    info = server.get(f"/object_info/{spec.id}")[spec.id]
    assert (info["display_name"], info["category"], info["output_node"]) == (spec.title, "Halo VAE", spec.is_output)
    assert info["description"] == spec.description
    assert info["output"] == [socket.type for socket in spec.outputs]
    assert info["output_name"] == [socket.id for socket in spec.outputs]
    order = [name for part in ("required", "optional") for name in info["input_order"].get(part, [])]
    assert order == [link.id for link in spec.links] + [widget.id for widget in spec.widgets]
    assert info["input"]["hidden"]["unique_id"] == ["UNIQUE_ID"]
    if install.version >= (0, 20):
        assert info["search_aliases"] == list(spec.aliases)
        assert info["has_intermediate_output"] is not spec.is_output


@pytest.mark.parametrize(("spec", "widget"), WIDGETS)
def test_ui_6_widgets_as_described(server: Server, install: Install, spec: NodeSpec, widget: Widget) -> None:
    kind, options = server.get(f"/object_info/{spec.id}")[spec.id]["input"]["required"][widget.id]
    assert kind == TYPES[widget.kind]
    assert options["default"] == widget.default
    assert options["tooltip"] == widget.tooltip
    if widget.kind == "int":
        assert (options["min"], options["max"], options["step"]) == (widget.minimum, widget.maximum, widget.step)
    if widget.id == "noise_seed":  # no second widget beside it, which would be stored among ours
        assert options["control_after_generate"] is False
    if widget.kind == "choice":
        assert options["options"] == list(widget.options)
    if install.version >= (0, 20):
        assert options.get("advanced", False) == widget.advanced


@pytest.mark.parametrize(("spec", "widget"), WIDGETS)
def test_widget_takes_its_range(server: Server, vae: str, spec: NodeSpec, widget: Widget) -> None:
    write_latent(server.base, "tiny.latent", (1, 4, 4, 5))
    prompt: Prompt = sources(vae, "tiny.latent")
    values = values_of(widget)
    if widget.id == "budget_seconds":  # it is spent
        values = values[:2]
    for number, value in enumerate(values, 10):
        prompt |= decoding(spec.id, number, **{widget.id: value})
    done = server.run(prompt)
    assert done.status == "success", str(done.messages[-1])[:1000]


@pytest.mark.parametrize(("spec", "widget"), WIDGETS)
def test_widget_refuses_what_lies_outside(server: Server, vae: str, spec: NodeSpec, widget: Widget) -> None:
    for value, kind in refused_of(widget):
        try:
            done = server.run({**sources(vae, "small.latent"), **decoding(spec.id, 10, **{widget.id: value})})
        except PromptRefusedError as refused:
            (error,) = refused.answer["node_errors"]["10"]["errors"]
            assert (error["type"], error["extra_info"]["input_name"]) == (kind, widget.id)
        else:  # older versions do not look at choices
            assert kind == "value_not_in_list"
            assert f"{widget.id} is 'nonsense'; choose one of" in done.error["exception_message"]


def test_stock_tiled_widgets_come_first(server: Server) -> None:
    """Drop-in: stock's names, order, defaults and bounds, then ours."""
    info = server.get("/object_info")
    stock, ours = info["VAEDecodeTiled"], info["HaloVAEDecodeTiled"]
    names = stock["input_order"]["required"]
    assert ours["input_order"]["required"][: len(names)] == names
    for name in names[2:]:
        theirs, mine = stock["input"]["required"][name][1], ours["input"]["required"][name][1]
        assert [theirs[key] for key in ("default", "min", "max", "step")] == [
            mine[key] for key in ("default", "min", "max", "step")
        ]
