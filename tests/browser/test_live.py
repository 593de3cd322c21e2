"""The progress that a node shows while it decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from halo_vae.tests.browser.pages import ended, panel_of, progress, send, warm_runs

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from halo_vae.tests.browser.conftest import Open
    from halo_vae.tests.browser.server import Backend


def live(panel: Locator, name: str) -> str:
    return panel.locator(f"[data-live='{name}']").inner_text()


def test_progress_while_a_decode_runs(open_page: Open, backend: Backend) -> None:
    page = open_page()
    send(page, "execution_start", prompt_id="p")
    send(page, "halo_vae.progress", **progress(chunk=[2, 4]))
    panel = panel_of(page)
    assert panel.get_attribute("data-state") == "running"
    assert live(panel, "stage") == "decoding: compute"
    assert live(panel, "tile") == "3 of 9"
    assert live(panel, "chunk") == "2 of 4"
    assert live(panel, "op") == "17 of 64: decoder.up.2.conv1"
    assert live(panel, "elapsed") == "2.20 s"
    assert live(panel, "left") == "about 3.00 s"
    assert live(panel, "speed") == "19.6 % per s"
    assert live(panel, "memory") == "3.00 GiB"
    assert panel.locator("[role=progressbar]").get_attribute("aria-valuenow") == "41"
    ended(page, backend.add(*warm_runs(backend, 1), node="5"))
    assert panel.get_attribute("data-state") == "ok"
    assert panel.locator("[role=progressbar]").count() == 0


def test_progress_that_knows_little(open_page: Open) -> None:
    page = open_page()
    nothing = {"tile": None, "op": None, "memory_bytes": None, "work_per_s": None}
    send(page, "halo_vae.progress", **progress(stage="plan", phase="plan", total=None, done=0, **nothing))
    panel = panel_of(page)
    assert live(panel, "stage") == "planning"
    assert panel.locator("[role=progressbar]").get_attribute("aria-valuenow") is None
    visible = panel.locator("[data-live]").evaluate_all(
        "all => all.filter((e) => e.offsetParent && e.textContent).map((e) => e.dataset.live)"
    )
    assert visible == ["stage", "elapsed"]


def test_a_burst_of_progress_is_drawn_once(open_page: Open) -> None:
    page = open_page()
    send(page, "halo_vae.progress", **progress(tile=[1, 99]))
    drawn = page.evaluate(
        """async (progress) => {
          let drawn = 0;
          const tile = document.querySelector("[data-live=tile]");
          new MutationObserver((changes) => (drawn += changes.length)).observe(tile, { childList: true });
          for (let i = 2; i <= 60; i += 1) comfy.api.send("halo_vae.progress", { ...progress, tile: [i, 99] });
          await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
          return [drawn, tile.textContent];
        }""",
        progress(),
    )
    assert drawn == [1, "60 of 99"]


@pytest.mark.parametrize(
    ("event", "detail", "state"),
    [
        ("execution_error", {"node_id": "9", "exception_message": "of another node"}, "ok"),
        ("execution_error", {"node_id": "5", "exception_message": "of this one"}, "error"),
        ("execution_interrupted", {"node_id": "5"}, "interrupted"),
        ("execution_success", {}, "ok"),
        ("reconnected", {}, "ok"),
    ],
)
def test_progress_ends_with_the_prompt(
    event: str, detail: dict[str, Any], state: str, open_page: Open, backend: Backend
) -> None:
    page = open_page()
    ended(page, backend.add(*warm_runs(backend, 1), node="5"))
    send(page, "execution_start", prompt_id="q")
    send(page, "halo_vae.progress", **progress(prompt_id="q"))
    assert panel_of(page).get_attribute("data-state") == "running"
    send(page, event, prompt_id="q", **detail)
    assert panel_of(page).get_attribute("data-state") == state


def test_a_node_inside_a_subgraph(open_page: Open, backend: Backend) -> None:
    (record,) = warm_runs(backend, 1)
    data = backend.add(record, node="7:12")
    page = open_page(nodes=())
    page.evaluate(
        """() => {
          const inner = new comfy.Graph();
          comfy.app.rootGraph._nodes.push({ id: 7, subgraph: inner });
          comfy.addNode("HaloVAEDecode", 12, "inside", inner);
        }"""
    )
    send(page, "halo_vae.progress", **progress(node="7:12"))
    panel = page.locator(".halo-vae-panel[data-node='7:12']")
    assert panel.get_attribute("data-state") == "running"
    send(page, "halo_vae.ended", node="7:12", prompt_id="p", panel=data)
    assert panel.get_attribute("data-record") == record.record_id


def test_messages_for_nodes_that_are_gone_change_nothing(open_page: Open, backend: Backend) -> None:
    page = open_page()
    data = backend.add(*warm_runs(backend, 1), node="99")
    for node in ("99", "7:12", "", None):
        send(page, "halo_vae.progress", **progress(node=node))
        send(page, "halo_vae.ended", node=node, prompt_id="p", panel=data)
    assert panel_of(page).get_attribute("data-state") == "idle"
