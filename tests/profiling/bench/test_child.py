"""Real children: what they decode with, what they find, and that none outlives its parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from halo_vae.profiling.bench import tasks
from halo_vae.profiling.bench.cases import BenchError
from halo_vae.profiling.bench.child import sentence_of
from halo_vae.profiling.bench.ending import ROOT
from halo_vae.profiling.bench.probe import install_probe
from halo_vae.profiling.bench.protocol import ChildEvent, ChildRequest, to_line
from halo_vae.profiling.bench.sides import Shapes, open_side
from halo_vae.profiling.bench.spawn import _PROGRAM
from halo_vae.profiling.cli.demo import DATA, VAE_NAME

TINY = ChildRequest(
    task="run", device="cpu", threads=None, vae=str(DATA / VAE_NAME), latent_shape=(1, 4, 8, 9), warm_ups=1, runs=2
)
CPU = torch.device("cpu")


def perform(request: ChildRequest) -> list[ChildEvent]:
    told: list[ChildEvent] = []
    tasks.perform(request, told.append)
    return told


def test_device_is_described() -> None:
    (event,) = perform(ChildRequest(task="describe", device="cpu", threads=None))
    found = event.described
    assert found is not None
    assert (found.device, found.pci, found.has_fp16) == ("cpu", None, False)
    assert found.threads == torch.get_num_threads()
    assert found.arch == found.environment.machine


@pytest.mark.parametrize("configuration", ["baseline", "phase1", "phase2", "phase3"])
def test_every_configuration_decodes_the_same_picture(configuration: str, tmp_path: Path) -> None:
    wanted = replace(TINY, configuration=configuration, reference=str(tmp_path / "picture"))  # type: ignore[arg-type]
    perform(replace(wanted, task="reference"))
    *times, last = perform(wanted)
    assert [e.event for e in times] == ["warm_up", "sample", "sample"]
    assert all(e.ns is not None and e.ns > 0 for e in times)
    found = last.measured
    assert found is not None
    assert (found.dtype, found.n_new) == ("fp32", 0)
    assert len(found.shapes) > 5
    assert found.max_error is not None
    assert found.max_error < 1e-4
    assert found.psnr_infinite == (configuration == "baseline")
    assert np.load(tmp_path / "picture").shape == (1, 64, 72, 3)


def test_loading_is_in_every_time_and_shapes_are_new() -> None:
    *_, last = perform(replace(TINY, configuration="phase3", with_loading=True, warm_ups=0, runs=1))
    assert last.measured is not None
    assert last.measured.n_new == len(last.measured.shapes) > 5
    assert last.measured.max_error is None  # nothing to compare with


def test_half_precision_is_what_is_decoded_in() -> None:
    for configuration in ("baseline", "phase1"):
        *_, last = perform(replace(TINY, configuration=configuration, precision="bf16", runs=1))  # type: ignore[arg-type]
        assert last.measured is not None
        assert last.measured.dtype == "bf16"


def test_picture_that_is_not_finite_ends_the_run_without_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Side:
        dtype = "fp32"

        def decode(self, latent: Tensor) -> Tensor:
            picture = torch.zeros(1, 2, 2, 3)
            picture[0, 0, 0, 0] = float("nan")
            return picture

    monkeypatch.setattr(tasks, "open_side", lambda *args: Side())
    (event,) = perform(TINY)
    assert (event.event, event.sentence) == ("not_finite", "1 of 12 values of the picture are NaN or infinite")


def test_clip_is_one_picture_per_frame(tmp_path: Path) -> None:
    from halo_vae.profiling.bench.vaes import prepare_vae

    vae = prepare_vae("wan21/24", "wan21", 0, tmp_path)
    assert vae is not None
    latent = torch.randn(2, 16, 2, 4, 5, generator=torch.Generator().manual_seed(0))
    pictures = []
    for configuration in ("baseline", "phase3"):
        wanted = replace(TINY, vae=str(vae.path), latent_shape=tuple(latent.shape), configuration=configuration)  # type: ignore[arg-type]
        pictures.append(open_side(wanted, CPU, Shapes()).decode(latent))
    assert pictures[0].shape == (2 * 5, 32, 40, 3)
    assert (pictures[0] - pictures[1]).abs().max().item() < 1e-4


def test_decoder_in_other_names_is_not_called_plain(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"decoder.conv_in.weight": torch.zeros(8, 4, 3, 3)}, str(tmp_path / "other.safetensors"))
    with pytest.raises(BenchError, match="published names"):
        open_side(replace(TINY, vae=str(tmp_path / "other.safetensors")), CPU, Shapes())


def test_stock_without_comfyui_is_told() -> None:
    with pytest.raises(BenchError, match="--comfyui"):
        open_side(replace(TINY, configuration="stock", comfyui="nowhere"), CPU, Shapes())


def test_error_is_one_sentence() -> None:
    assert sentence_of(BenchError("no ComfyUI")) == "no ComfyUI"
    assert sentence_of(ValueError("first\nsecond")) == "ValueError: first"
    assert sentence_of(MemoryError()) == "MemoryError"


def test_probe_that_is_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no Python file"):
        install_probe(tmp_path / "probe.txt")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for the child in /proc")
def test_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    request = to_line(replace(TINY, probe=str(Path(__file__).with_name("hanging_probe.py"))))
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2]], stdin=subprocess.PIPE)\n"
        "child.stdin.write(sys.argv[3].encode())\nchild.stdin.flush()\nchild.wait()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-S", "-c", code, _PROGRAM, str(ROOT), request.decode()],
        env={**os.environ, "PROBE_PID_FILE": str(pid_file)},
    )
    while not pid_file.exists():
        assert parent.poll() is None
        time.sleep(0.05)
    child = int(pid_file.read_text())
    assert runs(child)
    parent.kill()
    parent.wait()
    while runs(child):  # it would sleep for ever
        time.sleep(0.05)


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
