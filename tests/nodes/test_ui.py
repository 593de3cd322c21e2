"""UI: what callers, saved workflows and the panel rely on, checked without a host."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halo_vae.nodes import actions
from halo_vae.nodes.specs import (
    BENCHMARK,
    DECODE,
    DECODE_TILED,
    DECODE_VIDEO,
    MONITOR,
    SPECS,
    STATS_VIEW,
    TUNE,
    NodeSpec,
    Widget,
)
from halo_vae.optim.settings import DecodeSettings
from halo_vae.tests.fixtures import latent
from halo_vae.tests.nodes.support import kl_vae, new_session

ROOT = Path(__file__).resolve().parents[2]
GOLDEN: dict[str, list[tuple[str, Any]]] = json.loads((Path(__file__).parent / "widgets.json").read_text("utf-8"))
ACTIONS = {DECODE: actions.decode, DECODE_TILED: actions.decode_tiled, DECODE_VIDEO: actions.decode_video}
RENAMED: dict[str, str] = {}
"""Ids that nodes had in earlier releases, and what they are called now."""
WIDGETS = [pytest.param(widget, id=f"{spec.id}-{widget.id}") for spec in SPECS for widget in spec.widgets]
SAMPLES = {"samples": latent((1, 4, 6, 6))}


@pytest.mark.parametrize("spec", ACTIONS, ids=lambda spec: spec.id)
def test_ui_1_only_samples_and_vae_are_needed(spec: NodeSpec) -> None:
    run, vae, session = ACTIONS[spec], kl_vae(), new_session()
    first = run(session, samples=SAMPLES, vae=vae).images
    assert torch.equal(run(session, vae=vae, samples=SAMPLES, tile_size=512).images, first)
    assert torch.equal(run(session, samples=SAMPLES, vae=vae, **spec.defaults()).images, first)
    with pytest.raises(TypeError, match="made_up"):
        run(session, samples=SAMPLES, vae=vae, made_up=1)


def test_ui_1_first_three_inputs_are_fixed() -> None:
    for spec, third in ((DECODE, "method"), (DECODE_TILED, "tile_size"), (DECODE_VIDEO, "method")):
        given = list(inspect.signature(ACTIONS[spec]).parameters)
        assert given[:4] == ["session", "samples", "vae", third]
        assert [*(link.id for link in spec.links), spec.widgets[0].id] == ["samples", "vae", third]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
def test_ui_2_stored_widgets_keep_their_place_and_default(spec: NodeSpec) -> None:
    """Workflows store widget values by position: new widgets go to the end of the list, and of widgets.json."""
    present = [[widget.id, widget.default] for widget in spec.widgets]
    golden = GOLDEN[spec.id]
    assert present[: len(golden)] == golden
    assert len(present) == len(golden), "a widget is missing from widgets.json"


def test_ui_2_no_node_is_gone() -> None:
    assert [spec.id for spec in SPECS] == list(GOLDEN)


def workflows() -> list[Path]:
    return sorted((ROOT / "example_workflows").glob("*.json"))


@pytest.mark.parametrize("path", workflows(), ids=lambda path: path.stem)
def test_ui_4_examples_fit_the_nodes(path: Path) -> None:
    workflow = json.loads(path.read_text("utf-8"))
    by_id, specs = {node["id"]: node for node in workflow["nodes"]}, {spec.id: spec for spec in SPECS}
    links = {link[0]: link for link in workflow["links"]}
    assert len(by_id) == len(workflow["nodes"])
    assert workflow["last_node_id"] >= max(by_id)
    assert workflow["last_link_id"] >= max(links)
    for number, source, slot, target, into, kind in links.values():
        assert number in by_id[source]["outputs"][slot]["links"]
        assert by_id[target]["inputs"][into]["link"] == number
        assert by_id[source]["outputs"][slot]["type"] == by_id[target]["inputs"][into]["type"] == kind
    ours = [node for node in workflow["nodes"] if node["type"].startswith("HaloVAE")]
    assert len(ours) >= 2
    for node in ours:
        spec = specs[node["type"]]
        sockets = [socket["name"] for socket in node["inputs"]]
        assert sockets == [*(link.id for link in spec.links), *(widget.id for widget in spec.widgets)]
        assert [socket["name"] for socket in node["outputs"]] == [out.id for out in spec.outputs]
        assert len(node["widgets_values"]) == len(spec.widgets)
        assert all(takes(w, value) for w, value in zip(spec.widgets, node["widgets_values"], strict=True))
        needed = {link.id for link in spec.links if not link.optional}
        assert needed <= {socket["name"] for socket in node["inputs"] if socket["link"] is not None}


def test_ui_4_there_is_an_example_of_each_use() -> None:
    uses = {"batch", "benchmark", "image", "stock_against_halo", "tiled", "tune", "wan_video"}
    assert {path.stem for path in workflows()} >= uses


def test_ui_4_renamed_nodes_lead_to_present_ones() -> None:
    assert set(RENAMED.values()) <= {spec.id for spec in SPECS}
    assert not set(RENAMED) & {spec.id for spec in SPECS}
    assert all(spec.id.startswith("HaloVAE") for spec in SPECS)  # ids of other packs are never ours


def takes(widget: Widget, value: Any) -> bool:
    """True if the widget could hold the value."""
    if widget.kind == "choice":
        return value in widget.options
    if widget.kind == "bool":
        return isinstance(value, bool)
    low, high, step = widget.minimum or 0, widget.maximum or 0, widget.step or 1
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high and (value - low) % step == 0


@pytest.mark.parametrize("widget", WIDGETS)
def test_ui_6_default_fits_its_widget(widget: Widget) -> None:
    assert takes(widget, widget.default)
    assert widget.tooltip.endswith(".")
    if widget.kind == "int":
        assert None not in (widget.minimum, widget.maximum, widget.step)
    plain = {"method", "precision_mode", "warm_ups", "runs", "stock"}
    assert widget.advanced == (widget.id not in plain and widget not in TUNE.widgets)


@pytest.mark.parametrize("spec", [*ACTIONS, TUNE, BENCHMARK], ids=lambda spec: spec.id)
def test_ui_6_functions_take_the_inputs_with_their_defaults(spec: NodeSpec) -> None:
    function: Any = {**ACTIONS, TUNE: actions.tune, BENCHMARK: actions.benchmark}[spec]
    parameters = list(inspect.signature(function).parameters.values())[1:]
    assert [p.name for p in parameters] == [link.id for link in spec.links] + [w.id for w in spec.widgets]
    assert {p.name: p.default for p in parameters if p.default is not p.empty} == spec.defaults()


def test_ui_6_defaults_are_the_recommended_settings() -> None:
    recommended = DecodeSettings()
    assert {name: getattr(recommended, name) for name in DECODE.defaults()} == DECODE.defaults()


def test_ui_6_the_video_node_asks_for_what_its_widgets_say() -> None:
    """Under its widget's name, but for the seed, and each value where it belongs."""
    values = {
        "method": "exact", "precision_mode": "fp32", "tile_size": 32, "overlap": 64, "chunk_frames": 5,
        "chunk_overlap": 3, "batch_optimization": False, "memory_prefetching": False, "adaptive_precision": False,
        "tensor_layout_optimization": False, "advanced_caching": False,
    }  # fmt: skip
    assert {*values, "noise_seed"} == set(DECODE_VIDEO.defaults())
    record = actions.decode_video(new_session(), samples=SAMPLES, vae=kl_vae(), noise_seed=7, **values).record
    assert record.request.settings == DecodeSettings(seed=7, **values)


def test_ui_6_nodes_have_what_a_panel_shows() -> None:
    assert len({spec.id for spec in SPECS}) == len({spec.title for spec in SPECS}) == len(SPECS)
    for spec in SPECS:
        assert spec.description.endswith(".")
        assert spec.outputs
        assert json.dumps(dataclasses.asdict(spec))
        names = [link.id for link in spec.links] + [widget.id for widget in spec.widgets]
        assert len(set(names)) == len(names)
    assert [spec for spec in SPECS if spec.is_output] == [STATS_VIEW, MONITOR, TUNE, BENCHMARK]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.id)
def test_ui_6_help_page_names_every_input(spec: NodeSpec) -> None:
    page = (ROOT / "web" / "docs" / f"{spec.id}.md").read_text("utf-8")
    assert page.startswith(f"# {spec.title}\n")
    inputs = [link.id for link in spec.links] + [widget.id for widget in spec.widgets]
    assert [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")] == inputs
    assert all(f"`{out.id}`" in page for out in spec.outputs)


def test_ui_7_optional_packages_may_be_missing(tmp_path: Path) -> None:
    absent = ["psutil", "triton", "amdsmi", "pynvml", "gguf", "einops", "matplotlib", "tqdm", "platformdirs", "PIL"]
    code = (
        f"import sys\nfor name in {absent!r}: sys.modules[name] = None\n"
        "import torch\nfor name in ('is_available', 'synchronize', 'mem_get_info', 'memory_stats'):\n"
        "    hasattr(torch.cuda, name) and delattr(torch.cuda, name)\n"
        "from halo_vae.nodes import actions\nfrom halo_vae.nodes.specs import SPECS\n"
        "from halo_vae.tests.nodes.support import kl_vae, new_session\n"
        "session = new_session()\n"
        "done = actions.decode(session, {'samples': torch.zeros(1, 4, 4, 4)}, kl_vae())\n"
        "assert 'Halo VAE' in actions.show_stats(session, done.record)\n"
        "assert 'Halo VAE' in actions.monitor(session, kl_vae())\n"
        "print(len(SPECS), tuple(done.images.shape))\n"
    )
    env = os.environ | {"HALO_VAE_DATA_DIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(maxsplit=1) == ["7", "(1, 16, 16, 3)\n"]
