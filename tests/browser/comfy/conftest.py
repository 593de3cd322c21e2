"""One ComfyUI server for each checkout, started when the first test asks for it, and pages of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from halo_vae.tests.browser.comfy.host import DEFAULTS, Host
from halo_vae.tests.browser.comfy.workflows import Workflows
from halo_vae.tests.comfyui.installs import Install, installs
from halo_vae.tests.comfyui.prompts import write_full_vae, write_latent
from halo_vae.tests.comfyui.server import Server, prepare_base, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PICTURES = "HALO_VAE_SCREENSHOTS"
"""A folder that keeps the screenshots; without it they go with the test's own."""
MakeHost = Callable[..., Host]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.comfyui)


@pytest.fixture(scope="session", params=installs() or [None], ids=lambda install: install.name if install else "none")
def install(request: pytest.FixtureRequest) -> Install:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def server(install: Install, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = prepare_base(tmp_path_factory.mktemp("browser") / install.name)
    write_latent(base, "small.latent", (1, 4, 12, 20))
    write_latent(base, "large.latent", (1, 4, 128, 128))
    write_latent(base, "wrong.latent", (1, 16, 8, 8))
    write_full_vae(base)
    with running(install, base) as server:
        yield server


@pytest.fixture(scope="session")
def workflows(install: Install, server: Server) -> Workflows:
    # older versions of ComfyUI know decoders of one width only, and the demo's is narrower
    vae = "tiny_kl_vae.safetensors" if install.version >= (0, 3, 70) else "full.safetensors"
    return Workflows(server.base, vae)


@pytest.fixture(scope="session")
def make_host(browser: Browser, server: Server, install: Install) -> Iterator[MakeHost]:
    """Makes pages, each with a memory of its own."""
    hosts = []

    def make(width: int = 1440, height: int = 900) -> Host:
        context = browser.new_context(viewport={"width": width, "height": height}, accept_downloads=True)
        hosts.append(Host(context.new_page(), server, install))
        return hosts[-1]

    yield make
    for host in hosts:
        host.page.context.close()


@pytest.fixture(scope="session")
def pages(make_host: MakeHost) -> dict[str, Host]:
    """One page for each way of drawing nodes, opened when it is first asked for: opening one takes seconds."""
    return {}


@pytest.fixture
def host(renderer: str, make_host: MakeHost, pages: dict[str, Host]) -> Iterator[Host]:
    """A page with our settings at their defaults; nothing of ours complains in its console during the test."""
    if renderer not in pages:
        pages[renderer] = make_host()
        pages[renderer].open(**{"Comfy.VueNodes.Enabled": renderer == "vue"})
    host = pages[renderer]
    host.tidy(DEFAULTS)
    yield host
    assert host.take_complaints() == []


@pytest.fixture
def renderer() -> str:
    """Who draws the nodes: the canvas (`classic`) or `vue`; tests of panels take both."""
    return "classic"


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get(PICTURES)
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
