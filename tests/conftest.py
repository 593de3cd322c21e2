"""Optional test groups: off unless asked for by `--with NAME`; skipped with a reason where something is missing."""

from __future__ import annotations

import importlib.util
import os
import re

import pytest

GROUPS = ("comfyui", "browser", "gpu", "gfx1151", "slow")
GPU_TESTS_ON = "HALO_VAE_GPU_TESTS_ON"
"""Set to "cpu", the tests in tests/gpu run on the CPU: that checks the tests, and tells nothing of a GPU."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--with",
        action="append",
        default=[],
        choices=(*GROUPS, "all"),
        dest="with_groups",
        help="also run the tests of this group; may be given several times",
    )

    parser.addoption(
        "--gpu-report",
        default="gpu-report.json",
        metavar="FILE",
        help="where the tests in tests/gpu write what they found; default gpu-report.json",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = {*config.getoption("with_groups"), *_groups_of(config.getoption("markexpr"))}
    if "gpu" in asked:  # whichever device it is: elsewhere they are skipped with a reason
        asked.add("gfx1151")
    reasons = {group: _reason_to_skip(group, asked) for group in GROUPS}
    for item in items:
        for group in GROUPS:
            if item.get_closest_marker(group) is not None and (reason := reasons[group]) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def _groups_of(marker_expression: str) -> set[str]:
    """Groups that `-m` asks for by name: it is enough to say it once."""
    return {g for g in GROUPS if re.search(rf"(?<!not )\b{g}\b", marker_expression)}


def _reason_to_skip(group: str, asked: set[str]) -> str | None:
    """Why tests of a group do not run here, or None if they do."""
    if not asked & {group, "all"}:
        return f"{group} tests are off; run them with --with {group}"
    return _MISSING[group]() if group in _MISSING else None


def _missing_comfyui() -> str | None:
    return None if os.environ.get("HALO_VAE_COMFYUI") else "HALO_VAE_COMFYUI names no ComfyUI (DIR=PYTHON pairs)"


def _missing_browser() -> str | None:
    from halo_vae.tests.browser.chromium import chromium

    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed; install the extra `browser`"
    return None if chromium() else "no Chromium is installed; HALO_VAE_BROWSER may name one"


def _missing_gpu() -> str | None:
    import torch

    if os.environ.get(GPU_TESTS_ON) == "cpu":
        return None
    return None if torch.cuda.is_available() else "torch sees no CUDA or HIP device"


def _missing_gfx1151() -> str | None:
    import torch

    if (missing := _missing_gpu()) is not None or os.environ.get(GPU_TESTS_ON) == "cpu":
        return missing
    arch = getattr(torch.cuda.get_device_properties(0), "gcnArchName", "")
    return None if arch.lower().split(":")[0] == "gfx1151" else f"the device is {arch or 'not an AMD one'}, not gfx1151"


_MISSING = {
    "comfyui": _missing_comfyui,
    "browser": _missing_browser,
    "gpu": _missing_gpu,
    "gfx1151": _missing_gfx1151,
}


@pytest.fixture(autouse=True)
def _user_folders_of_the_test(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test never writes to the user's own history or tuning store."""
    home = tmp_path_factory.mktemp("user")
    monkeypatch.setenv("HALO_VAE_DATA_DIR", str(home / "data"))
    monkeypatch.setenv("HALO_VAE_CACHE_DIR", str(home / "cache"))


STEADY_MEMORY = 32 << 30
"""System memory that tests plan for: what the machine has free changes from one reading to the next."""
_REAL_MEMORY = ("gpu", "gfx1151", "slow", "comfyui")
"""Groups that measure the machine itself."""


@pytest.fixture
def machine_memory() -> None:
    """Asked for by a test that is about the machine's own reading."""


@pytest.fixture(autouse=True)
def _steady_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plans in one test, or on two machines, have the same budget."""
    if "machine_memory" in request.fixturenames or any(map(request.node.get_closest_marker, _REAL_MEMORY)):
        return
    from halo_vae.optim import device_readers

    steady = device_readers.PoolReading(free_bytes=STEADY_MEMORY, total_bytes=STEADY_MEMORY)
    monkeypatch.setattr(device_readers, "read_host_pool", lambda: steady)
