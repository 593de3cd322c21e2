from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halo_vae.profiling.memory import MemoryCounters
from halo_vae.profiling.memory_chart import ChartError, write_memory_chart
from halo_vae.profiling.record import DecodeRecord
from halo_vae.profiling.run import Run
from halo_vae.tests.profiling.fakes import MS, PLAN, FakeClock, FakeCounter, make_collector, record_events, report

PNG = b"\x89PNG\r\n\x1a\n"


def record(level: Any = "per_op", steps: int = 40) -> DecodeRecord:
    clock, counter = FakeClock(), FakeCounter(now=300 << 20)

    def memory(device: str) -> MemoryCounters:
        return MemoryCounters(allocated=None, reserved=None, process=counter, available_bytes=None)

    def events(run: Run) -> None:
        run.planned(PLAN)
        for i in range(steps):
            run.op_started(i, steps, f"decoder.up.{i}.conv", 1)
            counter.now += (1 if i < steps // 2 else -1) << 20
            counter.touch(0)
            clock.advance((i + 1) * MS)
            run.op_done(report(f"decoder.up.{i}.conv"))

    made: DecodeRecord = record_events(make_collector(level, clock=clock, memory=memory), events)
    return made


def test_a_chart_is_a_png_of_some_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.png"
    write_memory_chart(record(), path)
    image = path.read_bytes()
    assert image.startswith(PNG)
    width, height = (int.from_bytes(image[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (1100, 550)
    flat = tmp_path / "flat.png"
    write_memory_chart(record(steps=1), flat)
    assert flat.read_bytes() != image  # what is drawn is the record


def test_a_failed_decode_has_a_chart_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from halo_vae.profiling.record import DecodeStatus

    failed = replace(record(), status=DecodeStatus.INTERRUPTED, error="stopped", image_shape=None, memory=None)
    write_memory_chart(failed, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("level", ["off", "summary"])
def test_without_samples_there_is_nothing_to_draw(level: str, tmp_path: Path) -> None:
    with pytest.raises(ChartError, match="per_op"):
        write_memory_chart(record(level), tmp_path / "memory.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ChartError) as told:
        write_memory_chart(record(), tmp_path / "memory.png")
    assert str(told.value) == "charts need matplotlib; install it (pip install 'halo-vae[charts]')"


def test_nobody_elses_charts_are_changed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code = f"""
        import sys
        from pathlib import Path
        from halo_vae.tests.profiling.test_memory_chart import record
        assert "matplotlib" not in sys.modules  # imported when a chart is asked for
        import matplotlib
        before = matplotlib.rcParams.copy()
        from halo_vae.profiling.memory_chart import write_memory_chart
        write_memory_chart(record(), Path({str(tmp_path / "memory.png")!r}))
        assert "matplotlib.pyplot" not in sys.modules  # which would choose a backend for the process
        assert matplotlib.rcParams.copy() == before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
