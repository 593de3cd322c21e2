"""Tables of a comparison: shares of the reference, the geometric mean, what failed and what is doubtful."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from halo_vae.profiling.bench.report_parts import Table
from halo_vae.profiling.codec import decode
from halo_vae.profiling.compare.figures import figures_of
from halo_vae.profiling.compare.records import Comparison
from halo_vae.profiling.compare.render import comparison_json, render_comparison
from halo_vae.profiling.compare.tables import relative_table, resources_table, rounds_table
from halo_vae.tests.profiling.compare.comparisons import QUIET, comparison, failed, rounds, setup

FIVE = (10.0, 10.1, 10.2, 10.1, 10.0)
TWICE = (5.0, 5.05, 5.1, 5.05, 5.0)


def texts(table: Table) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def notes_at(table: Table, row: int, column: int) -> list[str]:
    return [table.notes[mark - 1] for mark in table.rows[row][column].marks]


def test_reference_is_100_percent_and_average_is_the_geometric_mean() -> None:
    slow = [4 * t for t in TWICE]
    taken = [*rounds("a", FIVE), *rounds("b", TWICE), *rounds("a", FIVE, "sd"), *rounds("b", slow, "sd")]
    table = relative_table(comparison(taken, {"a": setup(), "b": setup()}, ("tiny", "sd")), "cpu")
    assert [row[1:] for row in texts(table)] == [
        ["100.00 %", "200.00 %"], ["100.00 %", "50.00 %"], ["100.00 %", "100.00 %"],
    ]  # fmt: skip
    assert texts(table)[-1][0] == "AVERAGE"
    assert table.notes == ()


def test_reference_may_be_any_installation() -> None:
    taken = [*rounds("a", FIVE), *rounds("b", TWICE)]
    table = relative_table(comparison(taken, {"a": setup(), "b": setup()}, reference="b"), "cpu")
    assert texts(table)[0][1:] == ["50.00 %", "100.00 %"]


def test_failure_is_an_x_with_its_reason_and_leaves_the_rest() -> None:
    taken = [*rounds("a", FIVE), *rounds("b", TWICE[:2]), failed("b", n=2), *rounds("c", TWICE)]
    all_of_it = comparison(taken, {"a": setup(), "b": setup(), "c": setup(), "d": "no torch"})
    table = relative_table(all_of_it, "cpu")
    assert texts(table)[0][1:] == ["100.00 %", "x", "200.00 %", "x"]
    assert notes_at(table, 0, 2) == ["b: crashed: ended by SIGSEGV (round 3 of 5)"]
    assert notes_at(table, 0, 4) == ["d: no torch"]
    raw = texts(rounds_table(all_of_it, "cpu"))
    assert [row[-2] for row in raw] == ["5", "2", "5", "–"]  # what was measured before it crashed stays
    assert [row[2] for row in texts(resources_table(all_of_it, "cpu"))] == ["2", "x", "2", "x"]


def test_failed_reference_is_no_yardstick() -> None:
    table = relative_table(comparison([failed("a"), *rounds("b", FIVE)], {"a": setup(), "b": setup()}), "cpu")
    assert texts(table)[0][1:] == ["x", "n/a"]
    assert "a, which is 100 %, failed here" in notes_at(table, 0, 2)[0]


def test_average_of_fewer_cases_says_so() -> None:
    taken = [*rounds("a", FIVE), *rounds("b", TWICE), *rounds("a", FIVE, "sd"), failed("b", case="sd")]
    table = relative_table(comparison(taken, {"a": setup(), "b": setup()}, ("tiny", "sd")), "cpu")
    assert texts(table)[-1][2] == "200.00 %"
    assert notes_at(table, 2, 2) == ["of 1 of 2 cases"]


@pytest.mark.parametrize(
    ("look", "wrong"), [((0.001, 0.5), False), ((0.2, 0.5), True)],
)  # fmt: skip
def test_other_picture_than_the_references_has_no_speed(look: tuple[float, ...], wrong: bool) -> None:
    taken = [*rounds("a", FIVE), *rounds("b", TWICE, look=look)]
    table = relative_table(comparison(taken, {"a": setup(), "b": setup()}), "cpu")
    assert (texts(table)[0][2] == "x") is wrong
    assert any("its picture differs from a's by up to 0.2" in note for note in table.notes) is wrong


def test_difference_within_the_noise_is_marked() -> None:
    taken = [*rounds("a", (10.0, 10.3, 10.1, 10.2, 10.4)), *rounds("b", (10.1, 10.2, 10.35, 10.0, 10.3))]
    table = relative_table(comparison(taken, {"a": setup(), "b": setup()}), "cpu")
    assert any("may be chance" in note for note in notes_at(table, 0, 2))
    assert notes_at(table, 0, 1) == []


def test_doubts_stand_under_the_tables_they_touch() -> None:
    taken = [*rounds("a", FIVE[:2]), *rounds("b", (5.0, 9.0))]
    table = relative_table(comparison(taken, {"a": setup(), "b": setup()}, rounds_asked=2), "cpu")
    assert any(note.startswith("2 samples only") for note in notes_at(table, 0, 1))
    assert any("of the median apart" in note for note in notes_at(table, 0, 2))


def test_own_rounds_are_no_load_of_others() -> None:
    busy = replace(QUIET, load_before=2.0, load_after=2.1)  # two threads of ours, in the rounds before
    taken = [*rounds("a", FIVE, facts=busy), *rounds("b", TWICE, facts=busy)]
    idle = comparison(taken, {"a": setup(), "b": setup()}, load_before=0.1)
    assert relative_table(idle, "cpu").notes == ()
    assert "load average was 1.50 on 2 cores" in relative_table(replace(idle, load_before=1.5), "cpu").notes[0]


def test_cpu_and_gpu_are_apart() -> None:
    taken = [*rounds("a", FIVE), *rounds("b", TWICE), *rounds("a", FIVE, device="gpu", gpu_peak_bytes=1 << 20)]
    gone = replace(failed("b", "failed", "its torch sees no GPU"), device="gpu")
    both = comparison([*taken, gone], {"a": setup(), "b": setup()}, devices=("cpu", "gpu"))
    assert texts(relative_table(both, "cpu"))[0][2] == "200.00 %"
    assert texts(relative_table(both, "gpu"))[0][2] == "x"
    text = render_comparison(both)
    assert "## Relative speed, CPU" in text
    assert "## Relative speed, GPU" in text
    assert texts(resources_table(both, "gpu"))[0][3] == "1.00 MiB"


def test_resources_are_of_one_decode() -> None:
    taken = [*rounds("a", FIVE, iterations=10), *rounds("b", TWICE, iterations=10, peak_bytes=50 << 20)]
    table = resources_table(comparison(taken, {"a": setup(), "b": setup()}), "cpu")
    assert texts(table)[1][2:] == ["2", "50.0 MiB", "50.00 %", "505 µs", "1.01 ms", "200.0 %", "100 %"]


def test_rounds_table_has_every_statistic() -> None:
    table = rounds_table(comparison(rounds("a", (10.0, 10.0, 10.0, 10.0, 20.0)), {"a": setup()}), "cpu")
    assert texts(table)[0][2:] == [
        "10.0 ms", "20.0 ms", "12.0 ms", "4.47 ms", "10.0 ms", "0 ns", "1", "83.3", "5", "10",
    ]  # fmt: skip


def test_json_holds_every_round_and_reads_back() -> None:
    taken = [*rounds("a", FIVE), failed("b", "not_finite", "3 of 12 values are NaN")]
    whole = comparison(taken, {"a": setup(), "b": setup()})
    found = json.loads(json.dumps(comparison_json(whole), allow_nan=False))
    extra = {key: found.pop(key) for key in ("figures", "config", "causes")}
    assert decode(Comparison, found, "comparison") == whole
    assert extra["figures"]["cpu"]["average_percent"] == {"a": pytest.approx(100.0), "b": None}
    assert extra["figures"]["cpu"]["rows"][1]["failure"] == "not finite: 3 of 12 values are NaN"


def test_cancelled_comparison_keeps_what_there_is() -> None:
    taken = [*rounds("a", FIVE[:3]), *rounds("b", TWICE[:3])]
    whole = comparison(taken, {"a": setup(), "b": setup()}, ("tiny", "sd"), cancelled=True)
    table = relative_table(whole, "cpu")
    assert texts(table)[0][1:] == ["100.00 %", "200.00 %"]
    assert texts(table)[1][1:] == ["x", "x"]
    assert "cancelled before its first round" in notes_at(table, 1, 1)[0]
    assert "cancelled before its end" in render_comparison(whole)


def test_names_are_no_markup() -> None:
    whole = comparison(rounds("a|b<script>", FIVE), {"a|b<script>": setup()})
    assert "a|b" not in render_comparison(whole).split("## What torch says")[0]
    assert figures_of(whole, "cpu")["tiny", "a|b<script>"].good is not None
