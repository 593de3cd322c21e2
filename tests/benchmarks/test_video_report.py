"""What the comparison of clip decodes derives from its measurements, and how it says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halo_vae.benchmarks.timing import TimedCase
from halo_vae.benchmarks.video_report import (
    MIB,
    Comparison,
    Decoded,
    Flatness,
    VideoCase,
    clip_doubts,
    memory_doubts,
    render_comparison,
    render_flatness,
)

SECOND = 10**9
CASE = VideoCase(
    family="wan21", size_px=256, frames=17, precision="fp32", threads=(1, 2), runs=3, processes=3, versions="Host 1"
)
DECODED = Decoded(
    host_frames=17, our_frames=17, deviation=0.5, max_error=2e-5, max_error_fp32=(0.0, 2e-5),
    predicted_bytes=700 * MIB, carried_bytes=400 * MIB, same_state=True,
)  # fmt: skip


def timed(side: str, threads: int, *seconds: float) -> TimedCase:
    return TimedCase(engine=side, threads=threads, samples_ns=tuple(int(s * SECOND) for s in seconds))


FOUND = Comparison(
    case=CASE, decoded=DECODED,
    times=(timed("host", 1, 9, 10, 20), timed("ours", 1, 12, 12, 12), timed("host", 2, 11, 11, 11),
           timed("ours", 2, 8, 8, 1)),
    peaks_bytes={"host": (900 * MIB, 1000 * MIB, 1100 * MIB), "ours": (700 * MIB, 690 * MIB, 800 * MIB)},
    doubts=("the moon was full",),
)  # fmt: skip


def rows(text: str) -> dict[str, list[str]]:
    """Cells of the table by the first one."""
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return {first: rest for first, *rest in cells}


def test_table_compares_medians_at_the_better_thread_count() -> None:
    table = rows(render_comparison(FOUND))
    assert table["time"] == ["10.00 s", "8.00 s", "0.80"]
    assert table["peak memory"] == ["1000.0 MiB", "700.0 MiB", "0.70"]
    assert table["carried state"] == ["400.0 MiB", "400.0 MiB", ""]
    assert table["peak less the carried state"] == ["600.0 MiB", "300.0 MiB", "0.50"]
    assert table["largest difference from the host's decode"] == ["–", "2.0e-05", ""]
    assert table["frames"] == ["17", "17", "equal"]


def test_bars_are_held_up_to_their_limit_and_missed_beyond() -> None:
    text = render_comparison(FOUND)
    assert "- time: 0.80, at most 0.90 wanted: held" in text
    assert "- working memory without the carried state: 0.50, at most 0.50 wanted: held" in text
    assert "- working memory with it: 0.70, at most 0.80 wanted: held" in text
    assert "MISSED" not in text
    slow = replace(FOUND, times=(timed("host", 1, 10), timed("ours", 1, 9.2)))
    assert "- time: 0.92, at most 0.90 wanted: MISSED" in render_comparison(slow)
    large = replace(FOUND, peaks_bytes={"host": (1000 * MIB,), "ours": (801 * MIB,)})
    assert render_comparison(large).count("MISSED") == 2


@pytest.mark.parametrize("other", [{"family": "wan22"}, {"size_px": 512}, {"frames": 5}])
def test_bars_are_for_one_case_only(other: dict[str, object]) -> None:
    found = replace(FOUND, case=replace(CASE, **other))  # type: ignore[arg-type]
    assert found.bars == ()
    text = render_comparison(found)
    assert "wanted" not in text
    assert "no bars: they are for wan21 at 256 pixels and 17 frames" in text


def test_unmeasured_memory_is_no_zero() -> None:
    found = replace(FOUND, case=replace(CASE, processes=0), peaks_bytes={"host": (), "ours": ()})
    assert [share for _, _, share in found.bars] == [0.8, None, None]
    text = render_comparison(found)
    assert rows(text)["peak memory"] == ["n/a", "n/a", "n/a"]
    assert "Memory: not measured." in text
    assert text.count(": not measured\n") == 2


def test_hosts_that_carry_other_frames_have_no_known_state() -> None:
    other = replace(FOUND, decoded=replace(DECODED, same_state=False))
    table = rows(render_comparison(other))
    assert table["carried state"] == ["n/a", "400.0 MiB", ""]
    assert table["peak less the carried state"] == ["n/a", "300.0 MiB", "n/a"]
    assert "what the host carries is not known" in render_comparison(other)
    assert "the host carries the same frames as our plan" in render_comparison(FOUND)
    single = replace(FOUND, decoded=replace(DECODED, carried_bytes=None))
    assert "takes this clip in one piece" in render_comparison(single)
    assert single.bars[1][2] is None


def test_narrow_dtypes_are_also_held_to_the_float32_decode() -> None:
    decoded = replace(DECODED, max_error=3e-2, max_error_fp32=(4e-2, 1e-2))
    narrow = replace(FOUND, case=replace(CASE, precision="bf16"), decoded=decoded)
    name = "largest difference from the host's float32 decode"
    assert rows(render_comparison(narrow))[name] == ["4.0e-02", "1.0e-02", ""]
    assert name not in rows(render_comparison(FOUND))


def test_samples_and_doubts_belong_to_the_report() -> None:
    text = render_comparison(FOUND)
    assert "- host at 1 thread(s): 9.00, 10.00, 20.00 s" in text
    assert "- peaks of ours: 700.0 MiB, 690.0 MiB, 800.0 MiB" in text
    assert "ours promised 700.0 MiB" in text
    assert text.endswith("- doubt: the moon was full")


def test_doubts_of_memory() -> None:
    assert memory_doubts({"host": (100, 104, 109), "ours": ()}) == ()
    few, apart = memory_doubts({"host": (100,), "ours": (100, 104, 120)})
    assert "only 1 process(es) for the memory of host" in few
    assert "peaks of ours" in apart


@pytest.mark.parametrize("deviation", [1e-3, 1e3, float("nan"), float("inf")])
def test_clips_of_senseless_deviation_are_doubted(deviation: float) -> None:
    assert clip_doubts(DECODED) == ()
    assert "deviation" in clip_doubts(replace(DECODED, deviation=deviation))[0]


def test_clips_of_other_lengths_are_doubted() -> None:
    decoded = replace(DECODED, our_frames=16, max_error=None)
    assert clip_doubts(decoded) == ("the host made 17 frames and ours made 16",)
    table = rows(render_comparison(replace(FOUND, decoded=decoded)))
    assert table["frames"] == ["17", "16", "DIFFER"]
    assert table["largest difference from the host's decode"][1] == "n/a"


def test_growth_is_told_in_percent_and_judged() -> None:
    small = Flatness(
        size_px=96, predicted_bytes=(100 * MIB, 104 * MIB), measured_bytes=((90, 100, 200), (106, 90, 107))
    )
    large = Flatness(size_px=256, predicted_bytes=(400 * MIB, 300 * MIB), measured_bytes=None)
    assert small.measured_change == pytest.approx(0.06)
    assert large.measured_change is None
    text = render_flatness(CASE, [large, small])
    assert "| 96x96 | predicted | 100.0 MiB | 104.0 MiB | +4.0% |" in text
    assert "- predicted at 96x96: +4.0%, less than 5% wanted: held" in text
    assert "- measured at 96x96: +6.0%, less than 5% wanted: MISSED" in text
    assert "- predicted at 256x256: -25.0%, less than 5% wanted: held" in text
    assert "measured at 256x256" not in text
