"""One task for each node, all results in one file: with a stand-in for Ray, and with a cluster on this machine."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from halo_vae.profiling.bench import ray_nodes
from halo_vae.profiling.bench.cases import BenchError
from halo_vae.profiling.bench.guard import BusyError
from halo_vae.profiling.bench.ray_nodes import NodeReport, NodeTask, host_labels, run_node, run_on_nodes
from halo_vae.profiling.bench.request import SMOKE_CASES
from halo_vae.profiling.bench.results import Line, RunLine, line_of
from halo_vae.tests.profiling.bench.fakes_bench import request
from halo_vae.tests.profiling.bench.lines import make_run


@dataclass
class FakeRay:
    """Runs tasks when they are asked for, in this process."""

    found: list[dict[str, Any]]
    calls: list[str] = field(default_factory=list)
    tasks: dict[int, tuple[str, NodeTask]] = field(default_factory=dict)
    lost: str | None = None
    """A node that goes away while it works."""
    stops: bool = False
    """Ctrl-C while others wait."""

    def init(self, address: str, log_to_driver: bool) -> None:
        if address == "nowhere":
            raise ConnectionError("no cluster")
        self.calls.append(f"init {address}")

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def nodes(self) -> list[dict[str, Any]]:
        return self.found

    def remote(self, function: Callable[..., Any]) -> Any:
        ray, this = self, self

        class Remote:
            def options(self, num_cpus: int, max_retries: int, scheduling_strategy: Any) -> Any:
                assert (num_cpus, max_retries, scheduling_strategy.soft) == (0, 0, False)
                self.node = scheduling_strategy.node_id
                return self

            def remote(self, task: NodeTask) -> int:
                ray.tasks[len(ray.tasks)] = (self.node, task)
                return len(ray.tasks) - 1

        this.function = function  # type: ignore[attr-defined]
        return Remote()

    def wait(self, waiting: list[int], num_returns: int) -> tuple[list[int], list[int]]:
        if self.stops and len(waiting) < len(self.tasks):
            raise KeyboardInterrupt
        return waiting[-1:], waiting[:-1]  # the last one is done first

    def get(self, reference: int) -> NodeReport:
        node, task = self.tasks[reference]
        if node == self.lost:
            raise RuntimeError("The node died\nand a long trace")
        report: NodeReport = self.function(task)  # type: ignore[attr-defined]
        return report

    def cancel(self, reference: int) -> None:
        self.calls.append(f"cancel {self.tasks[reference][0]}")


@dataclass
class Affinity:
    node_id: str
    soft: bool


NODES = [
    {"NodeID": "aaaa1111bbbb2222", "NodeManagerHostname": "left", "Alive": True},
    {"NodeID": "cccc3333dddd4444", "NodeManagerHostname": "right", "Alive": True},
    {"NodeID": "eeee", "NodeManagerHostname": "dead", "Alive": False},
]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    module: Any = ModuleType("ray.util.scheduling_strategies")
    module.NodeAffinitySchedulingStrategy = Affinity
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def run(task: NodeTask) -> NodeReport:
        line = make_run(host=task.request.host, session=task.session)
        return NodeReport(host=task.request.host, lines=(line_of(line),))

    monkeypatch.setattr(ray_nodes, "run_node", run)
    return FakeRay(found=NODES)


def run(ray: FakeRay, address: str = "there:6379") -> tuple[tuple[NodeReport, ...], list[RunLine]]:
    kept: list[Line] = []
    reports = run_on_nodes(request(), address, kept.append, load=lambda: ray)
    return reports, [line for line in kept if isinstance(line, RunLine)]


def test_each_living_node_has_one_task_and_its_lines_are_gathered(ray: FakeRay) -> None:
    reports, kept = run(ray)
    assert {report.host for report in reports} == {"left", "right"}
    assert sorted(line.host for line in kept) == ["left", "right"]
    assert len({line.session for line in kept}) == 1
    assert [node for node, _ in ray.tasks.values()] == ["aaaa1111bbbb2222", "cccc3333dddd4444"]
    assert ray.calls == ["init there:6379", "shutdown"]


def test_node_that_is_lost_is_told_and_the_others_are_kept(ray: FakeRay) -> None:
    ray.lost = "cccc3333dddd4444"
    reports, kept = run(ray)
    assert [line.host for line in kept] == ["left"]
    assert [r.why_not for r in reports if r.host == "right"] == ["The node died"]


def test_ctrl_c_keeps_nodes_that_are_done_and_cancels_the_others(ray: FakeRay) -> None:
    ray.stops = True
    kept: list[Line] = []
    with pytest.raises(KeyboardInterrupt):
        run_on_nodes(request(), "there:6379", kept.append, load=lambda: ray)
    assert len(kept) == 1
    assert ray.calls[1:] == ["cancel aaaa1111bbbb2222", "shutdown"]


def test_nodes_on_one_machine_have_names_and_folders_of_their_own(ray: FakeRay) -> None:
    ray.found = [{**node, "NodeManagerHostname": "box"} for node in NODES]
    assert host_labels(ray.found[:2]) == {"aaaa1111bbbb2222": "box", "cccc3333dddd4444": "box#2"}
    run(ray)
    assert {task.folder_name for _, task in ray.tasks.values()} == {"ray-aaaa1111bbbb", "ray-cccc3333dddd"}


def test_no_cluster_no_node_and_no_ray_are_told(ray: FakeRay) -> None:
    with pytest.raises(BenchError, match="no Ray cluster at nowhere"):
        run(ray, "nowhere")
    ray.found = NODES[2:]
    with pytest.raises(BenchError, match="no living node"):
        run(ray)

    def missing() -> Any:
        raise ModuleNotFoundError("ray")

    with pytest.raises(BenchError, match=r"halo-vae\[ray\]"):
        run_on_nodes(request(), "there", lambda line: None, load=missing)


@pytest.mark.parametrize("error", [BusyError("another benchmark is running"), BenchError("no VAE"), OSError("disk")])
def test_what_one_node_is_to_blame_for_is_in_its_report(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(ray_nodes, "run_invocation", fail)
    report = run_node(NodeTask(request=request(), session="s", comfyui_url=None))
    assert (report.lines, report.why_not) == ((), str(error))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is missing (pip install 'halo-vae[ray]')")
def test_cluster_of_two_workers_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.cluster_utils import Cluster  # type: ignore[import-not-found]

    monkeypatch.setenv("HALO_VAE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    kept: list[Line] = []
    try:
        cluster.wait_for_nodes()
        wanted = request(cases=SMOKE_CASES[:1], runs=1, device="cpu", threads=1, time_limit_s=300.0)
        reports = run_on_nodes(wanted, cluster.address, kept.append)
    finally:
        cluster.shutdown()
    assert [report.why_not for report in reports] == [None, None]
    assert len({line.host for line in kept}) == 2
    assert all(isinstance(line, RunLine) and line.status == "ok" for line in kept)
