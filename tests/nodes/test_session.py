"""The way of a decode through the nodes: what the host is asked, what is recorded, what is kept."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from halo_vae.nodes import actions
from halo_vae.nodes import session as session_module
from halo_vae.nodes.session import Session, needed_bytes
from halo_vae.nodes.user_settings import read_level
from halo_vae.nodes.vae import VaeError
from halo_vae.optim.errors import LatentError, UnknownDecoderError
from halo_vae.profiling.record import DecodeStatus
from halo_vae.profiling.store import HistoryStore
from halo_vae.tests.cases.support import max_diff
from halo_vae.tests.fixtures import ConvDec, FakeVAE, PointDec, latent
from halo_vae.tests.nodes.fake_host import GIB, FakeHost, Interrupted
from halo_vae.tests.nodes.support import KLModel, kl_vae, new_session, stock
from halo_vae.tests.optim.profiles import profile_of

Z = latent((1, 4, 12, 20))


def test_known_vae_is_decoded_exactly_and_recorded() -> None:
    session, vae = new_session(), kl_vae()
    done = actions.decode(session, {"samples": Z}, vae)
    assert max_diff(done.images, stock(kl_vae(), Z)) <= 1e-4
    assert vae.first_stage_model.calls == []
    assert done.record.status is DecodeStatus.OK
    assert (done.record.identity.family, done.record.plan.method) == ("kl", "exact")
    assert done.record.image_shape == tuple(done.images.shape)
    assert session.collector.records() == (done.record,)


def test_unknown_vae_is_blended_and_says_why() -> None:
    done = actions.decode(new_session(), {"samples": latent((1, 4, 8, 8))}, FakeVAE(ConvDec()))
    assert done.record.plan.method == "blended"
    (fallback,) = done.record.fallbacks
    assert (fallback.kind, fallback.given, fallback.used) == ("method", "exact", "blended")
    assert "no known decoder" in fallback.reason
    blended = actions.decode(new_session(), {"samples": Z}, FakeVAE(ConvDec()), method="blended")
    assert blended.record.fallbacks == ()  # it was asked for


def test_exact_on_an_unknown_vae_is_an_error_that_says_why() -> None:
    session = new_session()
    with pytest.raises(UnknownDecoderError, match=r"no known decoder.*blended"):
        actions.decode(session, {"samples": Z}, FakeVAE(ConvDec()), method="exact")
    (record,) = session.collector.records()
    assert record.status is DecodeStatus.ERROR


def circular(model: KLModel) -> None:
    model.decoder.conv_in.padding_mode = "circular"


def replaced(model: KLModel) -> None:
    model.decoder.conv_out.forward = model.decoder.conv_out.forward  # type: ignore[method-assign]


def hooked(model: KLModel) -> None:
    model.decoder.norm_out.register_forward_hook(lambda *given: None)


def decode_replaced(model: KLModel) -> None:
    model.decode = model.decode  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [circular, replaced, hooked, decode_replaced])
def test_changed_model_is_decoded_by_its_own_call(change: Any) -> None:
    vae = kl_vae()
    change(vae.first_stage_model)
    done = actions.decode(new_session(), {"samples": Z}, vae)
    assert done.record.plan.method == "blended"
    assert "was changed" in done.record.fallbacks[0].reason
    assert len(vae.first_stage_model.calls) == 1


def test_vae_that_contradicts_its_weights_is_not_decoded_exactly() -> None:
    vae = kl_vae()
    vae.upscale_ratio = 8
    assert "x4" in new_session().decoders.of(vae).reason
    assert new_session().decoders.of(vae).decoder is None


def test_host_is_asked_for_the_planned_peak_once() -> None:
    host = FakeHost()
    session, vae = new_session(host), kl_vae()
    record = actions.decode(session, {"samples": Z}, vae).record
    assert host.loads == [record.plan.predicted.total]
    # what the pool holds by now is in use already, and repacked weights are there
    again = actions.decode(session, {"samples": Z}, vae).record
    assert host.loads[1] == again.plan.predicted.scratch + again.plan.predicted.packed + again.plan.predicted.output
    assert host.loads[1] < host.loads[0]


def test_output_elsewhere_is_not_asked_for() -> None:
    host, vae = FakeHost(), kl_vae()
    vae.output_device = torch.device("meta")
    plan = new_session(host).engine.plan(new_session(host).decoders.of(vae).decoder, (1, 4, 8, 8)).summary
    peak = plan.predicted
    assert needed_bytes(plan, 0, torch.device("cpu"), vae) == peak.total - peak.output
    assert needed_bytes(plan, peak.pool + 1, torch.device("cpu"), vae) == peak.scratch + peak.packed


def test_me_1_blended_asks_for_a_tile_and_stock_for_itself() -> None:
    vae = FakeVAE(PointDec())
    z = torch.zeros(1, 4, 512, 512)
    host = FakeHost()
    actions.decode(new_session(host), {"samples": z}, vae, method="blended", tile_size=512, overlap=0)
    full = vae.memory_used_decode((1, 4, 512, 512), torch.float32)
    picture = 4 * 3 * 4096 * 4096
    assert max(max(shape[2:]) for shape in vae.mem_shapes[:-1]) <= 64
    assert host.loads[0] - picture <= full / 30
    host = FakeHost()
    done = actions.decode(new_session(host), {"samples": Z}, vae, method="stock")
    assert host.loads == []  # the host's own decode loads for itself
    assert done.record.plan.predicted.scratch == vae.memory_used_decode(tuple(Z.shape), torch.float32)


@pytest.mark.parametrize("method", ["exact", "blended"])
def test_cp_3_interrupt_stops_within_a_tile(method: str) -> None:
    host = FakeHost(interrupt_after=3)
    session, vae = new_session(host), kl_vae()
    with pytest.raises(Interrupted):
        actions.decode(session, {"samples": Z}, vae, method=method, tile_size=16, overlap=0)
    assert host.checks == 4
    assert len(vae.first_stage_model.calls) <= 2
    (record,) = session.collector.records()
    assert record.status is DecodeStatus.INTERRUPTED
    host.interrupt_after = None
    assert max_diff(actions.decode(session, {"samples": Z}, vae).images, stock(kl_vae(), Z)) <= 1e-4


@pytest.mark.parametrize("method", ["exact", "blended"])
def test_cp_4_progress_reaches_its_total(method: str) -> None:
    host = FakeHost()
    actions.decode(new_session(host), {"samples": Z}, kl_vae(), method=method, tile_size=16, overlap=0)
    (steps,) = host.bars
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert len({total for _, total in steps}) == 1
    assert steps[-1][0] == steps[-1][1]


def test_stock_shows_the_hosts_own_progress_only() -> None:
    host = FakeHost()
    actions.decode(new_session(host), {"samples": Z}, kl_vae(), method="stock")
    assert host.bars == []


@pytest.mark.parametrize("method", ["exact", "blended"])
def test_picture_has_the_hosts_dtype(method: str) -> None:
    done = actions.decode(new_session(FakeHost(dtype=torch.float16)), {"samples": Z}, kl_vae(), method=method)
    assert done.images.dtype == torch.float16
    assert max_diff(done.images.float(), stock(kl_vae(), Z)) <= 1e-3
    assert not done.images.is_inference()


def test_free_empties_pool_and_packed_weights() -> None:
    host = FakeHost()
    session, vae = new_session(host), kl_vae()
    first = actions.decode(session, {"samples": Z}, vae).images
    assert session.engine.pool.held_bytes > 0
    assert session.decoders.packed_bytes > 0
    assert host.held() == session.engine.pool.held_bytes + session.decoders.packed_bytes
    host.release()
    assert host.held() == 0
    assert torch.equal(actions.decode(session, {"samples": Z}, vae).images, first)


def test_mp_7_decoders_belong_to_their_vae_and_patch() -> None:
    host = FakeHost()
    session, vae = new_session(host), kl_vae()
    kept = session.decoders.of(vae)
    assert session.decoders.of(vae) is kept
    assert session.decoders.of(vae, keep=False) is not kept
    host.patches = 1
    patched = session.decoders.of(vae)
    assert patched is not kept
    vae.first_stage_model = kl_vae(seed=9).first_stage_model
    assert session.decoders.of(vae).decoder.content_hash != patched.decoder.content_hash
    actions.decode(session, {"samples": Z}, vae)
    model, gone = weakref.ref(vae.first_stage_model), weakref.ref(vae)
    del vae, kept, patched
    gc.collect()
    assert gone() is None
    assert model() is None
    assert session.decoders.packed_bytes == 0


def test_advanced_caching_off_keeps_nothing_packed() -> None:
    session = new_session()
    actions.decode(session, {"samples": Z}, kl_vae(), advanced_caching=False)
    assert session.decoders.packed_bytes == 0


def test_history_gets_every_outcome(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path / "history.jsonl")
    host = FakeHost()
    session = new_session(host, store=store)
    actions.decode(session, {"samples": Z}, kl_vae())
    host.interrupt_after = 0
    with pytest.raises(Interrupted):
        actions.decode(session, {"samples": Z}, kl_vae())
    assert [r.status for r in store.read().records] == [DecodeStatus.OK, DecodeStatus.INTERRUPTED]


@pytest.mark.parametrize("vae", [None, FakeVAE(None)])
def test_vk_8_no_vae_leaves_the_statistics_alone(vae: Any) -> None:
    session = new_session()
    with pytest.raises(VaeError, match="no valid VAE in this checkpoint"):
        actions.decode(session, {"samples": Z}, vae)
    assert session.collector.records() == ()


def test_vk_6_audio_vae_is_refused_before_any_load() -> None:
    host, vae = FakeHost(), FakeVAE(PointDec(), channels=64, dim=1, ratio=2048)
    for method in ("auto", "exact", "blended", "stock"):
        with pytest.raises(LatentError, match="VAE Decode Audio"):
            actions.decode(new_session(host), {"samples": latent((1, 64, 256))}, vae, method=method)
    assert (host.loads, vae.first_stage_model.log) == ([], [])


def test_ls_7_wrong_vae_is_told_before_any_load() -> None:
    host, vae = FakeHost(), kl_vae()
    with pytest.raises(LatentError, match=r"16 channels.* 4"):
        actions.decode(new_session(host), {"samples": latent((1, 16, 8, 8))}, vae)
    assert (host.loads, vae.first_stage_model.calls) == ([], [])


@pytest.mark.parametrize("method", ["auto", "blended", "stock"])
def test_ls_8_called_from_a_script(method: str) -> None:
    vae = kl_vae()
    vae.first_stage_model.requires_grad_()
    with torch.enable_grad():
        images = actions.decode(new_session(), {"samples": Z}, vae, method=method).images
        assert torch.is_grad_enabled()
    assert images.grad_fn is None
    assert not images.requires_grad
    images.add_(0)


@pytest.mark.parametrize(
    ("environ", "level"),
    [({}, "summary"), ({"HALO_VAE_PROFILE": "off"}, "off"), ({"HALO_VAE_PROFILE": " Per_Op "}, "per_op")],
)
def test_profile_level_by_environment(environ: dict[str, str], level: str) -> None:
    assert read_level(environ) == level


def test_unknown_profile_level_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert read_level({"HALO_VAE_PROFILE": "all"}) == "summary"
    assert "off, summary or per_op" in caplog.text


def test_planner_gets_no_more_than_the_host_has() -> None:
    session = new_session(FakeHost(total=3 << 20))
    profile = session.engine.device_profile(torch.device("cpu"))
    assert profile.budget_bytes == 3 << 20
    assert new_session(FakeHost(total=None)).engine.device_profile(torch.device("cpu")).budget_bytes != 3 << 20


@pytest.mark.parametrize(
    ("machine", "loaded_gib", "total_gib", "budget_gib", "words"),
    [
        ("gfx1100", 6, 24, 23 + 1, "all that a test gives of this device"),  # models give back up to the whole card
        ("gfx1100", 0.5, 24, 23.5, "and 0.5 GiB of models that can be unloaded"),
        ("gfx1100", 0, None, 23, "what HIP calls free"),
        ("gfx1151", 6, 64, 63, "what HIP calls free"),  # an unloaded model stays in the same memory
        ("gfx1151", 0, 40, 40, "all that a test gives of this device"),
    ],
)
def test_models_that_leave_a_card_make_room_and_those_of_an_apu_do_not(
    machine: str, loaded_gib: float, total_gib: float | None, budget_gib: float, words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(session_module, "describe_device", lambda device: profile_of(machine))
    total = None if total_gib is None else int(total_gib * GIB)
    session = new_session(FakeHost(total=total, loaded=int(loaded_gib * GIB)))
    found = session.engine.device_profile(torch.device("cpu"))
    assert found.budget_bytes == int(budget_gib * GIB)
    assert words in found.budget_reason


def short_of_memory(session: Session, times: int) -> None:
    """The session's pool gets no memory the first few times."""
    asked: list[int] = []

    def source(nbytes: int, device: torch.device) -> torch.Tensor:
        asked.append(nbytes)
        if len(asked) <= times:
            raise RuntimeError("HIP error: out of memory")
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    session.engine.pool._source = source


def test_om_1_the_host_is_asked_for_room_before_anything_is_given_up() -> None:
    host = FakeHost()
    session, vae = new_session(host), kl_vae()
    short_of_memory(session, 1)
    decoded = actions.decode(session, {"samples": Z}, vae)
    assert decoded.record.status is DecodeStatus.OK
    (asked,) = host.rooms
    assert decoded.record.plan is not None
    assert asked == (decoded.record.plan.predicted.working, torch.device("cpu"))
    assert [f.used.split(":")[0] for f in decoded.record.fallbacks] == ["kept memory given back"]
    assert len(host.loads) == 2  # the VAE may have been unloaded to make room
    calm = actions.decode(new_session(), {"samples": Z}, kl_vae())
    assert torch.allclose(decoded.images, calm.images, atol=1e-6)


def test_om_4_auto_ends_in_blended_tiles_of_the_vae() -> None:
    session, vae = new_session(FakeHost()), kl_vae()
    short_of_memory(session, 99)
    decoded = actions.decode(session, {"samples": Z}, vae)
    assert decoded.record.plan is not None
    assert decoded.record.plan.method == "blended"
    assert decoded.record.fallbacks[-1].used.startswith("blended tiles")
    assert vae.first_stage_model.calls
    with pytest.raises(torch.OutOfMemoryError, match="tried: kept memory given back"):
        actions.decode(session, {"samples": Z}, vae, method="exact")
    assert session.collector.records()[-1].status is DecodeStatus.OUT_OF_MEMORY
