"""A node's panel and the sidebar's history, as tests read and use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halo_vae.tests.browser.comfy.host import STEP_MS, Host
from halo_vae.tests.browser.comfy.workflows import DECODE

if TYPE_CHECKING:
    from playwright.sync_api import Locator

TAB = "halo-vae"


class Panel:
    """The panel of one node."""

    def __init__(self, host: Host, node: int = DECODE) -> None:
        self.host = host
        self.root: Locator = host.page.locator(f'.halo-vae-panel[data-node="{node}"]')
        self._selector = f'.halo-vae-panel[data-node="{node}"]'

    def wait_for(self, state: str, timeout_ms: int = STEP_MS) -> None:
        self.host.page.wait_for_selector(
            f'{self._selector}[data-state="{state}"]', state="attached", timeout=timeout_ms
        )

    @property
    def record_id(self) -> str:
        return self.root.get_attribute("data-record") or ""

    def figures(self) -> dict[str, tuple[str, str]]:
        """The raw value and the text of each figure, by name."""
        found = self.root.locator("[data-figure]").evaluate_all(
            "all => all.map(e => [e.dataset.figure, e.dataset.value ?? '', e.textContent.trim()])"
        )
        return {name: (value, text) for name, value, text in found}

    @property
    def text(self) -> str:
        return self.root.inner_text()


class History:
    """The sidebar's tab."""

    def __init__(self, host: Host) -> None:
        self.host, self.page = host, host.page
        self.root = host.page.locator(".halo-vae-history")
        self.rows = self.root.locator("tbody tr[data-record]")
        self.message = self.root.locator(".halo-vae-message")

    def open(self) -> None:
        self.page.locator(f".{TAB}-tab-button").click()
        self.root.wait_for()

    def start_over(self) -> None:
        """The newest decodes, all of them."""
        back = self.root.locator('[data-action="back"]')
        if back.is_visible():
            back.click()
        self.root.locator('[data-filter="outcome"]').select_option("")
        self.root.locator('[data-filter="vae"]').fill("")
        if self.root.locator('th[data-column="started_at"]').get_attribute("aria-sort") != "descending":
            self.sort("started_at")
            self.sort("started_at")
        self.root.locator('[data-action="refresh"]').click()

    def ids(self) -> list[str]:
        return self.rows.evaluate_all("all => all.map(e => e.dataset.record)")  # type: ignore[no-any-return]

    def column(self, name: str) -> list[str]:
        cells = self.rows.locator(f'[data-cell="{name}"]')
        return cells.evaluate_all("all => all.map(e => e.textContent.trim())")  # type: ignore[no-any-return]

    def sort(self, column: str) -> None:
        self.root.locator(f'th[data-column="{column}"] button').click()

    def wait_for_rows(self, n: int) -> None:
        self.page.wait_for_function(
            "n => document.querySelectorAll('.halo-vae-history tbody tr[data-record]').length === n", arg=n
        )

    def export(self, form: str, folder: Path) -> tuple[str, str]:
        """Press a button for a file; gives its name and its text."""
        with self.page.expect_download() as waiting:
            self.root.locator(f'[data-export="{form}"]:visible').click()
        path = folder / f"{form}-{waiting.value.suggested_filename}"
        waiting.value.save_as(path)
        return waiting.value.suggested_filename, path.read_text("utf-8")


def record_of(host: Host, record_id: str) -> dict[str, Any]:
    return host.server.get(f"/halo_vae/records/{record_id}")  # type: ignore[no-any-return]


def row_of(host: Host, record_id: str) -> dict[str, Any]:
    rows = host.server.get("/halo_vae/history")["rows"]
    return next(row for row in rows if row["record_id"] == record_id)  # type: ignore[no-any-return]


def numbers_in(value: Any) -> set[str]:
    """Every number with more digits than a setting has, as text: what is measured and no part of a workflow."""
    if isinstance(value, dict):
        return set().union(*map(numbers_in, value.values()), set())
    if isinstance(value, list):
        return set().union(*map(numbers_in, value), set())
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {json.dumps(value)} if is_number and len(str(value)) > 5 else set()
