"""Gathering the doctor's facts: what is read where, and that nothing which cannot be read stops it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from halo_vae.optim import device_readers
from halo_vae.optim.device import describe_device
from halo_vae.optim.settings import KEEP_BYTES
from halo_vae.profiling import doctor_folders, doctor_read
from halo_vae.profiling.doctor import diagnose
from halo_vae.profiling.doctor_folders import (
    find_user_dir,
    measure_folder,
    read_comfyui_version,
    read_folders,
    read_history_lines,
    read_kitchen,
)
from halo_vae.profiling.doctor_read import read_facts, read_flags, read_swap
from halo_vae.profiling.render.doctor import render_report

KIB = 1024


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# -- this process


def test_facts_of_this_process(tmp_path: Path) -> None:
    environ = {f"HALO_VAE_{kind}_DIR": str(tmp_path / kind) for kind in ("DATA", "CACHE")}
    facts = read_facts("cpu", environ, home=tmp_path)
    assert (facts.device.name, facts.device.kind, facts.device.family) == ("cpu", "cpu", "cpu")
    assert facts.device.native_dtypes == describe_device("cpu").native_dtypes
    assert facts.versions.torch == str(torch.__version__)
    assert facts.flags.threads == torch.get_num_threads()
    assert facts.platform.cpu_count == os.cpu_count()
    assert facts.pool.held_bytes is None
    assert facts.pool.keep_bytes == KEEP_BYTES
    assert [f.exists for f in facts.folders] == [False] * 4
    assert list(tmp_path.iterdir()) == []


def test_a_running_process_tells_its_pool_and_leaves_the_disk_alone(tmp_path: Path) -> None:
    facts = read_facts("cpu", {}, held_bytes=0, disk=False, home=tmp_path)
    assert facts.pool.held_bytes == 0
    assert (facts.folders, facts.history_lines) == ((), None)


def test_gpu_that_the_driver_lost_still_gets_a_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.2.53211")

    class Lost:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("HIP error: no device")

    monkeypatch.setattr(device_readers, "gpu_api", Lost)
    monkeypatch.setattr(doctor_read, "gpu_api", Lost)
    facts = read_facts("cuda:0", {}, home=tmp_path)
    assert (facts.device.kind, facts.device.model, facts.device.built_for) == ("hip", None, None)
    assert (facts.memory.torch_total_bytes, facts.memory.budget_bytes) == (None, None)
    report = diagnose(facts, {})
    assert "no device" in render_report(report)
    assert "no device" not in render_report(report.redacted())


@pytest.mark.usefixtures("machine_memory")
def test_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(device_readers, "SYS", tmp_path / "sys")
    monkeypatch.setattr(device_readers, "PROC", tmp_path / "proc")
    environ = {"LOCALAPPDATA": str(tmp_path / "Local"), "WSL_DISTRO_NAME": "Ubuntu"}
    facts = read_facts("cpu", environ, home=tmp_path, system="win32")
    assert facts.versions.system == "Windows"
    assert (facts.platform.kfd, facts.platform.wsl) == (None, False)
    assert (facts.memory.host_available_bytes, facts.memory.budget_bytes) == (None, None)
    assert (facts.memory.swap_total_bytes, facts.device.kernel_gfx) == (None, None)
    places = [Path(f.path or "").relative_to(tmp_path) for f in facts.folders]
    ours = Path("Local", "halo-vae")
    assert places == [ours, ours / "Cache", Path(".miopen", "db"), Path(".miopen", "cache")]
    assert "unknown" in render_report(diagnose(facts, environ))


def test_wsl_is_known_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_read.platform, "release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    assert read_facts("cpu", {}, disk=False, system="linux").platform.wsl


def test_the_kernel_knows_the_chip_that_torch_does_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = tmp_path / "class" / "kfd" / "kfd" / "topology" / "nodes"
    write(nodes / "0" / "properties", "cpu_cores_count 32\nsimd_count 0\n")
    write(nodes / "1" / "properties", "simd_count 80\nsimd_per_cu 2\ngfx_target_version 110501\n")
    monkeypatch.setattr(device_readers, "SYS", tmp_path)
    facts = read_facts("cpu", {}, disk=False)
    assert facts.device.kernel_gfx == "gfx1151"
    if torch.version.hip is None and torch.version.cuda is None:
        assert "cpu_build" in [f.id for f in diagnose(facts, {}).findings]


def test_device_node_of_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_read, "KFD", tmp_path / "kfd")
    assert read_facts("cpu", {}, disk=False, system="linux").platform.kfd == "absent"
    (tmp_path / "kfd").touch()
    assert read_facts("cpu", {}, disk=False, system="linux").platform.kfd == "open"
    monkeypatch.setattr(doctor_read.os, "access", lambda path, mode: False)
    assert read_facts("cpu", {}, disk=False, system="linux").platform.kfd == "denied"


def test_flags_that_cannot_be_read_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("mixed interfaces")

    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", fail)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    found = read_flags(on_gpu=False)
    assert found.sdpa_flash is None
    assert found.cudnn_benchmark is True
    assert found.blas is None
    assert doctor_read._float32(fail, lambda: True) == "tf32"  # before torch 2.9
    assert doctor_read._float32(fail, lambda: False) == "ieee"
    assert doctor_read._float32(lambda: "none", fail) == "none"
    assert doctor_read._float32(fail, fail) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MemTotal: 9 kB\nSwapTotal:   8 kB\nSwapFree:    2 kB\n", (2 * KIB, 8 * KIB)),
        ("SwapTotal:       0 kB\nSwapFree:        0 kB\n", (0, 0)),  # read, and there is none
        ("SwapTotal: 8 kB\n", None),
        (None, None),
    ],
)
def test_swap(text: str | None, expected: tuple[int, int] | None, tmp_path: Path) -> None:
    if text is not None:
        write(tmp_path / "meminfo", text)
    found = read_swap(tmp_path)
    assert (None if found is None else (found.free_bytes, found.total_bytes)) == expected


# -- folders


def test_folder_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a" / "one", "x" * 10)
    write(tmp_path / "a" / "deep" / "two", "x" * 5)
    found = measure_folder("some", tmp_path / "a")
    assert (found.exists, found.bytes, found.files) == (True, 15, 2)
    missing = measure_folder("some", tmp_path / "b")
    assert (missing.exists, missing.bytes, missing.files) == (False, None, None)
    nowhere = measure_folder("some", None)
    assert (nowhere.path, nowhere.exists, nowhere.bytes) == (None, None, None)
    monkeypatch.setattr(doctor_folders, "MOST_FILES", 1)
    given_up = measure_folder("some", tmp_path / "a")
    assert (given_up.exists, given_up.bytes) == (True, None)


def test_folder_that_cannot_be_read_has_no_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "one", "x" * 10)

    def refuse(path: object) -> object:
        raise PermissionError(13, "no")

    monkeypatch.setattr(doctor_folders.os, "lstat", refuse)
    assert measure_folder("some", tmp_path).bytes is None


def test_miopen_folders_by_variable_by_presence_and_by_default(tmp_path: Path) -> None:
    def paths(environ: dict[str, str]) -> list[str]:
        return [str(f.path) for f in read_folders(environ, tmp_path, "linux")[2:]]

    config, cache = tmp_path / ".config" / "miopen", tmp_path / ".cache" / "miopen"
    assert paths({}) == [str(config), str(cache)]
    newer = write(tmp_path / ".miopen" / "db" / "gfx1151_20.ufdb.txt", "x").parent
    assert paths({}) == [str(newer), str(cache)]
    write(config / "gfx1151_20.ufdb.txt", "x")
    assert paths({}) == [str(config), str(newer), str(cache)]
    given = {"MIOPEN_USER_DB_PATH": "/somewhere/db", "MIOPEN_CUSTOM_CACHE_DIR": "/somewhere/cache"}
    assert paths(given) == [str(Path(p)) for p in given.values()]


def test_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", fail)
    assert find_user_dir("data", {}, "linux") is None
    assert find_user_dir("cache", {}, "linux") is None
    assert [f.path for f in read_folders({}, None, "linux")] == [None] * 4
    assert read_history_lines(None) is None


def test_history_lines_of_all_its_files(tmp_path: Path) -> None:
    assert read_history_lines(tmp_path) == 0
    write(tmp_path / "history.jsonl", "{}\n{}\n")
    write(tmp_path / "history.1.jsonl", "{}\n")
    write(tmp_path / "other.jsonl", "{}\n")
    assert read_history_lines(tmp_path) == 3


# -- packages


def test_kitchen_is_not_imported_unless_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path / "comfy_kitchen" / "__init__.py", "raise OSError('libhip.so: not found\\nmore')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "comfy_kitchen", raising=False)
    found = read_kitchen(try_import=False)
    assert (found.installed, found.importable) == (True, None)
    assert {f.present for f in found.functions} == {None}
    broken = read_kitchen(try_import=True)
    assert (broken.installed, broken.importable, broken.reason) == (True, False, "libhip.so: not found")
    assert broken.backends == ()


def test_kitchen_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)
    found = read_kitchen(try_import=True)
    assert (found.installed, found.importable) == (False, False)
    assert "pip install" in (found.reason or "")


def test_kitchen_of_an_older_version(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {
        "hip": {"available": False, "disabled": False, "unavailable_reason": "no HIP"},
        "cuda": {"available": True, "disabled": True, "unavailable_reason": None},
        "eager": {"available": True, "disabled": False, "unavailable_reason": None},
    }
    registry = SimpleNamespace(list_backends=lambda: state)
    package = SimpleNamespace(fp16_conv3d=lambda: None, registry=registry)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", package)
    found = read_kitchen(try_import=False)
    assert found.importable is True
    assert [f.name for f in found.functions if f.present] == ["fp16_conv3d"]
    assert [f.name for f in found.functions if f.present is False] == ["group_norm_silu_pad3d", "group_norm_stats3d"]
    assert [(b.name, b.available, b.reason) for b in found.backends] == [
        ("cuda", False, "disabled"), ("eager", True, None), ("hip", False, "no HIP"),
    ]  # fmt: skip
    registry.list_backends = lambda: 1 / 0  # not a published interface
    assert read_kitchen(try_import=False).backends == ()


def test_comfyui_is_read_and_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "comfyui_version", raising=False)
    write(tmp_path / "comfyui_version.py", '"""x"""\n__version__ = "0.20.1"\nraise SystemExit\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_comfyui_version() == "0.20.1"
    assert "comfyui_version" not in sys.modules
    monkeypatch.setitem(sys.modules, "comfyui_version", SimpleNamespace(__version__="0.21.0"))
    assert read_comfyui_version() == "0.21.0"
    monkeypatch.setitem(sys.modules, "comfyui_version", None)
    assert read_comfyui_version() is None
