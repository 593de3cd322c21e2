"""Screenshots of what a user sees, in two sizes and two themes, to be looked at; and that it fits and can be read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from halo_vae.tests.browser.comfy.conftest import MakeHost
from halo_vae.tests.browser.comfy.host import RUN_MS, Host
from halo_vae.tests.browser.comfy.panel import History, Panel
from halo_vae.tests.browser.comfy.workflows import DECODE, Workflows
from halo_vae.tests.comfyui.installs import Install

if TYPE_CHECKING:
    from playwright.sync_api import Locator

SIZES = {"large": (1600, 1000), "small": (1024, 700)}
LEAST_CONTRAST = 4.5
"""Of text on its background, by WCAG 2."""

_CONTRAST = """root => {
    const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const over = colours => {  // these colours, one on the other, the last one on top
        pen.clearRect(0, 0, 1, 1);
        for (const colour of colours) {
            pen.fillStyle = colour;
            pen.fillRect(0, 0, 1, 1);
        }
        return [...pen.getImageData(0, 0, 1, 1).data];
    };
    const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = element => {
        const colours = [];
        for (let e = element; e; e = e.parentElement) colours.unshift(getComputedStyle(e).backgroundColor);
        return ["white", ...colours];
    };
    const found = [];
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
        if (!text || !element.checkVisibility() || element.closest("svg, [data-earlier], :disabled")) continue;
        const ground = behind(element);
        const [a, b] = [light(over([...ground, getComputedStyle(element).color])), light(over(ground))];
        found.push([text.slice(0, 40), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]);
    }
    return found;
}"""
_OVERHANG = """root => [...root.querySelectorAll('*')]
    .filter(e => e.checkVisibility() && !e.closest('.halo-vae-table-scroll, .halo-vae-hidden, svg'))
    .filter(e => e.getBoundingClientRect().right > root.getBoundingClientRect().right + 1)
    .map(e => `${e.tagName}.${e.className}: ${e.textContent.slice(0, 40)}`)"""


class Album:
    """Takes pictures of one page under names that say where."""

    def __init__(self, host: Host, folder: Path, name: str) -> None:
        self._host, self._folder, self._name = host, folder, name
        self.faults: list[tuple[str, ...]] = []
        """Texts that cannot be read on what is behind them, and what hangs over its place's edge."""

    def take(self, what: str, root: Locator) -> None:
        """A picture of the page, with `root` in view."""
        self._host.settle()
        self._host.page.screenshot(path=str(self._folder / f"{self._name}-{what}.png"), animations="disabled")
        contrasts = root.evaluate(_CONTRAST)
        assert contrasts, what
        self.faults += [(what, text, f"contrast {c:.2f}") for text, c in contrasts if c < LEAST_CONTRAST]
        self.faults += [(what, text, "hangs over") for text in root.evaluate(_OVERHANG)]


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("drawn", ["classic", "vue"])
def test_pictures(
    make_host: MakeHost, install: Install, workflows: Workflows, pictures: Path, drawn: str, theme: str, size: str
) -> None:
    if drawn == "vue" and install.version < (0, 4):
        pytest.skip("nodes drawn by Vue have no widgets of extensions in this version's page")
    host = make_host(*SIZES[size])
    host.open(**{"Comfy.VueNodes.Enabled": drawn == "vue", "Comfy.ColorPalette": theme})
    album = Album(host, pictures, f"{install.name}-{drawn}-{theme}-{size}")
    panel, history = Panel(host), History(host)

    host.load(workflows.image(), workflows.folder)
    host.show_node(DECODE)
    album.take("idle", panel.root)
    for _ in range(2):
        host.load(workflows.image(), workflows.folder)
        assert host.run() == "success"
    panel.wait_for("ok")
    host.show_node(DECODE)
    album.take("ok", panel.root)

    if size == "large":
        host.load(workflows.long(), workflows.folder)
        host.start()
        panel.wait_for("running", RUN_MS)
        host.show_node(DECODE)
        panel.root.locator("[data-live=op]").wait_for(timeout=RUN_MS)
        album.take("running", panel.root)
        host.stop()
        assert host.ended() == "interrupted"
        panel.wait_for("interrupted")
        album.take("cancelled", panel.root)

    host.load(workflows.failing(), workflows.folder)
    assert host.run() == "error"
    panel.wait_for("error")
    host.close_dialogs()
    host.show_node(DECODE)
    album.take("failed", panel.root)

    history.open()
    history.rows.first.wait_for()
    album.take("history", history.root)
    row = history.rows.filter(has_text="ok").first
    row.locator('[data-action="open"]').click()
    history.root.locator(".halo-vae-detail").wait_for()
    album.take("record", history.root)
    host.page.close()
    assert album.faults == []
    assert host.take_complaints() == []
