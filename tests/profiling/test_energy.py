"""Energy per decode: readings, arithmetic, and where nothing may be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halo_vae.profiling import energy
from halo_vae.profiling.energy import (
    SAMPLE_EVERY_NS,
    CounterMeter,
    EnergyMeter,
    PowerMeter,
    amdsmi_source,
    hwmon_source,
    meter_for,
    read_number,
)
from halo_vae.profiling.record import DecodeRecord
from halo_vae.profiling.render.text import render_record
from halo_vae.tests.profiling.fakes import (
    IDENTITY,
    MS,
    ON_GPU,
    REQUEST,
    SECOND,
    FakeClock,
    busy_events,
    make_collector,
    record_events,
    record_failure,
)

WATT = 1_000_000  # microwatts


class Readings:
    """Gives one reading after the other, and counts."""

    def __init__(self, *values: int | None) -> None:
        self._values: Iterator[int | None] = iter(values)
        self.count = 0

    def __call__(self) -> int | None:
        self.count += 1
        return next(self._values)


def measure(meter: EnergyMeter, times_ns: Sequence[int]) -> int | None:
    """Begin, ticks, end at these times."""
    meter.begin(times_ns[0])
    for now_ns in times_ns[1:-1]:
        meter.tick(now_ns)
    return meter.end(times_ns[-1])


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(1000, 51_000, 50_000), (None, 5, None), (5, None, None), (5, 5, None), (5, 4, None)],
)
def test_a_counter_is_read_at_start_and_end(start: int | None, stop: int | None, expected: int | None) -> None:
    readings = Readings(start, stop)
    assert measure(CounterMeter(readings), [0, 1 * SECOND, 2 * SECOND, 3 * SECOND]) == expected
    assert readings.count == 2


def test_power_is_integrated_between_samples() -> None:
    readings = Readings(10 * WATT, 30 * WATT, 50 * WATT)
    # 20 W for one second, then 40 W for two.
    assert measure(PowerMeter(readings), [5 * SECOND, 6 * SECOND, 8 * SECOND]) == 100_000_000
    assert readings.count == 3


def test_power_is_sampled_at_most_four_times_a_second() -> None:
    readings = Readings(*[20 * WATT] * 100)
    times = [i * MS for i in range(0, 2001)]
    assert measure(PowerMeter(readings), times) == 40_000_000
    assert SAMPLE_EVERY_NS == 250 * MS
    assert readings.count == 1 + 7 + 1  # start, 250 to 1750 ms, end


def test_few_events_are_few_samples() -> None:
    readings = Readings(20 * WATT, 40 * WATT)
    assert measure(PowerMeter(readings), [0, 2 * SECOND]) == 60_000_000
    assert readings.count == 2


def test_a_sample_that_fails_is_bridged() -> None:
    readings = Readings(10 * WATT, None, 30 * WATT)
    assert measure(PowerMeter(readings), [0, 1 * SECOND, 2 * SECOND]) == 40_000_000


@pytest.mark.parametrize(
    "values", [(None, 30 * WATT, 30 * WATT), (30 * WATT, 30 * WATT, None), (0, 0, 0), (None, None, None)]
)
def test_power_that_is_not_known_at_both_ends_is_unknown(values: tuple[int | None, ...]) -> None:
    assert measure(PowerMeter(Readings(*values)), [0, 1 * SECOND, 2 * SECOND]) is None


# -- hwmon


@pytest.fixture
def card(tmp_path: Path) -> Callable[..., Path]:
    """A card's device folder whose hwmon has these files."""

    def make(number: int = 3, **files: object) -> Path:
        folder = tmp_path / "hwmon" / f"hwmon{number}"
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("files", "kind", "value"),
    [
        ({"energy1_input": 7, "power1_average": 8, "power1_input": 9}, "counter", 7),
        ({"power1_average": 8, "power1_input": 9}, "power", 8),
        ({"power1_input": 9, "temp1_input": 40_000}, "power", 9),
        ({"power1_average": "", "power1_input": 9}, "power", 9),  # there, and not readable
        ({"energy1_input": -1, "power1_average": 8}, "power", 8),
    ],
)
def test_the_best_sensor_of_a_card(card: Callable[..., Path], files: dict[str, object], kind: str, value: int) -> None:
    source = hwmon_source(card(**files))
    assert source is not None
    assert (source.kind, source.read()) == (kind, value)
    assert (source.meter().source, type(source.meter())) == (kind, PowerMeter if kind == "power" else CounterMeter)


def test_a_card_without_sensors(card: Callable[..., Path], tmp_path: Path) -> None:
    assert hwmon_source(tmp_path / "none") is None
    assert hwmon_source(card(temp1_input=40_000, power1_cap=100)) is None


def test_a_second_sensor_folder_is_looked_at_too(card: Callable[..., Path]) -> None:
    card(1, temp1_input=40_000)
    source = hwmon_source(card(2, power1_average=5))
    assert source is not None
    assert source.read() == 5


def test_a_sensor_that_goes_away(card: Callable[..., Path], tmp_path: Path) -> None:
    source = hwmon_source(card(power1_average=20 * WATT))
    assert source is not None
    meter = source.meter()
    meter.begin(0)
    (tmp_path / "hwmon" / "hwmon3" / "power1_average").unlink()  # the driver was reloaded
    meter.tick(1 * SECOND)
    assert meter.end(2 * SECOND) is None


@pytest.mark.parametrize("text", ["", "much", "1.5", "-3", "0x10"])
def test_what_is_no_number_is_not_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    assert read_number(tmp_path / "file") is None
    assert read_number(tmp_path / "none") is None


# -- AMD SMI


class FakeSmi(SimpleNamespace):
    """What the package amdsmi has of it."""

    def __init__(self, *counts: Any) -> None:
        super().__init__()
        self.asked: list[str] = []
        self._counts = iter(counts)

    def amdsmi_init(self) -> None:
        self.asked.append("init")

    def amdsmi_get_processor_handle_from_bdf(self, bdf: str) -> str:
        self.asked.append(bdf)
        return "handle"

    def amdsmi_get_energy_count(self, handle: str) -> dict[str, Any]:
        assert handle == "handle"
        count = next(self._counts)
        if isinstance(count, Exception):
            raise count
        found: dict[str, Any] = count
        return found


def test_amd_smis_counter_is_in_its_own_units() -> None:
    smi = FakeSmi(
        {"energy_accumulator": 5, "counter_resolution": 15.3, "timestamp": 1},
        {"energy_accumulator": 100, "counter_resolution": 15.3, "timestamp": 2},
        {"power": 300, "counter_resolution": 15.3, "timestamp": 3},  # as versions before 6 call it
    )
    source = amdsmi_source("0000:c3:00", lambda: smi)
    assert source is not None
    assert smi.asked == ["init", "0000:c3:00.0"]
    meter = source.meter()
    assert meter.source == "amdsmi"
    meter.begin(0)
    assert meter.end(1) == 4590 - 1530


@pytest.mark.parametrize(
    "count",
    [RuntimeError("not supported"), {}, {"energy_accumulator": 0, "counter_resolution": 15.3}, {"power": "N/A"}],
)
def test_amd_smi_may_have_no_counter(count: Any) -> None:
    assert amdsmi_source("0000:c3:00", lambda: FakeSmi(count)) is None


def test_amd_smi_may_be_missing() -> None:
    def missing() -> Any:
        raise ImportError("no amdsmi")

    def broken() -> Any:
        raise OSError("libamd_smi.so: cannot open shared object file")

    for load in (missing, broken):
        assert amdsmi_source("0000:c3:00", load) is None
    assert amdsmi_source(None, lambda: pytest.fail("no address, nothing to ask about")) is None


# -- which device


def test_nothing_is_read_for_a_cpu_and_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "_source_of", lambda device: pytest.fail("looked for a sensor"))
    for hip in (True, False):
        monkeypatch.setattr(energy, "is_hip", lambda hip=hip: hip)
        assert meter_for("cpu") is None
    assert meter_for("cuda:0") is None
    assert meter_for("mps") is None


def test_a_hip_device_is_found_by_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from halo_vae.optim import device_readers
    from halo_vae.tests.optim.test_device_readers import add_card

    add_card(tmp_path, 0, "0000:03:00.0", **{"hwmon/hwmon1/power1_average": 1})
    add_card(tmp_path, 1, "0000:c3:00.0", **{"hwmon/hwmon2/power1_average": 2})
    monkeypatch.setattr(energy, "is_hip", lambda: True)
    monkeypatch.setattr(device_readers, "SYS", tmp_path)
    asked: list[str] = []

    def address(device: object) -> str:
        asked.append(str(device))
        return "0000:c3:00"

    monkeypatch.setattr(device_readers, "read_pci_address", address)
    energy._source_of.cache_clear()
    try:
        readings = []
        for _ in range(2):
            meter = meter_for("cuda:0")
            assert isinstance(meter, PowerMeter)
            readings.append(meter._read())
        assert readings == [2, 2]
        assert asked == ["cuda:0"]  # once per process
    finally:
        energy._source_of.cache_clear()


# -- in records


class FakeMeter:
    """Counts its calls; ends with a figure."""

    source = "power"

    def __init__(self, ended: int | None = 2_500_000) -> None:
        self.calls: list[tuple[str, int]] = []
        self._ended = ended

    def begin(self, now_ns: int) -> None:
        self.calls.append(("begin", now_ns))

    def tick(self, now_ns: int) -> None:
        self.calls.append(("tick", now_ns))

    def end(self, now_ns: int) -> int | None:
        self.calls.append(("end", now_ns))
        return self._ended


def test_a_record_holds_energy_and_where_it_is_from() -> None:
    meter, asked = FakeMeter(), []

    def meter_of(device: str) -> Any:
        asked.append(device)
        return meter

    record: DecodeRecord = record_events(make_collector(energy=meter_of), busy_events, ON_GPU)
    assert asked == ["cuda:0"]
    assert (record.energy_uj, record.energy_from) == (2_500_000, "power")
    assert [name for name, _ in meter.calls[:1] + meter.calls[-1:]] == ["begin", "end"]
    assert {name for name, _ in meter.calls[1:-1]} == {"tick"}
    assert DecodeRecord.from_json(record.to_json()) == record
    (line,) = (line for line in render_record(record).splitlines() if line.strip().startswith("energy"))
    assert line.split() == ["energy", "2.5", "J", "of", "the", "whole", "device"]


def test_energy_spans_the_whole_decode() -> None:
    clock, meter = FakeClock(), FakeMeter()
    collector = make_collector(clock=clock, energy=lambda device: meter)
    with collector.recording(ON_GPU, REQUEST) as run:
        clock.advance(3 * SECOND)
        run.delivered((1, 8, 8, 3))
    assert meter.calls == [("begin", 5 * SECOND), ("end", 8 * SECOND)]


@pytest.mark.parametrize("ended", [None, 5])
def test_a_decode_that_failed_took_energy_too(ended: int | None) -> None:
    collector = make_collector(energy=lambda device: FakeMeter(ended))
    record_failure(collector, ValueError("no"))
    (record,) = collector.records()
    assert (record.energy_uj, record.energy_from) == (ended, "power" if ended else None)


def test_level_off_and_cpus_have_none() -> None:
    off = record_events(make_collector("off", energy=lambda device: pytest.fail("read at level off")), busy_events)
    plain = record_events(make_collector(energy=meter_for), busy_events, IDENTITY)
    assert [(r.energy_uj, r.energy_from) for r in (off, plain)] == [(None, None)] * 2
