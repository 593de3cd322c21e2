"""One server per ComfyUI, started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from halo_vae.tests.comfyui.installs import Install, installs
from halo_vae.tests.comfyui.prompts import write_full_vae, write_latent, write_wan_vae
from halo_vae.tests.comfyui.server import Server, prepare_base, running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.comfyui)


@pytest.fixture(scope="session", params=installs() or [None], ids=lambda install: install.name if install else "none")
def install(request: pytest.FixtureRequest) -> Install:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def base(install: Install, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare_base(tmp_path_factory.mktemp("comfyui") / install.name)
    write_latent(folder, "small.latent", (1, 4, 12, 20))
    write_latent(folder, "medium.latent", (1, 4, 16, 28))
    write_latent(folder, "pair.latent", (2, 4, 8, 8))
    write_full_vae(folder)
    write_wan_vae(folder, any_width=install.version >= (0, 4))
    return folder


@pytest.fixture(scope="session")
def vae(install: Install) -> str:
    """A VAE file this ComfyUI loads: older ones know decoders of one width only, and the demo's is narrower."""
    return "tiny_kl_vae.safetensors" if install.version >= (0, 3, 70) else "full.safetensors"


@pytest.fixture
def calm(server: Server) -> Iterator[None]:
    """Nothing in the test makes ComfyUI log a traceback."""
    before = len(server.log)
    yield
    assert "Traceback" not in server.log[before:]


@pytest.fixture(scope="session")
def server(install: Install, base: Path) -> Iterator[Server]:
    with running(install, base) as server:
        yield server
