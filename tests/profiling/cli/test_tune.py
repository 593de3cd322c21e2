"""`halo-vae tune`: real decodes within a budget, what it prints, keeps, lists, forgets and suggests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halo_vae.optim import tune as tuning_loop
from halo_vae.optim import tune_run
from halo_vae.optim.tune import TuneOptions
from halo_vae.optim.tuning import Overrides, TuningStore
from halo_vae.profiling.render.tuning import miopen_advice, render_entry
from halo_vae.profiling.store import HistoryStore
from halo_vae.tests.profiling.cli.test_app import python

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents of a few elements: what is found matters to no test here."""
    monkeypatch.setattr(tuning_loop, "PROBES", (2, 4))


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = [[Overrides(kernel_backend="shifted_gemm")], [Overrides(strategy="tiles")]]
    monkeypatch.setattr(tuning_loop, "candidates", lambda decoder, profile, options: axes)


def tune_json(halo: Run, vae: Path, *argv: object) -> dict[str, Any]:
    ended = halo("tune", "--vae", vae, "--device", "cpu", "--json", *argv)
    assert ended.code == 0, ended.err
    assert ended.out.count("\n") == 1
    line: dict[str, Any] = json.loads(ended.out)
    return line


def test_a_tiny_budget_is_kept_with_real_decodes(halo: Run, vae: Path) -> None:
    line = tune_json(halo, vae, "--budget", 0.001)
    assert (line["schema_version"], line["kind"], line["complete"]) == (1, "tuned", False)
    assert line["rule_ns"] > 0
    assert line["measured"] == []  # the rules' own time used it up
    (kept,) = TuningStore().entries()
    assert kept.best == Overrides()


@pytest.mark.usefixtures("few_candidates")
def test_what_was_measured_is_shown_and_kept(halo: Run, vae: Path) -> None:
    ended = halo("tune", "--vae", vae, "--device", "cpu")
    assert ended.code == 0, ended.err
    (kept,) = TuningStore().entries()
    assert kept.complete
    tried = [m for m in kept.measured if m.outcome == "ok"]
    assert {m.overrides.kernel_backend for m in tried} >= {"shifted_gemm"}
    assert all(m.ns and m.beside_ns and m.max_error is not None and m.max_error < 1e-3 for m in tried)
    for words in ("candidate", "change", "max error", "kernel_backend shifted_gemm", "2×2", f"best: {kept.best.text}"):
        assert words in ended.out
    assert render_entry(kept) == ended.out
    listed = halo("tune", "--list")
    assert kept.key.structure in listed.out
    assert json.loads(halo("tune", "--list", "--json", "--vae", vae).out)["key"]["dtype"] == "float32"


@pytest.mark.usefixtures("few_candidates")
def test_ctrl_c_keeps_what_was_measured(halo: Run, vae: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = tuning_loop.DecodeTimer.__call__, []

    def interrupted(self: Any, overrides: Overrides, probe: int, *, first: bool) -> int:
        calls.append(overrides)
        if overrides.strategy == "tiles":
            raise KeyboardInterrupt
        return real(self, overrides, probe, first=first)

    monkeypatch.setattr(tuning_loop.DecodeTimer, "__call__", interrupted)
    ended = halo("tune", "--vae", vae, "--device", "cpu")
    assert ended.code == 130
    assert "what was measured is kept" in ended.err
    assert "kernel_backend shifted_gemm" in ended.out
    (kept,) = TuningStore().entries()
    assert not kept.complete
    assert len(kept.measured) >= 1
    monkeypatch.setattr(tuning_loop.DecodeTimer, "__call__", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    ended = halo("tune", "--vae", vae, "--device", "cpu")  # before anything was measured
    assert (ended.code, ended.out) == (130, "")
    assert TuningStore().entries() == (kept,)


def test_forgetting_leaves_other_decoders(halo: Run, vae: Path, video_vae: Path) -> None:
    tune_json(halo, vae, "--budget", 0.001)
    tune_json(halo, video_vae, "--budget", 0.001)
    ended = halo("tune", "--forget", "--vae", vae, "--device", "cpu")
    assert ended.code == 0
    assert "forgot 1 entry" in ended.out
    (left,) = TuningStore().entries()
    assert left.key.structure not in ended.out
    assert json.loads(halo("tune", "--forget", "--vae", vae, "--json", "--device", "cpu").out)["entries"] == 0
    assert "nothing is tuned yet" in halo("tune", "--list", "--vae", vae, "--device", "cpu").out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "--vae FILE"), (("--forget",), "--vae FILE"), (("--vae", "VAE", "--budget", "0"), "more than 0"),
        (("--vae", "VAE", "--budget", "nan"), "more than 0"), (("--vae", "VAE", "--device", "gpu7"), "gpu7"),
        (("--vae", "VAE", "--threads", "0"), "--threads"), (("--list", "--suggest"), "not allowed with"),
        (("--vae", "missing.safetensors"), "missing.safetensors"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(argv: tuple[str, ...], words: str, halo: Run, vae: Path) -> None:
    ended = halo("tune", *(str(vae) if a == "VAE" else a for a in argv))
    assert ended.code == 2
    assert words in ended.err
    assert TuningStore().entries() == ()


def test_suggestions_come_from_the_history(
    halo: Run, vae: Path, latent_file: Callable[..., Path], tmp_path: Path
) -> None:
    assert "no decoder that is used often" in halo("tune", "--suggest").out
    for i in range(2):
        assert halo("decode", latent_file(), "--vae", vae, "-o", tmp_path / str(i), "--device", "cpu").code == 0
    ended = halo("tune", "--suggest")
    assert ended.code == 0
    assert "2 decodes took" in ended.out
    assert "not tuned" in ended.out
    assert "1×4×5×7" in ended.out
    line = json.loads(halo("tune", "--suggest", "--json").out)
    assert (line["kind"], line["usage"]["decodes"], line["usage"]["tuned"]) == ("suggestion", 2, False)


def test_miopen_is_spoken_of_on_rocm_only() -> None:
    assert miopen_advice({}, None, "Linux") == ()
    first, then = miopen_advice({}, "7.1.0", "Linux")
    assert "export MIOPEN_FIND_MODE=NORMAL" in first
    assert "export MIOPEN_FIND_MODE=FAST" in then
    assert "set MIOPEN_FIND_MODE=NORMAL" in miopen_advice({}, "7.1.0", "Windows")[0]
    assert miopen_advice({"MIOPEN_FIND_MODE": "3"}, "7.1.0", "Linux") == ()


def test_repacked_weights_are_dropped_and_the_largest_plan_is_told(tmp_path: Path) -> None:
    from halo_vae.tests.optim.helpers import PROFILE, golden_decoder

    decoder, store = golden_decoder("kl_sd"), TuningStore(tmp_path / "tuning.json")
    cancelled: list[int] = []

    def before_each() -> None:
        cancelled.append(1)
        if len(cancelled) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune_run.tune_decoder(decoder, PROFILE, TuneOptions(), store=store, before_each=before_each)
    assert decoder.packed.nbytes == 0
    assert len(store.entries()) == 1  # the rules were timed: 4 decodes
    assert tune_run.most_bytes(decoder, PROFILE, TuneOptions()) > 0


AGAIN = """
import json, sys
from halo_vae.optim import tune
tune.PROBES = (2, 4)
tune.candidates = lambda decoder, profile, options: [[tune.Overrides(strategy="tiles")]]
tune.GAIN = -100.0  # whatever is tried wins
from halo_vae.profiling.cli import main
sys.exit(main(sys.argv[1:]))
"""
OTHER_VERSION = """
import dataclasses, sys
from halo_vae.optim import device
real = device.profile_from
def changed(readings):
    return dataclasses.replace(found := real(readings), versions=dataclasses.replace(found.versions, torch="99.0"))
device.profile_from = changed
from halo_vae.profiling.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_new_process_uses_what_was_tuned_until_versions_change(
    vae: Path, latent_file: Callable[..., Path], tmp_path: Path
) -> None:
    folders = {"HALO_VAE_CACHE_DIR": str(tmp_path / "cache"), "HALO_VAE_DATA_DIR": str(tmp_path / "data")}
    done = python(tmp_path, AGAIN, "tune", "--vae", str(vae), "--device", "cpu", "--threads", "1", **folders)
    assert done.returncode == 0, done.stderr
    decode = (
        "decode", str(latent_file()), "--vae", str(vae), "-o", str(tmp_path / "out"), "--device", "cpu",
        "--threads", "1", "--force",
    )  # fmt: skip
    plain = "import sys\nfrom halo_vae.profiling.cli import main\nsys.exit(main(sys.argv[1:]))"
    for code in (plain, OTHER_VERSION):
        done = python(tmp_path, code, *decode, **folders)
        assert done.returncode == 0, done.stderr
    tuned, changed = HistoryStore(tmp_path / "data" / "history.jsonl").read().records
    assert tuned.plan is not None
    (choice,) = (c for c in tuned.plan.choices if c.name == "plan")
    assert (choice.value, choice.reason.split()[0]) == ("tiles", "tuned:")
    assert [(c.lookups, c.hits) for c in tuned.caches or () if c.name == "tuning"] == [(1, 1)]
    assert changed.plan is not None
    assert not any(c.reason.startswith("tuned:") for c in changed.plan.choices)
    assert [(c.lookups, c.hits) for c in changed.caches or () if c.name == "tuning"] == [(1, 0)]
