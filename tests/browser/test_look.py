"""What the panel and the tab look like: pictures for people, and what a machine can check of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from halo_vae.tests.browser import records
from halo_vae.tests.browser.themes import THEMES

if TYPE_CHECKING:
    from halo_vae.tests.browser.conftest import Open
    from halo_vae.tests.browser.server import Backend

LEAST_CONTRAST = 4.5
"""Of small text against what is behind it. Source: WCAG 2.2, success criterion 1.4.3."""
_NODES = (
    ("HaloVAEDecode", 5, "VAE Decode (Halo)"),
    ("HaloVAEDecodeVideo", 6, "VAE Decode Video (Halo)"),
    ("HaloVAEDecode", 7, "VAE Decode (Halo)"),
    ("HaloVAEDecode", 8, "VAE Decode (Halo)"),
    ("HaloVAEDecode", 9, "VAE Decode (Halo)"),
)
_PROGRESS = {
    "node": "9", "prompt_id": "p", "stage": "decode", "phase": "compute", "chunk": None,
    "op": [17, 64, "decoder.up.2.block.0.conv1"], "tile": [3, 9], "done": 412, "total": 1000,
    "elapsed_ns": 2_200_000_000, "memory_bytes": 3 << 30, "work_per_s": 196.0,
}  # fmt: skip
# Colours are painted and read back, as a style may give them in any colour space.
_CONTRASTS = """() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    const part = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
    return a === 0 ? null : 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const behind = (e) => light(getComputedStyle(e).backgroundColor) ?? behind(e.parentElement);
  const found = [];
  for (const e of document.querySelectorAll(".halo-vae *")) {
    const own = [...e.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const isFaint = e instanceof SVGElement || e.closest("[data-earlier], .halo-vae-hidden");
    if (!own || isFaint || !e.checkVisibility()) continue;
    const [a, b] = [light(getComputedStyle(e).color), behind(e)];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.className, e.textContent.slice(0, 40)]);
  }
  return found.sort((x, y) => x[0] - y[0]);
}"""


def fill(backend: Backend) -> None:
    bench = backend.bench
    runs = [bench.decode(factor=f) for f in (1.9, 1.0, 1.04, 0.97, 1.1)]
    runs += [records.cancelled(bench), *(bench.decode(factor=f) for f in (1.02, 0.99, 1.0, 0.94))]
    backend.add(*runs, node="5")
    backend.add(records.video(bench), node="6")
    backend.add(records.out_of_memory(bench), node="7")


@pytest.mark.parametrize(("width", "height"), [(1700, 1000), (900, 700)])
@pytest.mark.parametrize("theme", list(THEMES))
def test_panels_and_tab(theme: str, width: int, height: int, open_page: Open, backend: Backend, pictures: Path) -> None:
    fill(backend)
    page = open_page(theme=theme, width=width, height=height, nodes=_NODES)
    page.wait_for_selector(".halo-vae-panel[data-node='7'][data-state='error']")
    page.evaluate("progress => comfy.api.send('halo_vae.progress', progress)", _PROGRESS)
    page.evaluate("comfy.toggle('halo-vae')")
    page.wait_for_selector("tr[data-record]")
    page.screenshot(path=pictures / f"panels-{theme}-{width}.png", full_page=True)
    wide = page.locator(".halo-vae-panel, .halo-vae-history").evaluate_all(
        "all => all.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.className)"
    )
    assert wide == []
    tall = page.locator(".halo-vae-panel").evaluate_all(
        "all => all.filter((e) => e.scrollHeight > e.clientHeight + 1).map((e) => e.dataset.node)"
    )
    assert tall == []
    contrasts = page.evaluate(_CONTRASTS)
    assert len(contrasts) > 100
    assert [c for c in contrasts if c[0] < LEAST_CONTRAST] == []


@pytest.mark.parametrize("theme", list(THEMES))
def test_a_record_in_full(theme: str, open_page: Open, backend: Backend, pictures: Path) -> None:
    record = records.video(records.Bench("per_op"))
    backend.add(record)
    page = open_page(theme=theme, nodes=())
    page.evaluate("comfy.toggle('halo-vae')")
    page.locator("tr[data-record] button").click()
    page.wait_for_selector(".halo-vae-detail")
    page.locator("#sidebar").evaluate("sidebar => sidebar.style.height = '1750px'")
    page.locator("#sidebar").screenshot(path=pictures / f"record-{theme}.png")
    contrasts = page.evaluate(_CONTRASTS)
    assert [c for c in contrasts if c[0] < LEAST_CONTRAST] == []


def test_a_panel_follows_the_width_of_its_node(open_page: Open, backend: Backend) -> None:
    fill(backend)
    page = open_page(nodes=_NODES[:1])
    page.wait_for_selector(".halo-vae-panel[data-state='ok']")
    bar = page.locator(".halo-vae-stack").first
    node = "comfy.app.rootGraph.getNodeById(5)"
    before = bar.bounding_box()
    page.evaluate(f"{node}.setSize([{node}.size[0] + 200, {node}.size[1]])")
    after = bar.bounding_box()
    assert before is not None
    assert after is not None
    assert after["width"] == pytest.approx(before["width"] + 200, abs=1)
