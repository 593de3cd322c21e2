"""Runs a comparison: each round of a case goes once through all installations, a process each, in turn."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from ...optim.accelerator import GPU
from ..ab.samples import load_average
from ..bench.cases import BenchError, CaseFamily
from ..bench.ending import ROOT
from ..bench.isolation import empty_caches
from ..bench.lines import hidden_paths, utc_now
from ..bench.vaes import VaeFile, prepare_vae
from ..render.units import format_ns
from .cases import CompareCase
from .records import Ask, CompareRequest, Comparison, DeviceKind, Installation, Round, SetupRead
from .spawn import Ended, Start, child_variables, run_child

Keep = Callable[[Comparison, Round], None]
Prepare = Callable[[str, CaseFamily, int, Path], VaeFile | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a comparison is made with; tests pass fakes."""

    start: Start = run_child
    prepare: Prepare = prepare_vae
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    now: Callable[[], datetime] = utc_now
    load: Callable[[], float | None] = load_average


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One process to start."""

    case: CompareCase
    device: DeviceKind
    round: int
    installation: Installation


def schedule(request: CompareRequest, devices: tuple[DeviceKind, ...]) -> Iterator[Turn]:
    """Every process, in order: within a round all installations, each round begun by the next one.

    So a machine that slows down, or that somebody else uses for a while, slows all of them.
    """
    n = len(request.installations)
    for device in devices:
        for case in request.cases:
            for i in range(request.rounds):
                for k in range(n):
                    yield Turn(case=case, device=device, round=i, installation=request.installations[(i + k) % n])


def run_comparison(
    request: CompareRequest, *, report: Callable[[str], None] = lambda text: None, keep: Keep = lambda all, one: None,
    tools: Tools | None = None,
) -> Comparison:  # fmt: skip
    """Measure everything. What fails is a round that says why; after Ctrl-C what there is comes with `cancelled`.

    `keep` gets each round as it ends, with all there is until then.

    BenchError or OSError where a VAE cannot be prepared.
    """
    with tempfile.TemporaryDirectory(prefix="halo-vae-compare-") as folder:
        return _Run(request, Path(folder), report, keep, tools or Tools()).run()


class _Run:
    def __init__(
        self, request: CompareRequest, work: Path, report: Callable[[str], None], keep: Keep, tools: Tools
    ) -> None:
        self._request, self._work, self._report, self._keep, self._tools = request, work, report, keep, tools
        self._started_at, self._load = self._now(), tools.load()
        self._setups: list[SetupRead] = []
        self._rounds: list[Round] = []
        self._given_up: set[tuple[str, str, DeviceKind]] = set()
        self._devices: tuple[DeviceKind, ...] = request.devices or ("cpu",)
        base = child_variables(tools.environ)
        self._environ = {
            one.name: empty_caches(work / f"caches-{i}").environment(base)
            for i, one in enumerate(request.installations)
        }
        self._hidden = {
            **{one.python: one.name for one in request.installations if os.sep in one.python},
            **hidden_paths(work, ROOT),
        }

    def run(self) -> Comparison:
        cancelled = False
        try:
            self._read_setups()
            vaes = self._prepare_vaes()
            for turn in schedule(self._request, self._devices):
                self._take(turn, vaes[turn.case.key])
        except KeyboardInterrupt:
            cancelled = True
        return self._so_far(cancelled)

    def _so_far(self, cancelled: bool = False) -> Comparison:
        request = self._request
        return Comparison(
            host=request.host, started_at=self._started_at, reference=request.reference_name,
            installations=tuple(one.name for one in request.installations), cases=request.cases,
            devices=self._devices, rounds_asked=request.rounds, setups=tuple(self._setups),
            rounds=tuple(self._rounds), load_before=self._load, cancelled=cancelled,
        )  # fmt: skip

    def _read_setups(self) -> None:
        for one in self._request.installations:
            ended = self._start(Ask(task="set_up", threads=self._request.threads), one)
            setup = ended.answer.setup if ended.answer is not None else None
            error = None if setup is not None else ended.error or "it told nothing of itself"
            status = ended.status if ended.status != "ok" or setup is not None else "failed"
            self._setups.append(SetupRead(installation=one.name, setup=setup, status=status, error=error))
            self._report(f"{one.name}: {error or (setup and f'torch {setup.environment.torch}')}")
        if self._request.devices is None and any(s.setup is not None and s.setup.has_gpu for s in self._setups):
            self._devices = ("cpu", "gpu")

    def _prepare_vaes(self) -> dict[str, VaeFile]:
        found: dict[tuple[str, CaseFamily], VaeFile] = {}
        for case in self._request.cases:
            if (case.vae, case.family) in found:
                continue
            self._report(f"preparing the VAE {case.vae}")
            vae = self._tools.prepare(case.vae, case.family, self._request.seed, self._work)
            if vae is None:
                raise BenchError(f"the case {case.key} needs a VAE of another kind than {case.vae}")
            found[case.vae, case.family] = vae
        return {case.key: found[case.vae, case.family] for case in self._request.cases}

    def _take(self, turn: Turn, vae: VaeFile) -> None:
        """One process, unless it is known how it would end: what has failed once is not tried again."""
        name = turn.installation.name
        cell = (name, turn.case.key, turn.device)
        if cell in self._given_up or any(s.installation == name and s.setup is None for s in self._setups):
            return
        case, shape, started_at = turn.case, turn.case.latent_shape(vae.latent_channels), self._now()
        ended = self._start(
            Ask(
                task="round", device="cpu" if turn.device == "cpu" else GPU, threads=self._request.threads,
                vae=str(vae.path), latent_shape=shape, seed=self._request.seed, configuration=case.way,
                precision=case.precision, iterations=case.iterations,
            ),
            turn.installation,
        )  # fmt: skip
        measured = ended.answer.measured if ended.answer is not None else None
        if ended.status == "ok" and measured is None:
            ended = replace(ended, status="failed", error="it told no time")
        if ended.status != "ok":
            self._given_up.add(cell)
        self._rounds.append(
            Round(
                installation=name, case=case.key, device=turn.device, round=turn.round, status=ended.status,
                started_at=started_at, error=ended.error, latent_shape=shape, process_ns=ended.process_ns,
                measured=measured if ended.status == "ok" else None,
            )
        )  # fmt: skip
        self._keep(self._so_far(), self._rounds[-1])
        told = f"{ended.status}, {ended.error}"
        if measured is not None and ended.status == "ok":
            told = format_ns(measured.ns / measured.iterations)
        self._report(f"{case.key} on the {turn.device.upper()}, round {turn.round + 1}, {name}: {told}")

    def _start(self, ask: Ask, one: Installation) -> Ended:
        ended = self._tools.start(ask, one.python, self._environ[one.name], self._request.time_limit_s)
        return replace(ended, error=None if ended.status == "ok" else self._clean(ended.error or ended.status))

    def _clean(self, sentence: str) -> str:
        """Tables are shown to others: where things lie here is nobody's business."""
        for path, word in sorted(self._hidden.items(), key=lambda item: -len(item[0])):
            if path:
                sentence = sentence.replace(path, word)
        return sentence

    def _now(self) -> str:
        return self._tools.now().isoformat(timespec="seconds")


def find_python(word: str) -> str:
    """The Python that a path stands for: a file as it is, of a folder of an environment the one within.

    A path that does not exist is given back, so that its column says so.
    """
    path = Path(word).expanduser()
    with contextlib.suppress(OSError):
        if path.is_dir():
            for inner in ("bin/python", "bin/python3", "Scripts/python.exe", "python.exe"):
                if (path / inner).is_file():
                    return str((path / inner).absolute())
    return str(path.absolute()) if os.sep in word or word.startswith("~") else word
