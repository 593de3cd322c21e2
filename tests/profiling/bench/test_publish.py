from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from halo_vae.profiling.bench.cases import BenchError
from halo_vae.profiling.bench.git_branch import Branch, GitError
from halo_vae.profiling.bench.publish import merge, publish
from halo_vae.profiling.bench.results import Results, ResultsFile, line_of
from halo_vae.tests.profiling.bench.lines import make_run, make_series

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    (tmp_path / "gitconfig").write_text("[user]\n name = A\n email = a@example.org\n[init]\n defaultBranch = main\n")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with a commit, a staged change and one that is not staged."""
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "a.txt").write_text("one\n")
    git(folder, "add", "a.txt")
    git(folder, "commit", "--quiet", "-m", "first")
    (folder / "staged.txt").write_text("staged\n")
    git(folder, "add", "staged.txt")
    (folder / "a.txt").write_text("two\n")
    return folder


def state(folder: Path) -> list[str]:
    """What is checked out, staged and lying there."""
    asked = (("status", "--porcelain"), ("rev-parse", "HEAD"), ("diff", "--cached"), ("diff",))
    files = sorted(p.name for p in folder.iterdir() if p.name != ".git")
    return [*(git(folder, *args) for args in asked), *files]


def names(folder: Path, branch: str = "gh-pages") -> list[str]:
    return git(folder, "ls-tree", "-r", "--name-only", branch).split("\n")


def show(folder: Path, path: str) -> str:
    return git(folder, "show", f"gh-pages:{path}")


RESULTS = Results(
    runs=(
        make_run(1),
        make_run(2, lane="nightly"),
        make_run(3, lane="instrumented"),
        make_run(4, configuration="baseline"),
    ),
    series=(make_series(),),
)


def test_pages_of_every_lane_and_nothing_else_is_touched(repo: Path) -> None:
    before = state(repo)
    done = publish(RESULTS, repo)
    assert state(repo) == before
    folders = ("data/nightly", "data/perf/20260101T000000Z", "data/single")
    expected = {f"{f}/{name}" for f in folders for name in ("bench.json", "index.html", "results.jsonl")}
    assert set(names(repo)) == expected | {".nojekyll", "bench.json", "data/index.html", "index.html"}
    assert done.commit == git(repo, "rev-parse", "gh-pages")
    assert (done.n_new, done.pushed) == (5, False)
    assert 'href="data/perf/20260101T000000Z/"' in show(repo, "index.html")
    assert 'href="../data/perf/20260101T000000Z/"' in show(repo, "data/index.html")
    assert sorted(json.loads(show(repo, "bench.json"))["lanes"]) == ["instrumented", "nightly", "single"]
    assert "Readings on box" in show(repo, "data/perf/20260101T000000Z/index.html")
    assert "lane nightly" in show(repo, "data/nightly/index.html")
    assert git(repo, "rev-list", "--count", "gh-pages") == "1"  # with no parent on the main branch


def test_the_same_results_again_make_no_commit(repo: Path) -> None:
    first = publish(RESULTS, repo).commit
    again = publish(RESULTS, repo)
    assert (again.commit, again.n_new, again.pages) == (None, 0, ())
    assert git(repo, "rev-parse", "gh-pages") == first


def test_what_is_there_stays(repo: Path) -> None:
    git(repo, "branch", "gh-pages")
    publish(Results(runs=(make_run(1),)), repo)
    assert show(repo, "a.txt") == "one"  # of the branch's own
    done = publish(Results(runs=(make_run(2), make_run(5, lane="nightly"))), repo)
    assert done.n_new == 2
    lines = show(repo, "data/single/results.jsonl").split("\n")
    assert [json.loads(line)["run_id"][-1] for line in lines] == ["1", "2"]
    assert json.loads(show(repo, "data/single/bench.json"))["lanes"]["single"][0]["n"] == 10
    assert show(repo, "a.txt") == "one"
    assert git(repo, "rev-list", "--count", "gh-pages") == "3"


def test_a_start_page_of_somebodys_own_is_left_alone(repo: Path) -> None:
    git(repo, "stash", "--quiet")
    git(repo, "checkout", "--quiet", "-b", "gh-pages")
    (repo / "index.html").write_text("mine\n")
    git(repo, "add", "index.html")
    git(repo, "commit", "--quiet", "-m", "mine")
    git(repo, "checkout", "--quiet", "main")
    publish(Results(runs=(make_run(1),)), repo)
    publish(Results(runs=(make_run(2),)), repo)
    assert show(repo, "index.html") == "mine"
    assert "data/single/" in show(repo, "data/index.html")


def test_lines_of_a_newer_format_stay_as_they_are() -> None:
    newer = line_of(make_run(1)).replace(b'"schema_version":1', b'"schema_version":9')
    raw, n = merge(newer.rstrip(b"\n"), [make_run(2), make_run(2), make_series(), make_series()])
    assert raw == newer + line_of(make_run(2)) + line_of(make_series())
    assert n == 2
    assert merge(raw, [make_run(2), make_series()]) == (raw, 0)


def test_only_the_lane_that_is_asked_for(repo: Path) -> None:
    publish(RESULTS, repo, lanes=("nightly",))
    assert [n for n in names(repo) if n.endswith("jsonl")] == ["data/nightly/results.jsonl"]
    with pytest.raises(BenchError, match="no result of that lane"):
        publish(Results(runs=(make_run(1),)), repo, lanes=("nightly",))


def test_a_detached_head_and_a_hooks_variables_do_no_harm(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(repo, "checkout", "--quiet", "--detach")
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "another-index"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    publish(RESULTS, repo)
    monkeypatch.delenv("GIT_INDEX_FILE")
    monkeypatch.delenv("GIT_DIR")
    assert "bench.json" in names(repo)
    assert not (tmp_path / "another-index").exists()
    assert git(repo, "rev-parse", "--abbrev-ref", "HEAD") == "HEAD"


def test_push_only_when_asked(repo: Path, tmp_path: Path) -> None:
    there = tmp_path / "remote.git"
    git(tmp_path, "init", "--quiet", "--bare", str(there))
    git(repo, "remote", "add", "origin", str(there))
    publish(RESULTS, repo)
    assert git(there, "branch", "--list") == ""
    assert publish(RESULTS, repo, push=True).pushed  # nothing new, and not there yet
    assert git(there, "rev-parse", "gh-pages") == git(repo, "rev-parse", "gh-pages")


def test_a_new_clone_builds_on_the_remotes_branch(repo: Path, tmp_path: Path) -> None:
    publish(Results(runs=(make_run(1),)), repo)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(repo), str(clone))
    done = publish(Results(runs=(make_run(2),)), clone, push=True)
    assert git(clone, "rev-parse", "gh-pages~1") == git(repo, "rev-parse", "gh-pages~1")
    assert done.commit == git(repo, "rev-parse", "gh-pages")
    # and a clone that fell behind moves on before it adds
    git(clone, "update-ref", "refs/heads/gh-pages", "gh-pages~1")
    assert publish(Results(runs=(make_run(2),)), clone).commit == done.commit


def test_a_push_that_is_refused_is_told(repo: Path) -> None:
    with pytest.raises(GitError, match=r"was not pushed to nowhere, and nothing was changed here; .*\(git: fatal"):
        publish(RESULTS, repo, push=True, remote="nowhere")
    assert git(repo, "branch", "--list", "gh-pages") == ""


def test_two_machines_publish_in_turn(repo: Path, tmp_path: Path) -> None:
    there = tmp_path / "remote.git"
    git(tmp_path, "init", "--quiet", "--bare", str(there))
    git(repo, "remote", "add", "origin", str(there))
    publish(Results(runs=(make_run(1),)), repo, push=True)
    other = tmp_path / "other"
    git(tmp_path, "clone", "--quiet", str(there), str(other))
    for n, folder in enumerate((other, repo, other, repo), 2):  # each has not seen the other's last
        publish(Results(runs=(make_run(n, host=folder.name),)), folder, push=True)
    assert git(there, "rev-list", "--count", "gh-pages") == "5"
    assert len(git(there, "show", "gh-pages:data/single/results.jsonl").split("\n")) == 5
    publish(Results(runs=(make_run(8),)), repo)
    publish(Results(runs=(make_run(9),)), other, push=True)
    with pytest.raises(GitError, match="the other way round"):
        publish(Results(runs=(make_run(10),)), repo, push=True)


def test_refusals(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(GitError, match="outside is in no git repository that can be used"):
        publish(RESULTS, outside)
    with pytest.raises(GitError, match="there is no folder"):
        publish(RESULTS, tmp_path / "none")
    with pytest.raises(GitError, match="main is checked out"):
        publish(RESULTS, repo, branch="main")
    with pytest.raises(GitError, match="is no name for a branch"):
        publish(RESULTS, repo, branch="a..b")
    with pytest.raises(BenchError, match="cannot name a folder"):
        publish(Results(runs=(make_run(1, lane="instrumented", session="../../x"),)), repo)
    monkeypatch.setenv("PATH", str(outside))
    with pytest.raises(GitError, match="git is not installed"):
        publish(RESULTS, repo)
    monkeypatch.undo()
    assert "gh-pages" not in git(repo, "branch", "--list")


def test_nobody_to_commit_as(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "gitconfig").write_text("[user]\n useConfigOnly = true\n")
    with pytest.raises(GitError, match="tell it who you are"):
        publish(RESULTS, repo)


def test_a_branch_that_somebody_moves_meanwhile_is_not_overwritten(repo: Path) -> None:
    publish(RESULTS, repo)
    onto = Branch(repo, "gh-pages", "origin")
    base = onto.tip()
    publish(Results(runs=(make_run(9),)), repo)
    theirs = git(repo, "rev-parse", "gh-pages")
    with pytest.raises(GitError, match="moved by somebody else"):
        onto.commit(base, {"x": b"y"}, "m")
    assert git(repo, "rev-parse", "gh-pages") == theirs


def test_command(repo: Path, tmp_path: Path, halo: Any) -> None:
    file = ResultsFile(tmp_path / "results.jsonl")
    file.append(make_run(1))
    ended = halo("publish", str(file.path), "--repo", str(repo))
    assert ended.code == 0
    assert "data/single/index.html\n" in ended.out
    assert f"gh-pages is at {git(repo, 'rev-parse', 'gh-pages')[:12]}" in ended.out
    assert halo("publish", str(file.path), "--repo", str(repo)).out == "gh-pages has all of it already\n"
    assert halo("publish", str(file.path), "--repo", str(repo), "--lane", "nightly").code == 1
