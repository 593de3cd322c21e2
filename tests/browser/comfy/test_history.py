"""The sidebar's history in the real page: read, sort, filter, open, take away, clear."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from halo_vae.tests.browser.comfy.host import Host
from halo_vae.tests.browser.comfy.panel import History, Panel, record_of
from halo_vae.tests.browser.comfy.workflows import Workflows
from halo_vae.tests.comfyui.workflows import to_prompt

STATUSES = ["ok", "error", "ok"]


@pytest.fixture
def history(host: Host, workflows: Workflows) -> History:
    """Three decodes, the second one failed, and the tab in view."""
    if [row["status"] for row in served(host)] != STATUSES:
        host.server.post("/halo_vae/clear")
        for workflow in (workflows.image(), workflows.failing(), workflows.image()):
            host.server.run(to_prompt(workflow, host.server.get("/object_info")))
    history = History(host)
    history.open()
    history.start_over()
    history.wait_for_rows(len(STATUSES))
    return history


def served(host: Host) -> list[dict[str, object]]:
    return host.server.get("/halo_vae/history")["rows"]  # type: ignore[no-any-return]


def test_decodes_are_listed_newest_first(history: History, host: Host) -> None:
    assert history.ids() == [row["record_id"] for row in served(host)]
    assert [row["status"] for row in served(host)] == STATUSES
    assert "failed" in history.column("status")[1]


def test_columns_sort_both_ways(history: History, host: Host) -> None:
    times = {row["record_id"]: row["wall_ns"] for row in served(host)}
    rising = sorted(times, key=lambda name: times[name])  # type: ignore[arg-type, return-value]
    history.sort("wall_ns")
    assert history.ids() == rising
    history.sort("wall_ns")
    assert history.ids() == rising[::-1]
    assert history.root.locator('th[data-column="wall_ns"]').get_attribute("aria-sort") == "descending"


def test_filters_leave_what_matches(history: History, host: Host) -> None:
    history.root.locator('[data-filter="outcome"]').select_option("error")
    history.wait_for_rows(1)
    history.root.locator('[data-filter="outcome"]').select_option("")
    history.root.locator('[data-filter="vae"]').fill("no such vae")
    history.wait_for_rows(0)
    assert "No decode matches" in history.root.inner_text()
    history.root.locator('[data-filter="vae"]').fill(str(served(host)[0]["family"])[:2])
    history.wait_for_rows(3)


def test_a_decode_that_ends_appears(history: History, host: Host, workflows: Workflows) -> None:
    host.load(workflows.image(), workflows.folder)
    assert host.run() == "success"
    history.wait_for_rows(4)


def test_a_record_opens_and_closes(history: History, host: Host) -> None:
    record_id = history.ids()[0]
    history.rows.first.locator('[data-action="open"]').click()
    history.root.locator(f'.halo-vae-detail[data-record="{record_id}"]').wait_for()
    shown = history.root.locator('.halo-vae-detail [data-figure="wall_ns"]').get_attribute("data-value")
    assert shown == str(record_of(host, record_id)["wall_ns"])
    history.root.locator('[data-action="back"]').click()
    history.wait_for_rows(3)


def test_the_panel_opens_its_record(history: History, host: Host, workflows: Workflows) -> None:
    host.load(workflows.image(), workflows.folder)
    assert host.run() == "success"
    panel = Panel(host)
    panel.wait_for("ok")
    panel.root.locator('[data-action="open"]').evaluate("e => e.click()")
    history.root.locator(f'.halo-vae-detail[data-record="{panel.record_id}"]').wait_for()


def test_history_is_saved_as_json_and_csv(history: History, host: Host, tmp_path: Path) -> None:
    name, text = history.export("json", tmp_path)
    assert name == "halo-vae-history.json"
    records = json.loads(text)
    listed = records if isinstance(records, list) else records["records"]
    assert [record["record_id"] for record in listed] == history.ids()
    assert listed[0] == record_of(host, history.ids()[0])
    name, text = history.export("csv", tmp_path)
    assert name == "halo-vae-history.csv"
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["record_id"] for row in rows] == history.ids()
    assert [int(row["wall_ns"]) for row in rows] == [row["wall_ns"] for row in served(host)]


def test_one_record_is_saved_with_its_trace(history: History, host: Host, tmp_path: Path) -> None:
    record_id = history.ids()[0]
    history.rows.first.locator('[data-action="open"]').click()
    history.root.locator(".halo-vae-detail").wait_for()
    name, text = history.export("trace", tmp_path)
    assert name == f"halo-vae-{record_id}.trace.json"
    events = json.loads(text)["traceEvents"]
    assert {"X"} <= {event["ph"] for event in events}
    name, text = history.export("json", tmp_path)
    assert name == f"halo-vae-{record_id}.json"
    assert record_id in text


def test_history_is_cleared_only_when_asked_twice(history: History, host: Host) -> None:
    clear = history.root.locator('[data-action="clear"]')
    clear.click()
    history.root.locator('[data-action="clear-cancel"]').click()
    assert len(served(host)) == 3
    clear.click()
    history.root.locator('[data-action="clear-confirm"]').click()
    history.wait_for_rows(0)
    assert served(host) == []
    assert "Removed 3 decodes" in history.message.inner_text()


def test_the_tab_can_be_closed_and_opened_again(history: History) -> None:
    history.page.locator(".halo-vae-tab-button").click()
    history.root.wait_for(state="detached")
    history.open()
    history.wait_for_rows(3)
