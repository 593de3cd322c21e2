"""What torch, /sys and /proc say about a device. Every reader gives None where it cannot read; nothing runs at import.

Sources: torch.cuda.get_device_properties and mem_get_info; amdgpu's mem_info_* files of a DRM card; the KFD topology;
/proc/meminfo, or GlobalMemoryStatusEx on Windows. None of them allocates device memory or starts a kernel.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from .accelerator import gpu_api, is_gpu, is_hip
from .gfx import gfx_of_target, parse_gfx
from .workers import worker_count

Kind = Literal["cpu", "cuda", "hip", "other"]
T = TypeVar("T")

SYS, PROC = Path("/sys"), Path("/proc")
ROCM_VERSION = Path("/opt/rocm/.info/version")
AMD_VENDOR = "0x1002"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReading:
    """One pool of memory, as it was read: not checked for sense yet."""

    free_bytes: int | None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Software under a device. None = not there, or not to be found out."""

    torch: str
    hip: str | None = None
    cuda: str | None = None
    rocm: str | None = None
    """Version of the ROCm that torch was built for, else of the installed one."""
    miopen: str | None = None
    cudnn: str | None = None
    driver: str | None = None
    """Version of the kernel module; of the kernel itself where the module is a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Everything that a profile is made of. Tests build their own."""

    kind: Kind
    name: str
    """Device string that torch understands ("cpu", "cuda:0")."""
    versions: Versions
    product: str | None = None
    """What the driver calls the device."""
    arch: str | None = None
    """Architecture as torch spells it ("gfx90a:sramecc+:xnack-")."""
    driver_gfx: str | None = None
    """Base name that the kernel driver gives, which HSA_OVERRIDE_GFX_VERSION does not change."""
    integrated: bool | None = None
    compute_units: int | None = None
    capability: tuple[int, int] | None = None
    """CUDA compute capability."""
    native_dtypes: tuple[str, ...] = ()
    """Dtypes that a CPU multiplies at full speed; of GPUs the table knows."""
    workers: int = 1
    device_pool: PoolReading | None = None
    """The runtime's own figure (hipMemGetInfo, cudaMemGetInfo)."""
    carve_out: PoolReading | None = None
    """Memory set aside for the GPU: an APU's carve-out, a card's own memory. amdgpu only."""
    gtt: PoolReading | None = None
    """Host memory that the GPU may map. amdgpu only."""
    host: PoolReading | None = None
    cached_bytes: int | None = None
    """Bytes torch has taken from the device and would hand out without asking it: part of no free figure."""
    errors: tuple[str, ...] = ()
    """Readers that raised, as "name: error"."""


def read_device(device: torch.device) -> Readings:
    """All readings of one device, now."""
    if not is_gpu(device):
        return _read_plain(device)
    hip = is_hip()
    errors: list[str] = []
    facts = _tried(lambda: gpu_api().get_device_properties(device), "device properties", errors)
    pool = _tried(lambda: read_device_pool(device), "HIP memory" if hip else "CUDA memory", errors)
    card = find_card(_pci_address(facts), SYS) if hip else None
    node = find_node(_pci_address(facts), SYS) if hip else None
    return Readings(
        kind="hip" if hip else "cuda",
        name=str(device),
        versions=read_versions(),
        product=_text(getattr(facts, "name", None)),
        arch=_text(getattr(facts, "gcnArchName", None)) if hip else None,
        driver_gfx=None if node is None else node.gfx,
        integrated=_flag(getattr(facts, "is_integrated", None)),
        compute_units=_compute_units(facts, node, hip),
        capability=None if hip else _capability(facts),
        device_pool=pool,
        carve_out=None if card is None else read_pool(card, "vram"),
        gtt=None if card is None else read_pool(card, "gtt"),
        host=read_host_pool(),
        cached_bytes=_tried(lambda: read_cached_bytes(device), "torch's cache", errors),
        errors=tuple(errors),
    )


def _read_plain(device: torch.device) -> Readings:
    kind: Kind = "cpu" if device.type == "cpu" else "other"
    return Readings(
        kind=kind, name=str(device), versions=Versions(torch=str(torch.__version__)),
        native_dtypes=_cpu_dtypes() if kind == "cpu" else (), workers=worker_count() if kind == "cpu" else 1,
        host=read_host_pool(), integrated=True if kind == "cpu" else None,
    )  # fmt: skip


def _tried(read: Callable[[], T], name: str, errors: list[str]) -> T | None:
    """What a call into torch gives, or None with a note: a driver that is missing or lost raises many kinds."""
    try:
        return read()
    except Exception as error:  # any of them means: cannot be read
        errors.append(f"{name}: {next(iter(str(error).splitlines()), '') or type(error).__name__}")
        return None


# -- torch


def read_device_pool(device: torch.device) -> PoolReading:
    """The runtime's free and total memory. Raises what the driver raises."""
    free, total = gpu_api().mem_get_info(device)
    return PoolReading(free_bytes=free, total_bytes=total)


def read_cached_bytes(device: torch.device) -> int:
    """Reserved and not allocated bytes of torch's allocator."""
    api = gpu_api()
    return max(0, int(api.memory_reserved(device)) - int(api.memory_allocated(device)))


def read_versions() -> Versions:
    """Versions of what lies under a GPU."""
    hip = torch.version.hip
    library = _tried(_convolution_library, "", [])
    return Versions(
        torch=str(torch.__version__),
        hip=hip,
        cuda=torch.version.cuda,
        rocm=(_text(getattr(torch.version, "rocm", None)) or _first_line(ROCM_VERSION)) if hip else None,
        miopen=library if hip else None,
        cudnn=None if hip else library,
        driver=_driver_version("amdgpu" if hip else "nvidia", SYS),
    )


def _convolution_library() -> str | None:
    """Version of cuDNN, or of MIOpen on a ROCm build, as torch numbers it."""
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return None if version is None else str(version)


def _driver_version(module: str, sys_root: Path) -> str | None:
    """The module's own version; a module that is built into the kernel's tree has the kernel's."""
    version = _first_line(sys_root / "module" / module / "version")
    if version is not None:
        return version
    inside = (sys_root / "module" / module).is_dir()
    return f"{platform.system()} {platform.release()}" if inside else None


def _capability(facts: Any) -> tuple[int, int] | None:
    major, minor = getattr(facts, "major", None), getattr(facts, "minor", None)
    return (major, minor) if isinstance(major, int) and isinstance(minor, int) else None


def read_pci_address(device: torch.device) -> str | None:
    """"0000:c3:00" of a GPU; None where this torch does not tell, and of a device that is lost."""
    return _pci_address(_tried(lambda: gpu_api().get_device_properties(device), "", []))


def _pci_address(facts: Any) -> str | None:
    """"0000:c3:00" of torch's device; None where this torch does not tell."""
    parts = [getattr(facts, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if not all(isinstance(part, int) for part in parts[1:]):
        return None
    domain, bus, slot = (part or 0 for part in parts)
    return f"{domain:04x}:{bus:02x}:{slot:02x}"


def _compute_units(facts: Any, node: KfdNode | None, hip: bool) -> int | None:
    """The kernel driver's figure, else torch's: which on RDNA counts pairs of compute units."""
    if node is not None and node.compute_units is not None:
        return node.compute_units
    count = getattr(facts, "multi_processor_count", None)
    if not isinstance(count, int) or count <= 0:
        return None
    gfx = parse_gfx(_text(getattr(facts, "gcnArchName", None))) or ""
    return 2 * count if hip and gfx.startswith(("gfx10", "gfx11", "gfx12")) else count


# -- amdgpu in /sys


def find_card(pci: str | None, sys_root: Path) -> Path | None:
    """The device folder of the DRM card at a PCI address; without an address the only amdgpu card, if there is one."""
    cards = []
    for card in _listed(sys_root / "class" / "drm", "card"):
        device = card / "device"
        if card.name[4:].isdigit() and _first_line(device / "vendor") == AMD_VENDOR:
            cards.append(device)
    if pci is not None:
        return next((card for card in cards if card.resolve().name.startswith(f"{pci}.")), None)
    return cards[0] if len(cards) == 1 else None


def read_pool(card: Path, name: str) -> PoolReading | None:
    """Free and total bytes of a card's `vram` or `gtt`. Free may come out negative where the driver counts wrong."""
    total, used = (_whole_number(card / f"mem_info_{name}_{what}") for what in ("total", "used"))
    return None if total is None or used is None else PoolReading(free_bytes=total - used, total_bytes=total)


@dataclass(frozen=True, slots=True, kw_only=True)
class KfdNode:
    """One GPU as the compute driver lists it."""

    gfx: str | None
    compute_units: int | None


def find_node(pci: str | None, sys_root: Path) -> KfdNode | None:
    """The compute driver's node of a PCI address ("0000:c3:00"); without one the only GPU node."""
    nodes = []
    for folder in _listed(sys_root / "class" / "kfd" / "kfd" / "topology" / "nodes", ""):
        facts = _properties(folder / "properties")
        if facts.get("simd_count", 0) <= 0:  # a CPU
            continue
        location = facts.get("location_id", -1)
        address = f"{facts.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
        units = facts["simd_count"] // facts["simd_per_cu"] if facts.get("simd_per_cu", 0) > 0 else None
        nodes.append((address, KfdNode(gfx=gfx_of_target(facts.get("gfx_target_version", 0)), compute_units=units)))
    if pci is not None:
        return next((node for address, node in nodes if address == pci), None)
    return nodes[0][1] if len(nodes) == 1 else None


def _properties(path: Path) -> dict[str, int]:
    """"name number" lines of a KFD file; empty where it cannot be read."""
    found = {}
    for line in (_text_of(path) or "").splitlines():
        name, _, number = line.partition(" ")
        if number.strip().isdigit():
            found[name] = int(number)
    return found


# -- the host


def _cpu_dtypes() -> tuple[str, ...]:
    """bf16 where the CPU multiplies it natively (AVX512-BF16 or AMX); fp16 convolution is emulated on all we know."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    native = any(getattr(torch.cpu, name, lambda: False)() for name in checks)
    return ("bfloat16", "float32") if native else ("float32",)


def read_host_pool() -> PoolReading | None:
    """Memory the system can still give, of how much. Source: /proc/meminfo, on Windows GlobalMemoryStatusEx."""
    if sys.platform == "win32":
        return _windows_host_pool()
    found: dict[str, int] = {}
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            for line in f:
                name, _, value = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    found[name] = int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    if "MemAvailable" not in found:
        return None
    return PoolReading(free_bytes=found["MemAvailable"], total_bytes=found.get("MemTotal"))


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX."""

    _fields_ = (
        ("length", ctypes.c_uint32), ("load", ctypes.c_uint32), ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64), ("page_total", ctypes.c_uint64), ("page_available", ctypes.c_uint64),
        ("virtual_total", ctypes.c_uint64), ("virtual_available", ctypes.c_uint64), ("extended", ctypes.c_uint64),
    )  # fmt: skip


def _windows_host_pool() -> PoolReading | None:
    status = _MemoryStatus()
    status.length = ctypes.sizeof(status)
    try:
        ok = getattr(ctypes, "windll").kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # noqa: B009 (Windows only)
    except (AttributeError, OSError):
        return None
    return PoolReading(free_bytes=int(status.available), total_bytes=int(status.total)) if ok else None


# -- files


def _listed(folder: Path, prefix: str) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.name.startswith(prefix))
    except OSError:
        return []


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def _first_line(path: Path) -> str | None:
    lines = (_text_of(path) or "").splitlines()
    return lines[0].strip() or None if lines else None


def _whole_number(path: Path) -> int | None:
    try:
        return int(_first_line(path) or "")
    except ValueError:
        return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _flag(value: object) -> bool | None:
    return bool(value) if isinstance(value, int) else None
