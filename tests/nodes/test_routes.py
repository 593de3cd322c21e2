"""What the server answers, asked without a server."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halo_vae.nodes import actions, routes
from halo_vae.nodes.routes import MAX_BODY_BYTES, MAX_ROWS, ROUTES, Answer, Asked, answer
from halo_vae.nodes.same_origin import foreign
from halo_vae.nodes.session import Session
from halo_vae.profiling.metrics import Metrics
from halo_vae.profiling.record import DecodeRecord
from halo_vae.profiling.rows import HistoryRow
from halo_vae.profiling.store import HistoryStore
from halo_vae.tests.fixtures import latent
from halo_vae.tests.nodes.support import kl_vae, new_session
from halo_vae.tests.profiling.fakes import busy_events, make_collector, record_events

BY_PATH = {route.path: route for route in ROUTES}
OURS = {"host": "127.0.0.1:8188", "content-type": "application/json"}
UNKNOWN_ID = "f" * 32


def ask(session: Session, path: str, name: str = "", **query: str) -> Answer:
    return answer(BY_PATH[path], lambda: session, Asked(query=query, name=name))


def clear(session: Session, headers: Mapping[str, str], body: bytes = b"{}") -> Answer:
    return answer(BY_PATH["/halo_vae/clear"], lambda: session, Asked(headers=headers, body=body))


def body_of(given: Answer, status: int = 200) -> Any:
    assert given.status == status, given.text
    assert given.content_type == "application/json"
    return json.loads(given.text)


def error_of(given: Answer, status: int) -> str:
    body = body_of(given, status)
    assert list(body) == ["error"]
    assert not re.search(r"(^|[^a-z])/\w", body["error"])  # no path
    return str(body["error"])


def numbered(n: int) -> DecodeRecord:
    return replace(record_events(make_collector("per_op"), busy_events), record_id=f"{n:032x}")


@pytest.fixture
def full(tmp_path: Path) -> Session:
    """A session with a history of seven records, numbered 1 to 7, none of this process."""
    store = HistoryStore(tmp_path / "history.jsonl")
    for n in range(1, 8):
        store.append(numbered(n))
    return new_session(store=store)


def ids(body: Any) -> list[int]:
    return [int(row["record_id"], 16) for row in body["rows"]]


def test_history_page_by_page(full: Session) -> None:
    page = body_of(ask(full, "/halo_vae/history", limit="3"))
    assert set(page) == {"schema_version", "rows", "next", "skipped", "problems"}
    assert (page["schema_version"], page["skipped"], page["problems"]) == (1, 0, [])
    assert set(page["rows"][0]) == {f.name for f in dataclasses.fields(HistoryRow)}
    seen = ids(page)
    while page["next"] is not None:
        page = body_of(ask(full, "/halo_vae/history", limit="3", before=page["next"]))
        seen += ids(page)
    assert seen == [7, 6, 5, 4, 3, 2, 1]
    assert ids(body_of(ask(full, "/halo_vae/history"))) == seen


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "99999", "1e2", "", "٣", "3 ", "0x3"])
def test_limit_is_checked(full: Session, limit: str) -> None:
    for path in ("/halo_vae/history", "/halo_vae/export"):
        assert f"1 to {MAX_ROWS}" in error_of(ask(full, path, limit=limit, format="json"), 400)


@pytest.mark.parametrize("before", ["nowhere", "../../etc/passwd", "0" * 5000, "\x00", "-1"])
def test_cursor_is_checked(full: Session, before: str) -> None:
    assert "before" in error_of(ask(full, "/halo_vae/history", before=before), 400)


def test_history_that_is_empty_or_absent(tmp_path: Path) -> None:
    for session in (new_session(), new_session(store=HistoryStore(tmp_path / "none" / "history.jsonl"))):
        assert body_of(ask(session, "/halo_vae/history"))["rows"] == []
        assert not (tmp_path / "none").exists()


def test_without_a_history_the_rows_are_those_of_the_process() -> None:
    session, vae = new_session(), kl_vae()
    for _ in range(3):
        last = actions.decode(session, {"samples": latent((1, 4, 4, 4))}, vae).record
    page = body_of(ask(session, "/halo_vae/history", limit="2"))
    assert len(page["rows"]) == 2
    assert page["rows"][0]["record_id"] == last.record_id
    assert body_of(ask(session, "/halo_vae/records/{name}", last.record_id)) == last.to_json()


def test_a_record_in_full(full: Session) -> None:
    record = body_of(ask(full, "/halo_vae/records/{name}", f"{4:032x}"))
    assert DecodeRecord.from_json(record) == numbered(4)
    assert record["stages"]
    assert "history" in error_of(ask(full, "/halo_vae/records/{name}", UNKNOWN_ID), 404)


@pytest.mark.parametrize("name", ["", "1", "../history.jsonl", "F" * 32, "g" * 32, "0" * 33, "0" * 32 + "\n", "*"])
def test_id_is_checked(full: Session, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: HistoryStore, record_id: str) -> None:
        raise AssertionError(f"{record_id} was looked up")

    monkeypatch.setattr(HistoryStore, "find", never)
    assert "32 digits" in error_of(ask(full, "/halo_vae/records/{name}", name), 400)
    if name:
        assert "32 digits" in error_of(ask(full, "/halo_vae/export", format="json", id=name), 400)


def test_metrics_are_the_eleven_and_the_counts() -> None:
    session = new_session()
    actions.decode(session, {"samples": latent((1, 4, 4, 4))}, kl_vae())
    body = body_of(ask(session, "/halo_vae/metrics"))
    assert body["schema_version"] == 1
    assert set(body["metrics"]) == {f.name for f in dataclasses.fields(Metrics)}
    assert body["metrics"]["total_executions"] == 1


def test_panel_of_a_node() -> None:
    session = new_session()
    assert "run it first" in error_of(ask(session, "/halo_vae/panels/{name}", "4"), 404)
    assert body_of(ask(session, "/halo_vae/panels/{name}", "4", missing="null")) is None
    done = actions.decode(session.at("12:4"), {"samples": latent((1, 4, 4, 4))}, kl_vae())
    assert body_of(ask(session, "/halo_vae/panels/{name}", "12:4")) == done.panel
    error_of(ask(session, "/halo_vae/panels/{name}", "4" * 5000), 404)


def test_export_as_json_and_csv(full: Session) -> None:
    given = ask(full, "/halo_vae/export", format="json")
    assert given.headers["Content-Disposition"] == 'attachment; filename="halo-vae-history.json"'
    assert "X-Halo-VAE-Left-Out" not in given.headers
    assert f"{7:032x}" in given.text
    table = ask(full, "/halo_vae/export", format="csv", limit="5")
    assert (table.status, table.content_type) == (200, "text/csv")
    rows = list(csv.DictReader(io.StringIO(table.text)))
    assert [int(row["record_id"], 16) for row in rows] == [7, 6, 5, 4, 3]
    one = ask(full, "/halo_vae/export", format="json", id=f"{4:032x}")
    assert f"{4:032x}" in one.headers["Content-Disposition"]
    assert (f"{4:032x}" in one.text, f"{5:032x}" in one.text) == (True, False)
    assert "json, csv or trace" in error_of(ask(full, "/halo_vae/export", format="xml"), 400)
    assert "json, csv or trace" in error_of(ask(full, "/halo_vae/export"), 400)


def test_export_as_a_trace(full: Session) -> None:
    given = ask(full, "/halo_vae/export", format="trace", id=f"{4:032x}")
    assert body_of(given)["traceEvents"]
    assert given.headers["Content-Disposition"].endswith('.trace.json"')
    assert body_of(ask(full, "/halo_vae/export", format="trace"))["traceEvents"]
    assert "run a decode" in error_of(ask(new_session(), "/halo_vae/export", format="trace"), 404)


def test_export_is_bounded_in_bytes(full: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(json.dumps(numbered(1).to_json()))
    monkeypatch.setattr(routes, "MAX_EXPORT_BYTES", 3 * size)
    given = ask(full, "/halo_vae/export", format="json")
    assert given.headers["X-Halo-VAE-Left-Out"] == "4"
    assert [f"{n:032x}" in given.text for n in (7, 5, 4)] == [True, True, False]


def private_values() -> set[str]:
    """Paths and values of this machine, long enough not to be words by chance."""
    values = {*os.environ.values(), tempfile.gettempdir(), str(Path.home()), os.getcwd(), str(Path(__file__).parent)}
    parts = {part for value in values for part in value.split(os.pathsep)}
    return {part for part in {*values, *parts} if len(part) >= 6 or os.sep in part.strip(os.sep)}


def test_doctor_shows_no_paths_and_no_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secrets = {
        "MIOPEN_CUSTOM_CACHE_DIR": str(tmp_path / "kernels"), "PYTORCH_HIP_ALLOC_CONF": "secret_conf:1",
        "HSA_OVERRIDE_GFX_VERSION": "9.8.7654", "MIOPEN_FIND_MODE": "secret_mode", "HALO_VAE_SOMETHING": "secret_word",
    }  # fmt: skip
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    given = ask(new_session(), "/halo_vae/doctor")
    report = body_of(given)
    assert report["kind"] == "doctor"
    assert {v["name"] for v in report["variables"]} >= {"MIOPEN_CUSTOM_CACHE_DIR", "HSA_OVERRIDE_GFX_VERSION"}
    # what torch, Python and the kernel say of themselves may be an environment's value as well
    public = json.dumps([report["versions"], report["platform"], report["device"]])
    shown = given.text.replace("\\\\", "\\")
    found = {value for value in private_values() if value in shown and value not in public}
    assert found == set()
    assert not any(value in given.text for value in secrets.values())
    assert all(folder["path"] is None for folder in report["folders"])


def test_clear_removes_the_history(full: Session) -> None:
    assert body_of(clear(full, OURS)) == {"removed": 7}
    assert body_of(ask(full, "/halo_vae/history"))["rows"] == []
    assert body_of(clear(full, OURS)) == {"removed": 0}
    assert body_of(clear(new_session(), OURS)) == {"removed": 0}


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://127.0.0.1:8188"},
        {"origin": "http://127.0.0.1:8188", "sec-fetch-site": "same-origin"},
        {"origin": "https://gpu.example", "host": "gpu.example"},
        {"origin": "https://gpu.example", "host": "gpu.example:443"},
        {"origin": "http://GPU.example:80", "host": "gpu.example"},
        {"origin": "http://[::1]:8188", "host": "[::1]:8188"},
        {"content-type": "application/json; charset=utf-8"},
        {},  # a program
    ],
)
def test_clear_takes_the_hosts_own_page(full: Session, headers: dict[str, str]) -> None:
    assert body_of(clear(full, OURS | headers)) == {"removed": 7}


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:8189"},  # another program of this machine
        {"origin": "http://127.0.0.1"},
        {"origin": "https://127.0.0.1:8188.evil.example"},
        {"origin": "http://127.0.0.1:8188@evil.example"},
        {"origin": "http://localhost:8188"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://[::1"},
        {"origin": "http://127.0.0.1:99999"},
        {"origin": "file://"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"origin": "http://127.0.0.1:8188", "sec-fetch-site": "cross-site"},
        {"origin": "http://127.0.0.1:8188", "host": ""},
    ],
)
def test_clear_refuses_pages_of_others(full: Session, headers: dict[str, str]) -> None:
    assert foreign(OURS | headers) is not None
    error_of(clear(full, OURS | headers), 403)
    assert len(body_of(ask(full, "/halo_vae/history"))["rows"]) == 7


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
def test_clear_needs_a_content_type_that_no_form_has(full: Session, kind: str) -> None:
    assert "application/json" in error_of(clear(full, OURS | {"content-type": kind}), 415)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 400), (b"[]", 400), (b"x", 400), (b"\xff", 400), (b"{" + b" " * MAX_BODY_BYTES + b"}", 413)],
)
def test_clear_needs_a_small_object(full: Session, body: bytes, status: int) -> None:
    error_of(clear(full, OURS, body), status)
    assert len(body_of(ask(full, "/halo_vae/history"))["rows"]) == 7


def test_only_clear_changes_anything() -> None:
    assert [route.path for route in ROUTES if route.method != "GET"] == ["/halo_vae/clear"]
    assert len(BY_PATH) == len(ROUTES)


@pytest.mark.parametrize("path", ["/halo_vae/history", "/halo_vae/export"])
def test_a_history_that_cannot_be_read_is_told_without_its_path(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "history.jsonl").mkdir()
    session = new_session(store=HistoryStore(tmp_path / "history.jsonl"))
    assert "server's log" in error_of(ask(session, path, format="csv"), 503)
    assert str(tmp_path) in caplog.text


def test_what_nobody_thought_of_is_told_without_words_of_code(full: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full, "collector", None)
    assert error_of(ask(full, "/halo_vae/metrics"), 500) == "this cannot be shown; the server's log says why"
