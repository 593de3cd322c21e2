"""Results put onto a branch of pages: merged with what is there, a page per lane and per instrumented session.

`data/single/` and `data/nightly/` grow; `data/perf/<session>/` are permalinks. Each holds `results.jsonl`, its
`bench.json` and a page; above them lie a page to choose from and a `bench.json` of everything. No commit without news.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .aggregate import aggregate, to_json
from .cases import LANES, BenchError, Lane
from .git_branch import Branch
from .lanes import in_lane
from .pages import GENERATOR, Target, render_choice, render_target
from .results import Line, Results, RunLine, line_of, parse_lines

BRANCH = "gh-pages"
_SESSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}")
_FOLDERS: dict[Lane, str] = {"single": "data/single", "nightly": "data/nightly"}
_PERF = "data/perf"
_TARGET = re.compile(rf"(data/single|data/nightly|{_PERF}/[0-9A-Za-z_-]+)/results\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What became of it."""

    commit: str | None
    """Id of the new commit; None where the branch held everything already."""
    pages: tuple[str, ...]
    """Paths of the pages that were written."""
    n_new: int
    """Lines that the branch did not have."""
    pushed: bool


def publish(
    results: Results, folder: Path, *, lanes: Iterable[Lane] = LANES, branch: str = BRANCH, remote: str = "origin",
    push: bool = False,
) -> Published:  # fmt: skip
    """Commit results of these lanes onto a branch. BenchError, nothing changed: no results, or git refuses."""
    wanted = _by_folder(results, lanes)
    if not wanted:
        raise BenchError("there is no result of that lane; run `halo-vae bench` first, or choose another lane")
    onto = Branch(folder, branch, remote)
    if push:
        onto.fetch()  # others publish there too
    base = onto.tip()
    there = {} if base is None else _stored(onto, base)
    names = () if base is None else onto.names(base)
    changed: dict[str, bytes] = {}
    n_new = 0
    for where, lines in wanted.items():
        raw, n = merge(there.get(where, b""), lines)
        n_new += n
        if n or f"{where}/index.html" not in names:
            there[where] = raw
            changed[f"{where}/results.jsonl"] = raw
    files = _pages(changed, there)
    if changed:
        files |= _overview(onto, base, there, names)
    commit = onto.commit(base, files, _message(n_new), push=push)
    pages = tuple(path for path in files if path.endswith(".html"))
    return Published(commit=commit, pages=pages, n_new=n_new, pushed=push)


def merge(raw: bytes, lines: Iterable[Line]) -> tuple[bytes, int]:
    """Stored lines as they are, also those that cannot be read here, then the new ones; how many those are."""
    known = parse_lines(raw.split(b"\n"), "results.jsonl")
    ids, series = {run.run_id for run in known.runs}, set(known.series)
    parts = [raw if not raw or raw.endswith(b"\n") else raw + b"\n"]
    for line in lines:
        if isinstance(line, RunLine):
            if line.run_id in ids:
                continue
            ids.add(line.run_id)
        else:
            if line in series:
                continue
            series.add(line)
        parts.append(line_of(line))
    return b"".join(parts), len(parts) - 1


def _by_folder(results: Results, lanes: Iterable[Lane]) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {}
    for lane in lanes:
        chosen = in_lane(results, lane)
        lines: tuple[Line, ...] = (*chosen.runs, *chosen.series)
        for line in lines:
            found.setdefault(_folder_of(line), []).append(line)
    return found


def _folder_of(line: Line) -> str:
    if line.lane != "instrumented":
        return _FOLDERS[line.lane]
    if _SESSION.fullmatch(line.session) is None:
        raise BenchError(
            f"session {line.session!r} cannot name a folder; sessions are letters, digits, - and _, such as "
            "20260131T235959Z"
        )
    return f"{_PERF}/{line.session}"


def _stored(onto: Branch, base: str) -> dict[str, bytes]:
    """Results on the branch, by their folder."""
    found = (match for name in onto.names(base) if (match := _TARGET.fullmatch(name)))
    return {match[1]: onto.read(base, match[0]) for match in found}


def _read(where: str, raw: bytes) -> Results:
    return parse_lines(raw.split(b"\n"), f"{where}/results.jsonl")


def _pages(changed: Mapping[str, bytes], there: Mapping[str, bytes]) -> dict[str, bytes]:
    """Every file of the folders that changed."""
    files = dict(changed)
    for path in changed:
        where = path.removesuffix("/results.jsonl")
        results = _read(where, there[where])
        files[f"{where}/bench.json"] = to_json(aggregate(results)).encode()
        files[f"{where}/index.html"] = render_target(results, depth=where.count("/") + 1).encode()
    return files


def _overview(onto: Branch, base: str | None, there: Mapping[str, bytes], names: Iterable[str]) -> dict[str, bytes]:
    """`bench.json` of everything and the page to choose from; a start page that is not ours is left alone."""
    read = {where: _read(where, raw) for where, raw in sorted(there.items())}
    everything = Results(
        runs=tuple(run for results in read.values() for run in results.runs),
        series=tuple(line for results in read.values() for line in results.series),
    )
    targets = tuple(Target(folder=where, results=results) for where, results in read.items())
    files = {
        "bench.json": to_json(aggregate(everything)).encode(),
        "data/index.html": render_choice(targets, prefix="../").encode(),
    }
    is_ours = base is None or "index.html" not in names or GENERATOR.encode() in onto.read(base, "index.html")
    if is_ours:
        files["index.html"] = render_choice(targets, prefix="").encode()
    if base is None:
        files[".nojekyll"] = b""  # files are served as they are
    return files


def _message(n_new: int) -> str:
    return f"Benchmarks: {n_new} new line{'' if n_new == 1 else 's'} of results"
