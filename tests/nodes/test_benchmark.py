"""The node that compares: what both sides run on, what is kept apart, and what it gives where a side fails."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.nodes import actions
from halo_vae.nodes import benchmark as module
from halo_vae.optim.errors import HaloError, LatentError, SettingsError
from halo_vae.profiling.parts import DecodeStatus
from halo_vae.profiling.store import HistoryStore
from halo_vae.tests.fixtures import ConvDec, FakeVAE, LimitDec, NoiseDec, OverflowDec, PointDec, latent
from halo_vae.tests.flags import state
from halo_vae.tests.nodes.fake_host import FakeHost, Interrupted
from halo_vae.tests.nodes.support import clip_vae, kl_vae, new_session, stock

Z = latent((1, 4, 6, 6))
SAMPLES = {"samples": Z}


def figures(done: module.Benchmarked) -> Any:
    return json.loads(done.figures)


def test_pictures_report_and_record(tmp_path: Path) -> None:
    host, vae = FakeHost(), kl_vae()
    done = actions.benchmark(new_session(host), SAMPLES, vae, warm_ups=2, runs=3)
    assert done.images is not None
    assert done.difference is not None
    assert done.record is not None
    assert len(vae.first_stage_model.calls) == 6  # stock's: warm-ups, memory, runs
    assert torch.allclose(done.images, stock(vae, Z), atol=1e-4)
    assert done.difference.shape == (1, 24, 24, 3)
    assert done.max_error is not None
    assert done.max_error <= 1e-4
    line = figures(done)
    assert [len(line[side]["samples"]["ns"]) for side in ("stock", "halo")] == [3, 3]
    assert [len(line[side]["warm_ups_ns"]) for side in ("stock", "halo")] == [2, 2]
    assert line["record_id"] == done.record.record_id
    assert done.speedup == line["verdict"]["speedup"]["ratio"]
    assert line["reference"] == {"dtype": "float32", "untiled": True}
    assert done.report.startswith("Halo VAE · benchmark on cpu: 1×4×6×6")
    assert "n=3" in done.report
    assert "kl, exact (equal to an untiled decode), float32" in done.report
    assert "resident set of the process" in done.report


def test_nothing_of_it_is_kept(tmp_path: Path) -> None:
    """Warm-ups and repeats would drown what the user decoded, in the history and in the averages."""
    host = FakeHost()
    session = new_session(host, store=HistoryStore(tmp_path / "history.jsonl"))
    actions.benchmark(session, SAMPLES, kl_vae(), runs=2)
    assert session.store is not None
    assert session.store.read().records == ()
    assert session.collector.records() == ()
    assert session.collector.metrics().total_executions == 0
    assert host.sent == []
    actions.decode(session, SAMPLES, kl_vae())
    assert len(session.store.read().records) == 1


def test_one_bar_goes_over_all_runs() -> None:
    host = FakeHost()
    actions.benchmark(new_session(host), SAMPLES, kl_vae(), warm_ups=1, runs=2)
    (bar,) = host.bars
    assert bar[0] == (0, 800)
    assert bar[-1] == (800, 800)
    assert [done for done, _ in bar] == sorted(done for done, _ in bar)
    assert any(done % 100 for done, _ in bar)  # within a decode of ours
    assert {total for _, total in bar} == {800}


def test_a_clip_is_compared_frame_by_frame() -> None:
    vae = clip_vae()
    z = latent((1, vae.latent_channels, 2, 3, 3))
    done = actions.benchmark(new_session(), {"samples": z}, vae, runs=1, warm_ups=0)
    assert done.images is not None
    assert done.difference is not None
    assert done.images.shape[0] == done.difference.shape[0] == 5
    assert done.max_error is not None
    assert done.max_error <= 1e-4
    assert figures(done)["quality"]["worst_picture"] in range(5)


def test_a_batch() -> None:
    done = actions.benchmark(new_session(), {"samples": latent((3, 4, 5, 6))}, kl_vae(), runs=1)
    assert done.images is not None
    assert done.images.shape[0] == 3
    assert figures(done)["latent_shape"] == [3, 4, 5, 6]


def test_an_unknown_decoder_is_blended_and_judged_as_such() -> None:
    done = actions.benchmark(new_session(), SAMPLES, FakeVAE(ConvDec()), runs=1)
    line = figures(done)
    assert "blended" in line["ours"]
    assert line["seen"]["fallbacks"]
    assert "fallback" in line["verdict"]["sentence"]


def test_stock_against_itself_is_identical() -> None:
    done = actions.benchmark(new_session(), SAMPLES, kl_vae(), runs=1, method="stock")
    assert done.max_error == 0
    assert done.difference is not None
    assert float(done.difference.abs().max()) == 0
    assert "the pictures are identical" in done.report
    assert figures(done)["quality"]["psnr_db"] is None


def test_half_precision_is_told_of_the_reference() -> None:
    vae = kl_vae(dtype=torch.bfloat16)
    vae.first_stage_model.bfloat16()
    done = actions.benchmark(new_session(), SAMPLES, vae, runs=1)
    assert "an untiled bfloat16 decode; rounding of stock's own is part of it" in done.report
    assert figures(done)["quality"]["limits"]["max_error"] == 0.25


def test_every_run_draws_the_same_noise() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    done = actions.benchmark(new_session(), SAMPLES, FakeVAE(NoiseDec()), runs=2, method="stock")
    assert done.max_error == 0
    torch.set_rng_state(before)
    assert done.images is not None
    assert torch.equal(done.images, stock(FakeVAE(NoiseDec()), Z))


def test_bm_3_a_wrong_picture_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    session = new_session()
    right = session.decode_apart

    def wrong(*given: Any, **named: Any) -> Any:
        images, record = right(*given, **named)
        return images.mul(0.5).add(0.1), record

    monkeypatch.setattr(session, "decode_apart", wrong)
    done = actions.benchmark(session, SAMPLES, kl_vae(), runs=2)
    assert figures(done)["figures"]["passed"] is False
    assert "FAIL: max error" in done.report
    assert done.max_error is not None
    assert done.max_error > 0.01
    assert done.images is not None


def test_stock_out_of_memory_is_told_and_ours_is_shown() -> None:
    vae = FakeVAE(LimitDec(PointDec(), limit=Z.numel() - 1))
    done = actions.benchmark(new_session(), SAMPLES, vae, runs=1, method="blended", tile_size=32, overlap=0)
    assert done.images is not None
    assert (done.difference, done.speedup, done.max_error) == (None, None, None)
    assert "no comparison: stock ran out of memory: HIP out of memory. (fake)" in done.report
    assert "out of memory" in done.report.split("Time,")[1]
    assert figures(done)["stock"]["failure"]["status"] == "out_of_memory"


def test_our_failure_is_told_with_its_record() -> None:
    done = actions.benchmark(new_session(), SAMPLES, FakeVAE(ConvDec()), runs=1, method="exact")
    assert (done.images, done.difference, done.speedup) == (None, None, None)
    assert "FAIL: Halo failed: method is exact" in done.report
    assert done.record is not None
    assert done.record.status is DecodeStatus.ERROR
    assert figures(done)["halo"]["failure"]["after"] == 0


def test_both_failing_is_an_error() -> None:
    vae = FakeVAE(LimitDec(PointDec(), limit=0))
    with pytest.raises(HaloError, match=r"both decodes failed\. Halo: .* Stock: HIP out of memory"):
        actions.benchmark(new_session(), SAMPLES, vae, runs=1)


def test_a_stock_picture_with_nan_is_no_reference() -> None:
    vae = FakeVAE(OverflowDec("nan", bad=(torch.float16,)), dtype=torch.float16)
    done = actions.benchmark(new_session(), SAMPLES, vae, runs=1, precision_mode="fp32")
    assert "no comparison: stock failed: its picture holds inf or nan" in done.report
    assert done.images is not None
    assert bool(torch.isfinite(done.images).all())
    assert done.difference is None


def test_what_the_host_warns_of_is_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = kl_vae()
    plain = vae.decode

    def tiled(z: Tensor, vae_options: Any = None) -> Tensor:
        logging.warning("Warning: Ran out of memory when regular VAE decoding, retrying with tiled VAE decoding.\nmore")
        return plain(z)

    monkeypatch.setattr(vae, "decode", tiled)
    handlers = list(logging.getLogger().handlers)
    done = actions.benchmark(new_session(), SAMPLES, vae, runs=2)
    line = figures(done)
    assert line["seen"]["said"] == [
        "Warning: Ran out of memory when regular VAE decoding, retrying with tiled VAE decoding."
    ]
    assert "that the host had to tile" in done.report
    assert "warning (stock)" in line["verdict"]["sentence"]
    assert logging.getLogger().handlers == handlers


def test_memory_that_the_host_takes_back_between_runs_is_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    vae, session = kl_vae(), new_session()
    plain = vae.decode

    def greedy(z: Tensor, vae_options: Any = None) -> Tensor:
        session.release()
        return plain(z)

    monkeypatch.setattr(vae, "decode", greedy)
    done = actions.benchmark(session, SAMPLES, vae, runs=2, warm_ups=0)
    assert figures(done)["seen"]["emptied"] >= 1
    assert "memory taken back" in done.report
    fresh = figures(actions.benchmark(new_session(), SAMPLES, kl_vae(), runs=2))
    assert fresh["seen"]["emptied"] == 0
    assert fresh["seen"]["first_of_shape_runs"] == 0


@pytest.mark.parametrize("checks", [0, 1, 2, 3, 5, 9, 14])
def test_cp_1_the_host_can_stop_it_between_and_within_runs(checks: int) -> None:
    host, vae = FakeHost(), kl_vae()
    session, before = new_session(host), state()
    kept = {name: tensor.clone() for name, tensor in vae.first_stage_model.state_dict().items()}
    host.interrupt_after = checks
    with pytest.raises(Interrupted):
        actions.benchmark(session, SAMPLES, vae, runs=2)
    assert state() == before
    assert session.engine.pool._leased_bytes == 0
    assert all(torch.equal(kept[name], tensor) for name, tensor in vae.first_stage_model.state_dict().items())
    host.interrupt_after = None
    assert torch.allclose(actions.decode(session, SAMPLES, vae).images, stock(vae, Z), atol=1e-4)


@pytest.mark.parametrize(
    ("given", "words"),
    [({"stock": "best"}, "choose one of plain, tiled"), ({"runs": 0}, "runs is 0"), ({"warm_ups": -1}, "warm_ups"),
     ({"method": "fast"}, "method"), ({"tile_size": -1}, "tile_size")],
)  # fmt: skip
def test_values_that_no_widget_offers_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        actions.benchmark(new_session(), SAMPLES, kl_vae(), **given)


def test_a_latent_that_cannot_be_decoded_is_refused_at_once() -> None:
    vae = kl_vae()
    for samples in ({"samples": latent((1, 5, 4, 4))}, {"samples": torch.full((1, 4, 4, 4), float("nan"))}, {}):
        with pytest.raises(LatentError):
            actions.benchmark(new_session(), samples, vae)
    assert vae.first_stage_model.calls == []


def test_the_latent_and_its_extras_stay() -> None:
    samples = {"samples": Z.clone(), "noise_mask": torch.ones(1)}
    actions.benchmark(new_session(), samples, kl_vae(), runs=1)
    assert torch.equal(samples["samples"], Z)
    assert list(samples) == ["samples", "noise_mask"]


def test_bytes_are_in_the_users_units() -> None:
    done = actions.benchmark(new_session(FakeHost(settings={"HaloVAE.Units": "decimal"})), SAMPLES, kl_vae(), runs=1)
    assert "iB" not in done.report


def test_stock_tiled_is_the_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    vae, asked = kl_vae(), list[dict[str, Any]]()

    def decode_tiled(z: Tensor, **options: Any) -> Tensor:
        asked.append(options)
        return vae.decode(z)

    monkeypatch.setattr(vae, "decode_tiled", decode_tiled, raising=False)
    done = actions.benchmark(new_session(), SAMPLES, vae, runs=1, warm_ups=0, stock="tiled")
    assert asked[0] == {"tile_x": 128, "tile_y": 128, "overlap": 16, "tile_t": None, "overlap_t": None}
    assert "a tiled float32 decode; tiling of stock's own is part of it" in done.report
