"""What a panel is made of: the record, what follows from it, and the node's own decodes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from halo_vae.nodes import actions
from halo_vae.nodes.panel_data import KEEP_DECODES, MAX_BYTES, Panels, bounded_record, panel_of, summary_of
from halo_vae.optim.events import Choice, Fallback
from halo_vae.profiling.parts import ChunkBoundary, PassRecord, TileShape
from halo_vae.profiling.record import DecodeRecord, DecodeStatus
from halo_vae.tests.fixtures import latent
from halo_vae.tests.nodes.fake_host import FakeHost, Interrupted
from halo_vae.tests.nodes.support import kl_vae, new_session
from halo_vae.tests.profiling.fakes import (
    ENVIRONMENT,
    IDENTITY,
    MS,
    PLAN,
    REQUEST,
    busy_events,
    make_collector,
    record_events,
)

PANEL_KEYS = {
    "schema_version", "record_id", "record", "summary", "recent", "median_ns", "n_median", "left_out",
}  # fmt: skip
SUMMARY_KEYS = {
    "used_bytes", "prediction_ratio", "conversion_share", "bytes_per_s", "bandwidth_share", "parallel_efficiency",
    "temporal_consistency", "fragmentation_bytes", "free_bytes", "cache_hit_rate", "cache_hit_rates", "pool_hit_rate",
    "mac_shares",
}  # fmt: skip


def busy_record(level: str = "summary") -> DecodeRecord:
    record: DecodeRecord = record_events(make_collector(level), busy_events)
    return record


def numbered(n: int, ms: int, **changes: Any) -> DecodeRecord:
    """Record `n`, warm and of `ms` milliseconds."""
    plain = {"record_id": f"{n:032x}", "wall_ns": ms * MS, "first_of_shape": False}
    return replace(busy_record(), **(plain | changes))


def failed(record: DecodeRecord, status: DecodeStatus = DecodeStatus.ERROR) -> DecodeRecord:
    return replace(record, status=status, error="it failed", image_shape=None)


def test_panel_is_the_record_and_what_follows_from_it() -> None:
    record = busy_record()
    panel = Panels().add("4", record, free_bytes=7)
    assert set(panel) == PANEL_KEYS
    assert json.loads(json.dumps(panel, allow_nan=False)) == panel
    assert panel["schema_version"] == 1
    assert panel["record_id"] == record.record_id
    whole = record.to_json()
    assert panel["record"] == {key: value for key, value in whole.items() if key not in ("stages", "trace")}
    summary = panel["summary"]
    assert set(summary) == SUMMARY_KEYS
    assert summary["free_bytes"] == 7
    assert summary["pool_hit_rate"] == 0.5
    assert summary["cache_hit_rate"] == 0.5
    assert summary["cache_hit_rates"]["program"] == 1.0
    assert summary["cache_hit_rates"]["plan"] == 0.0
    assert summary["cache_hit_rates"]["packed"] is None  # never looked at
    assert summary["mac_shares"] == {"fp16": 0.0, "bf16": 0.75, "fp32": 0.25}
    assert summary["temporal_consistency"] == 0.75
    assert summary["conversion_share"] == record.conversion_share == 40 / 4000
    assert summary["used_bytes"] is None  # no counter


def test_nothing_counted_is_unknown_not_zero() -> None:
    summary = summary_of(replace(busy_record("off"), plan=None))
    known = {"cache_hit_rates": {}, "temporal_consistency": 0.75}
    assert summary == dict.fromkeys(SUMMARY_KEYS) | known


def test_ops_are_left_out_and_counted() -> None:
    record = busy_record("per_op")
    assert len(record.stages) > 0
    panel = Panels().add("4", record)
    assert panel["left_out"] == {"stages": len(record.stages)}
    assert "stages" not in panel["record"]
    assert "trace" not in panel["record"]


def test_recent_decodes_of_one_node() -> None:
    panels = Panels()
    panels.add("4", numbered(1, 900, first_of_shape=True))
    panels.add("4", numbered(2, 10))
    panels.add("5", numbered(3, 1))  # another node's
    panels.add("4", failed(numbered(4, 70)))
    wide = replace(REQUEST, latent_shape=(1, 4, 64, 96))
    panels.add("4", numbered(5, 50, request=wide))
    panels.add("4", numbered(6, 30, first_of_shape=None))  # nothing was counted
    panels.add("4", numbered(7, 20))
    panel = panels.add("4", numbered(8, 40))
    assert [int(entry["record_id"], 16) for entry in panel["recent"]] == [1, 2, 4, 5, 6, 7, 8]
    assert [entry["cold"] for entry in panel["recent"]] == [True, False, False, False, None, False, False]
    assert [entry["same"] for entry in panel["recent"]] == [True, True, True, False, True, True, True]
    assert [entry["status"] for entry in panel["recent"]][:3] == ["ok", "ok", "error"]
    assert panel["recent"][-1]["wall_ns"] == 40 * MS
    assert (panel["median_ns"], panel["n_median"]) == (15 * MS, 2)  # 2 and 7: ok, warm, the same, earlier


def test_first_decode_has_no_median() -> None:
    panel = Panels().add(None, numbered(1, 5))
    assert (panel["median_ns"], panel["n_median"]) == (None, 0)
    assert len(panel["recent"]) == 1


def test_vaes_without_a_hash_are_not_compared() -> None:
    panels, unknown = Panels(), replace(IDENTITY, vae_hash=None)
    panels.add("4", numbered(1, 5, identity=unknown))
    panel = panels.add("4", numbered(2, 5, identity=unknown))
    assert [entry["same"] for entry in panel["recent"]] == [False, False]
    assert panel["n_median"] == 0


def test_a_record_shown_again_is_not_counted_again() -> None:
    panels = Panels()
    first = panels.add("4", numbered(1, 5))
    assert panels.add("4", numbered(1, 5)) == first
    assert len(panels.add("4", numbered(2, 5))["recent"]) == 2


def test_what_is_kept_is_bounded() -> None:
    panels = Panels(keep_nodes=3)
    for n in range(KEEP_DECODES + 9):
        panel = panels.add("4", numbered(n, 5))
    assert len(panel["recent"]) == KEEP_DECODES
    assert int(panel["recent"][-1]["record_id"], 16) == KEEP_DECODES + 8
    for node in ("5", "6", "7"):
        panels.add(node, numbered(1, 5))
    assert panels.last("4") is None
    assert panels.last("7") is not None


def huge_record() -> DecodeRecord:
    record = busy_record("per_op")
    text = "x" * 300
    fallback = Fallback(kind="dtype", where=text, given=text, used=text, reason=text)
    assert record.batch is not None
    assert record.tiles is not None
    return replace(
        record,
        boundaries=tuple(ChunkBoundary(frame=i, smoothness=0.5) for i in range(256)),
        fallbacks=(fallback,) * 64,
        stages=record.stages * 5000,
        batch=replace(record.batch, passes=(PassRecord(images=1, slots=1, ns=1),) * 256),
        tiles=replace(record.tiles, shapes=(TileShape(shape=(1, 4, 66, 66), dtype="float32", count=1),) * 64),
        plan=replace(PLAN, boundaries=tuple(range(20_000)), choices=(Choice(name="a", value="b", reason=text),) * 20),
    )


def test_a_huge_record_makes_a_small_panel() -> None:
    record = huge_record()
    panel = Panels().add("4", record)
    assert len(json.dumps(panel).encode()) <= MAX_BYTES
    left_out = panel["left_out"]
    assert left_out["stages"] == len(record.stages)
    assert left_out["plan.boundaries"] == 20_000
    assert left_out["fallbacks"] == 64
    assert panel["record"]["plan"]["boundaries"] == []
    assert panel["record"]["n_fallbacks"] == record.n_fallbacks
    assert panel["record"]["identity"] == record.to_json()["identity"]


def test_texts_are_cut_where_lists_are_not_the_reason() -> None:
    long = "e" * (2 * MAX_BYTES)
    record = replace(failed(busy_record()), error=long, environment=replace(ENVIRONMENT, cpu=long))
    panel = panel_of(record, ())
    assert len(json.dumps(panel).encode()) <= MAX_BYTES
    assert panel["record"]["error"].endswith("e…")


def test_a_whole_record_is_bounded_too() -> None:
    record = huge_record()
    small = bounded_record(record, 200_000)
    assert len(json.dumps(small)) <= 200_000
    assert small["left_out"]["stages"] == len(record.stages)
    assert bounded_record(busy_record(), 200_000) == busy_record().to_json()


def test_numbers_that_json_lacks_are_unknown() -> None:
    record = replace(busy_record(), boundaries=(ChunkBoundary(frame=1, smoothness=float("nan")),))
    panel = Panels().add("4", record)
    json.dumps(panel, allow_nan=False)
    assert panel["summary"]["temporal_consistency"] is None


def test_decodes_of_a_node_have_their_panel() -> None:
    host = FakeHost()
    session, vae, samples = new_session(host), kl_vae(), {"samples": latent((1, 4, 6, 6))}
    cold = actions.decode(session.at("4"), samples, vae)
    assert cold.panel is not None
    assert cold.panel["recent"][0]["cold"] in (True, False)
    actions.decode(session.at("4"), samples, vae)
    third = actions.decode(session.at("4"), samples, vae)
    assert third.panel is not None
    assert third.panel == session.panels.last("4")
    assert third.panel["record_id"] == third.record.record_id
    assert len(third.panel["recent"]) == 3
    assert third.panel["n_median"] in (1, 2)  # the first was cold if nothing before it in this process had its shapes
    assert third.panel["summary"]["free_bytes"] == host.free
    assert actions.decode(session, samples, vae).panel is not None  # from a script
    assert len(session.panels.last("4")["recent"]) == 3


@pytest.mark.parametrize("status", ["interrupted", "error"])
def test_decodes_that_fail_have_their_panel(status: str) -> None:
    host = FakeHost(interrupt_after=0 if status == "interrupted" else None)
    session, vae = new_session(host), kl_vae()
    samples = {"samples": latent((1, 4, 6, 6))}
    if status == "error":
        vae.first_stage_model.forward = vae.process_output = lambda x: 1 / 0
    with pytest.raises((Interrupted, ZeroDivisionError)):
        actions.decode(session.at("4"), samples, vae)
    panel = session.panels.last("4")
    assert panel is not None
    assert panel["recent"][0]["status"] == panel["record"]["status"] == status
