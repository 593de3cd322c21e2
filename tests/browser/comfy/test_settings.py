"""Our entries in ComfyUI's settings dialog, and that the server acts on them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from halo_vae.tests.browser.comfy.host import Host
from halo_vae.tests.browser.comfy.panel import Panel, record_of
from halo_vae.tests.browser.comfy.workflows import Workflows

if TYPE_CHECKING:
    from playwright.sync_api import Locator

IDS = ("HaloVAE.Profile", "HaloVAE.HistorySize", "HaloVAE.Panel", "HaloVAE.Units")


def dialog(host: Host) -> Locator:
    """The settings dialog on our page."""
    host.command("Comfy.ShowSettingsDialog")
    found = host.page.locator("[role=dialog]").filter(has_text="Settings").last
    found.wait_for()
    found.get_by_text("Halo VAE", exact=True).first.click()
    found.get_by_text("What to record of each decode").wait_for()
    return found


def test_entries_are_in_the_dialog(host: Host, pictures: Path) -> None:
    found = dialog(host)
    for name in IDS:
        assert found.locator(f"[id='{name}']").count() == 1, name
    host.page.screenshot(path=str(pictures / f"{host.install.name}-settings.png"), animations="disabled")


def test_a_choice_in_the_dialog_reaches_the_server(host: Host, workflows: Workflows) -> None:
    found = dialog(host)
    found.locator("[id='HaloVAE.Profile']").click()
    with host.page.expect_response(lambda answer: "/settings" in answer.url and answer.request.method == "POST"):
        host.page.get_by_role("option", name="summary and each op").click()
    assert host.stored()["HaloVAE.Profile"] == "per_op"
    host.page.keyboard.press("Escape")
    host.load(workflows.image(), workflows.folder)
    assert host.run() == "success"
    panel = Panel(host)
    panel.wait_for("ok")
    record = record_of(host, panel.record_id)
    assert record["level"] == "per_op"
    assert record["stages"]
    host.set("HaloVAE.Profile", "off")
    host.load(workflows.image(), workflows.folder)
    assert host.run() == "success"
    panel.wait_for("ok")
    assert record_of(host, panel.record_id)["level"] == "off"
    assert "profile level is off" in panel.text
