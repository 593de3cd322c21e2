"""A small server on 127.0.0.1: the stand-in page, the extension's own files, the real frontend's styles, the routes."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from halo_vae.profiling.codec import encode
from halo_vae.profiling.metrics import metrics_of
from halo_vae.profiling.record import DecodeRecord
from halo_vae.profiling.rows import row_of

WEB = Path(__file__).resolve().parents[2] / "web"
PAGE = Path(__file__).resolve().parent / "page"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2"}


def frontend() -> Path | None:
    """The files of ComfyUI's own frontend, from its package; None where that is not installed."""
    spec = importlib.util.find_spec("comfyui_frontend_package")
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]).resolve() / "static" if places else None


class Backend:
    """What the page can ask for."""

    def __init__(self) -> None:
        self.records: list[DecodeRecord] = []
        self.panels: dict[str, Any] = {}
        self.page_rows = 100
        self.skipped = 0
        self.refuse: str | None = None
        """A sentence that every request is refused with."""

    def answer(self, method: str, path: str, query: dict[str, str]) -> tuple[int, str, str]:
        """Status, content type and text."""
        if self.refuse is not None:
            return 503, "application/json", json.dumps({"error": self.refuse})
        if method == "POST" and path == "/halo_vae/clear":
            removed, self.records = len(self.records), []
            return _json({"removed": removed})
        if path == "/halo_vae/history":
            return _json(self._history(int(query["limit"]), query.get("before")))
        if path == "/halo_vae/metrics":
            return _json({"metrics": encode(metrics_of(self.records))})
        if path == "/halo_vae/export":
            return 200, "text/plain", f"{query['format']} of {query.get('id', 'all')}"
        kind, _, name = path.removeprefix("/halo_vae/").partition("/")
        if kind == "panels":
            return _json(self.panels.get(name))
        found = [r for r in self.records if r.record_id == name]
        return _json(found[0].to_json()) if found else (404, "application/json", json.dumps({"error": "no such record"}))

    def _history(self, limit: int, before: str | None) -> dict[str, Any]:
        newest = self.records[::-1]
        start, size = int(before or 0), min(limit, self.page_rows)
        end = start + size
        rows = [encode(row_of(r)) for r in newest[start:end]]
        following = str(end) if end < len(newest) else None
        return {"schema_version": 1, "rows": rows, "next": following, "skipped": self.skipped, "problems": []}


def _json(body: Any) -> tuple[int, str, str]:
    return 200, "application/json", json.dumps(body, allow_nan=False)


@contextmanager
def serving(backend: Backend) -> Iterator[str]:
    """The address of a server for `backend`, until the block ends."""
    styles = frontend()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer("POST")

        def _answer(self, method: str) -> None:
            url = urlsplit(self.path)
            path = unquote(url.path)
            if path.startswith("/api/"):
                query = {name: values[-1] for name, values in parse_qs(url.query).items()}
                status, kind, text = backend.answer(method, path.removeprefix("/api"), query)
                self._send(status, kind, text.encode())
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
