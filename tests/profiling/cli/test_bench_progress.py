"""How far a benchmark is: a bar on terminals, a line for each run everywhere."""

from __future__ import annotations

import io
import sys

import pytest

from halo_vae.profiling.bench.results import ShapeCounts
from halo_vae.profiling.bench.runner import Progress
from halo_vae.profiling.cli.bench_progress import BenchBar, run_text
from halo_vae.tests.profiling.bench.lines import make_run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_shows_the_time_left_on_terminals_and_runs_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        with BenchBar() as bar:
            bar.report(Progress(done=0.0, total=10.0, text="looking at the device"))
            bar.report(Progress(done=5.0, total=10.0, text="small_image phase1 hot", line=make_run()))
            bar.report(Progress(done=5.0, total=10.0, text="small_image phase2 hot"))
        assert "small_image phase1 hot: median 100 ms, n = 5" in stream.getvalue()
        assert (" left, small_image phase2 hot" in stream.getvalue()) is stream.isatty()


def test_run_is_told_with_its_errors_and_what_was_new_to_a_warm_one() -> None:
    shapes = ShapeCounts(requested=9, new=2, not_in_hot=("1x4x32x36 * 4x4x1x1", "b"))
    text = run_text(make_run(scenario="warm", shapes=shapes))
    assert "max error 1.0e-06, PSNR 120.0 dB" in text
    assert "asked for 2 convolution shape(s) that the hot run did not, such as 1x4x32x36 * 4x4x1x1" in text
    assert "PSNR inf" in run_text(make_run(psnr_db=None, psnr_infinite=True))


def test_run_that_failed_is_told_in_words_and_frozen_ones_with_their_doubt() -> None:
    bad = make_run(status="crashed", error="ended by SIGSEGV", scenario="frozen", page_cache="unverified")
    assert run_text(bad) == "small_image phase1 frozen*: crashed, ended by SIGSEGV"
