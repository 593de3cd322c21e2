"""`halo-vae publish`: results of benchmarks onto a branch of pages."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .command import ExitCode

LANES = ("single", "instrumented", "nightly")


class PublishCommand:
    """Commit results of benchmarks onto a branch of pages, beside what is there; push only when asked.

    Neither files nor index of the checked out branch are touched. The same results again make no new commit. Names of
    machines are published; `halo-vae bench --host NAME` chooses them.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        add = parser.add_argument
        add("results", nargs="+", type=Path, metavar="RESULTS", help="files that `halo-vae bench` wrote, as one")
        add("--lane", choices=LANES, help="only results of this lane; by default of each, to its own place")
        add("--branch", default="gh-pages", metavar="NAME", help="branch to commit onto, default gh-pages")
        add("--repo", type=Path, default=Path(), metavar="DIR", help="folder in the git repository, default this one")
        add("--push", action="store_true", help="also push the branch")
        add("--remote", default="origin", metavar="NAME", help="remote to push to and to begin from, default origin")

    def run(self, args: argparse.Namespace) -> ExitCode:
        """See Command."""
        from ..bench.cases import LANES as ALL
        from ..bench.publish import publish
        from ..bench.results import read_all

        lanes = ALL if args.lane is None else tuple(lane for lane in ALL if lane == args.lane)
        done = publish(
            read_all(args.results), args.repo, lanes=lanes, branch=args.branch, remote=args.remote, push=args.push
        )
        for path in done.pages:
            sys.stdout.write(f"{path}\n")
        what = "has all of it already" if done.commit is None else f"is at {done.commit[:12]}"
        sys.stdout.write(f"{args.branch} {what}{', pushed' if done.pushed else ''}\n")
        return ExitCode.OK
