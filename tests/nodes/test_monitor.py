"""The monitor's panel and the advice on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halo_vae.nodes import actions, monitor
from halo_vae.nodes.advice import advise
from halo_vae.optim.errors import LatentError
from halo_vae.optim.events import Fallback
from halo_vae.profiling.bandwidth import PROCESS_RATES
from halo_vae.profiling.doctor_facts import Facts
from halo_vae.profiling.environment import read_environment
from halo_vae.profiling.record import DecodeRecord, DecodeStatus
from halo_vae.profiling.render.units import format_bytes, format_rate
from halo_vae.profiling.store import HistoryStore
from halo_vae.tests.fixtures import ConvDec, FakeVAE, latent
from halo_vae.tests.nodes.fake_host import GIB, FakeHost
from halo_vae.tests.nodes.support import kl_vae, new_session
from halo_vae.tests.optim.profiles import profile_of
from halo_vae.tests.profiling.doctor_fakes import STRIX_HALO, change

SAMPLES = {"samples": latent((2, 4, 6, 10))}


@pytest.fixture(scope="module")
def ok() -> DecodeRecord:
    return actions.decode(new_session(), SAMPLES, kl_vae()).record


def failed(record: DecodeRecord, status: DecodeStatus) -> DecodeRecord:
    return replace(record, status=status, error="it went wrong", image_shape=None)


def repaired(record: DecodeRecord, kind: str, given: str) -> DecodeRecord:
    event = Fallback(kind=kind, where="conv", given=given, used="float32", reason="")  # type: ignore[arg-type]
    return replace(record, fallbacks=(event,), n_fallbacks=1)


def blended(record: DecodeRecord) -> DecodeRecord:
    assert record.plan is not None
    request = replace(record.request, settings=replace(record.request.settings, method="blended"))
    return replace(record, plan=replace(record.plan, method="blended", approximate=True), request=request)


def uncached(record: DecodeRecord) -> DecodeRecord:
    settings = replace(record.request.settings, advanced_caching=False)
    return replace(record, request=replace(record.request, settings=settings))


def test_no_advice_where_all_is_well(ok: DecodeRecord) -> None:
    assert advise([]) == ()
    assert advise([ok, ok, ok]) == ()


def test_advice_by_what_happened(ok: DecodeRecord) -> None:
    lost = failed(ok, DecodeStatus.OUT_OF_MEMORY)
    assert advise([ok, lost])[0].startswith("1 decode ran out of memory")
    again = repaired(ok, "out_of_memory", "1024")
    assert advise([again]) == ()
    assert "2 decodes had to do with less memory" in advise([again, again])[0]
    assert "turn adaptive_precision on" in advise([failed(ok, DecodeStatus.NON_FINITE)])[0]
    widened = repaired(ok, "non_finite", "float16")
    assert "where float16 overflowed" in advise([widened, widened])[0]
    assert "no exact decoder is known for kl" in advise([repaired(ok, "method", "exact")])[0]
    assert "1 decode blended tiles of a VAE that method auto decodes exactly" in advise([ok, blended(ok)])[0]
    assert advise([blended(ok)]) == ()
    assert "advanced_caching is off" in advise([uncached(ok)] * 2)[0]
    assert advise([uncached(ok), ok]) == ()


def test_new_shapes_are_pointed_out_on_hip_only(ok: DecodeRecord) -> None:
    new = replace(ok, first_of_shape=True)
    assert advise([new] * 5) == ()
    on_hip = replace(new, environment=replace(new.environment, hip="7.1"))
    assert "convolution shapes" in advise([on_hip] * 5)[0]
    seen = replace(on_hip, first_of_shape=False)
    assert advise([on_hip] * 4 + [seen] * 5) == ()


def test_panel_without_inputs(tmp_path: Path) -> None:
    host = FakeHost(free=3 * GIB)
    text = actions.monitor(new_session(host, store=HistoryStore(tmp_path / "history.jsonl")))
    assert "3.00 GiB" in text
    assert "nothing was decoded yet" in text
    assert "VAE\n" not in text
    rate = PROCESS_RATES.known("cpu")  # the monitor measured it
    assert rate is not None
    assert f"plain copy {format_rate(rate)}" in " ".join(text.split())


def test_panel_of_a_known_vae(tmp_path: Path) -> None:
    session = new_session(store=HistoryStore(tmp_path / "history.jsonl"))
    actions.decode(session, SAMPLES, kl_vae())
    text = actions.monitor(session, kl_vae(), SAMPLES)
    assert "auto chooses  exact" in text
    assert "its weights are those of a kl decoder" in text
    assert text.count("Plan for") == 1
    assert "Plan for 2×4×6×10 (24×40 px)" in text
    assert "History of the last 1 decode\n" in text
    assert actions.monitor(session, kl_vae()).count("Plan for") == 3


def test_panel_of_an_unknown_vae() -> None:
    session, vae = new_session(), FakeVAE(ConvDec())
    text = actions.monitor(session, vae, SAMPLES)
    assert "auto chooses  blended" in text
    assert "no known decoder has these weights" in text
    assert vae.first_stage_model.log == []
    assert session.collector.records() == ()


def test_plan_that_does_not_fit_is_told() -> None:
    text = actions.monitor(new_session(FakeHost(total=1 << 20)), kl_vae())
    assert "1 MiB are free" in text


def test_wrong_latent_is_refused() -> None:
    with pytest.raises(LatentError, match="16 channels"):
        actions.monitor(new_session(), kl_vae(), {"samples": latent((1, 16, 8, 8))})


def test_stats_take_a_record_only(ok: DecodeRecord) -> None:
    assert actions.show_stats(new_session(), ok).startswith("Halo VAE · kl on cpu: 2×4×6×10")
    with pytest.raises(ValueError, match="connect the STATS output"):
        actions.show_stats(new_session(), {"status": "ok"})  # type: ignore[arg-type]


def test_panel_shows_the_doctors_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = change(STRIX_HALO, flags={"cudnn_benchmark": True, "sdpa_flash": True})
    asked: list[dict[str, Any]] = []

    def read(device: str, **options: Any) -> Facts:
        asked.append({"device": device, **options})
        return facts

    monkeypatch.setattr(monitor, "read_facts", read)
    session = new_session()
    text = actions.monitor(session)
    (line,) = (line for line in text.splitlines() if "cudnn.benchmark" in line)
    assert line.split()[0] == "warning"
    assert "torch's fused attention on ROCm" not in text  # a note, for the whole report
    assert asked[0]["disk"] is False
    assert not asked[0].get("import_packages")
    assert asked[0]["held_bytes"] == session.held_bytes()
    monkeypatch.setattr(monitor, "read_facts", lambda device, **options: STRIX_HALO)
    assert "Warnings" not in actions.monitor(session)


def test_the_device_is_shown_with_its_chip_its_memory_and_the_reasons_of_its_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = profile_of("gfx1151")
    seen = replace(
        read_environment("cpu"), device="Radeon 8060S Graphics", device_arch="gfx1151", device_family="rdna3.5",
        compute_units=40, hip="7.1.25424", rocm="7.1.0", miopen="3005001", driver="Linux 6.17.0",
    )  # fmt: skip
    monkeypatch.setattr(monitor, "read_environment", lambda device: seen)
    session = new_session(FakeHost(total=None))
    monkeypatch.setattr(type(session.engine), "device_profile", lambda self, device: machine)
    text = actions.monitor(session, None, None)
    assert "gfx1151, rdna3.5, 40 compute units" in text
    for version in ("HIP 7.1.25424", "ROCm 7.1.0", "MIOpen 3005001", "driver Linux 6.17.0"):
        assert version in text
    assert f"memory for a decode   {format_bytes(63 * GIB)}" in text
    assert "limited by what HIP calls free" in text
    for reason in (machine.reasons.layout, machine.reasons.batch_cap, machine.reasons.attention):
        assert reason in text
