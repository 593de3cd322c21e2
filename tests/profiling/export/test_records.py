from __future__ import annotations

import json
from dataclasses import replace

from halo_vae.profiling.export import json_of
from halo_vae.profiling.record import SCHEMA_VERSION, DecodeRecord, DecodeStatus
from halo_vae.tests.profiling.fakes import busy_events, make_collector, record_events

RECORD: DecodeRecord = record_events(make_collector("per_op"), busy_events)


def test_records_come_back_in_their_order() -> None:
    failed = replace(RECORD, status=DecodeStatus.ERROR, error='no "room" × \udc80', image_shape=None)
    text = json_of([RECORD, failed])
    text.encode()
    document = json.loads(text)
    assert list(document) == ["schema_version", "kind", "records"]
    assert (document["schema_version"], document["kind"]) == (SCHEMA_VERSION, "history")
    assert [line["schema_version"] for line in document["records"]] == [SCHEMA_VERSION] * 2
    assert [DecodeRecord.from_json(line) for line in document["records"]] == [RECORD, failed]
    assert (text.count("\n"), text[-1]) == (1, "\n")


def test_no_records_are_a_document_too() -> None:
    assert json_of([]) == '{"schema_version":1,"kind":"history","records":[]}\n'
