"""Real processes: this interpreter as an installation, and fakes that fail in the ways that real ones do."""

from __future__ import annotations

import _thread
import json
import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halo_vae.profiling.bench.results import ResultsFile
from halo_vae.profiling.cli import main
from halo_vae.profiling.compare.measure import look_at
from halo_vae.profiling.compare.records import Ask
from halo_vae.profiling.compare.spawn import Ended, child_variables, run_child
from halo_vae.tests.profiling.cli.conftest import halo

__all__ = ["halo"]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake interpreters are shell scripts")
PATIENCE_S = 300.0
ASK = Ask(task="round", vae="/nowhere/vae.safetensors", latent_shape=(1, 4, 8, 8), threads=1)


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def without_torch(path: Path) -> str:
    """This interpreter, started so that it finds no packages."""
    return script(path, f'exec "{sys.executable}" -S "$@"')


def is_gone(pid: int) -> bool:
    """True also where it only waits for its parent to notice."""
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().split()[2] == "Z"


def run(python: str, limit_s: float = PATIENCE_S) -> Ended:
    return run_child(ASK, python, child_variables(os.environ), limit_s)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("kill -SEGV $$", "crashed", "SIGSEGV"),
        ("echo 'Illegal instruction' >&2; exit 132", "crashed", "132: Illegal instruction"),
        ("echo 'no such option' >&2; exit 2", "failed", "exit code 2: no such option"),
        ("echo hello", "failed", "it gave no answer"),
        ("exit 0", "failed", "it gave no answer"),
    ],
)
def test_ends_are_told_apart(tmp_path: Path, body: str, status: str, words: str) -> None:
    ended = run(script(tmp_path / "python", body))
    assert ended.status == status
    assert words in (ended.error or "")


def test_hang_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    ended = run(script(tmp_path / "python", f"sleep 600 & echo $! > '{pid}'; wait"), limit_s=2.0)
    assert (ended.status, ended.error) == ("timeout", "not done after 2 s, the time limit of a run")
    assert is_gone(int(pid.read_text()))


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    pid, started = tmp_path / "pid", tmp_path / "started"
    os.mkfifo(started)
    # once it was asked: one that was only started would end with the process that hears the interrupt
    python = script(tmp_path / "python", f"read -r ask; echo $$ > '{pid}'; echo > '{started}'; exec sleep 600")

    def interrupt() -> None:
        started.read_bytes()  # returns when the process runs
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(python)
    assert is_gone(int(pid.read_text()))


@pytest.mark.parametrize("python", ["/nowhere/python", "", "/"])
def test_python_that_does_not_start_is_a_reason(python: str) -> None:
    ended = run(python)
    assert ended.status == "failed"
    assert "cannot be started" in (ended.error or "")


def test_missing_file_is_the_childs_own_reason() -> None:
    ended = run(sys.executable)
    assert ended.status == "failed"
    assert "vae.safetensors" in (ended.error or "")


def test_picture_that_is_not_finite_has_no_time(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from halo_vae.profiling.cli.demo import DATA, VAE_NAME

    weights = load_file(DATA / VAE_NAME)
    name = next(key for key in weights if key.endswith("conv_out.bias"))
    save_file({**weights, name: torch.full_like(weights[name], float("nan"))}, tmp_path / "nan.safetensors")
    ask = Ask(task="round", vae=str(tmp_path / "nan.safetensors"), latent_shape=(1, 4, 8, 8), threads=1)
    ended = run_child(ask, sys.executable, child_variables(os.environ), PATIENCE_S)
    assert ended.status == "not_finite"
    assert "NaN" in (ended.error or "")
    assert ended.answer is not None
    assert ended.answer.measured is None


def test_look_is_short_and_even() -> None:
    import torch

    assert look_at(torch.arange(6.0)) == (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert len(look_at(torch.rand(1, 100, 100, 3))) <= 32


@pytest.mark.slow
def test_two_installations_and_broken_ones_give_all_tables(
    tmp_path: Path, halo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALO_VAE_CACHE_DIR", str(tmp_path / "cache"))
    out, results = tmp_path / "out.json", tmp_path / "results.jsonl"
    ended = halo(
        "compare", "--env", f"one={sys.executable}", "--env", f"two={sys.executable}",
        "--env", f"bare={without_torch(tmp_path / 'bare')}", "--env", "gone=/nowhere/python",
        "--cases", "tiny_64", "--threads", 1, "--device", "cpu", "--host", "box", "-o", out, "--results", results,
    )  # fmt: skip
    assert ended.code == 1, ended.err
    found = json.loads(out.read_text("utf-8"))
    rows = {row["installation"]: row for row in found["figures"]["cpu"]["rows"]}
    assert rows["one"]["relative_percent"] == pytest.approx(100.0)
    assert rows["two"]["relative_percent"] > 0
    assert rows["two"]["stats"]["n"] == 5
    assert "torch, numpy and safetensors" in rows["bare"]["failure"]
    assert "cannot be started" in rows["gone"]["failure"]
    one, two = (r["measured"] for r in found["rounds"][:2])
    assert one["look"] == two["look"]
    assert one["threads"] == 1
    assert one["cpu_ns"] > 0
    assert str(tmp_path) not in out.read_text("utf-8")
    lines = ResultsFile(results).read()
    assert {line.host for line in lines.runs} == {"box:one", "box:two"}
    assert len(lines.runs) == 10
    assert not (tmp_path / "cache" / "bench.lock").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "name an installation"),
        (("--env", "python"), "give NAME=PYTHON"),
        (("--env", "a=python", "--runs", "4"), "takes 5 or more"),
        (("--env", "a=python", "--cases", "huge"), "there is no case 'huge'"),
        (("--env", "a=python", "--cases", ","), "--cases names nothing"),
        (("--env", "a=python", "--reference", "b"), "choose from a"),
    ],
)
def test_bad_input_is_one_sentence(argv: tuple[str, ...], words: str, halo: Callable[..., Any]) -> None:
    ended = halo("compare", *argv)
    assert ended.code == 2
    assert words in ended.err
    assert ended.out == ""


def test_list_runs_nothing(halo: Callable[..., Any]) -> None:
    ended = halo("compare", "--list")
    assert ended.code == 0
    assert "tiny_plain: Tiny VAE, plain torch, 256x256, fp32\n" in ended.out


def test_ctrl_c_shows_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from halo_vae.profiling.compare import run as compare_run
    from halo_vae.tests.profiling.compare.comparisons import comparison, rounds, setup

    part = comparison(rounds("a", (10.0, 10.1)), {"a": setup()}, cancelled=True)
    monkeypatch.setattr(compare_run, "run_comparison", lambda request, **kwargs: part)
    monkeypatch.setenv("HALO_VAE_CACHE_DIR", str(tmp_path))
    assert main(["compare", "--env", "a=python"]) == 130
    captured = capsys.readouterr()
    assert "| Tiny VAE: 256×256 | 100.00 %" in captured.out
    assert "cancelled; the tables hold 2 run(s)" in captured.err


def test_other_benchmark_is_not_disturbed(
    tmp_path: Path, halo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from halo_vae.profiling.bench import guard

    monkeypatch.setenv("HALO_VAE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(guard, "_is_alive", lambda holder: True)
    (tmp_path / guard.LOCK_NAME).write_text(json.dumps({"pid": 1, "born": "x"}), encoding="utf-8")
    ended = halo("compare", "--env", f"a={sys.executable}")
    assert ended.code == 0
    assert "another benchmark is running" in ended.out
