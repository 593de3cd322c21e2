from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest

from halo_vae.profiling.bench.aggregate import aggregate, to_json
from halo_vae.profiling.bench.lanes import MixedError
from halo_vae.profiling.bench.report import build_report, render
from halo_vae.profiling.bench.report_parts import Chart, Report, Table
from halo_vae.profiling.bench.results import Results, ResultsFile, RunLine, ShapeCounts
from halo_vae.profiling.bench.svg import Strip, line_chart, scatter
from halo_vae.tests.profiling.bench.lines import make_run, make_series

TIMES = make_run().samples_ns


def of(*runs: RunLine, **rest: Any) -> Report:
    return build_report(Results(runs=runs, **rest))


def section(report: Report, title: str) -> tuple[Any, ...]:
    return next(s.parts for s in report.sections if s.title.startswith(title))


def column(table: Table, title: str) -> list[str]:
    i = [c.title for c in table.columns].index(title)
    return [row[i].text for row in table.rows]


def times(factor: float) -> tuple[int, ...]:
    return tuple(int(ns * factor) for ns in TIMES)


def three() -> Report:
    """Case BM-3: fast but wrong, right but slower, right and faster."""
    return of(
        make_run(0, configuration="baseline", samples_ns=times(1)),
        make_run(1, configuration="phase1", samples_ns=times(0.2), max_error=0.1, mean_error=0.1, psnr_db=20.0),
        make_run(2, configuration="phase2", samples_ns=times(3)),
        make_run(3, configuration="phase3", samples_ns=times(0.5)),
    )


def test_bm_3_a_wrong_result_is_not_praised_and_a_slower_one_is_shown() -> None:
    report = three()
    table = section(report, "Phases against the baseline")[-1]
    assert column(table, "configuration") == ["baseline", "phase1", "phase2", "phase3"]
    assert column(table, "speed ÷ baseline") == ["base", "5.00 ×", "0.33 ×", "2.00 ×"]
    wrong = "FAIL: max error 0.1 (at most 0.01), mean error 0.1 (at most 0.001)"
    assert column(table, "pictures") == ["pass", wrong, "pass", "pass"]
    assert "n/a" not in column(table, "max error") + column(table, "mean error")
    assert [sentence.split(": ", 1)[1] for sentence in report.failures] == [wrong]
    means = section(report, "Phases against the baseline")[0]
    assert column(means, "configuration") == ["phase2", "phase3"]  # the wrong one is in no mean
    for fmt in ("md", "html"):
        assert wrong in render(report, fmt).replace("\\", "")  # type: ignore[arg-type]


def test_bm_3_exit_code(tmp_path: Path, halo: Any) -> None:
    file = ResultsFile(tmp_path / "results.jsonl")
    file.append(make_run(1))
    assert halo("report", str(file.path)).code == 0
    file.append(make_run(2, configuration="phase2", max_error=0.1, mean_error=0.1))
    for fmt in ("md", "html", "json"):
        ended = halo("report", str(file.path), "--format", fmt)
        assert ended.code == 1
        assert "FAIL" in ended.out
        assert "1 figure has wrong pictures" in ended.err


def test_results_show_every_statistic_and_n() -> None:
    (table,) = section(of(make_run()), "Measured results on box, x86_64 (cpu)")
    named = {c.title: cell.text for c, cell in zip(table.columns, table.rows[0], strict=True)}
    assert named == {
        "case": "Small Image 256×256", "configuration": "phase1", "n": "5", "median": "100 ms", "mean": "100 ms",
        "min": "99.0 ms", "max": "101 ms", "stdev": "791 µs", "IQR": "1.00 ms", "MAD": "500 µs", "outliers": "0",
        "per second": "10.0", "peak memory": "47.7 MiB",
    }  # fmt: skip
    assert table.caption == "All rows: condition hot, dtype fp32, threads 2, VAE tiny."


def test_doubts_stand_under_the_table_and_their_figure_points_at_them() -> None:
    report = of(make_run(1), make_run(2, case="k", samples_ns=(10**9, 2 * 10**9)))
    (table,) = section(report, "Measured results")
    i = [c.title for c in table.columns].index("median")
    marks = [row[i].marks for row in table.rows]
    sentences = [[table.notes[mark - 1] for mark in some] for some in marks]
    assert sentences[0] == []
    assert [s.split(":")[0] for s in sentences[1]] == [
        "2 samples only", "slowest and fastest sample are 67% of the median apart"
    ]  # fmt: skip
    assert "2 samples only: take 5 or more" in render(report, "md")
    charts = section(report, "Every run")[1:]
    assert [bool(chart.data.notes) for chart in charts] == [False, True]


def test_machines_have_tables_of_their_own_and_no_ratio_between_them() -> None:
    report = of(make_run(1, configuration="baseline"), make_run(2, arch="gfx1151", device="cuda", host="apu"))
    titles = [s.title for s in report.sections]
    assert "Measured results on apu, gfx1151 (cuda)" in titles
    for table in (p for s in report.sections for p in s.parts if isinstance(p, Table)):
        if "speed ÷ baseline" in [c.title for c in table.columns]:
            assert set(column(table, "speed ÷ baseline")) <= {"base", "n/a"}


def test_conditions_are_multiples_of_hot_and_frozen_needs_to_be_verified() -> None:
    runs = [make_run(f, scenario=s, samples_ns=times(f)) for s, f in (("hot", 1), ("warm", 2), ("cold", 4))]
    star = make_run(9, scenario="frozen", page_cache="unverified", samples_ns=times(8))
    (table,) = section(of(*runs, star), "Ratios between cache conditions")
    row = {c.title: cell for c, cell in zip(table.columns, table.rows[0], strict=True)}
    assert row["warm ÷ hot"].text.startswith("2.00 × (")
    assert row["cold ÷ hot"].text.endswith("n=5")
    assert row["frozen ÷ hot"].text == "n/a"
    assert "frozen*" in table.notes[row["frozen ÷ hot"].marks[0] - 1]
    sure = make_run(9, scenario="frozen", page_cache="dropped", samples_ns=times(8))
    (table,) = section(of(*runs, sure), "Ratios between cache conditions")
    assert column(table, "frozen ÷ hot")[0].startswith("8.00 ×")


def test_what_caches_did() -> None:
    counts = ShapeCounts(requested=9, new=2, not_in_hot=("a", "b"))
    report = of(
        make_run(1, scenario="warm", shapes=counts, cache_charges=2, served=None),
        make_run(2, shapes=ShapeCounts(requested=9, new=0), cache_charges=0),
        make_run(3, shapes=ShapeCounts(requested=9, new=0), cache_charges=1),
        make_run(4, scenario="cold", served=None),
    )
    (table,) = section(report, "Caches")
    assert column(table, "condition") == ["warm", "hot"]
    assert column(table, "served") == ["", "recomputed"]
    assert column(table, "that hot did not ask for") == ["2", ""]
    assert column(table, "kernel searches") == ["2", "0–1"]


def test_doubts_that_differ_in_a_number_are_one_note() -> None:
    slow, slower = ({"samples_ns": (100, 100, 100, 100, n)} for n in (115, 140))
    report = of(make_run(1, **slow), make_run(2, case="k", **slower), make_run(3, case="l", note="1/4 of it", **slow))
    (table,) = section(report, "Measured results")
    i = [c.title for c in table.columns].index("median")
    assert [row[i].marks for row in table.rows] == [(1,), (1,), (1, 2)]
    spread = "slowest and fastest sample are 15–40% of the median apart: rerun on an idle machine"
    assert table.notes == (spread, "1/4 of it")


def test_a_warm_run_of_another_size_says_so() -> None:
    warm = make_run(1, scenario="warm", latent_shape=(1, 4, 32, 36), samples_ns=times(2))
    report = of(make_run(2), warm)
    (table,) = section(report, "Ratios between cache conditions")
    assert column(table, "warm ÷ hot")[0].startswith("2.00 ×")
    assert "1.12 × the elements of hot's, as a size not decoded before" in table.notes[0]
    (table,) = section(report, "Measured results")
    assert table.notes == ("decodes 288×256 pixels, a size not decoded before",)


def test_runs_that_failed_are_told_with_their_reason_and_have_no_time() -> None:
    report = of(make_run(1, status="timeout", error="it did not end", samples_ns=()))
    (table,) = section(report, "Runs without a figure")
    assert (column(table, "status"), column(table, "reason")) == (["timeout"], ["it did not end"])
    (table,) = section(report, "Measured results")
    assert table.rows == ()


def test_a_picture_that_is_not_finite_fails_without_a_time() -> None:
    report = of(make_run(1, status="not_finite", error="inf", samples_ns=(), max_error=None, mean_error=None))
    table = section(report, "Phases")[-1]
    assert column(table, "median") == ["n/a"]
    assert column(table, "pictures") == ["FAIL: the picture holds inf or nan"]


def test_lanes_are_refused_together(tmp_path: Path, halo: Any) -> None:
    both = Results(runs=(make_run(1), make_run(2, lane="nightly")))
    with pytest.raises(MixedError):
        build_report(both)
    assert build_report(both, "nightly").facts[:2] == ("lane nightly", "1 run")
    file = ResultsFile(tmp_path / "results.jsonl")
    for run in both.runs:
        file.append(run)
    ended = halo("report", str(file.path))
    assert (ended.code, ended.out) == (2, "")
    assert "never mixed; choose one, with --lane" in ended.err
    assert halo("report", str(file.path), "--lane", "nightly").code == 0
    assert halo("report", str(file.path), "--lane", "instrumented").code == 2
    assert sorted(json.loads(halo("report", str(file.path), "--format", "json").out)["lanes"]) == ["nightly", "single"]


def test_format_follows_the_file_and_nothing_is_overwritten(tmp_path: Path, halo: Any) -> None:
    source, target = tmp_path / "results.jsonl", tmp_path / "report.html"
    ResultsFile(source).append(make_run())
    source.write_bytes(source.read_bytes() + b'{"torn')
    ended = halo("report", str(source), "-o", str(target))
    assert ended.code == 0
    assert "left out 1 line" in ended.err
    assert target.read_text("utf-8").startswith("<!doctype html>")
    assert halo("report", str(source), "-o", str(target)).code == 2
    assert halo("report", str(source), "-o", str(target), "--force", "--format", "md").code == 0
    assert target.read_text("utf-8").startswith("# Halo VAE")
    assert halo("report", str(tmp_path / "none.jsonl")).code == 1


HOSTILE = '<script>alert(1)</script>"\'><img src=x onerror=y>|`*_[a](javascript:b)\n# head\u202e\x00&amp;'


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile() -> Report:
    run = {"host": HOSTILE, "arch": HOSTILE, "case": HOSTILE, "dtype": HOSTILE, "vae": HOSTILE, "note": HOSTILE}
    return of(
        make_run(1, **run),
        make_run(2, **{**run, "vae": "x"}),
        make_run(3, status="failed", error=HOSTILE, samples_ns=(), **run),
        problems=(HOSTILE,), skipped=1,
    )  # fmt: skip


def test_hostile_names_are_text_in_html() -> None:
    tags = Tags()
    tags.feed(render(hostile(), "html"))
    assert not tags.tags & {"script", "img", "iframe", "object", "link"}
    assert not {name for name in tags.attributes if name.startswith("on") or name == "src"}
    assert "<script>alert(1)</script>" in tags.text
    assert "\u202e" not in tags.text
    assert "\x00" not in tags.text


def test_hostile_names_are_text_in_markdown() -> None:
    text = render(hostile(), "md")
    assert re.search(r"(?<!\\)<", text) is None
    assert re.search(r"(?<!\\)[`\[]", text) is None
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    tables: dict[int, int] = {}
    for i, line in enumerate(text.splitlines()):
        if line in rows:
            tables[i] = len(re.findall(r"(?<!\\)\|", line))
    assert all(n == tables.get(i + 1, n) for i, n in tables.items())  # no cell is split
    assert not any(line.startswith("# head") for line in text.splitlines())


def test_the_page_loads_nothing_and_follows_the_readers_theme() -> None:
    page = render(three(), "html")
    assert re.search(r"<(script|link|iframe|img|object|embed)\b|url\(|@import|\bsrc\s*=|https?://", page) is None
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page


def test_every_sample_is_a_point() -> None:
    charts = [p for p in section(three(), "Every run") if isinstance(p, Chart)]
    assert [len(re.findall("<circle", chart.svg)) for chart in charts] == [20]
    assert column(charts[0].data, "n") == ["5"] * 4
    at = [float(x) for x in re.findall(r'cx="([\d.]+)"', charts[0].svg)]
    assert min(at[5:10]) < max(at[5:10]) < min(at[:5]) < min(at[10:15])  # 0.2, 1 and 3 times as long


@pytest.mark.parametrize("samples", [(5,), (7, 7, 7), (1, 10**12), (10**9, 10**9 + 1), (10**9, 1_004_000_000)])
def test_scatter_of_any_times(samples: tuple[int, ...]) -> None:
    low, high = min(samples), max(samples)
    strip = Strip(label="a", colour="phase1", samples_ns=samples, median_ns=low, q1_ns=low, q3_ns=high)
    drawn = scatter([strip], "t")
    assert "nan" not in drawn
    numbers = [float(x) for x in re.findall(r'(?:cx|x1)="([-\d.]+)"', drawn)]
    assert all(0 <= x <= 920 for x in numbers)
    ticks = re.findall(r'class="tick"[^>]*>([^<]+)<', drawn)
    assert len(ticks) == len(set(ticks))


def test_readings_of_an_instrumented_session() -> None:
    report = of(make_run(lane="instrumented"), series=(make_series(), make_series(name="none", values=(None,) * 3)))
    (chart,) = section(report, "Readings on box, session 20260101T000000Z")
    assert chart.title == "cpu_share, up to 90.0 %"
    assert chart.svg.count("<circle") == 2  # two readings with a gap between them
    many = line_chart(tuple(range(50_000)), tuple(float(i % 7) for i in range(50_000)), "t", "7")
    assert len(many) < 40_000
    with pytest.raises(ValueError, match="at least one"):
        line_chart((0,), (None,), "t", "")


def test_an_empty_report() -> None:
    for fmt in ("md", "html"):
        assert "There are no runs." in render(build_report(Results()), fmt)  # type: ignore[arg-type]


def test_equal_results_give_equal_reports_whatever_their_order() -> None:
    runs = [make_run(n, configuration=c) for n, c in enumerate(("baseline", "phase1", "phase3"))]
    fmt: Literal["md", "html"]
    for fmt in ("md", "html"):
        assert render(of(*runs), fmt) == render(of(*reversed(runs)), fmt)


def test_figures_as_json_hold_no_inf_and_their_lanes_apart() -> None:
    equal = make_run(1, configuration="baseline", psnr_db=None, psnr_infinite=True)
    found = json.loads(to_json(aggregate(Results(runs=(equal, make_run(2), make_run(3, lane="nightly"))))))
    first, second = found["lanes"]["single"]
    assert (first["n"], first["psnr_infinite"], first["stats"]["median_ns"]) == (5, True, 100_000_000)
    assert second["speed_over_baseline"]["value"] == 1.0
    assert found["lanes"]["nightly"][0]["speed_over_baseline"] is None  # the baseline is of another lane
    assert list(found["environments"]) == [equal.environment_id]
