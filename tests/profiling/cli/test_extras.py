"""`halo-vae decode --profile`, `--trace` and `--memory-chart`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halo_vae.optim.decode import Engine
from halo_vae.profiling.bandwidth import PROCESS_RATES
from halo_vae.profiling.cli import extras
from halo_vae.profiling.record import DecodeRecord
from halo_vae.profiling.store import HistoryStore
from halo_vae.profiling.trace import chrome_trace
from halo_vae.tests.profiling.trace_format import read_trace

Run = Callable[..., "Ended"]  # noqa: F821 (the fixture's type)
MakeLatent = Callable[..., Path]
NPY = ("--format", "npy", "--device", "cpu")


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Devices whose copies were to be measured; 9 GB/s each."""
    asked: list[str] = []
    known: dict[str, int | None] = {}

    def measure(device: str) -> int:
        asked.append(device)
        known[device] = 9_000_000_000
        return 9_000_000_000

    monkeypatch.setattr(PROCESS_RATES, "_known", known)
    monkeypatch.setattr(PROCESS_RATES, "measure", measure)
    return asked


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize(("flags", "level", "n_measured"), [
    ((), "summary", 0), (("--profile", "off"), "off", 0), (("--profile", "summary"), "summary", 0),
    (("--profile", "per_op"), "per_op", 1), (("--trace",), "per_op", 1),
])  # fmt: skip
def test_the_level_is_the_one_asked_for(
    flags: tuple[str, ...], level: str, n_measured: int,
    halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path, measured: list[str],
) -> None:  # fmt: skip
    ended = halo("decode", latent_file(), "--vae", vae, "-o", tmp_path / "out", *NPY, "--json", *flags)
    assert ended.code == 0, ended.err
    record = DecodeRecord.from_json(json.loads(ended.out))
    assert record.level == level
    assert measured == ["cpu"] * n_measured  # before the decode, on request alone
    assert (record.copy_bytes_per_s, record.bandwidth_share is None) == (
        (9_000_000_000, False) if n_measured else (None, True)
    )


def test_a_trace_beside_the_picture(halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = halo("decode", latent_file(), "--vae", vae, "-o", out, *NPY, "--trace")
    assert ended.code == 0, ended.err
    assert names(out) == ["small.npy", "small.trace.json"]
    assert ended.out.splitlines() == [str(out / "small.npy"), str(out / "small.trace.json")]
    written = json.loads((out / "small.trace.json").read_text(encoding="utf-8"))
    (record,) = HistoryStore().read().records
    assert written == chrome_trace(record)
    assert len(read_trace(written).decode.of("tile")) == record.tiles.count  # type: ignore[union-attr]


def test_a_chart_beside_the_picture(halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    ended = halo("decode", latent_file(), "--vae", vae, "-o", out, *NPY, "--memory-chart")
    assert ended.code == 0, ended.err
    assert names(out) == ["small.memory.png", "small.npy"]


def test_without_matplotlib_nothing_is_decoded(
    halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    ended = halo("decode", latent_file(), "--vae", vae, "-o", tmp_path / "out", *NPY, "--memory-chart")
    assert ended.code == 1
    assert "halo-vae[charts]" in ended.err
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize("flag", ["--trace", "--memory-chart"])
def test_a_level_that_has_no_trace_is_refused(
    flag: str, halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: object())
    out = tmp_path / "out"
    ended = halo("decode", latent_file(), "--vae", vae, "-o", out, *NPY, flag, "--profile", "summary")
    assert ended.code == 2
    assert f"{flag} needs --profile per_op and --profile is summary" in ended.err
    assert names(out) == []


def test_a_trace_that_exists_is_not_overwritten(halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "small.trace.json").write_text("mine")
    ended = halo("decode", latent_file(), "--vae", vae, "-o", out, *NPY, "--trace")
    assert ended.code == 2
    assert (out / "small.trace.json").read_text() == "mine"
    assert halo("decode", latent_file(), "--vae", vae, "-o", out, *NPY, "--trace", "--force").code == 0
    assert (out / "small.trace.json").read_text() != "mine"


def test_a_decode_that_fails_leaves_its_trace(
    halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Engine, *args: Any, observer: Any, **more: Any) -> None:
        observer.op_started(0, 1, "decoder.conv_in", 1)
        observer.mark("compute")
        raise MemoryError

    monkeypatch.setattr(Engine, "decode", fail)
    out = tmp_path / "out"
    ended = halo("decode", latent_file(), "--vae", vae, "-o", out, *NPY, "--trace")
    assert ended.code == 1
    assert names(out) == ["small.trace.json"]
    read = read_trace(json.loads((out / "small.trace.json").read_text(encoding="utf-8")))
    assert read.decode.args["status"] == "out_of_memory"
    assert [n.name for n in read.decode.of("op")] == ["decoder.conv_in"]
