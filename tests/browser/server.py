"""A small server on 127.0.0.1: the stand-in page, the extension's own files, the real frontend's styles, the routes."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

from halo_vae.nodes.panel_data import Panels
from halo_vae.nodes.routes import ROUTES, Answer, Asked, answer
from halo_vae.nodes.session import Session
from halo_vae.profiling.collector import Collector
from halo_vae.profiling.record import DecodeRecord
from halo_vae.profiling.store import HistoryStore
from halo_vae.tests.browser.records import Bench

WEB = Path(__file__).resolve().parents[2] / "web"
PAGE = Path(__file__).resolve().parent / "page"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2"}


def frontend() -> Path | None:
    """The files of ComfyUI's own frontend, from its package; None where that is not installed."""
    spec = importlib.util.find_spec("comfyui_frontend_package")
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]).resolve() / "static" if places else None


class Backend:
    """What the page can ask for: the routes that ComfyUI serves, over a history and panels of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.bench = Bench()
        self.store = HistoryStore(folder / "history.jsonl")
        self.panels = Panels()
        self.refuse: str | None = None
        """A sentence that every request is refused with."""

    @property
    def collector(self) -> Collector:
        return self.bench.collector

    def add(self, *records: DecodeRecord, node: str | None = None) -> Any:
        """Write decodes to the history, as those of `node`; gives the last one's panel."""
        panel = None
        for record in records:
            self.store.append(record)
            panel = self.panels.add(node, record, free_bytes=11 << 30)
        return panel

    def answer(self, method: str, path: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> Answer:
        """What the server says."""
        if self.refuse is not None:
            return Answer(status=503, text=json.dumps({"error": self.refuse}))
        for route in ROUTES:
            prefix, _, named = route.path.partition("{")
            if route.method == method and (path.startswith(prefix) if named else path == prefix):
                asked = Asked(query=query, name=path[len(prefix) :], headers=headers, body=body)
                return answer(route, lambda: cast(Session, self), asked)
        return Answer(status=404, text=json.dumps({"error": "nothing is here"}))


@contextmanager
def serving(backend: Backend) -> Iterator[str]:
    """The address of a server for `backend`, until the block ends."""
    styles = frontend()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("GET", b"")

        def do_POST(self) -> None:
            self._answer("POST", self.rfile.read(int(self.headers.get("Content-Length", 0))))

        def _answer(self, method: str, body: bytes) -> None:
            url = urlsplit(self.path)
            path = unquote(url.path)
            if path.startswith("/api/"):
                query = {name: values[-1] for name, values in parse_qs(url.query).items()}
                headers = {name.lower(): value for name, value in self.headers.items()}
                said = backend.answer(method, path.removeprefix("/api"), query, headers, body)
                self._send(said.status, said.content_type, said.text.encode())
                return
            found = _file_of(path, styles)
            if found is None or not found.is_file():
                self._send(404, "text/plain", b"not here")
            elif path == "/":
                text = found.read_text(encoding="utf-8").replace("<!-- styles -->", _links(styles))
                self._send(200, _TYPES[".html"], text.encode())
            else:
                self._send(200, _TYPES.get(found.suffix, "application/octet-stream"), found.read_bytes())

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing: the tests look at the page."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def _links(styles: Path | None) -> str:
    """The style sheets that ComfyUI's page loads."""
    sheets = sorted((styles / "assets").glob("*.css")) if styles else []
    named = [s.name for s in sheets if s.name.startswith(("index-", "GraphView-", "dialogService-", "vendor-other-"))]
    return "".join(f'<link rel="stylesheet" href="/frontend/assets/{name}" />' for name in named)


def _file_of(path: str, styles: Path | None) -> Path | None:
    """The file that an address stands for."""
    if path == "/":
        return PAGE / "index.html"
    for prefix, folder in (("/extensions/halo_vae/", WEB), ("/frontend/", styles), ("/scripts/", PAGE / "scripts")):
        if folder is not None and path.startswith(prefix):
            found = (folder / path.removeprefix(prefix)).resolve()
            return found if found.is_relative_to(folder) else None
    return None
