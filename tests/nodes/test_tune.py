"""The node that tunes: what the host is asked, how it is stopped, and what later decodes say."""

from __future__ import annotations

from pathlib import Path

import pytest

from halo_vae.nodes import actions
from halo_vae.nodes.session import Session
from halo_vae.optim import tune as tuning_loop
from halo_vae.optim.errors import HaloError, SettingsError
from halo_vae.optim.tuning import Overrides, TuningStore
from halo_vae.profiling.store import HistoryStore
from halo_vae.tests.fixtures import ConvDec, FakeVAE, latent
from halo_vae.tests.nodes.fake_host import FakeHost, Interrupted
from halo_vae.tests.nodes.support import kl_vae, new_session

SAMPLES = {"samples": latent((1, 4, 6, 6))}
TRIED = Overrides(strategy="tiles")


@pytest.fixture(autouse=True)
def one_candidate_that_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_loop, "PROBES", (2, 4))
    monkeypatch.setattr(tuning_loop, "candidates", lambda decoder, profile, options: [[TRIED]])
    monkeypatch.setattr(tuning_loop, "GAIN", -100.0)


def session_at(tmp_path: Path, host: FakeHost) -> Session:
    store = HistoryStore(tmp_path / "history.jsonl")
    return Session(host, level="summary", store=store, tuning=TuningStore(tmp_path / "tuning.json"))


def test_later_decodes_use_what_was_found(tmp_path: Path) -> None:
    host = FakeHost()
    session, vae = session_at(tmp_path, host), kl_vae()
    before = actions.decode(session, SAMPLES, vae).record
    host.loads.clear()
    text = actions.tune(session, vae)
    assert "strategy tiles" in text
    assert text.startswith("Halo VAE · tuning on cpu")
    assert len(host.loads) == 1
    assert host.loads[0] > 0
    assert host.bars[-1][0] == (0, 1)
    assert host.bars[-1][-1] == (1, 1)
    after = actions.decode(session, SAMPLES, vae)
    assert "tuned: plan" in actions.show_stats(session, after.record)
    assert "tuned: none" in actions.show_stats(session, before)
    by_name = {c.name: c for c in after.record.plan.choices} if after.record.plan else {}
    assert by_name["plan"].value == "tiles"
    assert by_name["plan"].reason.startswith("tuned:")


def test_tuning_is_no_decode_of_the_records(tmp_path: Path) -> None:
    session = session_at(tmp_path, FakeHost())
    actions.tune(session, kl_vae())
    assert session.collector.records() == ()
    assert session.collector.metrics().total_executions == 0
    assert session.store is not None
    assert session.store.read().records == ()
    assert session.held_bytes() == 0


def test_without_caching_it_is_not_looked_up(tmp_path: Path) -> None:
    session, vae = session_at(tmp_path, FakeHost()), kl_vae()
    actions.tune(session, vae)
    record = actions.decode(session, SAMPLES, vae, advanced_caching=False).record
    assert "tuned: none" in actions.show_stats(session, record)
    assert [c.lookups for c in record.caches or () if c.name == "tuning"] == [0]


@pytest.mark.parametrize("checks", [0, 1, 3])
def test_the_host_can_stop_it_at_any_decode(checks: int, tmp_path: Path) -> None:
    session = session_at(tmp_path, FakeHost(interrupt_after=checks))
    with pytest.raises(Interrupted):
        actions.tune(session, kl_vae())
    assert TuningStore(tmp_path / "tuning.json").entries() == ()  # the rules' own time was not complete


def test_stopped_later_it_keeps_what_was_measured(tmp_path: Path) -> None:
    session = session_at(tmp_path, FakeHost(interrupt_after=9))
    with pytest.raises(Interrupted):
        actions.tune(session, kl_vae())
    (kept,) = TuningStore(tmp_path / "tuning.json").entries()
    assert not kept.complete


def test_what_cannot_be_tuned_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HaloError, match="not decoded exactly: no known decoder"):
        actions.tune(new_session(), FakeVAE(ConvDec()))
    with pytest.raises(SettingsError, match="budget"):
        actions.tune(session_at(tmp_path, FakeHost()), kl_vae(), budget_seconds=0)
    session = session_at(tmp_path, FakeHost())
    monkeypatch.setattr(session, "tuning", None)
    with pytest.raises(HaloError, match="HALO_VAE_CACHE_DIR"):
        actions.tune(session, kl_vae())


def test_the_monitor_says_what_to_tune_next(tmp_path: Path) -> None:
    session, vae = session_at(tmp_path, FakeHost()), kl_vae()
    for _ in range(2):
        actions.decode(session, SAMPLES, vae)
    text = actions.monitor(session)
    assert "0 entries" in text
    assert "kl in float32 on cpu" in text
    assert "2 decodes took" in text
    actions.tune(session, vae)
    actions.decode(session, SAMPLES, vae)
    text = actions.monitor(session)
    assert "1 entry" in text
    assert "tune next" not in text
