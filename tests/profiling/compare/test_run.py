"""The order of processes, what fails, and what is kept; with a fake in place of processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from halo_vae.profiling.bench.cases import BenchError
from halo_vae.profiling.bench.vaes import VaeFile
from halo_vae.profiling.compare.cases import CASES, USUAL, case_of
from halo_vae.profiling.compare.records import Answer, Ask, CompareRequest, Comparison, Installation, Round
from halo_vae.profiling.compare.results_lines import line_of_round, per_decode
from halo_vae.profiling.compare.run import Tools, find_python, run_comparison, schedule
from halo_vae.profiling.compare.spawn import Ended
from halo_vae.tests.profiling.compare.comparisons import comparison, failed, measured, rounds, setup

A, B, C = (Installation(name=name, python=f"/secret/{name}/python") for name in ("a", "b", "c"))
Judge = Callable[[Ask, str, int], Ended | None]


class FakeStart:
    """Answers each task; `judge` may answer otherwise, by task, installation and how many rounds it had."""

    def __init__(self, judge: Judge = lambda ask, name, n: None, has_gpu: bool = False) -> None:
        self.asked: list[tuple[str, Ask]] = []
        self.environs: dict[str, Mapping[str, str]] = {}
        self._judge, self._has_gpu = judge, has_gpu

    def __call__(self, ask: Ask, python: str, environ: Mapping[str, str], time_limit_s: float) -> Ended:
        name = python.split("/")[2]
        n = sum(1 for who, one in self.asked if who == name and one.task == "round")
        self.asked.append((name, ask))
        self.environs[name] = environ
        if (ended := self._judge(ask, name, n)) is not None:
            return ended
        if ask.task == "set_up":
            return Ended(status="ok", answer=Answer(setup=setup(has_gpu=self._has_gpu)))
        return Ended(status="ok", answer=Answer(measured=measured(10.0)), process_ns=5)

    @property
    def rounds(self) -> list[str]:
        return [name for name, ask in self.asked if ask.task == "round"]


def prepare(word: str, family: Any, seed: int, folder: Path) -> VaeFile:
    return VaeFile(path=folder / "vae", label=word, family=family, latent_channels=4)


def run(start: FakeStart, *installations: Installation, keep: Any = None, **changes: Any) -> Comparison:
    asked: dict[str, Any] = {"cases": (case_of("tiny"),), "rounds": 3, **changes}
    request = CompareRequest(installations=installations, **asked)
    tools = Tools(
        start=start, prepare=prepare, environ={"PYTHONPATH": "/secret/path", "HOME": "/secret/home", "FOO": "1"},
        now=lambda: datetime(2026, 1, 31, tzinfo=timezone.utc), load=lambda: 0.25,
    )  # fmt: skip
    return run_comparison(request, tools=tools, **({} if keep is None else {"keep": keep}))


def test_installations_take_turns_and_each_begins_a_round() -> None:
    request = CompareRequest(installations=(A, B, C), cases=(case_of("tiny"), case_of("sd")), rounds=4)
    turns = [(t.case.key, t.round, t.installation.name) for t in schedule(request, ("cpu",))]
    assert len(turns) == len(set(turns)) == 24
    assert "".join(name for key, _, name in turns if key == "tiny") == "abcbcacababc"
    assert [t.device for t in schedule(request, ("cpu", "gpu"))] == ["cpu"] * 24 + ["gpu"] * 24


def test_every_round_is_kept_in_order() -> None:
    start = FakeStart()
    found = run(start, A, B)
    assert start.rounds == ["a", "b", "b", "a", "a", "b"]
    assert [r.installation for r in found.rounds] == start.rounds
    assert not found.cancelled
    assert found.load_before == 0.25
    ask = start.asked[-1][1]
    assert (ask.configuration, ask.precision, ask.latent_shape) == ("phase3", "fp32", (1, 4, 32, 32))
    assert ask.iterations == case_of("tiny").iterations > 1


def test_what_failed_once_is_not_tried_again_and_the_others_go_on() -> None:
    def judge(ask: Ask, name: str, n: int) -> Ended | None:
        return Ended(status="crashed", error="ended by SIGSEGV") if (name, n) == ("b", 1) else None

    found = run(FakeStart(judge), A, B)
    assert [(r.round, r.status) for r in found.rounds if r.installation == "b"] == [(0, "ok"), (1, "crashed")]
    assert sum(r.installation == "a" for r in found.rounds) == 3


def test_installation_that_tells_nothing_is_asked_no_more() -> None:
    def judge(ask: Ask, name: str, n: int) -> Ended | None:
        return Ended(status="failed", error="/secret/b/python is no Python") if name == "b" else None

    start = FakeStart(judge)
    found = run(start, A, B)
    assert start.rounds == ["a"] * 3
    assert found.setups[1].error == "b is no Python"  # where it lies is nobody's business


def test_answer_without_a_time_is_a_failure() -> None:
    def judge(ask: Ask, name: str, n: int) -> Ended | None:
        return Ended(status="ok", answer=Answer()) if ask.task == "round" else None

    found = run(FakeStart(judge), A)
    assert [(r.status, r.error) for r in found.rounds] == [("failed", "it told no time")]


def test_ctrl_c_keeps_what_was_measured() -> None:
    def judge(ask: Ask, name: str, n: int) -> Ended | None:
        if (name, n) == ("a", 2):
            raise KeyboardInterrupt
        return None

    found = run(FakeStart(judge), A, B)
    assert found.cancelled
    assert [r.installation for r in found.rounds] == ["a", "b", "b", "a"][: len(found.rounds)]
    assert len(found.rounds) == 4


def test_gpu_is_compared_where_any_installation_has_one() -> None:
    assert run(FakeStart(), A).devices == ("cpu",)
    start = FakeStart(has_gpu=True)
    assert run(start, A).devices == ("cpu", "gpu")
    assert [ask.device for _, ask in start.asked if ask.task == "round"] == ["cpu"] * 3 + ["cuda"] * 3
    assert run(FakeStart(has_gpu=True), A, devices=("cpu",)).devices == ("cpu",)


def test_environment_of_each_process_is_its_own() -> None:
    start = FakeStart()
    run(start, A, B)
    one, other = start.environs["a"], start.environs["b"]
    assert "PYTHONPATH" not in one
    assert one["FOO"] == "1"
    assert one["PYTHONDONTWRITEBYTECODE"] == "1"
    assert one["MIOPEN_USER_DB_PATH"] != other["MIOPEN_USER_DB_PATH"]


def test_rounds_are_handed_over_as_they_end() -> None:
    kept: list[tuple[int, Round]] = []
    run(FakeStart(), A, keep=lambda whole, one: kept.append((len(whole.rounds), one)))
    assert [n for n, _ in kept] == [1, 2, 3]


def test_rounds_are_lines_of_results() -> None:
    taken = [*rounds("a", (10.0,), iterations=10), failed("a", n=1), failed("gone")]
    whole = comparison(taken, {"a": setup(), "gone": "no torch"})
    line, other, none = (line_of_round(whole, one, f"{i:032x}") for i, one in enumerate(taken))
    assert line is not None
    assert (line.samples_ns, line.host, line.case, line.configuration, line.scenario, line.vae) == (
        (1_000_000,), "box:a", "tiny", "phase3", "hot", "tiny",
    )  # fmt: skip
    assert other is not None
    assert (other.status, other.error, other.samples_ns) == ("crashed", "ended by SIGSEGV", ())
    assert none is None
    with pytest.raises(ValueError, match="was not measured"):
        per_decode(taken[1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"installations": ()}, "nothing to compare"),
        ({"installations": (A, A)}, "two installations are called a"),
        ({"reference": "z"}, "choose from a, b"),
        ({"cases": ()}, "nothing to run"),
        ({"rounds": 0}, "--runs is 0"),
        ({"threads": 0}, "--threads is 0"),
        ({"time_limit_s": 0.0}, "--time-limit is 0"),
        ({"time_limit_s": float("nan")}, "--time-limit is nan"),
        ({"seed": -1}, "--seed is -1"),
    ],
)
def test_requests_are_checked(changes: dict[str, Any], words: str) -> None:
    asked: dict[str, Any] = {"installations": (A, B), **changes}
    with pytest.raises(BenchError, match=words):
        CompareRequest(**asked)


def test_cases_have_names_and_small_defaults() -> None:
    assert len({case.key for case in CASES}) == len(CASES)
    assert 5 <= len(USUAL) < len(CASES)
    assert max(case.width_px for case in USUAL) <= 256
    assert case_of("wan").latent_shape(16) == (1, 16, 3, 8, 8)
    with pytest.raises(BenchError, match="choose from tiny_plain"):
        case_of("huge")


def test_folder_of_an_environment_is_its_python(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert find_python(str(tmp_path)) == str(tmp_path / "bin" / "python")
    assert find_python("python3.12") == "python3.12"
    assert find_python(str(tmp_path / "gone")) == str(tmp_path / "gone")
