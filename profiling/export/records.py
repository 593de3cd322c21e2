"""Records as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterable

from ..record import SCHEMA_VERSION, DecodeRecord


def json_of(records: Iterable[DecodeRecord]) -> str:
    """An object with `schema_version`, `kind` "history" and `records`, in the order given, each as in the history.

    Every record carries its own `schema_version`. Ends with a line feed; text that is no Unicode becomes escapes.
    """
    document = {
        "schema_version": SCHEMA_VERSION,
        "kind": "history",
        "records": [record.to_json() for record in records],
    }
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace").decode() + "\n"
