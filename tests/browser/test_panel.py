"""The panel on a node, against the record that it shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from halo_vae.nodes import user_settings
from halo_vae.optim.events import PHASES
from halo_vae.profiling.render import units
from halo_vae.profiling.store import MAX_BYTES
from halo_vae.tests.browser import records
from halo_vae.tests.browser.pages import ended, executed, figure, panel_of, progress, send, warm_runs

if TYPE_CHECKING:
    from halo_vae.tests.browser.conftest import Open
    from halo_vae.tests.browser.server import Backend

FREE = 11 << 30


def test_before_the_first_run(open_page: Open) -> None:
    panel = panel_of(open_page())
    assert panel.get_attribute("data-state") == "idle"
    assert panel.inner_text().startswith("Not run yet.")


def test_every_figure_of_a_decode(open_page: Open, backend: Backend) -> None:
    runs = warm_runs(backend, 1.9, 1, 1.02, 1.1)
    data = backend.add(*runs, node="5")
    page = open_page()
    ended(page, data)
    panel, record = panel_of(page), runs[-1]
    assert panel.get_attribute("data-state") == "ok"
    assert panel.get_attribute("data-record") == record.record_id
    assert figure(panel, "wall_ns") == (str(record.wall_ns), units.format_ns(record.wall_ns))
    median = (runs[1].wall_ns + runs[2].wall_ns) / 2
    slower = units.format_share(record.wall_ns / median - 1)
    assert figure(panel, "change")[1] == f"▲ {slower} slower than the median {units.format_ns(median)} of 2 runs"
    assert record.phases is not None
    for phase in PHASES:
        if ns := record.phases.of(phase):
            assert figure(panel, f"phases.{phase}_ns") == (str(ns), units.format_share(ns / record.phases.total_ns))
    assert record.plan is not None
    assert record.used_bytes == 401 << 20
    assert figure(panel, "used_bytes") == (str(record.used_bytes), "401 MiB")
    assert figure(panel, "predicted_bytes") == (str(record.plan.predicted.total), "412 MiB")
    assert figure(panel, "prediction_ratio")[1] == units.format_ratio(record.prediction_ratio) == "1.03 ×"
    assert figure(panel, "free_bytes") == (str(FREE), "11.0 GiB")
    assert figure(panel, "pool_hit_rate")[1] == "97.5 %"
    assert figure(panel, "cache_hit_rate")[1] == "75.0 %"
    assert figure(panel, "mac_shares.bf16")[1] == "91.9 %"
    assert figure(panel, "mac_shares.fp32")[1] == "8.1 %"
    assert figure(panel, "tiles") == ("27", "27")
    assert figure(panel, "convs.new") == ("0", "0 of 3")
    assert figure(panel, "n_fallbacks") == ("0", "none")
    assert panel.locator("[data-figure='temporal_consistency']").count() == 0
    assert "kl, 512×512" in panel.inner_text()


def test_lengths_of_the_bars(open_page: Open, backend: Backend) -> None:
    (record,) = warm_runs(backend, 1)
    page = open_page()
    ended(page, backend.add(record, node="5"))
    assert record.phases is not None
    times = [ns for phase in PHASES if (ns := record.phases.of(phase))]
    parts = panel_of(page).locator("[aria-label^='Time by phase'] .halo-vae-stack-part")
    widths = parts.evaluate_all("parts => parts.map((part) => part.getBoundingClientRect().width)")
    assert len(widths) == len(times)
    for width, ns in zip(widths, times, strict=True):
        assert width / sum(widths) == pytest.approx(ns / sum(times), abs=0.01)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (0.9, "▼ 10.0 % faster than the median 1.40 s of 1 run"),
        (1.005, "= as fast as the median 1.40 s of 1 run"),
    ],
)
def test_change_against_the_median(last: float, words: str, open_page: Open, backend: Backend) -> None:
    page = open_page()
    ended(page, backend.add(*warm_runs(backend, 3, 1, last), node="5"))
    assert figure(panel_of(page), "change")[1] == words


def test_first_run_has_nothing_to_compare_with(open_page: Open, backend: Backend) -> None:
    page = open_page()
    ended(page, backend.add(*warm_runs(backend, 1), node="5"))
    panel = panel_of(page)
    assert figure(panel, "change") == ("", "no earlier run like it to compare with")
    assert "first run of these shapes" in panel.inner_text()


def test_sparkline_tells_warm_first_failed_and_cancelled_runs_apart(open_page: Open, backend: Backend) -> None:
    page = open_page()
    runs = [*warm_runs(backend, 2, 1), records.out_of_memory(backend.bench), records.cancelled(backend.bench)]
    ended(page, backend.add(*runs, *warm_runs(backend, 1), node="5"))
    shown = panel_of(page).locator(".halo-vae-spark-run")
    kinds = shown.evaluate_all("runs => runs.map((run) => run.dataset.kind)")
    assert kinds == ["cold", "warm", "error", "interrupted", "warm"]
    assert shown.nth(0).get_attribute("title") == "2.80 s: ok, first run of its shapes"
    assert shown.nth(2).inner_text() == "✕"
    heights = [shown.nth(i).locator(".halo-vae-spark-bar").bounding_box() for i in (0, 1)]
    assert heights[0] is not None
    assert heights[1] is not None
    assert heights[0]["height"] == pytest.approx(2 * heights[1]["height"], abs=1)


def test_a_decode_that_failed(open_page: Open, backend: Backend) -> None:
    page = open_page()
    record = records.out_of_memory(backend.bench)
    panel = backend.add(record, node="5")
    send(page, "execution_start", prompt_id="p")
    send(page, "halo_vae.ended", node="5", prompt_id="p", panel=panel)
    send(page, "execution_error", node_id="5", prompt_id="p", exception_message="another sentence")
    shown = panel_of(page)
    assert shown.get_attribute("data-state") == "error"
    assert "out of memory" in shown.inner_text()
    assert shown.locator("[role=alert]").inner_text() == record.error


def test_an_error_before_anything_was_recorded(open_page: Open, backend: Backend) -> None:
    page = open_page()
    send(page, "execution_start", prompt_id="p")
    send(page, "execution_error", node_id="5", prompt_id="p", exception_message="16 channels; give 4\nmore")
    panel = panel_of(page)
    assert panel.get_attribute("data-state") == "error"
    assert panel.locator("[role=alert]").inner_text() == "16 channels; give 4"


def test_a_cancelled_decode(open_page: Open, backend: Backend) -> None:
    page = open_page()
    record = records.cancelled(backend.bench)
    ended(page, backend.add(record, node="5"))
    send(page, "execution_interrupted", prompt_id="p", node_id="5", executed=[])
    panel = panel_of(page)
    assert panel.get_attribute("data-state") == "interrupted"
    assert "cancelled" in panel.inner_text()
    assert figure(panel, "wall_ns")[1] == units.format_ns(record.wall_ns)


def test_a_video(open_page: Open, backend: Backend) -> None:
    page = open_page(nodes=[("HaloVAEDecodeVideo", 5)])
    ended(page, backend.add(records.video(backend.bench), node="5"))
    panel = panel_of(page)
    assert figure(panel, "temporal_consistency") == ("0.91", "0.910")
    assert "wan21, 256×256, 13 images" in panel.inner_text()


def test_a_decode_of_which_only_the_time_is_known(open_page: Open, backend: Backend) -> None:
    page = open_page()
    ended(page, backend.add(records.Bench("off").decode(), node="5"))
    text = panel_of(page).inner_text()
    assert "Only the time is recorded" in text
    assert "pool hits" not in text


def test_names_are_shown_as_text(open_page: Open, backend: Backend) -> None:
    page = open_page()
    ended(page, backend.add(records.hostile(backend.bench), node="5"))
    panel = panel_of(page)
    assert records.HOSTILE in panel.inner_text()
    assert panel.locator("img, script").count() == 0
    assert page.evaluate("window.hacked") is None
    fallbacks = panel.locator("[data-figure=n_fallbacks]").locator("..")
    assert records.FORMULA in (fallbacks.get_attribute("title") or "")


def test_a_cached_node_says_so_and_is_not_counted_again(open_page: Open, backend: Backend) -> None:
    page = open_page()
    data = backend.add(*warm_runs(backend, 2, 1), node="5")
    ended(page, data)
    send(page, "execution_start", prompt_id="q")
    send(page, "execution_cached", nodes=["5"], prompt_id="q")
    executed(page, data)
    send(page, "execution_success", prompt_id="q")
    panel = panel_of(page)
    assert panel.get_attribute("data-state") == "cached"
    assert panel.locator("[role=status]").inner_text() == "cached: shown from an earlier run"
    assert panel.locator(".halo-vae-spark-run").count() == 2
    ended(page, backend.add(*warm_runs(backend, 1), node="5"))
    assert panel.get_attribute("data-state") == "ok"
    assert panel.locator(".halo-vae-spark-run").count() == 3


def test_a_reload_brings_the_panel_back(open_page: Open, backend: Backend) -> None:
    (record,) = warm_runs(backend, 1)
    backend.add(record, node="5")
    page = open_page(nodes=[("HaloVAEDecode", 5), ("HaloVAEDecode", 6)])
    page.wait_for_selector(f"[data-record='{record.record_id}']")
    panel = panel_of(page)
    assert panel.get_attribute("data-state") == "ok"
    assert panel.locator("[role=status]").inner_text() == "shown from an earlier run"
    assert panel_of(page, 6).get_attribute("data-state") == "idle"


def test_another_workflow_does_not_take_over_panels_by_number(open_page: Open, backend: Backend) -> None:
    backend.add(*warm_runs(backend, 1), node="5")
    page = open_page(nodes=[("HaloVAEDecode", 6)])
    page.evaluate("comfy.load([['HaloVAEDecode', 5, 'of another workflow']])")
    page.evaluate("fetch('/api/halo_vae/metrics')")
    assert page.evaluate("comfy.api.asked") == ["GET /halo_vae/panels/6?missing=null"]
    assert panel_of(page).get_attribute("data-state") == "idle"


def test_outputs_that_the_page_still_has_are_shown(open_page: Open, backend: Backend) -> None:
    page = open_page()
    data = backend.add(*warm_runs(backend, 1), node="5")
    ended(page, data)
    page.evaluate("comfy.load([['HaloVAEDecode', 5, 'the same workflow again']])")
    assert panel_of(page).get_attribute("data-record") == data["record_id"]


def test_nothing_measured_is_saved(open_page: Open, backend: Backend) -> None:
    page = open_page()
    saved = "JSON.stringify(comfy.app.rootGraph.getNodeById(5).serialize())"
    ended(page, backend.add(*warm_runs(backend, 2, 1), node="5"))
    before = page.evaluate(f"JSON.parse({saved})")
    assert before["widgets_values"] == ["auto"]
    assert before["properties"] == {}
    once = page.evaluate(saved)
    ended(page, backend.add(records.out_of_memory(backend.bench), node="5"))
    assert page.evaluate(saved) == once
    options = page.evaluate("comfy.app.rootGraph.getNodeById(5).widgets.at(-1).options.serialize")
    assert options is False


def test_panels_can_be_turned_off_and_on(open_page: Open, backend: Backend) -> None:
    page = open_page()
    ended(page, backend.add(*warm_runs(backend, 1), node="5"))
    set_ = "([id, value]) => comfy.app.extensionManager.setting.set(id, value)"
    page.evaluate(set_, [user_settings.PANEL, False])
    assert not panel_of(page).is_visible()
    assert page.evaluate("comfy.app.rootGraph.getNodeById(5).size[1]") == 84
    send(page, "halo_vae.progress", **progress())
    page.evaluate(set_, [user_settings.PANEL, True])
    assert panel_of(page).is_visible()


def test_units_follow_the_setting(open_page: Open, backend: Backend) -> None:
    page = open_page()
    ended(page, backend.add(*warm_runs(backend, 1), node="5"))
    set_ = "([id, value]) => comfy.app.extensionManager.setting.set(id, value)"
    page.evaluate(set_, [user_settings.UNITS, "decimal"])
    with units.byte_units("decimal"):
        assert figure(panel_of(page), "used_bytes")[1] == units.format_bytes(401 << 20) == "420 MB"
    page.evaluate(set_, [user_settings.UNITS, "binary"])
    assert figure(panel_of(page), "used_bytes")[1] == "401 MiB"


def test_settings_are_those_the_server_reads(open_page: Open) -> None:
    page = open_page(nodes=())
    settings = {s["id"]: s for s in page.evaluate("JSON.parse(JSON.stringify(comfy.app.extensions[0].settings))")}
    names = (user_settings.PROFILE, user_settings.HISTORY_SIZE, user_settings.PANEL, user_settings.UNITS)
    assert set(settings) == set(names)
    given = {name: settings[name]["defaultValue"] for name in names}
    unset = user_settings.settings_of({}, {}, pytest.fail)
    assert user_settings.settings_of(given, {}, pytest.fail).level == unset.level
    assert given[user_settings.HISTORY_SIZE] == MAX_BYTES >> 20
    assert settings[user_settings.HISTORY_SIZE]["attrs"]["max"] == user_settings.MOST_MIB
    for name, option in ((n, o) for n in names for o in settings[n].get("options", ())):
        user_settings.settings_of({name: option["value"]}, {}, pytest.fail)


def test_other_nodes_have_no_panel(open_page: Open) -> None:
    page = open_page(nodes=[("VAEDecode", 1), ("HaloVAEMonitor", 2), ("HaloVAEStats", 3)])
    assert page.locator(".halo-vae-panel").count() == 1


def test_a_panel_of_another_version_says_what_to_do(open_page: Open, backend: Backend) -> None:
    page = open_page()
    ended(page, backend.add(*warm_runs(backend, 1), node="5") | {"schema_version": 2})
    assert "reload the page" in panel_of(page).locator("[role=alert]").inner_text()


def test_what_happens_while_the_server_is_asked_is_newer(open_page: Open, backend: Backend) -> None:
    data = backend.add(*warm_runs(backend, 1), node="6")
    state = open_page().evaluate(
        """async (data) => {
          const { NodePanel } = await import("/extensions/halo_vae/panel/panel.js");
          const panel = new NodePanel();
          panel.fail("newer");
          panel.show(data, { isRestored: true });
          return panel.state;
        }""",
        data,
    )
    assert state == "error"
