"""The comparison with stock: what it runs, what it prints, what it refuses, and the shapes it counts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halo_vae.benchmarks import vs_stock
from halo_vae.benchmarks.engines import load_weights, make_side, random_latent, save_weights
from halo_vae.benchmarks.plain_kl import PlainKLDecoder, random_sd_weights
from halo_vae.benchmarks.shapes import RESOLUTIONS, count_shapes, plain_shapes
from halo_vae.benchmarks.timing import TimedCase, best_ns, doubts, time_in_turn
from halo_vae.optim import device
from halo_vae.optim.device import describe_device

CH = 32
TINY = ("--size", "64", "--ch", str(CH), "--threads", "1", "--runs", "1")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")


# -- the report


def test_report_holds_every_engine_and_the_errors_are_rounding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    threads = torch.get_num_threads()
    assert vs_stock.main([*TINY, "--processes", "0", "--json", str(out)]) == 0
    assert torch.get_num_threads() == threads

    text = capsys.readouterr().out
    table = [line for line in text.splitlines() if line.startswith("|")]
    names = [row.split("|")[1].strip() for row in table[2:6]]
    assert names == ["stock, untiled", "stock, tiled (mean of three passes)", "Halo VAE, strips", "Halo VAE, tiles"]
    assert len({row.count("|") for row in table[:6]}) == 1
    assert "only 1 run(s)" in text  # doubt is part of the result
    assert f"{CH} channels" in text

    result = json.loads(out.read_text("utf-8"))
    assert result["schema_version"] == vs_stock.SCHEMA_VERSION
    assert [e["engine"] for e in result["engines"]] == ["plain", "three_pass", "strips", "tiles"]
    assert all(len(case["samples_ns"]) == 1 and case["samples_ns"][0] > 0 for case in result["times"])
    errors = {e["engine"]: e["fidelity"]["max_abs"] for e in result["engines"]}
    assert errors["plain"] == 0
    assert 0 < errors["strips"] <= 1e-4
    assert 0 < errors["tiles"] <= 1e-4
    assert all(e["peak"] is None for e in result["engines"])


@linux
@pytest.mark.slow
def test_report_holds_peaks_and_their_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert vs_stock.main([*TINY, "--processes", "1", "--engines", "plain", "--plans", "strips"]) == 0
    text = capsys.readouterr().out
    main = [line for line in text.splitlines() if line.startswith(("| stock", "| Halo"))][:2]
    assert all("MiB" in row for row in main)
    promised = next(line for line in text.splitlines() if line.startswith("| strips"))
    assert promised.rstrip("| ").endswith("yes")  # the pool took what the plan says


def test_tiled_stock_differs_from_untiled_and_halo_does_not() -> None:
    weights, latent = random_sd_weights(0, CH), random_latent(576)[:, :, :16]
    plain, tiled, tiles = (make_side(name, weights).decode(latent) for name in ("plain", "three_pass", "tiles"))
    assert plain.shape == tiled.shape == tiles.shape == (1, 128, 576, 3)
    assert (tiled - plain).abs().max() > 1e-2
    assert (tiles - plain).abs().max() <= 1e-4


def test_weights_come_back_from_disk(tmp_path: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in random_sd_weights(3, CH).items()}
    save_weights(weights, tmp_path / "w.safetensors")
    loaded = load_weights(tmp_path / "w.safetensors")
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


# -- what is refused


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--size", "100"], "multiple of 8"),
        (["--engines", "plain,turbo"], "turbo"),
        (["--plans", "stripes"], "stripes"),
        (["--threads", "two"], "whole numbers"),
        (["--threads", "0"], "at least 1"),
        (["--runs", "0"], "at least 1"),
        (["--ch", "48"], "multiple of 32"),
    ],
)
def test_senseless_requests_are_refused(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert vs_stock.main([*argv, "--processes", "0"]) == 2
    assert word in capsys.readouterr().err


def test_bf16_is_refused_where_it_is_emulated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    emulated = replace(describe_device("cpu"), native_dtypes=("float32",))
    monkeypatch.setattr(device, "describe_device", lambda *_: emulated)
    assert vs_stock.main([*TINY, "--precision", "bf16", "--processes", "0"]) == 2
    assert "bfloat16" in capsys.readouterr().err


def test_an_existing_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    out.write_text("mine")
    assert vs_stock.main([*TINY, "--processes", "0", "--json", str(out)]) == 2
    assert out.read_text() == "mine"
    assert str(out) in capsys.readouterr().err


def test_memory_off_linux_is_refused_clearly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert vs_stock.main([*TINY]) == 2
    assert "Linux" in capsys.readouterr().err


def test_starts_over_with_passive_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}

    class Done:
        returncode = 7

    def run(command: list[str], *, env: dict[str, str], check: bool) -> Done:
        started.update(command=command, env=env)
        return Done()

    monkeypatch.setattr(vs_stock.subprocess, "run", run)
    monkeypatch.setenv(vs_stock.WAIT_POLICY, "passive")
    assert vs_stock.with_passive_waiting() is None
    assert not started
    monkeypatch.delenv(vs_stock.WAIT_POLICY)
    assert vs_stock.with_passive_waiting() == 7
    assert started["env"][vs_stock.WAIT_POLICY] == "passive"
    assert started["command"][1:] == sys.orig_argv[1:]


# -- times


def test_sides_are_timed_in_turn() -> None:
    order: list[tuple[str, int]] = []
    now = iter(range(0, 1000, 10))

    def side(name: str) -> Any:
        return lambda: order.append((name, torch.get_num_threads()))

    before = torch.get_num_threads()
    cases = time_in_turn({"a": side("a"), "b": side("b")}, threads=(1, 2), runs=2, clock=lambda: next(now))
    assert torch.get_num_threads() == before
    assert order == [("a", 1), ("b", 1), ("a", 2), ("b", 2)] * 2
    assert [(c.engine, c.threads, c.samples_ns) for c in cases] == [
        ("a", 1, (10, 10)), ("b", 1, (10, 10)), ("a", 2, (10, 10)), ("b", 2, (10, 10)),
    ]  # fmt: skip


def case(*samples: int, threads: int = 1) -> TimedCase:
    return TimedCase(engine="plain", threads=threads, samples_ns=samples)


def test_the_bar_is_the_better_thread_count() -> None:
    assert best_ns((case(50, 40, 60), case(90, 30, 20, threads=2)), "plain") == 30
    with pytest.raises(ValueError, match="not timed"):
        best_ns((case(1),), "tiles")


QUIET = case(100, 101, 102, 103, 104)


@pytest.mark.parametrize(
    ("cases", "load", "policy", "word"),
    [
        ((QUIET,), (0.1, 1.0), "passive", None),
        ((case(100, 100, 100, 100, 111),), (0.1, 1.0), "passive", "apart"),  # 11 % between fastest and slowest
        ((case(100, 100, 100),), (0.1, 1.0), "passive", "only 3"),
        ((QUIET,), (0.7, 1.0), "passive", "before the first run"),  # more than 0.3 on each of two cores
        ((QUIET,), (0.1, 1.6), "passive", "after 1 thread"),
        ((QUIET,), (None, None), "passive", None),  # a system that tells no load
        ((QUIET,), (0.1, 1.0), None, "OMP_WAIT_POLICY is not set"),
        ((case(1000, 1001, 1002, 1003, 1004, threads=4),), (0.1, 1.0), "passive", "on 2 core"),
    ],
)
def test_doubts(
    cases: tuple[TimedCase, ...], load: tuple[float | None, float | None], policy: str | None, word: str | None
) -> None:
    found = doubts(cases, *load, cores=2, wait_policy=policy)
    if word is None:
        assert found == ()
    else:
        assert len(found) == 1
        assert word in found[0]


# -- convolution shapes


class _Convolutions(TorchDispatchMode):
    """Notes the shapes of every convolution that torch really runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.seen.append((*args[0].shape, *args[1].shape))
        return func(*args, **(kwargs or {}))


def test_shapes_without_running_are_those_of_a_run() -> None:
    weights = random_sd_weights(0, CH)
    with _Convolutions() as ran:
        PlainKLDecoder.from_weights(weights).decode(torch.zeros(1, 4, 5, 8))
    with torch.device("meta"):
        decoder = PlainKLDecoder([CH, CH * 2, CH * 4, CH * 4], latent=4)
    assert plain_shapes(decoder, (64, 40)) == ran.seen
    assert len(ran.seen) > 30


def test_resolutions_are_thirty_that_a_decoder_can_make() -> None:
    assert len(set(RESOLUTIONS)) == len(RESOLUTIONS) == 30
    assert all(edge >= 256 and edge % 8 == 0 for size in RESOLUTIONS for edge in size)


def test_tiles_ask_for_few_shapes_at_any_resolution() -> None:
    tiles = count_shapes("tiles")
    assert 0 < tiles.total <= 16
    assert sum(tiles.new_at_each) == tiles.total
    plain = count_shapes("plain")
    assert plain.total >= 300  # about a dozen levels and widths, times thirty
    assert min(plain.new_at_each) >= 9
    with pytest.raises(ValueError, match="three_pass"):
        count_shapes("three_pass")
