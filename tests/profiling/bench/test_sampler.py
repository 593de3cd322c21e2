"""What is sampled throughout a benchmark: from files that tests write, at times that tests turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from halo_vae.profiling.bench import invocation
from halo_vae.profiling.bench.facts import FactsWatch, Readers, merged, read_temperature, read_throttle_count
from halo_vae.profiling.bench.invocation import Guards, run_invocation
from halo_vae.profiling.bench.protocol import Described
from halo_vae.profiling.bench.results import Line, ResultsFile, RunFacts, SeriesLine
from halo_vae.profiling.bench.runner import BenchOutcome
from halo_vae.profiling.bench.sampler import Sampler, Sensor, sensors_for
from halo_vae.tests.profiling.bench.fakes_bench import request
from halo_vae.tests.profiling.fakes import ENVIRONMENT

SECOND = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.ns = 7 * SECOND

    def __call__(self) -> int:
        return self.ns


def sampled(sensors: list[Sensor], steps: int, before_each: Callable[[int], None], **options: int) -> list[SeriesLine]:
    clock = Clock()
    sampler = Sampler(sensors, now_ns=clock, **options)  # type: ignore[arg-type]
    sampler._began = clock.ns
    for i in range(steps):
        before_each(i)
        sampler.tick()
        clock.ns += SECOND
    return list(sampler.finish("20260131T000000Z", "here"))


def test_levels_rates_and_times() -> None:
    values = [0.0]
    level = Sensor(name="level", unit="bytes", read=lambda: values[0], scale=2.0)
    rate = Sensor(name="rate", unit="bytes/s", read=lambda: values[0], rate=True, scale=1024)
    found = sampled([level, rate], 4, lambda i: values.__setitem__(0, [1.0, 5.0, 5.0, 2.0][i]))
    assert [(s.name, s.values) for s in found] == [
        ("level", (2.0, 10.0, 10.0, 4.0)),
        ("rate", (None, 4096.0, 0.0, None)),  # a counter that fell began anew
    ]
    assert found[0].at_ns == (0, SECOND, 2 * SECOND, 3 * SECOND)
    assert (found[0].session, found[0].host, found[0].lane) == ("20260131T000000Z", "here", "instrumented")


def test_sensor_that_fails_gives_none_and_one_that_never_works_no_series() -> None:
    def broken() -> float | None:
        raise OSError("gone")

    turns = iter([1.0, None, 3.0])
    sensors = [
        Sensor(name="broken", unit="W", read=broken), Sensor(name="at times", unit="W", read=lambda: next(turns)),
    ]  # fmt: skip
    found = sampled(sensors, 3, lambda i: None)
    assert [(s.name, s.values) for s in found] == [("at times", (1.0, None, 3.0))]


def test_long_benchmarks_are_bounded_and_keep_their_whole_length() -> None:
    count = Sensor(name="count", unit="W", read=lambda: 1.0)
    (series,) = sampled([count], 1000, lambda i: None, max_points=10)
    assert len(series.values) <= 11
    assert series.at_ns[0] == 0
    assert series.at_ns[-1] > 800 * SECOND
    gaps = {later - earlier for earlier, later in zip(series.at_ns, series.at_ns[1:], strict=False)}
    assert len(gaps) == 1


def test_thread_reads_until_it_is_finished() -> None:
    seen: list[int] = []

    def read() -> float | None:
        seen.append(1)
        return 1.0

    sampler = Sampler([Sensor(name="x", unit="W", read=read)], interval_s=0.001)
    sampler.start()
    while len(seen) < 3:
        pass
    (series,) = sampler.finish("s", "here")
    n = len(seen)
    assert len(series.values) == n
    assert sampler._thread is not None
    assert not sampler._thread.is_alive()


def card_of(folder: Path) -> Path:
    """An amdgpu card's device folder."""
    hwmon = folder / "hwmon" / "hwmon3"
    hwmon.mkdir(parents=True)
    files = {
        "gpu_busy_percent": "37", "mem_info_vram_total": "1000", "mem_info_vram_used": "300",
        "mem_info_gtt_total": "5000", "mem_info_gtt_used": "700", "hwmon/hwmon3/freq1_input": "2900000000",
        "hwmon/hwmon3/power1_average": "45000000", "hwmon/hwmon3/temp1_input": "61000",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    return folder


def test_every_sensor_of_a_card_and_of_the_machine(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    proc.mkdir()

    def write(i: int) -> None:
        (proc / "stat").write_text(f"cpu {100 + 30 * i} 0 0 {200 + 60 * i} {0 + 10 * i} 0 0 0 99 99\ncpu0 1\n")
        (proc / "vmstat").write_text(f"pgpgin {8 * i}\npgpgout {2 * i}\n")

    found = {s.name: s for s in sampled(list(sensors_for(card_of(tmp_path / "card"), proc)), 2, write)}
    assert found["cpu_share"].values == (None, pytest.approx(0.3))
    assert found["read_bytes"].values == (None, 8192.0)
    assert found["written_bytes"].values == (None, 2048.0)
    assert found["gpu_busy_share"].values == (0.37, 0.37)
    assert found["gpu_memory_bytes"].values == (1000.0, 1000.0)
    assert found["gpu_clock_hz"].values == (2.9e9, 2.9e9)
    assert found["gpu_power_w"].values == (45.0, 45.0)
    assert found["gpu_temperature_c"].values == (61.0, 61.0)
    units = {s.unit for s in found.values()}
    assert units <= {"share", "bytes", "bytes/s", "Hz", "W", "°C"}


def test_machine_that_tells_nothing_gives_no_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halo_vae.profiling.bench.sampler.read_host_pool", lambda: None)
    assert sampled(list(sensors_for(tmp_path / "none", tmp_path)), 2, lambda i: None) == []


@pytest.mark.parametrize("lane", ["single", "instrumented"])
def test_only_the_instrumented_lane_is_sampled_and_its_series_lie_with_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    def run(request: object, work: Path, keep: object, *, tools: object, session: str, **rest: object) -> BenchOutcome:
        described = Described(
            environment=ENVIRONMENT, device="cpu", arch="x86_64", threads=1, has_fp16=False, pci=None
        )
        tools.before_device(described)  # type: ignore[attr-defined]
        return BenchOutcome(lines=(), cancelled=True)

    always = Sensor(name="always", unit="W", read=lambda: 1.0)
    monkeypatch.setattr(invocation, "run_bench", run)
    monkeypatch.setattr(invocation, "sensors_for", lambda card: (always,))
    results = ResultsFile(tmp_path / "results.jsonl")
    kept: list[Line] = []

    def keep(line: Line) -> None:
        results.append(line)
        kept.append(line)

    guards = Guards(comfyui_url=None, cache_folder=tmp_path / "cache")
    run_invocation(request(lane=lane), keep, guards=guards, session="20260131T000000Z")
    if lane == "single":
        assert kept == []
    else:
        (series,) = results.read().series
        assert (series.name, series.session) == ("always", "20260131T000000Z")


# -- facts


def test_facts_hold_what_was_before_and_after_and_how_far_the_clocks_moved_apart() -> None:
    turns = {"wall": iter([100, 100 + 5 - 60]), "mono": iter([0, 5]), "load": iter([0.5, 1.5])}
    heat, count = iter([40.0, 70.0]), iter([3, 4])
    readers = Readers(
        wall_ns=lambda: next(turns["wall"]), monotonic_ns=lambda: next(turns["mono"]),
        load=lambda: next(turns["load"]), temperature=lambda: next(heat), throttles=lambda: next(count),
    )  # fmt: skip
    facts = FactsWatch(readers).finish()
    assert (facts.load_before, facts.load_after) == (0.5, 1.5)
    assert (facts.run_ns, facts.clock_drift_ns) == (5, -60)  # the wall clock was set back: no time is measured by it
    assert (facts.temperature_before_c, facts.temperature_after_c, facts.throttled) == (40.0, 70.0, True)


def test_facts_that_nobody_tells_are_none() -> None:
    facts = FactsWatch(Readers(load=lambda: None, temperature=lambda: None, throttles=lambda: None)).finish()
    assert (facts.load_before, facts.temperature_before_c, facts.throttled) == (None, None, None)
    assert merged(()) == RunFacts()


def test_facts_of_several_processes_are_put_together() -> None:
    first = RunFacts(load_before=1.0, load_after=2.0, clock_drift_ns=-5, run_ns=10, throttled=False)
    last = RunFacts(load_before=3.0, load_after=4.0, clock_drift_ns=2, run_ns=20, throttled=True)
    both = merged((first, last))
    assert (both.load_before, both.load_after) == (1.0, 4.0)
    assert (both.clock_drift_ns, both.run_ns, both.throttled) == (-3, 30, True)


def test_heat_and_throttling_are_read_from_sys(tmp_path: Path) -> None:
    assert read_temperature(tmp_path) is None
    assert read_throttle_count(tmp_path) is None
    for i, (chip, degrees) in enumerate((("k10temp", 55000), ("nvme", 80000))):
        folder = tmp_path / "class" / "hwmon" / f"hwmon{i}"
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{chip}\n")
        (folder / "temp1_input").write_text(f"{degrees}\n")
    for i in range(2):
        folder = tmp_path / "devices" / "system" / "cpu" / f"cpu{i}" / "thermal_throttle"
        folder.mkdir(parents=True)
        (folder / "core_throttle_count").write_text(f"{i + 1}\n")
    assert read_temperature(tmp_path) == 55.0
    assert read_throttle_count(tmp_path) == 3
