"""Readers of torch, /sys and /proc, on trees of files that stand for machines."""

from __future__ import annotations

import builtins
import ctypes
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halo_vae.optim import device_readers
from halo_vae.optim.accelerator import gpu_api
from halo_vae.optim.decode import Engine
from halo_vae.optim.device import describe_device, profile_from
from halo_vae.optim.device_readers import (
    KfdNode,
    PoolReading,
    find_card,
    find_node,
    read_device,
    read_host_pool,
    read_pool,
    read_versions,
)
from halo_vae.tests.cases.exact import exact_kl
from halo_vae.tests.fixtures import latent

GIB = 1 << 30


def write(root: Path, files: Mapping[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def add_card(root: Path, number: int, pci: str, vendor: str = "0x1002", **files: int) -> Path:
    """A DRM card whose device is a link to its PCI folder, as in /sys."""
    folder = root / "devices" / "pci0000:00" / pci
    write(folder, {"vendor": vendor, **files})
    card = root / "class" / "drm" / f"card{number}"
    card.mkdir(parents=True)
    (card / "device").symlink_to(folder)
    (root / "class" / "drm" / f"card{number}-DP-1").mkdir()  # a connector is no card
    return folder


def add_node(root: Path, number: int, **facts: int) -> None:
    lines = "\n".join(f"{name} {value}" for name, value in facts.items())
    write(root / "class" / "kfd" / "kfd" / "topology" / "nodes" / str(number), {"properties": lines})


APU = {
    "mem_info_vram_total": 64 * GIB, "mem_info_vram_used": 3 * GIB, "mem_info_gtt_total": 32 * GIB,
    "mem_info_gtt_used": GIB,
}  # fmt: skip


def test_pools_of_the_only_card(tmp_path: Path) -> None:
    add_card(tmp_path, 1, "0000:c3:00.0", **APU)
    add_card(tmp_path, 0, "0000:01:00.0", vendor="0x10de")
    card = find_card(None, tmp_path)
    assert card is not None
    assert read_pool(card, "vram") == PoolReading(free_bytes=61 * GIB, total_bytes=64 * GIB)
    assert read_pool(card, "gtt") == PoolReading(free_bytes=31 * GIB, total_bytes=32 * GIB)
    assert read_pool(card, "vis_vram") is None


def test_of_two_cards_torchs_address_tells_which(tmp_path: Path) -> None:
    add_card(tmp_path, 0, "0000:03:00.0", mem_info_vram_total=16 * GIB, mem_info_vram_used=0)
    add_card(tmp_path, 1, "0000:c3:00.0", **APU)
    assert find_card(None, tmp_path) is None  # it could be either
    assert find_card("0000:44:00", tmp_path) is None
    first, second = find_card("0000:03:00", tmp_path), find_card("0000:c3:00", tmp_path)
    assert first is not None
    assert second is not None
    pools = [read_pool(card, "vram") for card in (first, second)]
    assert [p and p.total_bytes for p in pools] == [16 * GIB, 64 * GIB]


def test_a_driver_that_counts_more_than_there_is_reads_negative(tmp_path: Path) -> None:
    card = add_card(tmp_path, 0, "0000:c3:00.0", mem_info_vram_total=5, mem_info_vram_used=7)
    assert read_pool(card, "vram") == PoolReading(free_bytes=-2, total_bytes=5)


@pytest.mark.parametrize("text", ["", "much", "0x10", "1.5"])
def test_what_is_no_number_is_not_read(text: str, tmp_path: Path) -> None:
    write(tmp_path, {"mem_info_vram_total": 5, "mem_info_vram_used": text})
    assert read_pool(tmp_path, "vram") is None


def test_nodes_of_the_compute_driver(tmp_path: Path) -> None:
    add_node(tmp_path, 0, cpu_cores_count=32, simd_count=0)
    add_node(tmp_path, 1, simd_count=80, simd_per_cu=2, gfx_target_version=110501, location_id=0xC300, domain=0)
    assert find_node(None, tmp_path) == KfdNode(gfx="gfx1151", compute_units=40)
    add_node(tmp_path, 2, simd_count=192, simd_per_cu=2, gfx_target_version=110000, location_id=0x0300, domain=0)
    assert find_node(None, tmp_path) is None
    assert find_node("0000:03:00", tmp_path) == KfdNode(gfx="gfx1100", compute_units=96)
    assert find_node("0001:03:00", tmp_path) is None


def test_no_sys_no_readings(tmp_path: Path) -> None:
    assert find_card(None, tmp_path / "none") is None
    assert find_node(None, tmp_path / "none") is None
    assert read_pool(tmp_path / "none", "vram") is None


# -- a HIP device


class FakeApi:
    """As much of torch.cuda as a profile needs; anything else is an error."""

    def __init__(self, **facts: Any) -> None:
        self.facts = SimpleNamespace(**facts)
        self.calls: list[str] = []

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        self.calls.append("properties")
        return self.facts

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        self.calls.append("memory")
        return 60 * GIB, 64 * GIB

    def memory_reserved(self, device: torch.device) -> int:
        return 5 * GIB

    def memory_allocated(self, device: torch.device) -> int:
        return 3 * GIB


def use(api: FakeApi, monkeypatch: pytest.MonkeyPatch, sys_root: Path, hip: str | None = "7.1.0") -> None:
    monkeypatch.setattr(device_readers, "gpu_api", lambda: api)
    monkeypatch.setattr(device_readers, "SYS", sys_root)
    monkeypatch.setattr(device_readers, "ROCM_VERSION", sys_root / "rocm")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 3005001)


STRIX = {
    "name": "Radeon 8060S Graphics", "gcnArchName": "gfx1151:sramecc-:xnack-", "is_integrated": 1,
    "multi_processor_count": 20, "pci_bus_id": 0xC3, "pci_device_id": 0, "pci_domain_id": 0,
}  # fmt: skip


def test_a_strix_halo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeApi(**STRIX)
    use(api, monkeypatch, tmp_path)
    add_card(tmp_path, 1, "0000:c3:00.0", **APU)
    add_node(tmp_path, 1, simd_count=80, simd_per_cu=2, gfx_target_version=110501, location_id=0xC300)
    write(tmp_path, {"rocm": "7.1.0-61", "module/amdgpu/version": "6.16.6"})
    readings = read_device(torch.device("cuda:0"))
    assert readings.kind == "hip"
    assert (readings.product, readings.arch, readings.driver_gfx) == (STRIX["name"], STRIX["gcnArchName"], "gfx1151")
    assert readings.integrated is True
    assert readings.compute_units == 40
    assert readings.device_pool == PoolReading(free_bytes=60 * GIB, total_bytes=64 * GIB)
    assert readings.carve_out == PoolReading(free_bytes=61 * GIB, total_bytes=64 * GIB)
    assert readings.gtt == PoolReading(free_bytes=31 * GIB, total_bytes=32 * GIB)
    assert readings.cached_bytes == 2 * GIB
    assert readings.errors == ()
    assert readings.versions.miopen == "3005001"
    assert readings.versions.cudnn is None
    assert readings.versions.driver == "6.16.6"
    assert readings.versions.rocm == (getattr(torch.version, "rocm", None) or "7.1.0-61")
    assert sorted(api.calls) == ["memory", "properties"]  # each thing is asked once
    found = profile_from(readings)
    assert (found.gfx, found.family, found.unified_memory, found.compute_units) == ("gfx1151", "rdna3.5", True, 40)
    assert found.budget_bytes == 62 * GIB  # what HIP calls free, and what torch holds unused
    assert "torch holds unused" in found.budget_reason


def test_without_the_compute_driver_torch_counts_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeApi(**STRIX), monkeypatch, tmp_path)
    readings = read_device(torch.device("cuda:0"))
    assert readings.compute_units == 40
    assert (readings.carve_out, readings.gtt, readings.driver_gfx) == (None, None, None)
    cdna = FakeApi(**(STRIX | {"gcnArchName": "gfx942", "multi_processor_count": 304, "is_integrated": 0}))
    use(cdna, monkeypatch, tmp_path)
    assert read_device(torch.device("cuda:0")).compute_units == 304


def test_a_torch_that_tells_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeApi(name="AMD Radeon Graphics"), monkeypatch, tmp_path)
    add_card(tmp_path, 0, "0000:c3:00.0", **APU)
    add_node(tmp_path, 0, simd_count=80, simd_per_cu=2, gfx_target_version=110501, location_id=0xC300)
    readings = read_device(torch.device("cuda:0"))
    assert (readings.arch, readings.integrated, readings.driver_gfx) == (None, None, "gfx1151")
    assert readings.carve_out is not None
    assert profile_from(readings).gfx == "gfx1151"
    assert profile_from(readings).unified_memory  # a chip that exists only inside a processor


def test_a_cuda_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeApi(name="NVIDIA T4", major=7, minor=5, multi_processor_count=40), monkeypatch, tmp_path, hip=None)
    add_card(tmp_path, 0, "0000:c3:00.0", **APU)  # the processor's own graphics
    write(tmp_path, {"module/nvidia/version": "570.86.10"})
    readings = read_device(torch.device("cuda:0"))
    assert (readings.kind, readings.capability, readings.arch) == ("cuda", (7, 5), None)
    assert (readings.carve_out, readings.gtt) == (None, None)
    assert readings.versions.cudnn == "3005001"
    assert readings.versions.driver == "570.86.10"
    assert profile_from(readings).native_dtypes == ("float16",)


def test_a_driver_inside_the_kernel_has_the_kernels_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeApi(), monkeypatch, tmp_path)
    assert read_versions().driver is None
    (tmp_path / "module" / "amdgpu").mkdir(parents=True)
    monkeypatch.setattr(device_readers.platform, "system", lambda: "Linux")
    monkeypatch.setattr(device_readers.platform, "release", lambda: "6.17.1")
    assert read_versions().driver == "Linux 6.17.1"


def test_a_gpu_that_is_not_there_is_told_of_and_not_fatal() -> None:
    if gpu_api().is_available():
        pytest.skip("this machine has a GPU")
    found = describe_device("cuda:0")
    assert found.kind == "cuda"
    assert found.budget_bytes is None
    assert any(text.startswith("CUDA memory: ") for text in found.invalid_readings)


# -- the host


def test_windows_tells_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(pointer: Any) -> int:
        status = pointer._obj
        assert status.length == ctypes.sizeof(status) == 64
        status.total, status.available = 64 * GIB, 40 * GIB
        return 1

    kernel32 = SimpleNamespace(GlobalMemoryStatusEx=tell)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    assert read_host_pool() == PoolReading(free_bytes=40 * GIB, total_bytes=64 * GIB)
    kernel32.GlobalMemoryStatusEx = lambda pointer: 0
    assert read_host_pool() is None
    monkeypatch.delattr(ctypes, "windll")
    assert read_host_pool() is None


@pytest.mark.usefixtures("machine_memory")
def test_all_of_proc_and_sys_hidden_and_a_decode_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Engine().decode(exact_kl(), latent((1, 4, 8, 8)))
    real_open, real_list = io.open, Path.iterdir
    asked: list[str] = []

    def hidden(path: object) -> bool:
        is_hidden = str(path).startswith(("/proc", "/sys"))
        asked.extend([str(path)] if is_hidden else [])
        return is_hidden

    def no_file(file: Any, *args: Any, **kwargs: Any) -> Any:
        if hidden(file):
            raise PermissionError(file)
        return real_open(file, *args, **kwargs)

    def no_folder(path: Path) -> Any:
        if hidden(path):
            raise FileNotFoundError(path)
        return real_list(path)

    monkeypatch.setattr(builtins, "open", no_file)
    monkeypatch.setattr(io, "open", no_file)
    monkeypatch.setattr(Path, "iterdir", no_folder)
    found = describe_device("cpu")
    assert found.budget_bytes is None
    assert found.budget_reason == "the system does not tell its available memory"
    assert torch.equal(Engine().decode(exact_kl(), latent((1, 4, 8, 8))), expected)
    monkeypatch.setattr(device_readers, "gpu_api", lambda: FakeApi(**STRIX))
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    gpu = describe_device("cuda:0")
    assert (gpu.gfx, gpu.budget_bytes) == ("gfx1151", 62 * GIB)
    assert "cannot be read here" in gpu.budget_reason
    assert torch.equal(Engine(profile=describe_device("cpu")).decode(exact_kl(), latent((1, 4, 8, 8))), expected)
    assert {path.split("/")[1] for path in asked} == {"proc", "sys"}
