"""The same benchmark on several machines at once: one task for each node of a Ray cluster, all results in one file.

Each node needs this package and its own copy of a VAE that is given as a file. Source: Ray's API reference (ray.init,
ray.nodes, NodeAffinitySchedulingStrategy, ray.wait, ray.cancel).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .cases import BenchError
from .invocation import Guards, run_invocation
from .lines import session_name, utc_now
from .request import BenchRequest
from .results import Line, line_of, parse_line


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What one node gave back."""

    host: str
    lines: tuple[bytes, ...] = ()
    """As in a file of results."""
    why_not: str | None = None
    """Why nothing, or not all, was run there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTask:
    """What one node is to do."""

    request: BenchRequest
    session: str
    comfyui_url: str | None
    folder_name: str | None = None
    """A folder of the node's own in the cache folder, where nodes share a machine; None where they do not."""


def run_on_nodes(
    request: BenchRequest, address: str, keep: Callable[[Line], None], *, comfyui_url: str | None = None,
    tell: Callable[[str], None] = lambda text: None, load: Callable[[], Any] | None = None,
) -> tuple[NodeReport, ...]:  # fmt: skip
    """Run on every living node of the cluster at `address`; `keep` gets a node's lines when that node is done.

    `load` gives the module ray. BenchError where it is not installed, the cluster is not there or has no node. After
    Ctrl-C the nodes that are done have been kept.
    """
    ray = _load(load)
    try:
        ray.init(address=address, log_to_driver=False)
    except Exception as error:  # its own kinds of errors differ between versions
        why = _first_line(error)
        raise BenchError(f"there is no Ray cluster at {address} ({why}); start one, or leave --ray out") from error
    try:
        return _gather(ray, request, keep, comfyui_url, tell)
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()


def run_node(task: NodeTask) -> NodeReport:
    """One node's part, on that node. Never raises what only one node is to blame for."""
    from ...optim.errors import HaloError
    from ...optim.files import user_dir
    from .guard import BusyError

    lines: list[bytes] = []
    folder = None if task.folder_name is None else user_dir("cache") / task.folder_name
    guards = Guards(comfyui_url=task.comfyui_url, cache_folder=folder)
    why_not = None
    try:
        outcome = run_invocation(
            task.request, lambda line: lines.append(line_of(line)), guards=guards, session=task.session
        )
        why_not = "cancelled" if outcome.cancelled else None
    except (BusyError, HaloError, OSError) as error:
        why_not = str(error)
    return NodeReport(host=task.request.host, lines=tuple(lines), why_not=why_not)


def _gather(
    ray: Any, request: BenchRequest, keep: Callable[[Line], None], comfyui_url: str | None, tell: Callable[[str], None]
) -> tuple[NodeReport, ...]:
    nodes = [node for node in ray.nodes() if node.get("Alive")]
    if not nodes:
        raise BenchError("the Ray cluster has no living node; start a worker")
    hosts, session = host_labels(nodes), session_name(utc_now())
    shared = len({node.get("NodeManagerHostname") for node in nodes}) < len(nodes)
    affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    remote = ray.remote(run_node)
    waiting: dict[Any, str] = {}
    for node in nodes:
        name = node["NodeID"]
        task = NodeTask(
            request=replace(request, host=hosts[name]), session=session, comfyui_url=comfyui_url,
            folder_name=f"ray-{name[:12]}" if shared else None,
        )  # fmt: skip
        placed = remote.options(num_cpus=0, max_retries=0, scheduling_strategy=affinity(node_id=name, soft=False))
        waiting[placed.remote(task)] = hosts[name]
    reports: list[NodeReport] = []
    try:
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1)
            for one in done:
                reports.append(_take(ray, one, waiting.pop(one), keep))
                tell(f"{reports[-1].host}: {reports[-1].why_not or f'{len(reports[-1].lines)} line(s)'}")
    except KeyboardInterrupt:
        for one in waiting:
            ray.cancel(one)
        raise
    return tuple(reports)


def _take(ray: Any, reference: Any, host: str, keep: Callable[[Line], None]) -> NodeReport:
    try:
        report: NodeReport = ray.get(reference)
    except Exception as error:  # a node that was lost, or whose Python lacks the package
        return NodeReport(host=host, why_not=_first_line(error))
    for raw in report.lines:
        keep(parse_line(raw))
    return report


def host_labels(nodes: list[Mapping[str, Any]]) -> dict[str, str]:
    """A label for each node id: its host's name, with a number where several nodes have one."""
    found: dict[str, str] = {}
    for node in nodes:
        name = str(node.get("NodeManagerHostname") or node["NodeID"][:12])
        n = sum(label == name or label.startswith(f"{name}#") for label in found.values())
        found[node["NodeID"]] = name if n == 0 else f"{name}#{n + 1}"
    return found


def _load(load: Callable[[], Any] | None) -> Any:
    try:
        return (load or (lambda: importlib.import_module("ray")))()
    except ImportError as error:
        raise BenchError("--ray needs Ray; install it (pip install 'halo-vae[ray]') or leave --ray out") from error


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__
