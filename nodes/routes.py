"""What the host's web server answers for the panels and the history page. Pure of any web framework.

Every route reads but one, `clear`, which takes requests of the host's own page only. Nothing that a request says
becomes a path: ids and cursors are checked, and looked up among what was read.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..profiling.codec import encode
from ..profiling.doctor import diagnose
from ..profiling.doctor_read import read_facts
from ..profiling.export import csv_of, json_of
from ..profiling.record import DecodeRecord
from ..profiling.rows import row_of
from ..profiling.store import CursorError, HistoryPage, StoreError
from ..profiling.trace import chrome_trace
from .panel_data import bounded_record
from .same_origin import foreign
from .session import Session

log = logging.getLogger("halo_vae")
SCHEMA_VERSION = 1
"""Format of the answers. History: 1 first version."""
MAX_ROWS = 1000
DEFAULT_ROWS = 100
MAX_RECORD_BYTES = 8 << 20
"""Most bytes of one record."""
MAX_EXPORT_BYTES = 32 << 20
"""Most bytes of records in one export."""
MAX_BODY_BYTES = 1024
_MAX_NAME = 128
_MAX_CURSOR = 256
_AT_A_TIME = 50
"""Records read at once."""
_JSON, _CSV = "application/json", "text/csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request."""

    query: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    """What stands for the `{…}` of the route's path."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By name in lower case."""
    body: bytes = b""
    """At most `MAX_BODY_BYTES` + 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response."""

    status: int
    text: str
    content_type: str = _JSON
    headers: Mapping[str, str] = field(default_factory=dict)


class RefusedError(Exception):
    """The request cannot be answered; the message is one sentence for the one who asked."""

    def __init__(self, status: int, sentence: str) -> None:
        """`status` is HTTP's."""
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One address and what answers there."""

    method: Literal["GET", "POST"]
    path: str
    """With at most one `{name}`."""
    handle: Callable[[Session, Asked], Answer]
    """May read files and wait; raises RefusedError."""


def answer(route: Route, session: Callable[[], Session], asked: Asked) -> Answer:
    """What the route answers; every error is a JSON object with one sentence, free of paths."""
    try:
        return route.handle(session(), asked)
    except RefusedError as refused:
        return _error(refused.status, str(refused))
    except StoreError as error:
        log.warning("a request for the history failed: %s", error)
        return _error(503, "the history cannot be read or changed now; the server's log says why")
    except Exception:
        log.exception("a request to %s failed", route.path)
        return _error(500, "this cannot be shown; the server's log says why")


def _history(session: Session, asked: Asked) -> Answer:
    """Rows of the history, newest first."""
    limit, before = _limit(asked, DEFAULT_ROWS), asked.query.get("before") or None
    if before is not None and len(before) > _MAX_CURSOR:
        raise RefusedError(400, "before is too long; use the value of next that an earlier answer gave")
    rows: list[Any] = []
    problems: dict[str, None] = {}
    skipped, following = 0, None
    for page in _pages(session, limit, before):
        rows += [encode(row_of(record)) for record in page.records]
        problems |= dict.fromkeys(page.problems)
        skipped, following = skipped + page.skipped, page.next
    return _json(
        {
            "schema_version": SCHEMA_VERSION, "rows": rows, "next": following, "skipped": skipped,
            "problems": list(problems),
        }
    )  # fmt: skip


def _record(session: Session, asked: Asked) -> Answer:
    """One record in full."""
    return _json(bounded_record(_find(session, asked.name), MAX_RECORD_BYTES))


def _metrics(session: Session, asked: Asked) -> Answer:
    """The aggregate over the decodes of this process."""
    return _json({"schema_version": SCHEMA_VERSION, "metrics": encode(session.collector.metrics())})


def _panel(session: Session, asked: Asked) -> Answer:
    """The last panel of a node, for a page that was loaded after it."""
    panel = session.panels.last(asked.name) if len(asked.name) <= _MAX_NAME else None
    if panel is None and asked.query.get("missing") == "null":
        return _json(None)  # browsers tell every refusal in their console, and a node that has not run is no fault
    if panel is None:
        raise RefusedError(404, "this node has decoded nothing since ComfyUI was started; run it first")
    return _json(panel)


def _doctor(session: Session, asked: Asked) -> Answer:
    """The doctor's report without paths and without values of variables."""
    device = session.host.main_device()
    facts = read_facts(
        str(device), held_bytes=session.held_bytes(), profile=session.engine.device_profile(device),
    )  # fmt: skip
    return _json(diagnose(facts, os.environ).redacted().to_json())


def _export(session: Session, asked: Asked) -> Answer:
    """Records as a file: one, or the newest ones."""
    form, record_id = asked.query.get("format", ""), asked.query.get("id")
    if form not in ("json", "csv", "trace"):
        raise RefusedError(400, "format may be json, csv or trace")
    limit = 1 if form == "trace" else _limit(asked, MAX_ROWS)
    records = iter([_find(session, record_id)]) if record_id else _newest(session, limit)
    left_out = 0
    if form == "trace":
        record = next(records, None)
        if record is None:
            raise RefusedError(404, "nothing was decoded yet; run a decode first")
        text = json.dumps(chrome_trace(record), allow_nan=False)
    elif form == "csv":
        text = csv_of([row_of(record) for record in records])
    else:
        kept, left_out = _fitting(records, MAX_EXPORT_BYTES)
        text = json_of(kept)
    return _file(form, text, record_id or "history", left_out)


def _clear(session: Session, asked: Asked) -> Answer:
    """Remove every record of the history."""
    why_not = foreign(asked.headers)
    if why_not is not None:
        raise RefusedError(403, why_not)
    if asked.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
        raise RefusedError(415, "the content type must be application/json")
    if len(asked.body) > MAX_BODY_BYTES:
        raise RefusedError(413, "the body is too large; send {}")
    try:
        is_object = isinstance(json.loads(asked.body), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise RefusedError(400, "the body must be a JSON object; send {}")
    return _json({"removed": 0 if session.store is None else session.store.clear()})


ROUTES = (
    Route(method="GET", path="/halo_vae/history", handle=_history),
    Route(method="GET", path="/halo_vae/records/{name}", handle=_record),
    Route(method="GET", path="/halo_vae/metrics", handle=_metrics),
    Route(method="GET", path="/halo_vae/export", handle=_export),
    Route(method="GET", path="/halo_vae/doctor", handle=_doctor),
    Route(method="GET", path="/halo_vae/panels/{name}", handle=_panel),
    Route(method="POST", path="/halo_vae/clear", handle=_clear),
)


def _limit(asked: Asked, default: int) -> int:
    given = asked.query.get("limit")
    if given is None:
        return default
    if not re.fullmatch(r"[0-9]{1,4}", given) or not 1 <= int(given) <= MAX_ROWS:
        raise RefusedError(400, f"limit may be a whole number from 1 to {MAX_ROWS}")
    return int(given)


def _find(session: Session, record_id: str) -> DecodeRecord:
    """A record by its id, of this process or of the history."""
    if not re.fullmatch(r"[0-9a-f]{32}", record_id):
        raise RefusedError(400, "a record's id has 32 digits of 0 to 9 and a to f")
    for record in reversed(session.collector.records()):
        if record.record_id == record_id:
            return record
    found = None if session.store is None else session.store.find(record_id)
    if found is None:
        raise RefusedError(404, "no record in the history has this id; it may be too old, or the history was cleared")
    return found


def _pages(session: Session, limit: int, before: str | None = None) -> Iterator[HistoryPage]:
    """The newest `limit` records, or those before a cursor, a few at a time: with traces they may be large."""
    if session.store is None:
        records = tuple(reversed(session.collector.records()))[:limit]
        yield HistoryPage(records=records, next=None, skipped=0, problems=())
        return
    left = limit
    while left > 0:
        try:
            page = session.store.page(min(left, _AT_A_TIME), before)
        except CursorError as error:
            raise RefusedError(
                400, "before is no place in the history, or that part of it is gone; begin again without before"
            ) from error
        yield page
        left, before = left - len(page.records), page.next
        if before is None or not page.records:
            return


def _newest(session: Session, limit: int) -> Iterator[DecodeRecord]:
    """Newest first."""
    for page in _pages(session, limit):
        yield from page.records


def _fitting(records: Iterator[DecodeRecord], most_bytes: int) -> tuple[list[DecodeRecord], int]:
    """The first records that make no more bytes than that together, and how many are left out."""
    kept: list[DecodeRecord] = []
    used = left_out = 0
    for record in records:
        used += 0 if left_out else len(json.dumps(record.to_json()))
        if left_out or used > most_bytes:
            left_out += 1
        else:
            kept.append(record)
    return kept, left_out


def _json(body: Any) -> Answer:
    return Answer(status=200, text=json.dumps(body, allow_nan=False))


def _file(form: str, text: str, name: str, left_out: int) -> Answer:
    ending = {"json": "json", "csv": "csv", "trace": "trace.json"}[form]
    headers = {"Content-Disposition": f'attachment; filename="halo-vae-{name}.{ending}"'}
    if left_out:
        headers["X-Halo-VAE-Left-Out"] = str(left_out)
    return Answer(status=200, text=text, content_type=_CSV if form == "csv" else _JSON, headers=headers)


def _error(status: int, sentence: str) -> Answer:
    return Answer(status=status, text=json.dumps({"error": sentence}))
