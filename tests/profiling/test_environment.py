from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from halo_vae.optim import device_readers
from halo_vae.profiling import environment, memory
from halo_vae.profiling.codec import decode, encode
from halo_vae.profiling.environment import (
    VARIABLES,
    Environment,
    environment_id,
    read_cpu_model,
    read_environment,
    read_variables,
)
from halo_vae.profiling.render.sections import device_note
from halo_vae.tests.optim.profiles import GFX1151_CARVE_OUT


def test_only_listed_variables_are_read_and_only_plain_values() -> None:
    found = read_variables(
        {
            "OMP_NUM_THREADS": "4",
            "MIOPEN_FIND_MODE": "FAST",
            "PYTORCH_HIP_ALLOC_CONF": "garbage_collection_threshold:0.8,max_split_size_mb:512",
            "CUBLAS_WORKSPACE_CONFIG": "/home/me/secret",  # not a plain word
            "HOME": "/home/me",
            "MY_TOKEN": "abc",
        }
    )
    assert {v.name: v.value for v in found} == {
        "OMP_NUM_THREADS": "4",
        "MIOPEN_FIND_MODE": "FAST",
        "PYTORCH_HIP_ALLOC_CONF": "garbage_collection_threshold:0.8,max_split_size_mb:512",
        "CUBLAS_WORKSPACE_CONFIG": "(set)",
    }
    assert [v.name for v in found] == sorted(v.name for v in found)


def test_environment_of_this_process() -> None:
    found = read_environment("cpu")
    assert found.torch == str(torch.__version__)
    assert found.threads == torch.get_num_threads()
    assert (found.device, found.device_arch, found.miopen, found.cudnn) == ("cpu", None, None, None)
    assert read_environment("cpu") is found  # slow parts are read once
    text = json.dumps(encode(found))
    assert str(Path.home()) not in text
    assert os.getcwd() not in text


def test_threads_and_variables_change_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment_id(read_environment("cpu"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    more_threads = environment_id(read_environment("cpu"))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    capped = environment_id(read_environment("cpu"))
    assert len({before, more_threads, capped}) == 3
    assert all(len(i) == 12 for i in (before, more_threads, capped))


@pytest.mark.parametrize(("hip", "miopen", "cudnn"), [("7.1.0", "3005000", None), (None, None, "3005000")])
def test_gpu_library_is_named_for_its_build(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, miopen: str | None, cudnn: str | None
) -> None:
    facts = SimpleNamespace(name="Some GPU", gcnArchName="gfx1151", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 3005000)
    environment._read.cache_clear()
    try:
        found = read_environment("cuda:0")
    finally:
        environment._read.cache_clear()
    assert (found.device, found.hip, found.miopen, found.cudnn) == ("Some GPU", hip, miopen, cudnn)


def test_cpu_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n")
    assert read_cpu_model(info) == "Some CPU @ 3 GHz"
    monkeypatch.setattr(environment.platform, "processor", lambda: "elsewhere")
    assert read_cpu_model(tmp_path / "none") == "elsewhere"
    monkeypatch.setattr(environment.platform, "processor", lambda: "")
    assert read_cpu_model(tmp_path / "none") is None


def test_allow_list_holds_no_place() -> None:
    assert not [name for name in VARIABLES if name.endswith(("PATH", "DIR", "HOME", "TOKEN"))]


def test_memory_module_is_the_only_source_of_gpu_facts() -> None:
    assert memory.accelerator_facts("meta") == ("meta", None)


def test_a_strix_halo_by_family_units_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(name="Radeon 8060S Graphics", gcnArchName="gfx1151:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    monkeypatch.setattr(device_readers, "read_device", lambda device: GFX1151_CARVE_OUT)
    monkeypatch.setattr(device_readers, "read_versions", lambda: GFX1151_CARVE_OUT.versions)
    environment._read.cache_clear()
    try:
        found = read_environment("cuda:0")
    finally:
        environment._read.cache_clear()
    assert (found.device_arch, found.device_family, found.compute_units) == ("gfx1151", "rdna3.5", 40)
    assert (found.rocm, found.miopen, found.cudnn) == ("7.1.0", "3005001", None)
    assert found.driver == "Linux 6.17.0-generic"
    assert device_note(found) == "gfx1151, rdna3.5, 40 compute units"
    assert environment_id(found) != environment_id(replace(found, driver="Linux 6.18.0"))
    assert decode(Environment, encode(found)) == found


def test_an_older_record_has_no_family() -> None:
    older = encode(read_environment("cpu"))
    assert isinstance(older, dict)
    for name in ("device_family", "compute_units", "rocm", "driver"):
        del older[name]
    found = decode(Environment, older)
    assert isinstance(found, Environment)
    assert (found.device_family, device_note(found)) == (None, "")
