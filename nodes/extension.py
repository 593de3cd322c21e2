"""The node classes that ComfyUI registers."""

from __future__ import annotations

import logging
import threading
from typing import Any

from . import actions, specs
from .comfy_host import ComfyExtension, ComfyHost, add_routes, io, known, node_of, panel, schema_of
from .session import Decoded, Session

log = logging.getLogger("halo_vae")
_SESSION: list[Session] = []
_LOCK = threading.Lock()


def session() -> Session:
    """The process's one session, made when it is first needed: by a node, or by a page that asks the server."""
    with _LOCK:
        if not _SESSION:
            _SESSION.append(Session(ComfyHost()))
        return _SESSION[0]


class HaloVAEDecode(io.ComfyNode):  # type: ignore[misc]
    """See specs.DECODE."""

    @classmethod
    def define_schema(cls) -> Any:
        """Sockets and widgets."""
        return schema_of(specs.DECODE)

    @classmethod
    def execute(cls, samples: Any, vae: Any, **widgets: Any) -> Any:
        """Pictures and record; widgets left out have their defaults."""
        return _decoded(actions.decode(session().at(node_of(cls)), samples, vae, **widgets))


class HaloVAEDecodeTiled(io.ComfyNode):  # type: ignore[misc]
    """See specs.DECODE_TILED."""

    @classmethod
    def define_schema(cls) -> Any:
        """Sockets and widgets."""
        return schema_of(specs.DECODE_TILED)

    @classmethod
    def execute(cls, samples: Any, vae: Any, **widgets: Any) -> Any:
        """Pictures and record; widgets left out have their defaults."""
        return _decoded(actions.decode_tiled(session().at(node_of(cls)), samples, vae, **widgets))


class HaloVAEDecodeVideo(io.ComfyNode):  # type: ignore[misc]
    """See specs.DECODE_VIDEO."""

    @classmethod
    def define_schema(cls) -> Any:
        """Sockets and widgets."""
        return schema_of(specs.DECODE_VIDEO)

    @classmethod
    def execute(cls, samples: Any, vae: Any, **widgets: Any) -> Any:
        """Pictures, record and their number; widgets left out have their defaults."""
        done = actions.decode_video(session().at(node_of(cls)), samples, vae, **widgets)
        return _decoded(done, done.images.shape[0])


class HaloVAEStats(io.ComfyNode):  # type: ignore[misc]
    """See specs.STATS_VIEW."""

    @classmethod
    def define_schema(cls) -> Any:
        """Sockets."""
        return schema_of(specs.STATS_VIEW)

    @classmethod
    def execute(cls, stats: Any) -> Any:
        """The record as text."""
        text = actions.show_stats(session(), stats)
        return panel(text, text=text, data=session().panels.add(node_of(cls), stats))


class HaloVAEMonitor(io.ComfyNode):  # type: ignore[misc]
    """See specs.MONITOR."""

    @classmethod
    def define_schema(cls) -> Any:
        """Sockets."""
        return schema_of(specs.MONITOR)

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> float:
        """Never the same twice: what it shows changes by itself."""
        return float("nan")

    @classmethod
    def execute(cls, vae: Any = None, samples: Any = None) -> Any:
        """The panel as text."""
        text = actions.monitor(session(), vae, samples)
        return panel(text, text=text)


class HaloVAETune(io.ComfyNode):  # type: ignore[misc]
    """See specs.TUNE."""

    @classmethod
    def define_schema(cls) -> Any:
        """Sockets and widgets."""
        return schema_of(specs.TUNE)

    @classmethod
    def execute(cls, vae: Any, **widgets: Any) -> Any:
        """What was found as text; widgets left out have their defaults."""
        text = actions.tune(session(), vae, **widgets)
        return panel(text, text=text)


class HaloVAEBenchmark(io.ComfyNode):  # type: ignore[misc]
    """See specs.BENCHMARK."""

    @classmethod
    def define_schema(cls) -> Any:
        """Sockets and widgets."""
        return schema_of(specs.BENCHMARK)

    @classmethod
    def execute(cls, samples: Any, vae: Any, **widgets: Any) -> Any:
        """Pictures, report and figures; widgets left out have their defaults."""
        done = actions.benchmark(session(), samples, vae, **widgets)
        results = (
            done.images, done.difference, done.report, done.figures, done.speedup, done.max_error, done.record
        )  # fmt: skip
        return panel(*map(known, results), text=done.report)


NODES = (
    HaloVAEDecode, HaloVAEDecodeTiled, HaloVAEDecodeVideo, HaloVAEStats, HaloVAEMonitor, HaloVAETune, HaloVAEBenchmark
)  # fmt: skip


class HaloVAEExtension(ComfyExtension):  # type: ignore[misc]
    """What ComfyUI asks for our nodes."""

    async def get_node_list(self) -> list[Any]:
        """Every node."""
        return list(NODES)


def extension(version: str) -> HaloVAEExtension:
    """The extension; says in the log that it is there, and has ComfyUI's server answer for it."""
    add_routes(session)
    log.info("Halo VAE %s: %d nodes in %s", version, len(NODES), ComfyHost().name)
    return HaloVAEExtension()


def _decoded(done: Decoded, *more: Any) -> Any:
    text = actions.show_stats(session(), done.record)
    return panel(done.images, done.record, *more, text=text, data=done.panel)
