"""What tests of the page do with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from halo_vae.profiling.record import DecodeRecord
    from halo_vae.tests.browser.server import Backend

_FRAME = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def send(page: Page, event: str, **detail: Any) -> None:
    page.evaluate("([event, detail]) => comfy.api.send(event, detail)", [event, detail])
    page.evaluate(_FRAME)


def ended(page: Page, panel: Any, node: str = "5") -> None:
    """What a page hears when a node has decoded."""
    send(page, "execution_start", prompt_id="p")
    send(page, "halo_vae.ended", node=node, prompt_id="p", panel=panel)
    executed(page, panel, node)


def executed(page: Page, panel: Any, node: str = "5") -> None:
    output = {"text": ["…"], "halo_vae": [panel]}
    page.evaluate("([node, output]) => comfy.executed(Number(node), output)", [node, output])
    page.evaluate(_FRAME)


def panel_of(page: Page, node: int = 5) -> Locator:
    page.evaluate(_FRAME)
    return page.locator(f".halo-vae-panel[data-node='{node}']")


def figure(panel: Locator, name: str) -> tuple[str, str]:
    """A figure's raw value and its text."""
    found = panel.locator(f"[data-figure='{name}']")
    return found.get_attribute("data-value") or "", found.inner_text()


def warm_runs(backend: Backend, *factors: float) -> list[DecodeRecord]:
    return [backend.bench.decode(factor=factor) for factor in factors]


def progress(**changed: Any) -> dict[str, Any]:
    return {
        "node": "5", "prompt_id": "p", "stage": "decode", "phase": "compute", "chunk": None,
        "op": [17, 64, "decoder.up.2.conv1"], "tile": [3, 9], "done": 412, "total": 1000,
        "elapsed_ns": 2_200_000_000, "memory_bytes": 3 << 30, "work_per_s": 196.0,
    } | changed  # fmt: skip
