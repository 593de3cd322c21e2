"""`halo-vae doctor` as a command: what it prints, how it ends, and that it changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halo_vae.profiling import doctor_read
from halo_vae.profiling.doctor_facts import Facts
from halo_vae.tests.profiling.cli.test_app import python
from halo_vae.tests.profiling.doctor_fakes import CPU, STRIX_HALO, WINDOWS, change

Run = Callable[..., Any]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Facts], None]:
    """Let the command run on another machine."""

    def set_facts(facts: Facts) -> None:
        monkeypatch.setattr(doctor_read, "read_facts", lambda device, **options: facts)

    return set_facts


def test_report_of_this_machine(halo: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALO_VAE_DATA_DIR", str(tmp_path / "data"))
    ended = halo("doctor", "--device", "cpu")
    assert ended.code == 0, ended.out
    for words in (
        str(torch.__version__),
        "Memory",
        "Versions",
        "Findings",
        "HALO_VAE_DATA_DIR",
        str(tmp_path / "data"),
    ):
        assert words in ended.out
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_line(halo: Run) -> None:
    ended = halo("doctor", "--json", "--device", "cpu")
    assert ended.out.count("\n") == 1
    line = json.loads(ended.out)
    assert (line["schema_version"], line["kind"], line["device"]["name"]) == (1, "doctor", "cpu")
    assert line["kitchen"]["importable"] in (True, False)  # it was tried


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_redacted_names_no_place_and_no_value(
    form: tuple[str, ...], halo: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALO_VAE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("MIOPEN_USER_DB_PATH", str(tmp_path / "db"))
    monkeypatch.setenv("MIOPEN_FIND_MODE", "a-value-of-mine")
    ended = halo("doctor", "--redact", "--device", "cpu", *form)
    assert ended.code == 0
    for secret in (str(tmp_path), "a-value-of-mine", str(Path.home()) + os.sep, os.getcwd()):
        assert secret not in ended.out
    assert "MIOPEN_FIND_MODE" in ended.out


def test_exit_code_says_whether_decodes_would_fail(halo: Run, machine: Callable[[Facts], None]) -> None:
    machine(change(STRIX_HALO, device={"built_for": ("gfx1100",)}))
    ended = halo("doctor", "--device", "cpu")
    assert ended.code == 1
    assert "this torch has no kernels for the GPU" in ended.out
    assert halo("doctor", "--json", "--redact", "--device", "cpu").code == 1
    machine(change(STRIX_HALO, flags={"cudnn_benchmark": True}))
    ended = halo("doctor", "--device", "cpu")
    assert ended.code == 0  # slow is not wrong
    assert "warning" in ended.out


@pytest.mark.parametrize("facts", [STRIX_HALO, WINDOWS, CPU])
def test_other_machines_are_printed_too(facts: Facts, halo: Run, machine: Callable[[Facts], None]) -> None:
    machine(facts)
    ended = halo("doctor", "--device", "cpu")
    assert ended.code == 0
    assert facts.versions.torch in ended.out
    assert json.loads(halo("doctor", "--json", "--device", "cpu").out)["versions"]["system"] == facts.versions.system


def test_wrong_device_is_bad_input(halo: Run) -> None:
    ended = halo("doctor", "--device", "gpu7")
    assert ended.code == 2
    assert "gpu7" in ended.err


def test_it_changes_nothing(halo: Run) -> None:
    def state() -> tuple[Any, ...]:
        cudnn: Any = torch.backends.cudnn
        return dict(os.environ), cudnn.enabled, cudnn.benchmark, cudnn.deterministic, torch.get_num_threads()

    before = state()
    halo("doctor", "--device", "cpu")
    assert state() == before


HIDDEN = """
import os, sys

def hide(event, args):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(args[0], (str, bytes, os.PathLike)):
        path = os.fsdecode(args[0])
        if path.startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "hidden", path)

sys.addaudithook(hide)
for name in ("posix_fadvise",):
    if hasattr(os, name):
        delattr(os, name)
import torch
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    torch.backends.cudnn.allow_tf32 = False  # the old and the new interface mixed: some flags now raise when read
    torch.backends.cuda.matmul.fp32_precision = "tf32"
from halo_vae.profiling.cli import main
code = main(["doctor", "--json", "--device", "cpu"])
sys.exit(code or main(["decode", *sys.argv[1:]]))
"""


def test_with_proc_sys_and_fadvise_hidden_doctor_and_decode_still_work(
    tmp_path: Path, vae: Path, latent_file: Callable[..., Path]
) -> None:
    out = tmp_path / "out"
    done = python(
        tmp_path, HIDDEN, str(latent_file()), "--vae", str(vae), "-o", str(out), "--format", "npy", "--device", "cpu",
        HALO_VAE_DATA_DIR=str(tmp_path / "data"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[0])
    memory = line["memory"]
    assert {memory[k] for k in ("host_total_bytes", "host_available_bytes", "swap_total_bytes", "gtt_total_bytes")} == {
        None
    }
    assert memory["budget_bytes"] is None
    assert line["device"]["kernel_gfx"] is None
    assert [p.name for p in out.iterdir()] == ["small.npy"]
