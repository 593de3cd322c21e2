"""Tuned choices: keys, the file that keeps them, and how a winner is found out of injected timings."""

from __future__ import annotations

import json
import logging
import multiprocessing
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

from halo_vae.optim import tune as tuning_loop
from halo_vae.optim.errors import HaloError, SettingsError
from halo_vae.optim.events import Choice
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.tune import PROBES, TuneOptions, candidates, tune
from halo_vae.optim.tuning import (
    Measured,
    Outcome,
    Overrides,
    TunedEntry,
    TuningKey,
    TuningStore,
    key_of,
    mark_choices,
    structure_of,
)
from halo_vae.tests.optim.helpers import PROFILE, golden_decoder

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
KEY = TuningKey(device="cpu cpu 2 workers", versions="torch 2.13.0", structure="0" * 16, dtype="float32")


def entry(key: TuningKey = KEY, **fields: object) -> TunedEntry:
    given = {
        "best": Overrides(layout="contiguous"), "rule_ns": 200, "best_ns": 150, "max_error": 1e-6, "complete": True,
        "measured": (), "created": "2026-01-02T03:04:05+00:00",
    }  # fmt: skip
    return TunedEntry(key=key, **{**given, **fields})  # type: ignore[arg-type]


# -- keys and overrides


def test_a_key_holds_what_a_measurement_depends_on() -> None:
    program = golden_decoder("kl_sd").program
    key = key_of(program, "float32", PROFILE)
    assert key == key_of(program, "float32", PROFILE)
    assert key.digest != key_of(program, "bfloat16", PROFILE).digest
    assert key.digest != key_of(program, "float32", replace(PROFILE, workers=PROFILE.workers + 1)).digest
    assert key.digest != key_of(golden_decoder("kl_flux").program, "float32", PROFILE).digest


def test_the_structure_does_not_depend_on_names_of_tensors() -> None:
    # the same network in two naming schemes
    assert structure_of(golden_decoder("kl_sd").program) == structure_of(golden_decoder("kl_diffusers").program)


def test_overrides_fill_in_only_what_was_left_open() -> None:
    tuned = Overrides(kernel_backend="shifted_gemm", precision_mode="bf16", chunk_lat=2, strategy="tiles")
    left = tuned.settings(DecodeSettings())
    assert (left.kernel_backend, left.precision_mode, left.chunk_lat) == ("shifted_gemm", "bf16", 2)
    asked = DecodeSettings(kernel_backend="torch", precision_mode="fp32", chunk_frames=8)
    assert tuned.settings(asked) == asked
    assert tuned.profile(PROFILE).strategy == "tiles"
    assert Overrides().profile(PROFILE) is PROFILE
    assert "shifted_gemm" in tuned.text
    assert Overrides().text == "the rules"


def test_choices_say_that_they_were_tuned() -> None:
    layout = Choice(name="layout", value="contiguous", reason="default: x")
    choices = (layout, Choice(name="plan", value="strips", reason="y"))
    marked = mark_choices(choices, entry(), DecodeSettings())
    assert marked[0].reason == "tuned: 25% faster than the rules, measured 2026-01-02"
    assert marked[1] == choices[1]
    assert mark_choices(choices, None, DecodeSettings()) == choices
    assert mark_choices(choices, entry(), DecodeSettings(tensor_layout_optimization=False)) == choices


# -- the file


def test_an_entry_comes_back_as_it_was(tmp_path: Path) -> None:
    store = TuningStore(tmp_path / "deep" / "tuning.json")
    assert store.get(KEY) is None
    kept = entry(measured=(Measured(overrides=Overrides(tile_bytes=5), outcome="crashed", probe=(12,), note="x"),))
    store.put(kept)
    assert TuningStore(store.path).get(KEY) == kept
    assert kept.bad == {Overrides(tile_bytes=5)}
    store.remove(KEY)
    assert TuningStore(store.path).entries() == ()


def test_a_changed_version_finds_nothing(tmp_path: Path) -> None:
    store = TuningStore(tmp_path / "tuning.json")
    store.put(entry())
    assert store.get(replace(KEY, versions="torch 2.14.0")) is None
    assert store.get(KEY) is not None


def test_another_process_is_heard_and_not_overwritten(tmp_path: Path) -> None:
    mine, theirs = TuningStore(tmp_path / "tuning.json"), TuningStore(tmp_path / "tuning.json")
    other = replace(KEY, dtype="bfloat16")
    mine.put(entry())
    theirs.put(entry(other))
    assert mine.get(other) is not None
    assert {e.key for e in mine.entries()} == {KEY, other}


def _put_many(path: str, dtype: str) -> None:
    for i in range(20):
        TuningStore(Path(path)).put(entry(replace(KEY, dtype=dtype, structure=f"{i:016d}")))


def test_two_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    spawn = multiprocessing.get_context("fork" if hasattr(multiprocessing, "get_context") else None)
    others = [spawn.Process(target=_put_many, args=(str(path), dtype)) for dtype in ("a", "b")]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert [other.exitcode for other in others] == [0, 0]
    assert len(TuningStore(path).entries()) == 40


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b'{"schema_version": 99, "entries": {}}', b"\xff\xfe", b'{"schema_version": 1}',
        b"[" * 100_000,
        json.dumps({"schema_version": 1, "entries": {"x": {"key": "nonsense"}}}).encode(),
    ],
)  # fmt: skip
def test_a_corrupt_store_is_set_aside_with_one_warning(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tuning.json"
    path.write_bytes(content)
    store = TuningStore(path)
    with caplog.at_level(logging.WARNING, logger="halo_vae"):
        assert store.get(KEY) is None
        assert store.get(KEY) is None
    assert len(caplog.records) == 1
    assert path.with_name("tuning.json.unreadable").read_bytes() == content
    store.put(entry())
    assert TuningStore(path).get(KEY) == entry()


@pytest.mark.parametrize(
    ("name", "value"),
    [("layout", "diagonal"), ("kernel_backend", "__import__"), ("tile_bytes", -1), ("chunk_lat", True), ("layout", 3)],
)
def test_values_that_nothing_takes_are_refused(tmp_path: Path, name: str, value: object) -> None:
    store = TuningStore(tmp_path / "tuning.json")
    store.put(entry())
    content = json.loads(store.path.read_text("utf-8"))
    content["entries"][KEY.digest]["best"][name] = value
    store.path.write_text(json.dumps(content), "utf-8")
    assert TuningStore(store.path).get(KEY) is None


def test_a_store_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(HaloError, match="HALO_VAE_CACHE_DIR"):
        TuningStore(tmp_path / "file" / "tuning.json").put(entry())


# -- finding the winner


class Clockwork:
    """Timings by overrides, and a note of who was asked."""

    def __init__(self, ns: dict[Overrides, int], default: int = 1000) -> None:
        self.ns, self.default, self.asked = ns, default, []  # type: ignore[var-annotated]

    def __call__(self, overrides: Overrides, probe: int, *, first: bool) -> int:
        self.asked.append((overrides, probe, first))
        value = self.ns.get(overrides, self.default)
        if value < 0:
            raise RuntimeError("MIOpen: no solution found\nmore")
        return value * (probe + 1)


def run(store: TuningStore, timer: Clockwork, **given: object) -> TunedEntry:
    fields = {
        "check": lambda overrides, probe: 1e-6, "survive": lambda overrides: "ok", "now": lambda: NOW,
        "clock": lambda: 0.0, **given,
    }  # fmt: skip
    options = fields.pop("options", TuneOptions())
    profile = fields.pop("profile", PROFILE)
    return tune(golden_decoder("kl_sd"), profile, options, store=store, timer=timer, **fields)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> TuningStore:
    return TuningStore(tmp_path / "tuning.json")


def test_the_fastest_wins_and_is_kept(store: TuningStore) -> None:
    winner = Overrides(kernel_backend="shifted_gemm")
    found = run(store, Clockwork({winner: 800}))
    assert found.best == winner
    assert found.complete
    assert found.gain == pytest.approx(0.2)
    assert TuningStore(store.path).get(found.key) == found


def test_small_probes_come_first_and_losers_see_no_large_one(store: TuningStore) -> None:
    timer = Clockwork({})
    run(store, timer)
    losers = [probe for overrides, probe, _ in timer.asked if overrides != Overrides()]
    assert set(losers) == {0}
    assert len(PROBES) == 2


@pytest.mark.parametrize(("ns", "wins"), [(975, False), (971, False), (960, True)])
def test_a_change_needs_more_than_three_percent(store: TuningStore, ns: int, wins: bool) -> None:
    candidate = Overrides(kernel_backend="shifted_gemm")
    assert (run(store, Clockwork({candidate: ns})).best == candidate) is wins


def test_a_change_needs_it_twice(store: TuningStore) -> None:
    candidate = Overrides(kernel_backend="shifted_gemm")

    class Fading(Clockwork):
        def __call__(self, overrides: Overrides, probe: int, *, first: bool) -> int:
            return super().__call__(overrides if probe == 0 else Overrides(), probe, first=first)

    found = run(store, Fading({candidate: 500}))
    assert found.best == Overrides()
    assert [m.probe for m in found.measured if m.overrides == candidate] == [(PROBES[0],), (PROBES[1],)]


def test_what_would_do_the_same_is_not_timed(store: TuningStore) -> None:
    twin = Overrides(kernel_backend="shifted_gemm")
    timer = Clockwork({twin: 500})
    found = run(store, timer, same=lambda one, other: {one, other} == {twin, Overrides()})
    assert found.best == Overrides()
    assert not any(overrides == twin for overrides, _, _ in timer.asked)
    # nor what is the same as the one that its axis began with, once that was beaten
    winner, late = Overrides(kernel_backend="torch"), Overrides(kernel_backend="winograd")
    timer = Clockwork({winner: 700, late: 100})
    found = run(store, timer, same=lambda one, other: {one, other} == {late, Overrides()})
    assert found.best == winner


def test_axes_build_on_each_other(store: TuningStore) -> None:
    first, both = Overrides(kernel_backend="shifted_gemm"), Overrides(kernel_backend="shifted_gemm", strategy="tiles")
    assert run(store, Clockwork({first: 800, both: 600})).best == both


def test_a_failure_is_noted_and_the_rest_goes_on(store: TuningStore) -> None:
    broken, good = Overrides(kernel_backend="torch"), Overrides(kernel_backend="shifted_gemm")
    found = run(store, Clockwork({broken: -1, good: 500}))
    assert found.best == good
    (noted,) = [m for m in found.measured if m.overrides == broken]
    assert (noted.outcome, noted.note) == ("failed", "MIOpen: no solution found")


def test_a_wrong_picture_never_wins(store: TuningStore) -> None:
    wrong = Overrides(kernel_backend="shifted_gemm")
    for error in (0.5, float("nan")):
        errors = {wrong: error}
        found = run(store, Clockwork({wrong: 10}), check=lambda overrides, probe, e=errors: e.get(overrides, 0.0))
        assert found.best == Overrides()
        assert "inexact" in {m.outcome for m in found.measured if m.overrides == wrong}


def test_a_crash_is_remembered_and_not_tried_again(store: TuningStore) -> None:
    asked: list[Overrides] = []
    crashing = Overrides(kernel_backend="shifted_gemm")

    def survive(overrides: Overrides) -> Outcome:
        asked.append(overrides)
        return "crashed" if overrides == crashing else "ok"

    hip = replace(PROFILE, kind="hip", name="cuda:0", convolution="direct")
    timer = Clockwork({crashing: 1})
    found = run(store, timer, profile=hip, survive=survive)
    assert crashing in asked
    assert crashing not in {overrides for overrides, _, _ in timer.asked}
    assert found.bad == {crashing}
    asked.clear()
    again = run(store, Clockwork({crashing: 1}), profile=hip, survive=survive)
    assert crashing not in asked
    assert again.bad == {crashing}


def test_the_time_budget_ends_it(store: TuningStore) -> None:
    ticks = iter(range(1000))
    timer = Clockwork({})
    found = run(store, timer, options=TuneOptions(budget_s=3), clock=lambda: float(next(ticks)))
    assert not found.complete
    first_axis = candidates(golden_decoder("kl_sd"), PROFILE, TuneOptions())[0]
    assert {overrides for overrides, _, _ in timer.asked} <= {Overrides(), *first_axis}


def test_nothing_is_timed_after_the_budget(store: TuningStore) -> None:
    timer = Clockwork({})
    found = run(store, timer, options=TuneOptions(budget_s=3), clock=iter(range(1000)).__next__)
    rules = 1 + tuning_loop.RUNS
    assert len(timer.asked) == rules + 1  # begun, candidate, one decode: the next is late
    assert found.measured == ()
    assert not found.complete


def test_a_run_cut_short_does_not_undo_a_better_one(store: TuningStore) -> None:
    winner = Overrides(kernel_backend="shifted_gemm")
    first = run(store, Clockwork({winner: 500}))
    short = run(store, Clockwork({}), options=TuneOptions(budget_s=3), clock=iter(range(1000)).__next__)
    assert short.best == Overrides()
    assert store.get(first.key) == first
    again = run(store, Clockwork({}))
    assert store.get(first.key) == again


def test_times_are_told_beside_those_of_the_best_before(store: TuningStore) -> None:
    winner = Overrides(kernel_backend="shifted_gemm")
    found = run(store, Clockwork({winner: 800}))
    small, large = (m for m in found.measured if m.overrides == winner)
    assert (small.ns, small.beside_ns, large.beside_ns) == (800, 1000, 2000)
    assert small.change == pytest.approx(-0.2)
    assert Measured(overrides=winner, outcome="failed").change is None


def test_a_narrow_decoder_is_not_held_to_float32(store: TuningStore) -> None:
    winner, decoder = Overrides(kernel_backend="shifted_gemm"), golden_decoder("kl_sd")
    decoder.loaded_dtype = torch.bfloat16
    for loaded, best in ((decoder, winner), (golden_decoder("kl_sd"), Overrides())):
        found = tune(
            loaded, PROFILE, store=store, timer=Clockwork({winner: 500}), check=lambda overrides, probe: 0.02,
            survive=lambda overrides: "ok",
        )  # fmt: skip
        assert found.best == best


def test_cancelling_keeps_what_was_measured(store: TuningStore) -> None:
    winner = Overrides(kernel_backend="shifted_gemm")

    def report(done: int, total: int, text: str) -> None:
        assert 0 <= done <= total
        if "strategy" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(store, Clockwork({winner: 500}), report=report)
    (kept,) = store.entries()
    assert kept.best == winner
    assert not kept.complete


def test_narrow_arithmetic_is_tried_on_request_only() -> None:
    decoder = golden_decoder("kl_sd")
    fast = replace(PROFILE, native_dtypes=("bfloat16", "float32"))

    def modes(options: TuneOptions) -> set[str | None]:
        return {c.precision_mode for axis in candidates(decoder, fast, options) for c in axis}

    assert modes(TuneOptions()) == {None}
    assert modes(TuneOptions(precisions=True)) == {None, "mixed", "bf16"}
    kitchen = [c for axis in candidates(decoder, fast, TuneOptions(fp16_accumulation=True)) for c in axis]
    assert Overrides(kernel_backend="kitchen", fp16_accumulation=True) in kitchen


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(SettingsError, match="more than 0"):
        tuning_loop.check_options(TuneOptions(budget_s=0))
