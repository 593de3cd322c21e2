"""The sidebar's tab, against the history that it shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from halo_vae.nodes.panel_data import summary_of
from halo_vae.nodes.routes import DEFAULT_ROWS
from halo_vae.profiling.codec import encode
from halo_vae.profiling.render import units
from halo_vae.tests.browser import records
from halo_vae.tests.browser.records import Bench

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from halo_vae.profiling.record import DecodeRecord
    from halo_vae.tests.browser.conftest import Open
    from halo_vae.tests.browser.server import Backend


def open_tab(page: Page) -> Locator:
    page.evaluate("comfy.toggle('halo-vae')")
    page.wait_for_selector(".halo-vae-totals dd")
    return page.locator(".halo-vae-history")


def open_row(tab: Locator) -> Locator:
    """The one row's record in full."""
    tab.locator("tr[data-record] button").click()
    detail = tab.locator(".halo-vae-detail")
    detail.wait_for()
    return detail


def column(tab: Locator, name: str) -> list[str]:
    texts: list[str] = tab.locator(f".halo-vae-table tbody [data-cell='{name}']").all_inner_texts()
    return texts


def sort_by(tab: Locator, name: str) -> str | None:
    heading = tab.locator(f"th[data-column='{name}']")
    heading.locator("button").click()
    return heading.get_attribute("aria-sort")


def mixed(bench: Bench) -> list[DecodeRecord]:
    """Oldest first."""
    return [
        bench.decode(factor=2), bench.decode(), records.video(bench), records.out_of_memory(bench),
        records.cancelled(bench), bench.decode(factor=1.2),
    ]  # fmt: skip


def test_an_empty_history(open_page: Open) -> None:
    tab = open_tab(open_page())
    assert "Nothing decoded yet." in tab.inner_text()
    assert tab.locator("[data-figure='metrics.total_executions']").inner_text() == "0"
    assert tab.locator("[data-figure='metrics.average_execution_time']").inner_text() == "n/a"


def test_every_decode_is_a_row(open_page: Open, backend: Backend) -> None:
    runs = mixed(backend.bench)
    backend.add(*runs)
    tab = open_tab(open_page())
    assert column(tab, "wall_ns") == [units.format_ns(r.wall_ns) for r in reversed(runs)]
    assert column(tab, "status") == ["✓ ok", "■ cancelled", "✕ out of memory", "✓ ok", "✓ ok", "✓ ok"]
    assert column(tab, "family") == ["kl 01234567"] * 3 + ["wan21 77aa55cc"] + ["kl 01234567"] * 2
    assert column(tab, "size")[3:5] == ["256×256, 13 images", "512×512"]
    assert column(tab, "size")[2] == "latent 1×4×64×64"
    assert column(tab, "first_of_shape") == ["warm"] * 5 + ["first"]
    assert column(tab, "used_bytes") == ["401 MiB"] * 6
    assert column(tab, "predicted_bytes") == ["412 MiB"] * 6
    assert column(tab, "temporal_consistency")[3] == "0.910"
    ids = tab.locator("tr[data-record]").evaluate_all("rows => rows.map((row) => row.dataset.record)")
    assert ids == [r.record_id for r in reversed(runs)]


def test_sorting_by_every_column(open_page: Open, backend: Backend) -> None:
    runs = mixed(backend.bench)
    backend.add(*runs)
    tab = open_tab(open_page())
    assert sort_by(tab, "wall_ns") == "ascending"
    ascending = [units.format_ns(r.wall_ns) for r in sorted(runs, key=lambda r: r.wall_ns)]
    assert column(tab, "wall_ns") == ascending
    assert sort_by(tab, "wall_ns") == "descending"
    assert column(tab, "wall_ns") == ascending[::-1]
    names = tab.locator("th[data-column]").evaluate_all("all => all.map((th) => th.dataset.column)")
    for name in dict.fromkeys(names):
        if name != "wall_ns":
            assert sort_by(tab, name) == "ascending"
            assert tab.locator("th[aria-sort]").count() == 1
    sort_by(tab, "temporal_consistency")
    assert column(tab, "temporal_consistency") == ["0.910", *["n/a"] * 5]


def test_filters(open_page: Open, backend: Backend) -> None:
    backend.add(*mixed(backend.bench))
    tab = open_tab(open_page())
    tab.locator("[data-filter=vae]").fill("WAN")
    assert column(tab, "family") == ["wan21 77aa55cc"]
    assert tab.locator(".halo-vae-chart").first.locator("circle, text").count() == 1
    tab.locator("[data-filter=vae]").fill("0123")
    tab.locator("[data-filter=outcome]").select_option("out_of_memory")
    assert column(tab, "status") == ["✕ out of memory"]
    tab.locator("[data-filter=vae]").fill("")
    tab.locator("[data-filter=outcome]").select_option("")
    tab.locator("[data-filter=size]").select_option("512×512")
    assert column(tab, "size") == ["512×512"] * 3
    tab.locator("[data-filter=vae]").fill("no such")
    assert "No decode matches the filter." in tab.inner_text()


def test_charts_mark_first_and_failed_runs(open_page: Open, backend: Backend) -> None:
    backend.add(*mixed(backend.bench))
    tab = open_tab(open_page())
    time = tab.locator(".halo-vae-chart").first
    kinds = time.locator("[data-kind]").evaluate_all("marks => marks.map((mark) => mark.dataset.kind)")
    assert kinds == ["cold", "warm", "warm", "error", "interrupted", "warm"]
    assert time.locator("svg").get_attribute("aria-label") == "Time of 6 runs: from 421 ms to 6.31 s"
    heights = time.locator("circle").evaluate_all("all => all.map((c) => parseFloat(c.getAttribute('cy')))")
    assert heights == pytest.approx([94 - wall / 6.309 * 88 for wall in (2.804, 1.402, 6.309, 1.6824)])
    memory = tab.locator(".halo-vae-chart").nth(1).locator("svg")
    assert memory.get_attribute("aria-label") == "Peak memory of 6 runs: from 401 MiB to 401 MiB"


def test_older_decodes_are_read_on_demand(open_page: Open, backend: Backend) -> None:
    first = backend.bench.decode()
    n = DEFAULT_ROWS + 30
    runs = [replace(first, record_id=f"{i:032x}", wall_ns=1_000_000 * (i + 1)) for i in range(n)]
    for record in runs:
        backend.store.append(record)
    tab = open_tab(open_page())
    assert tab.locator("tr[data-record]").count() == DEFAULT_ROWS
    tab.locator("[data-action=older]").click()
    more = tab.locator("[data-action=more]")
    more.wait_for()
    assert more.inner_text() == "Show 30 more of 30 decodes"
    more.click()
    assert column(tab, "wall_ns") == [units.format_ns(r.wall_ns) for r in reversed(runs)]
    assert not tab.locator("[data-action=older]").is_visible()
    assert not more.is_visible()


def test_totals(open_page: Open, backend: Backend) -> None:
    backend.add(*mixed(backend.bench))
    tab = open_tab(open_page())
    metrics = backend.collector.metrics()
    shown = {
        "total_executions": "4", "interrupted_executions": "1", "failed_executions": "1",
        "first_of_shape_executions": "1",
        "average_execution_time": units.format_seconds(metrics.average_execution_time),
        "average_execution_time_repeated": units.format_seconds(metrics.average_execution_time_repeated),
        "cache_hit_rate": "75.0 %", "memory_efficiency": "97.5 %", "batch_efficiency": "100 %",
        "prefetch_efficiency": "n/a", "total_memory_saves": "780",
    }  # fmt: skip
    for name, text in shown.items():
        assert tab.locator(f"[data-figure='metrics.{name}']").inner_text() == text
    given = encode(metrics)
    names = tab.locator("[data-figure^='metrics.']").evaluate_all("all => all.map((e) => e.dataset.figure.slice(8))")
    assert set(names) == set(given)


def test_one_record_in_full(open_page: Open, backend: Backend) -> None:
    record = records.video(Bench("per_op"))
    backend.add(record)
    tab = open_tab(open_page())
    detail = open_row(tab)
    assert detail.get_attribute("data-record") == record.record_id
    text = detail.inner_text()
    assert detail.locator("[data-figure=wall_ns]").inner_text() == units.format_ns(record.wall_ns)
    for expected in (
        "equal to an untiled decode",
        "3×3 of at most 256×256 px",
        "frame 8",
        "0.910",
        "1.24 TMAC",
        "195 of 200",
    ):
        assert expected in text
    assert column(tab.locator(".halo-vae-detail"), "op") == [
        "decoder.mid.attn_1",
        "decoder.up.0.conv",
        "decoder.conv_out",
    ]
    op = record.stages[1]
    row = detail.locator("tr", has_text="decoder.up.0.conv").locator("td").all_inner_texts()
    assert row[:2] == ["2", units.format_ns(op.host_ns)]
    assert row[3:] == ["conv", "bf16", "winograd", "9", units.format_macs(op.macs), units.format_bytes(op.memory_bytes)]
    tab.locator("[data-action=back]").click()
    assert tab.locator("tr[data-record]").count() == 1
    assert tab.page.evaluate("document.activeElement.closest('tr')?.dataset.record") == record.record_id


@pytest.mark.parametrize(
    "make", [records.video, records.out_of_memory, records.cancelled, records.hostile, Bench.decode]
)
def test_figures_of_a_record_are_those_of_its_panel(make: Any, open_page: Open) -> None:
    for level in ("off", "summary"):
        record = make(Bench(level))
        page = open_page(nodes=())
        call = "async (record) => (await import('/extensions/halo_vae/history/summary.js')).summaryOf(record)"
        given = {k: v if v is None else pytest.approx(v) for k, v in summary_of(record).items()}
        assert page.evaluate(call, record.to_json()) == given


def test_ten_thousand_ops_are_laid_out_a_hundred_at_a_time(open_page: Open, backend: Backend) -> None:
    record = records.many_ops(Bench("per_op"))
    backend.bench.collector = Bench().collector
    backend.add(record)
    tab = open_tab(open_page())
    open_row(tab)
    rows = tab.locator(".halo-vae-detail .halo-vae-table tbody tr")
    more = tab.locator(".halo-vae-detail [data-action=more]")
    assert rows.count() == 100
    assert "10 000 ops" in tab.locator(".halo-vae-detail").inner_text()
    assert more.inner_text() == "Show 100 more of 9 900 ops"
    assert rows.first.locator("th").inner_text() == "decoder.op_09999"
    more.click()
    assert rows.count() == 200
    assert rows.last.locator("th").inner_text() == "decoder.op_09800"
    assert sort_by(tab.locator(".halo-vae-detail"), "number") == "ascending"
    assert rows.count() == 100
    assert rows.first.locator("th").inner_text() == "decoder.op_00000"


def test_names_are_shown_as_text(open_page: Open, backend: Backend) -> None:
    backend.add(records.hostile(Bench("per_op")))
    page = open_page()
    tab = open_tab(page)
    assert column(tab, "family") == [f"{records.HOSTILE} =1+1"]
    detail = open_row(tab)
    assert {records.HOSTILE, records.FORMULA} < set(column(detail, "op"))
    assert f"{records.FORMULA} → {records.HOSTILE}" in detail.inner_text()
    assert tab.locator("img, script").count() == 0
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("form", ["json", "csv", "trace"])
def test_files_to_take_away(form: str, open_page: Open, backend: Backend, tmp_path: Path) -> None:
    bench = backend.bench = Bench("per_op")
    record = bench.decode()
    backend.add(record)
    tab = open_tab(open_page())
    with tab.page.expect_download() as download:
        tab.locator(f"[data-export={form}]").first.click()
    assert download.value.suggested_filename == f"halo-vae-history.{'trace.json' if form == 'trace' else form}"
    text = Path(download.value.path()).read_text(encoding="utf-8")
    if form == "csv":
        assert record.record_id in text
    elif form == "trace":
        assert json.loads(text)["traceEvents"]
    else:
        assert record.record_id in json.dumps(json.loads(text))
    open_row(tab)
    with tab.page.expect_download() as download:
        tab.locator(f".halo-vae-record-view [data-export={form}]").click()
    assert record.record_id in download.value.suggested_filename


def test_clearing_asks_first(open_page: Open, backend: Backend) -> None:
    backend.add(*mixed(backend.bench))
    tab = open_tab(open_page())
    tab.locator("[data-action=clear]").click()
    question = tab.get_by_role("alertdialog")
    assert "cannot be undone" in question.inner_text()
    assert tab.page.evaluate("document.activeElement.textContent") == "Keep it"
    tab.page.keyboard.press("Escape")
    assert not question.is_visible()
    tab.locator("[data-action=clear]").click()
    tab.locator("[data-action=clear-cancel]").click()
    assert not question.is_visible()
    assert len(backend.store.read().records) == 6
    tab.locator("[data-action=clear]").click()
    tab.locator("[data-action=clear-confirm]").click()
    tab.get_by_text("Removed 6 decodes.").wait_for()
    assert backend.store.read().records == ()
    assert tab.locator("tr[data-record]").count() == 0


def test_what_the_server_refuses_is_said_in_its_words(open_page: Open, backend: Backend) -> None:
    backend.add(*mixed(backend.bench))
    tab = open_tab(open_page())
    backend.refuse = "the history cannot be read now"
    tab.locator("[data-action=refresh]").click()
    tab.get_by_text("the history cannot be read now").wait_for()
    assert tab.locator("tr[data-record]").count() == 6


def test_lines_that_cannot_be_read_are_told(open_page: Open, backend: Backend) -> None:
    backend.add(backend.bench.decode())
    with backend.store.path.open("a", encoding="utf-8") as file:
        file.write("not a record\n")
    backend.add(backend.bench.decode())
    tab = open_tab(open_page())
    assert tab.locator("tr[data-record]").count() == 2
    assert tab.get_by_role("status").inner_text() != ""


def test_a_decode_that_ends_appears(open_page: Open, backend: Backend) -> None:
    page = open_page()
    tab = open_tab(page)
    record = backend.bench.decode()
    panel = backend.add(record, node="5")
    page.evaluate("panel => comfy.api.send('halo_vae.ended', { node: '5', prompt_id: 'p', panel })", panel)
    tab.locator(f"tr[data-record='{record.record_id}']").wait_for()


def test_from_a_panel_to_its_record(open_page: Open, backend: Backend) -> None:
    record = backend.bench.decode()
    backend.add(record, node="5")
    page = open_page()
    page.locator(".halo-vae-panel [data-action=open]").click()
    page.locator(f".halo-vae-detail[data-record='{record.record_id}']").wait_for()
    page.evaluate("comfy.toggle('halo-vae')")
    assert page.locator(".halo-vae-history").count() == 0
    page.evaluate("comfy.toggle('halo-vae')")
    assert page.locator(".halo-vae-detail").count() == 1


def test_units_follow_the_setting(open_page: Open, backend: Backend) -> None:
    backend.add(backend.bench.decode())
    page = open_page()
    tab = open_tab(page)
    page.evaluate("comfy.app.extensionManager.setting.set('HaloVAE.Units', 'decimal')")
    assert column(tab, "used_bytes") == ["420 MB"]
    page.evaluate("comfy.app.extensionManager.setting.set('HaloVAE.Units', 'binary')")
    assert column(tab, "used_bytes") == ["401 MiB"]


def test_the_keyboard_reaches_and_works_everything(open_page: Open, backend: Backend) -> None:
    backend.add(*mixed(backend.bench))
    page = open_page(nodes=())
    tab = open_tab(page)
    page.locator("[data-action=refresh]").focus()
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("""() => {
          const { dataset, parentElement } = document.activeElement;
          return dataset.export ?? dataset.action ?? dataset.filter ?? parentElement?.dataset.column ?? "";
        }""")
        )
    assert {"json", "csv", "trace", "clear", "vae", "size", "outcome", "wall_ns", "used_bytes", "open"} <= set(reached)
    tab.locator("th[data-column=wall_ns] button").focus()
    page.keyboard.press("Enter")
    assert tab.locator("th[data-column=wall_ns]").get_attribute("aria-sort") == "ascending"


def test_everything_has_a_name(open_page: Open, backend: Backend) -> None:
    backend.add(*mixed(backend.bench))
    tab = open_tab(open_page())
    nameless = tab.locator("button, input, select, svg, [role=img], [role=region]").evaluate_all(
        """all => all
          .filter((e) => e.checkVisibility() && !(e.getAttribute("aria-label") ?? e.textContent).trim())
          .map((e) => e.outerHTML)"""
    )
    assert nameless == []
    assert tab.locator("table caption").first.inner_text() == "Decodes"
    assert tab.locator("thead th:not([scope=col])").count() == 0
    assert tab.locator(".halo-vae-table tbody tr").first.locator("th[scope=row]").count() == 1


def test_older_decodes_stay_when_a_new_one_ends(open_page: Open, backend: Backend) -> None:
    first = backend.bench.decode()
    n = DEFAULT_ROWS + 5
    for i in range(n):
        backend.store.append(replace(first, record_id=f"{i:032x}"))
    page = open_page()
    tab = open_tab(page)
    tab.locator("[data-action=older]").click()
    tab.locator("[data-action=more]").click()
    assert tab.locator("tr[data-record]").count() == n
    tab.locator(f"tr[data-record='{1:032x}'] button").focus()
    panel = backend.add(replace(first, record_id="f" * 32), node="5")
    page.evaluate("panel => comfy.api.send('halo_vae.ended', { node: '5', prompt_id: 'p', panel })", panel)
    tab.locator(f"tr[data-record='{'f' * 32}']").wait_for()
    assert tab.locator("tr[data-record]").count() == n + 1
    assert page.evaluate("document.activeElement.closest('tr').dataset.record") == f"{1:032x}"
