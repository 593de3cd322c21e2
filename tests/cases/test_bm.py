"""BM: the benchmark command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.profiling.bench import tasks
from halo_vae.profiling.bench.protocol import ChildEvent, ChildRequest
from halo_vae.profiling.bench.results import ResultsFile, RunLine
from halo_vae.profiling.bench.stats import describe

NO_NETWORK = "import socket\ndef refuse(*a, **k): raise OSError('no network')\nsocket.create_connection = refuse\n"
SECONDS = (5.0, 0.1, 0.1, 0.12, 0.1)


class Turned:
    """A decode that takes as long as it is told, and the clock that shows it."""

    dtype = "fp32"

    def __init__(self, seconds: tuple[float, ...]) -> None:
        self.left, self.now_ns = list(seconds), 0

    def decode(self, latent: Tensor) -> Tensor:
        self.now_ns += round(self.left.pop(0) * 1e9)
        return torch.zeros(1, 8, 8, 3)


def test_bm_1_cold_first_run_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Turned(SECONDS)
    monkeypatch.setattr(tasks, "open_side", lambda *args: side)
    monkeypatch.setattr(tasks.time, "perf_counter_ns", lambda: side.now_ns)
    told: list[ChildEvent] = []
    wanted = ChildRequest(task="run", device="cpu", threads=None, latent_shape=(1, 4, 1, 1), warm_ups=1, runs=4)
    tasks.Timing(wanted, torch.device("cpu"), told.append, None).run()
    warm_ups = [e.ns for e in told if e.event == "warm_up"]
    samples = tuple(e.ns for e in told if e.event == "sample" and e.ns is not None)
    assert warm_ups == [5_000_000_000]
    assert samples == (100_000_000, 100_000_000, 120_000_000, 100_000_000)  # raw, in order
    figures = describe(samples)
    assert (figures.median_ns, figures.mean_ns, figures.n) == (100_000_000, 105_000_000, 4)
    halved = describe(tuple(ns // 2 for ns in samples))
    assert figures.median_ns / halved.median_ns == 2.0  # of warm medians: the cold run has no part in it


def bench(folder: Path, seed: int, name: str, *flags: str) -> tuple[RunLine, ...]:
    """A smoke run in a process of its own, without a network, a ComfyUI or a GPU."""
    code = f"{NO_NETWORK}import sys\nfrom halo_vae.profiling.cli import main\nraise SystemExit(main(sys.argv[1:]))"
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("HALO_VAE_", "CUDA_", "HIP_"))}
    environ |= {
        "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "",
        "HALO_VAE_CACHE_DIR": str(folder / "cache"), "HALO_VAE_DATA_DIR": str(folder / "data"),
    }  # fmt: skip
    argv = ["bench", "--smoke", "--seed", str(seed), "--threads", "1"]
    argv += ["--scenarios", "hot", "--configurations", "phase3", *flags]
    done = subprocess.run(
        [sys.executable, "-c", code, *argv, "--host", "here", "-o", str(folder / name)], env=environ, cwd=folder,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return ResultsFile(folder / name).read().runs


def test_bm_5_works_on_a_bare_machine_and_equal_seeds_give_equal_errors(tmp_path: Path) -> None:
    first = bench(tmp_path, 7, "a.jsonl")
    again = bench(tmp_path, 7, "b.jsonl", "--cases", "smoke_video")
    assert [run.case for run in first] == ["smoke_image", "smoke_video"]

    def errors(runs: tuple[RunLine, ...]) -> list[Any]:
        return [(run.max_error, run.mean_error, run.psnr_db) for run in runs]

    assert errors(first[1:]) == errors(again)
    assert all(run.max_error is not None and 0 < run.max_error < 1e-4 for run in first)
    for run in first:
        assert (run.environment.torch, run.environment.python) == (torch.__version__, sys.version.split()[0])
        assert (run.environment.machine, run.threads, run.seed, run.device) == (platform.machine(), 1, 7, "cpu")
        assert run.environment.cpu
        assert (run.lane, run.vae, run.latent_shape) in {
            ("single", "tiny", (1, 4, 32, 32)), ("single", "random:wan21/24", (1, 16, 2, 32, 32)),
        }  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.lock", "b.jsonl", "b.jsonl.lock", "cache"]


def test_bm_5_another_seed_gives_another_picture() -> None:
    def latent(seed: int) -> Tensor:
        ask = ChildRequest(task="run", device="cpu", threads=1, latent_shape=(1, 4, 2, 2), seed=seed)
        return tasks.make_latent(ask)

    assert torch.equal(latent(7), latent(7))
    assert not torch.equal(latent(7), latent(8))
