"""A browser on a stand-in for ComfyUI's page; what the page writes to its console fails the test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from halo_vae.tests.browser.chromium import chromium
from halo_vae.tests.browser.server import Backend, frontend, serving
from halo_vae.tests.browser.themes import THEMES

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PICTURES = "HALO_VAE_SCREENSHOTS"
"""A folder that keeps the screenshots; without it they go with the test's own."""
Open = Callable[..., "Page"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def open_page(browser: Browser, backend: Backend) -> Iterator[Open]:
    """Opens the page: `open_page(theme="light", width=800, nodes=[("HaloVAEDecode", 5)], scale=1)`."""
    if frontend() is None:
        pytest.skip("comfyui-frontend-package is not installed")
    contexts, said = [], list[str]()

    with serving(backend) as address:

        def make(*, theme: str = "dark", width: int = 1200, height: int = 940, nodes: Any = None, scale: float = 1) -> Page:
            context = browser.new_context(
                viewport={"width": width, "height": height}, accept_downloads=True, device_scale_factor=scale
            )
            contexts.append(context)
            page = context.new_page()
            page.on("console", lambda m: said.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None)
            page.on("pageerror", lambda e: said.append(f"exception: {e}"))
            page.on("request", lambda r: None if r.url.startswith((address, "data:", "blob:")) else said.append(f"asked {r.url}"))
            page.goto(address)
            page.wait_for_selector("html[data-ready]")
            page.evaluate("([dark, values]) => { document.body.classList.toggle('dark-theme', dark);"
                          " for (const [k, v] of Object.entries(values)) document.documentElement.style.setProperty(k, v); }",
                          [theme == "dark", THEMES[theme]])  # fmt: skip
            given = [("HaloVAEDecode", 5)] if nodes is None else nodes
            page.evaluate("nodes => comfy.load(nodes)", [list(node) for node in given])
            return page

        yield make
        for context in contexts:
            context.close()
    assert not backend.refuse and said == [], said


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get(PICTURES)
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
