"""`halo-vae bench`: flags to requests, exit codes, and that what is measured outlives whatever ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halo_vae.profiling.bench import invocation, ray_nodes, runner
from halo_vae.profiling.bench.cases import CASES, CONFIGURATIONS
from halo_vae.profiling.bench.guard import BusyError
from halo_vae.profiling.bench.request import SMOKE_CASES, TIME_LIMIT_S, BenchRequest, ComfyUI
from halo_vae.profiling.bench.results import ResultsFile
from halo_vae.profiling.bench.spawn import Interpreter
from halo_vae.profiling.cli import app, bench
from halo_vae.profiling.cli.command import CommandError
from halo_vae.tests.profiling.bench.fake_child import fake

posix = pytest.mark.skipif(sys.platform == "win32", reason="the fake interpreter is a shell script")
SMALL = ("--vae", "tiny", "--cases", "small_image", "--configurations", "phase3", "--comfyui-url", "none")


def asked(*argv: str) -> BenchRequest:
    return bench.request_from(app.build_parser().parse_args(["bench", *argv]))


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Children are fake, and the user's folders are the test's."""
    python = fake(tmp_path)
    monkeypatch.setattr(runner._Bench, "_ours", lambda self: Interpreter(python=python))
    monkeypatch.setenv("HALO_VAE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("FAKE_FAULT", "FAKE_FAULT_AT", "FAKE_FAULT_IN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "results.jsonl"


# -- flags


def test_without_flags_the_eight_cases_run_hot_in_all_phases() -> None:
    wanted = asked("--host", "here")
    assert wanted == BenchRequest(host="here", cases=CASES, configurations=CONFIGURATIONS[:-1])
    assert (wanted.runs, wanted.warm_ups, wanted.time_limit_s) == (5, 1, TIME_LIMIT_S)


def test_names_are_put_in_order_and_groups_stand_for_their_conditions() -> None:
    names = ("--cases", "large_image,small_image", "--configurations", "phase3, baseline")
    wanted = asked(*names, "--scenarios", "hot,all")
    assert [case.key for case in wanted.cases] == ["large_image", "small_image"]
    assert wanted.configurations == ("baseline", "phase3")
    assert set(wanted.scenarios) == {"cold", "warm", "hot"}
    assert set(asked("--scenarios", "everything").scenarios) == {"frozen", "cold", "warm", "hot"}


def test_smoke_is_small_and_each_of_its_choices_may_be_replaced() -> None:
    smoke = asked("--smoke")
    assert (smoke.cases, smoke.runs, smoke.vaes) == (SMOKE_CASES, 1, ("tiny",))
    assert set(smoke.scenarios) == {"cold", "warm", "hot"}
    other = asked("--smoke", "--runs", "2", "--scenarios", "hot", "--vae", "sd/4", "--cases", "smoke_video")
    assert (other.cases, other.runs, other.vaes, other.scenarios) == (SMOKE_CASES[1:], 2, ("sd/4",), ("hot",))


def test_comfyui_brings_the_stock_configuration(tmp_path: Path) -> None:
    (tmp_path / "main.py").touch()
    wanted = asked("--comfyui", f"{tmp_path}=python3")
    assert wanted.comfyui == ComfyUI(folder=tmp_path, python="python3")
    assert wanted.configurations == CONFIGURATIONS


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (("--cases", "tiny_image"), "tiny_image"), (("--cases", ","), "--cases"), (("--scenarios", "mild"), "mild"),
        (("--configurations", "phase4"), "phase4"), (("--runs", "0"), "--runs"), (("--threads", "0"), "--threads"),
        (("--comfyui", "nowhere"), "DIR=PYTHON"), (("--comfyui", "nowhere=python3"), "main.py"),
        (("--configurations", "stock"), "--comfyui"), (("--lane", "nightly", "--scenarios", "frozen"), "nightly"),
        (("--time-limit", "-1"), "--time-limit"), (("--lane", "fast"), "--lane"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_bad_input(argv: tuple[str, ...], word: str, halo: Callable[..., Any]) -> None:
    ended = halo("bench", *argv)
    assert ended.code == 2
    assert word in ended.err


def test_cases_are_listed(halo: Callable[..., Any]) -> None:
    ended = halo("bench", "--list")
    assert ended.code == 0
    assert all(f"{case.key}: {case.title}," in ended.out for case in CASES)
    assert "16 frames (of 17 decoded)" in ended.out
    assert "8 frames (of 9 decoded)" in ended.out


# -- runs


@posix
def test_run_appends_a_line_and_tells_it(fakes: Path, halo: Callable[..., Any]) -> None:
    ended = halo("bench", *SMALL, "--runs", "2", "-o", fakes)
    assert (ended.code, ended.out) == (0, f"{fakes}\n")
    assert "small_image phase3 hot: median" in ended.err
    assert halo("bench", *SMALL, "--runs", "2", "-o", fakes).code == 0
    runs = ResultsFile(fakes).read().runs
    assert [run.samples_ns for run in runs] == [(1000, 1001)] * 2
    assert len({run.run_id for run in runs}) == 2
    assert not list((fakes.parent / "cache" / "bench").iterdir())


@posix
def test_run_that_fails_is_exit_code_1(fakes: Path, halo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAULT", "crash")
    ended = halo("bench", *SMALL, "-o", fakes)
    assert ended.code == 1
    assert "crashed, ended by SIGSEGV" in ended.err
    assert [run.status for run in ResultsFile(fakes).read().runs] == ["crashed"]


@posix
def test_ctrl_c_is_130_and_says_what_is_kept(
    fakes: Path, halo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: Any, **kwargs: Any) -> Any:
        return runner.BenchOutcome(lines=(), cancelled=True)

    monkeypatch.setattr(invocation, "run_bench", run)
    ended = halo("bench", *SMALL, "-o", fakes)
    assert ended.code == 130
    assert "0 run(s) are kept" in ended.err


@posix
def test_busy_device_ends_with_0_and_says_why(
    fakes: Path, halo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(url: str | None) -> None:
        raise BusyError(f"ComfyUI at {url} has 1 prompt(s) running and 0 waiting; wait for its queue")

    monkeypatch.setattr(invocation, "check_comfyui", busy)
    ended = halo("bench", *SMALL[:-2], "-o", fakes)
    assert ended.code == 0
    assert ended.out == (
        "nothing was run: ComfyUI at http://127.0.0.1:8188 has 1 prompt(s) running and 0 waiting; wait for its queue\n"
    )
    assert fakes.read_bytes() == b""


@posix
def test_other_benchmark_ends_with_0(fakes: Path, halo: Callable[..., Any]) -> None:
    lock = fakes.parent / "cache" / "bench.lock"
    lock.parent.mkdir()
    lock.write_text(json.dumps({"pid": os.getppid(), "born": None}))
    ended = halo("bench", *SMALL, "-o", fakes)
    assert ended.code == 0
    assert "another benchmark is running" in ended.out


@posix
def test_results_that_cannot_be_written_are_told_before_anything_is_run(
    fakes: Path, halo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.write_text("")
    monkeypatch.setattr(invocation, "run_bench", lambda *args, **kwargs: pytest.fail("it ran"))
    ended = halo("bench", *SMALL, "-o", fakes / "below_a_file.jsonl")
    assert ended.code == 1
    assert "name another file with --output" in ended.err


def test_own_caches_are_emptied_only_with_a_yes(halo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("some") / "cache"
    monkeypatch.setattr("halo_vae.profiling.bench.isolation.real_caches", lambda: (folder,))
    args = app.build_parser().parse_args(["bench", "--purge-real-caches"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    with pytest.raises(CommandError, match="--yes"):
        bench._confirm_purge(args)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    for answer, goes_on in (("y\n", True), ("\n", False), ("no\n", False)):
        monkeypatch.setattr(sys.stdin, "readline", lambda answer=answer: answer)
        if goes_on:
            bench._confirm_purge(args)
        else:
            with pytest.raises(CommandError, match="nothing was run"):
                bench._confirm_purge(args)
    args.yes = True
    monkeypatch.setattr(sys.stdin, "isatty", lambda: pytest.fail("nobody is asked"))
    bench._confirm_purge(args)


@posix
def test_ray_reports_decide_the_exit_code(
    fakes: Path, halo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(request: Any, address: str, keep: Any, **rest: Any) -> tuple[ray_nodes.NodeReport, ...]:
        assert address == "there:6379"
        return tuple(ray_nodes.NodeReport(host=host, why_not=why) for host, why in found)

    monkeypatch.setattr(ray_nodes, "run_on_nodes", run)
    found: list[tuple[str, str | None]] = [("a", None), ("b", None)]
    assert halo("bench", *SMALL, "--ray", "there:6379", "-o", fakes).code == 0
    found[1] = ("b", "another benchmark is running")
    assert halo("bench", *SMALL, "--ray", "there:6379", "-o", fakes).code == 1


# -- ends from outside

PARENT = """
import sys
from halo_vae.profiling.bench import runner
from halo_vae.profiling.bench.spawn import Interpreter
from halo_vae.profiling.cli import main
runner._Bench._ours = lambda self: Interpreter(python=sys.argv[1])
raise SystemExit(main(sys.argv[2:]))
"""


def start(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[subprocess.Popen[bytes], int]:
    """A benchmark in a process of its own, whose second run hangs; and that run's process."""
    pid_file = fakes.parent / "pid"
    faults = {"FAKE_FAULT": "hang", "FAKE_FAULT_AT": "1", "FAKE_FAULT_IN": "phase3", "FAKE_PID_FILE": str(pid_file)}
    names = ("--configurations", "phase1,phase3", "--runs", "2", "-o", str(fakes))
    argv = [sys.executable, "-c", PARENT, str(fakes.parent / "fake-python"), "bench", *SMALL, *names]
    process = subprocess.Popen(
        argv, env={**os.environ, **faults, "PYTHONPATH": os.pathsep.join(sys.path)}, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    while not (pid_file.exists() and pid_file.read_text()):
        assert process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.05)
    return process, int(pid_file.read_text())


@posix
def test_kill_9_leaves_whole_lines_and_the_next_benchmark_takes_over(
    fakes: Path, halo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, child = start(fakes, monkeypatch)
    process.kill()
    process.communicate()
    os.kill(child, signal.SIGKILL)  # a fake: real ones end with their parent
    found = ResultsFile(fakes).read()
    assert ([run.configuration for run in found.runs], found.skipped) == (["phase1"], 0)
    lock, work = fakes.parent / "cache" / "bench.lock", fakes.parent / "cache" / "bench"
    assert json.loads(lock.read_text())["pid"] == process.pid
    assert list(work.iterdir())
    assert halo("bench", *SMALL, "-o", fakes).code == 0
    assert len(ResultsFile(fakes).read().runs) == 2
    assert not lock.exists()
    assert not list(work.iterdir())


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_terminate_keep_finished_samples_and_leave_no_child(
    fakes: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    process, child = start(fakes, monkeypatch)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 130, err.decode()
    assert b"2 run(s) are kept" in err
    runs = ResultsFile(fakes).read().runs
    assert [(run.configuration, run.status, run.samples_ns) for run in runs] == [
        ("phase1", "ok", (1000, 1001)), ("phase3", "cancelled", (1000,)),
    ]  # fmt: skip
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not (fakes.parent / "cache" / "bench.lock").exists()


def test_lines_for_cron_and_systemd_are_commands_that_exist() -> None:
    text = (Path(app.__file__).resolve().parents[2] / "docs" / "nightly.md").read_text("utf-8")
    lines = [line for line in text.splitlines() if "bin/halo-vae" in line]
    found = [line.partition("bin/halo-vae ")[2].partition(" >")[0] for line in lines]
    assert len(found) == 2
    for command in found:
        wanted = bench.request_from(app.build_parser().parse_args(command.split()))
        assert (wanted.lane, set(wanted.scenarios)) == ("nightly", {"cold", "warm", "hot"})
    (cron,) = (line for line in text.splitlines() if line.startswith("30 3"))
    assert "%" not in cron  # cron would cut the line there
