"""Files committed onto a branch that is not checked out, by git's plumbing: no work tree and no index is touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .cases import BenchError

_MISLEADING = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX", "GIT_NAMESPACE")
"""Set inside hooks: they would point at another repository or index than the one asked for."""


class GitError(BenchError):
    """git cannot do what publishing needs."""


class Branch:
    """One branch of a repository. GitError from everything where git refuses."""

    def __init__(self, folder: Path, name: str, remote: str) -> None:
        """`folder` lies in the repository. GitError: no git, no repository, no such name, or it is checked out."""
        program = shutil.which("git")
        if program is None:
            raise GitError("git is not installed, and publishing commits with it; install git")
        if not folder.is_dir():
            raise GitError(f"there is no folder {folder}; give one in a git repository with --repo")
        self._git, self._folder, self.name, self.remote = program, folder, name, remote
        self._ref = f"refs/heads/{name}"
        self._old = ""
        """Where the branch was when `tip` looked; empty = there was none."""
        self._ask("rev-parse", "--git-dir", what=f"{folder} is in no git repository that can be used")
        self._ask("check-ref-format", self._ref, what=f"{name!r} is no name for a branch")
        self._refuse_checked_out()

    def tip(self) -> str | None:
        """The commit to build on; None where there is no such branch yet.

        The remote's, as it was when last fetched, where the local one is missing or behind it. GitError where both
        have commits of their own.
        """
        local = self._commit(self._ref)
        self._old = local or ""
        there = self._commit(f"refs/remotes/{self.remote}/{self.name}")
        if local is None or there is None:
            return local or there
        if self._is_within(local, there):
            return there
        if self._is_within(there, local):
            return local
        raise GitError(
            f"{self.name} has commits here that {self.remote}'s lacks, and the other way round; merge them, or where "
            f"all of them are published results, remove it here with `git branch -D {self.name}` and publish again"
        )

    def fetch(self) -> None:
        """Learn where the remote's branch is, if it has one and is reached."""
        self._run("fetch", "--quiet", self.remote, f"+{self._ref}:refs/remotes/{self.remote}/{self.name}")

    def names(self, commit: str) -> tuple[str, ...]:
        """Paths of all files of a commit."""
        listed = self._ask("ls-tree", "-r", "-z", "--name-only", commit, what=f"{self.name} cannot be read")
        return tuple(os.fsdecode(path) for path in listed.split(b"\0") if path)

    def read(self, commit: str, path: str) -> bytes:
        """Content of a file of a commit."""
        return self._ask("cat-file", "blob", f"{commit}:{path}", what=f"{path} on {self.name} cannot be read")

    def commit(self, base: str | None, files: Mapping[str, bytes], message: str, *, push: bool = False) -> str | None:
        """Put files onto the branch, all others kept; the commit's id, None where the branch here does not move.

        With `push` the remote's branch moves first. Nothing has happened where this raises, other than objects that git
        sweeps up by and by; also where somebody else has moved either branch meanwhile.
        """
        new = self._committed(base, files, message)
        if push:
            what = f"{self.name} was not pushed to {self.remote}, and nothing was changed here; see to it and try again"
            self._ask("push", "--quiet", self.remote, f"{new}:{self._ref}", what=what)
        return self._move(new) if new != self._old else None

    def _committed(self, base: str | None, files: Mapping[str, bytes], message: str) -> str:
        """A commit that no branch names yet, or `base` where it holds all of it."""
        tree = self._tree(base, files)
        if base is not None and tree == self._line("rev-parse", f"{base}^{{tree}}"):
            return base
        parent = () if base is None else ("-p", base)
        return self._line(
            "commit-tree", tree, *parent, "-m", message,
            what="git makes no commit; tell it who you are with `git config user.name` and `git config user.email`",
        )  # fmt: skip

    def _move(self, new: str) -> str:
        """Let the branch name a commit; it must not have moved since it was read."""
        what = f"{self.name} was moved by somebody else meanwhile; publish again"
        self._ask("update-ref", "-m", "publish benchmarks", self._ref, new, self._old, what=what)
        return new

    def _tree(self, base: str | None, files: Mapping[str, bytes]) -> str:
        with tempfile.TemporaryDirectory(prefix="halo-vae-") as folder:
            index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
            if base is not None:
                self._ask("read-tree", base, env=index)
            entries = []
            for path, content in files.items():
                blob = self._line("hash-object", "-w", "--stdin", given=content)
                entries.append(f"100644 {blob}\t{path}\0".encode())
            self._ask("update-index", "-z", "--index-info", given=b"".join(entries), env=index)
            return self._line("write-tree", env=index)

    def _refuse_checked_out(self) -> None:
        listed = self._ask("worktree", "list", "--porcelain").decode("utf-8", "replace")
        if f"branch {self._ref}" in listed.splitlines():
            raise GitError(
                f"{self.name} is checked out, and its files would no longer fit it; check another branch out first"
            )

    def _is_within(self, older: str, newer: str) -> bool:
        return self._run("merge-base", "--is-ancestor", older, newer).returncode == 0

    def _commit(self, ref: str) -> str | None:
        found = self._run("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
        return found.stdout.decode().strip() if found.returncode == 0 else None

    def _line(self, *args: str, what: str = "", given: bytes = b"", env: Mapping[str, str] | None = None) -> str:
        return self._ask(*args, what=what, given=given, env=env).decode().strip()

    def _ask(self, *args: str, what: str = "", given: bytes = b"", env: Mapping[str, str] | None = None) -> bytes:
        done = self._run(*args, given=given, env=env)
        if done.returncode:
            raise GitError(_sentence(what or f"git {args[0]} failed", done.stderr))
        return done.stdout

    def _run(
        self, *args: str, given: bytes = b"", env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        clean = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
        command: Sequence[str] = (self._git, *args)
        try:
            return subprocess.run(
                command, cwd=self._folder, env={**clean, "LC_ALL": "C", **(env or {})}, input=given,
                capture_output=True, check=False,
            )  # fmt: skip
        except OSError as error:
            raise GitError(f"git cannot be started ({error.strerror or error}); see its installation") from error


def _sentence(what: str, stderr: bytes) -> str:
    """What failed, and what git said first of all that matters."""
    lines = [line.strip() for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith(("fatal:", "error:", "!"))), lines[0] if lines else "")
    return f"{what} (git: {said})" if said else what
