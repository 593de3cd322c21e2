"""The user's settings in the host's dialog: what they change, when, and what becomes of bad ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from halo_vae.nodes import actions
from halo_vae.nodes.session import Session
from halo_vae.nodes.user_settings import SettingsReader, UserSettings
from halo_vae.profiling.store import MAX_BYTES, HistoryStore
from halo_vae.tests.fixtures import latent
from halo_vae.tests.nodes.fake_host import FakeHost
from halo_vae.tests.nodes.support import kl_vae

SAMPLES = {"samples": latent((1, 4, 6, 6))}


def read(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> UserSettings:
    return SettingsReader(lambda: given, environ or {}).read()


def test_nothing_set_is_the_default(caplog: pytest.LogCaptureFixture) -> None:
    assert read({}) == UserSettings()
    assert caplog.text == ""


def test_every_setting_is_read(caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "HaloVAE.Profile": "per_op", "HaloVAE.HistorySize": 2, "HaloVAE.Panel": False, "HaloVAE.Units": "decimal",
        "Comfy.ColorPalette": "dark",
    }  # fmt: skip
    assert read(given) == UserSettings(
        level="per_op", level_from="settings", history_bytes=2 << 20, units="decimal", panel=False
    )
    assert caplog.text == ""


def test_the_environment_wins() -> None:
    found = read({"HaloVAE.Profile": "per_op"}, {"HALO_VAE_PROFILE": "off"})
    assert (found.level, found.level_from) == ("off", "environment")
    assert read({"HaloVAE.Profile": "per_op"}, {"HALO_VAE_PROFILE": ""}).level == "per_op"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HaloVAE.Profile", "all"), ("HaloVAE.Profile", 3), ("HaloVAE.Profile", ["off"]),
        ("HaloVAE.HistorySize", 0), ("HaloVAE.HistorySize", "9"), ("HaloVAE.HistorySize", True),
        ("HaloVAE.HistorySize", 1e9), ("HaloVAE.HistorySize", float("nan")), ("HaloVAE.Panel", "no"),
        ("HaloVAE.Units", "si"), ("HaloVAE.Units", {}),
    ],
)  # fmt: skip
def test_a_bad_value_is_told_once_and_left_out(name: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    reader = SettingsReader(lambda: {name: value}, {})
    for _ in range(3):
        found = reader.read()
    assert (found.level, found.history_bytes, found.panel, found.units) == ("summary", MAX_BYTES, True, "binary")
    (line,) = caplog.records
    assert line.getMessage().startswith(f"{name} is ")
    assert "it may be" in line.getMessage()


def test_a_file_that_cannot_be_read_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def damaged() -> Mapping[str, Any]:
        raise ValueError("/home/someone/comfy.settings.json is no JSON")

    reader = SettingsReader(damaged, {})
    assert reader.read() == reader.read() == UserSettings()
    (line,) = caplog.records
    assert "/home" not in line.getMessage()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    monkeypatch.delenv("HALO_VAE_PROFILE", raising=False)
    return FakeHost()


def test_a_changed_profile_holds_for_the_next_decode(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    session, vae = Session(host, keep_history=False), kl_vae()
    for level in ("per_op", "off", "summary"):
        host.settings = {"HaloVAE.Profile": level}
        assert actions.decode(session, SAMPLES, vae).record.level == level
    monkeypatch.setenv("HALO_VAE_PROFILE", "off")
    assert actions.decode(session, SAMPLES, vae).record.level == "off"


def test_a_changed_size_holds_for_the_next_decode(host: FakeHost, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    session, vae = Session(host, store=HistoryStore(path, max_bytes=1)), kl_vae()
    actions.decode(session, SAMPLES, vae)
    actions.decode(session, SAMPLES, vae)
    assert len(path.read_text("utf-8").splitlines()) == 1  # each in a file of its own
    host.settings = {"HaloVAE.HistorySize": 1}
    actions.decode(session, SAMPLES, vae)
    assert len(path.read_text("utf-8").splitlines()) == 2
    assert len(session.store.read().records) == 3


def test_units_of_the_text(host: FakeHost) -> None:
    session = Session(host, keep_history=False)
    record = actions.decode(session, SAMPLES, kl_vae()).record
    assert "KiB" in actions.show_stats(session, record)
    host.settings = {"HaloVAE.Units": "decimal"}
    text = actions.show_stats(session, record)
    assert "KiB" not in text
    assert "kB" in text
    host.settings = {}
    assert "KiB" in actions.show_stats(session, record)
