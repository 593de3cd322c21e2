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
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page

PICTURES = "HALO_VAE_SCREENSHOTS"
"""A folder that keeps the screenshots; without it they go with the test's own."""
Open = Callable[..., "Page"]
_NODE = ("HaloVAEDecode", 5, "VAE Decode (Halo)")
_SET_THEME = """([isDark, values]) => {
  document.body.classList.toggle("dark-theme", isDark);
  for (const [name, value] of Object.entries(values)) document.documentElement.style.setProperty(name, value);
}"""


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
def backend(tmp_path: Path) -> Backend:
    return Backend(tmp_path)


@pytest.fixture
def open_page(browser: Browser, backend: Backend) -> Iterator[Open]:
    """Opens the page: `open_page(theme="light", width=800, nodes=[("HaloVAEDecode", 5)])`."""
    if frontend() is None:
        pytest.skip("comfyui-frontend-package is not installed")
    contexts: list[BrowserContext] = []
    said: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not backend.refuse:
            said.append(f"{message.type}: {message.text}")

    with serving(backend) as address:

        def make(*, theme: str = "dark", width: int = 1200, height: int = 940, nodes: Any = (_NODE,)) -> Page:
            context = browser.new_context(viewport={"width": width, "height": height}, accept_downloads=True)
            contexts.append(context)
            page = context.new_page()
            page.set_default_timeout(10_000)
            page.on("console", hear)
            page.on("pageerror", lambda error: said.append(f"exception: {error}"))
            page.on("request", lambda request: said.extend(_foreign(request.url, address)))
            page.goto(address)
            page.wait_for_selector("html[data-ready]")
            page.evaluate(_SET_THEME, [theme.startswith("dark"), THEMES[theme]])
            page.evaluate("nodes => comfy.load(nodes)", [list(node) for node in nodes])
            return page

        yield make
        for context in contexts:
            unheard = [page.evaluate("comfy.api.unheard") for page in context.pages]
            said.extend(f"nobody listens to {name}" for names in unheard for name in names)
            context.close()
    assert said == []


def _foreign(url: str, address: str) -> list[str]:
    """A complaint about a request that leaves the server."""
    return [] if url.startswith((address, "data:", f"blob:{address}")) else [f"asked {url}"]


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get(PICTURES)
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
