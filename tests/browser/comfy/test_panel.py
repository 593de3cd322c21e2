"""The panel on a node of the real page: what it shows is what was recorded."""

from __future__ import annotations

import io
import json

import pytest
from PIL import Image

from halo_vae.profiling.render.units import format_bytes, format_count, format_ns, format_share
from halo_vae.tests.browser.comfy.host import RUN_MS, Host
from halo_vae.tests.browser.comfy.panel import Panel, numbers_in, record_of, row_of
from halo_vae.tests.browser.comfy.workflows import DECODE, SAVE, STATS, Workflows
from halo_vae.tests.comfyui.installs import Install


@pytest.fixture(params=["classic", "vue"])
def renderer(request: pytest.FixtureRequest, install: Install) -> str:
    if request.param == "vue" and install.version < (0, 4):
        pytest.skip("nodes drawn by Vue have no widgets of extensions in this version's page")
    return str(request.param)


def test_panel_shows_the_record(host: Host, workflows: Workflows) -> None:
    host.load(workflows.image(), workflows.folder)
    panel = Panel(host)
    panel.wait_for("idle")
    assert "Not run yet" in panel.text
    assert host.run() == "success"
    panel.wait_for("ok")
    record, row, shown = record_of(host, panel.record_id), row_of(host, panel.record_id), panel.figures()
    assert record["status"] == "ok"
    kept = {part["dtype"]: part["macs"] for part in record["precision"]["kept"]}
    expected = {
        "wall_ns": (record["wall_ns"], format_ns(record["wall_ns"])),
        "used_bytes": (row["used_bytes"], format_bytes(row["used_bytes"])),
        "predicted_bytes": (row["predicted_bytes"], format_bytes(row["predicted_bytes"])),
        "tiles": (record["tiles"]["count"], format_count(record["tiles"]["count"])),
        "convs.new": (record["convs"]["new"], None),
        "n_fallbacks": (record["n_fallbacks"], format_count(record["n_fallbacks"]) if row["n_fallbacks"] else "none"),
        "mac_shares.fp32": (1, None) if list(kept) == ["float32"] else (None, None),
    }
    for name, (value, text) in expected.items():
        assert name in shown
        if value is not None:
            assert float(shown[name][0]) == value, name
        assert text is None or shown[name][1] == text, name
    times = {name: ns for name, ns in record["phases"].items() if ns}
    assert {name.removeprefix("phases.") for name in shown if name.startswith("phases.")} >= times.keys()
    for name, ns in times.items():
        assert float(shown[f"phases.{name}"][0]) == ns
        assert format_share(ns / sum(times.values())) in shown[f"phases.{name}"][1]
    host.show_node(DECODE)
    assert panel.root.is_visible()
    box = panel.root.bounding_box()
    assert box is not None
    assert min(box["width"], box["height"]) > 200


def test_stats_node_shows_the_same_decode(host: Host, workflows: Workflows) -> None:
    host.load(workflows.image(), workflows.folder)
    assert host.run() == "success"
    panel, stats = Panel(host), Panel(host, STATS)
    panel.wait_for("ok")
    stats.wait_for("ok")
    assert stats.record_id == panel.record_id
    assert stats.figures()["wall_ns"] == panel.figures()["wall_ns"]


def test_warm_runs_are_compared_with_those_before(host: Host, workflows: Workflows) -> None:
    for _ in range(4):
        host.load(workflows.image(), workflows.folder)
        assert host.run() == "success"
    panel = Panel(host)
    panel.wait_for("ok")
    served = host.server.get(f"/halo_vae/panels/{DECODE}")
    assert served["n_median"] >= 2
    value, text = panel.figures()["change"]
    assert float(value) == pytest.approx(served["record"]["wall_ns"] / served["median_ns"] - 1)
    assert format_ns(served["median_ns"]) in text


def test_reload_shows_the_earlier_run(host: Host, workflows: Workflows) -> None:
    host.load(workflows.image(), workflows.folder)
    assert host.run() == "success"
    panel = Panel(host)
    panel.wait_for("ok")
    before = (panel.record_id, panel.figures())
    host.reload()
    panel.wait_for("ok")
    assert (panel.record_id, panel.figures()) == before
    assert "earlier run" in panel.text


def test_cached_run_says_so(host: Host, workflows: Workflows) -> None:
    host.load(workflows.image(), workflows.folder)
    assert host.run() == "success"
    panel = Panel(host)
    panel.wait_for("ok")
    before = panel.record_id
    assert host.run() == "success"
    panel.wait_for("cached")
    assert panel.record_id == before
    assert "cached" in panel.text
    host.load(workflows.image(), workflows.folder)
    assert host.run() == "success"
    panel.wait_for("ok")
    assert panel.record_id != before


def test_cancelled_run_says_so(host: Host, workflows: Workflows) -> None:
    host.load(workflows.long(), workflows.folder)
    host.start()
    panel = Panel(host)
    panel.wait_for("running", RUN_MS)
    bar = panel.root.locator("[role=progressbar]")
    bar.wait_for(state="attached")
    host.page.wait_for_function(
        "node => Number(document.querySelector(`.halo-vae-panel[data-node='${node}'] [role=progressbar]`)"
        "?.getAttribute('aria-valuenow')) > 0",
        arg=DECODE,
        timeout=RUN_MS,
    )
    host.stop()
    assert host.ended() == "interrupted"
    panel.wait_for("interrupted")
    assert "cancelled" in panel.text.lower()
    assert "Exception" not in panel.text
    assert record_of(host, panel.record_id)["status"] == "interrupted"
    host.load(workflows.image(), workflows.folder)
    assert host.run() == "success"
    panel.wait_for("ok")


def test_failed_run_says_why(host: Host, workflows: Workflows) -> None:
    host.load(workflows.failing(), workflows.folder)
    assert host.run() == "error"
    panel = Panel(host)
    panel.wait_for("error")
    assert "the latent has 16 channels" in panel.text
    told = next(detail for kind, detail in host.told() if kind == "execution_error")
    assert told["exception_type"] == "halo_vae.optim.errors.LatentError"  # shown before the sentence
    host.close_dialogs()
    host.load(workflows.image(), workflows.folder)
    assert host.run() == "success"
    panel.wait_for("ok")
    assert "16 channels" not in panel.text


def test_nothing_measured_is_saved(host: Host, workflows: Workflows) -> None:
    given = workflows.image()
    host.load(given, workflows.folder)
    assert host.run() == "success"
    panel = Panel(host)
    panel.wait_for("ok")
    saved, prompt = host.saved(), host.prompt()
    for node in given["nodes"]:
        kept = next(n for n in saved["nodes"] if n["id"] == node["id"])
        assert kept.get("widgets_values", []) == node.get("widgets_values", [])
    assert set(prompt[str(DECODE)]["inputs"]) == {"samples", "vae", *_widgets(host)}
    done = next(detail for kind, detail in host.told() if kind == "executed" and detail["node"] == str(SAVE))
    stored = Image.open(io.BytesIO(host.server.view(done["output"]["images"][0]))).info
    record = record_of(host, panel.record_id)
    measured = numbers_in({"wall": record["wall_ns"], "phases": record["phases"], "memory": record["memory"]})
    assert len(measured) >= 3
    for text in (json.dumps(saved), json.dumps(prompt), stored["workflow"], stored["prompt"]):
        assert panel.record_id not in text
        assert "halo_vae_panel" not in text
        assert not [number for number in measured if number in text]


def _widgets(host: Host) -> list[str]:
    described = host.server.get("/object_info/HaloVAEDecode")["HaloVAEDecode"]["input"]
    names = [*described["required"], *described.get("optional", {})]
    return [name for name in names if name not in ("samples", "vae")]


def test_panel_can_be_switched_off(host: Host, workflows: Workflows) -> None:
    host.load(workflows.image(), workflows.folder)
    assert host.run() == "success"
    panel = Panel(host)
    panel.wait_for("ok")
    host.show_node(DECODE)
    panel.root.wait_for(state="visible")
    host.set("HaloVAE.Panel", False)
    panel.root.wait_for(state="hidden")
    host.set("HaloVAE.Panel", True)
    panel.root.wait_for(state="visible")


@pytest.mark.parametrize("units", ["binary", "decimal"])
def test_units_are_the_users(host: Host, workflows: Workflows, units: str) -> None:
    host.set("HaloVAE.Units", units)
    host.load(workflows.image(), workflows.folder)
    assert host.run() == "success"
    panel = Panel(host)
    panel.wait_for("ok")
    text = panel.figures()["predicted_bytes"][1]
    assert text.endswith(("KiB", "MiB", "GiB") if units == "binary" else ("kB", "MB", "GB"))
