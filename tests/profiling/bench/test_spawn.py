"""Child processes: heard to the end, ended where they hang, and told apart by how they end."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from halo_vae.profiling.bench.protocol import ChildEvent, ChildRequest, event_from, request_from, to_line
from halo_vae.profiling.bench.spawn import ChildOutcome, ChildStoppedError, Interpreter, run_child
from halo_vae.tests.profiling.bench.fake_child import fake

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake interpreter is a shell script")
PATIENCE_S = 60.0
RUN = ChildRequest(
    task="run", device="cpu", threads=1, vae="/secret/vae.safetensors", latent_shape=(1, 4, 8, 8), warm_ups=1, runs=3
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "db").mkdir()
    return {"PATH": os.environ["PATH"], "MIOPEN_USER_DB_PATH": str(tmp_path / "db")}


def run(tmp_path: Path, environ: dict[str, str], limit_s: float = PATIENCE_S, **faults: str) -> ChildOutcome:
    environ |= {f"FAKE_{name.upper()}": value for name, value in faults.items()}
    return run_child(RUN, Interpreter(python=fake(tmp_path)), environ, limit_s)


def test_request_and_event_go_through_their_lines() -> None:
    assert request_from(to_line(RUN)) == RUN
    event = ChildEvent(event="sample", ns=5)
    assert event_from(to_line(event)) == event


def test_times_are_heard_in_order_and_warm_ups_apart(tmp_path: Path, environ: dict[str, str]) -> None:
    heard: list[ChildEvent] = []
    outcome = run_child(RUN, Interpreter(python=fake(tmp_path)), environ, PATIENCE_S, heard.append)
    assert (outcome.ending, outcome.sentence) == ("ok", None)
    assert outcome.warm_ups_ns == (9000,)
    assert outcome.samples_ns == (1000, 1001, 1002)
    assert outcome.measured is not None
    assert outcome.measured.max_error == 0.001
    assert [e.event for e in heard] == ["warm_up", "sample", "sample", "sample", "done"]


def test_crash_is_told_by_its_signal_and_samples_are_kept(tmp_path: Path, environ: dict[str, str]) -> None:
    outcome = run(tmp_path, environ, fault="crash", fault_at="2")
    assert (outcome.ending, outcome.sentence) == ("crashed", "ended by SIGSEGV")
    assert outcome.samples_ns == (1000, 1001)


def test_hang_is_ended_at_the_limit(tmp_path: Path, environ: dict[str, str]) -> None:
    pid_file = tmp_path / "pid"
    outcome = run(tmp_path, environ, 4.0, fault="hang", fault_at="1", pid_file=str(pid_file))
    assert outcome.ending == "timeout"
    assert "4 s" in (outcome.sentence or "")
    assert outcome.samples_ns == (1000,)
    with pytest.raises(ProcessLookupError):  # it was waited for
        os.kill(int(pid_file.read_text()), 0)


def test_picture_that_is_not_finite_is_an_ending(tmp_path: Path, environ: dict[str, str]) -> None:
    outcome = run(tmp_path, environ, fault="nan", fault_at="1")
    assert outcome.ending == "not_finite"
    assert "NaN" in (outcome.sentence or "")


def test_error_is_told_in_its_own_words(tmp_path: Path, environ: dict[str, str]) -> None:
    outcome = run(tmp_path, environ, fault="error")
    assert (outcome.ending, outcome.sentence) == (
        "failed", "WeightsError: /secret/vae.safetensors holds no tensor 'x'",
    )  # fmt: skip


def test_lines_that_are_no_events_are_left_out(tmp_path: Path, environ: dict[str, str]) -> None:
    outcome = run(tmp_path, environ, fault="garbage", fault_at="1")
    assert outcome.ending == "ok"
    assert len(outcome.samples_ns) == 3


def test_interpreter_without_torch_says_so(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    describe = replace(RUN, task="describe")
    outcome = run_child(describe, Interpreter(python=str(bare)), {"PATH": os.environ["PATH"]}, PATIENCE_S)
    assert outcome.ending == "failed"
    assert "No module named" in (outcome.sentence or "")


def test_interpreter_that_does_not_exist_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run_child(RUN, Interpreter(python=str(tmp_path / "none")), {}, PATIENCE_S)


def test_ctrl_c_ends_the_child_and_keeps_what_it_told(tmp_path: Path, environ: dict[str, str]) -> None:
    def stop(event: ChildEvent) -> None:
        if event.ns == 1001:
            raise KeyboardInterrupt

    environ["FAKE_FAULT"], environ["FAKE_FAULT_AT"] = "hang", "2"
    with pytest.raises(ChildStoppedError) as stopped:
        run_child(RUN, Interpreter(python=fake(tmp_path)), environ, PATIENCE_S, stop)
    assert stopped.value.outcome.samples_ns == (1000, 1001)
