"""Gathers the doctor's facts: reads torch, the system and the disk, changes nothing, and gives None for what it cannot.

Only `accelerator.py` and `device_readers.py` of the engine touch a GPU; this file asks them.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import __version__
from ..optim import device_readers
from ..optim.accelerator import gpu_api, is_gpu
from ..optim.device import DeviceProfile, profile_from
from ..optim.device_readers import PoolReading, read_device
from ..optim.settings import KEEP_BYTES
from .doctor_facts import (
    DeviceFacts,
    DriverAccess,
    Facts,
    FlagFacts,
    MemoryFacts,
    PlatformFacts,
    PoolFacts,
    VersionFacts,
)
from .doctor_folders import (
    find_user_dir,
    read_comfyui_version,
    read_folders,
    read_history_lines,
    read_kitchen,
    read_kitchen_version,
    read_tuned_entries,
)
from .environment import read_cpu_model

T = TypeVar("T")
KFD = Path("/dev/kfd")


def read_facts(
    device: str,
    environ: Mapping[str, str] | None = None,
    *,
    held_bytes: int | None = None,
    keep_bytes: int = KEEP_BYTES,
    profile: DeviceProfile | None = None,
    import_packages: bool = False,
    disk: bool = True,
    home: Path | None = None,
    system: str = sys.platform,
) -> Facts:
    """Everything about decodes on `device` in this process.

    `held_bytes` is what this process's pool holds, `profile` what it plans with instead of what is read here.
    `import_packages` allows optional packages to be imported to see whether they work; `disk` False leaves folders
    out, which take a while to measure. `environ`, `home` and `system` stand in for this process's own in tests.
    """
    env = os.environ if environ is None else environ
    readings = read_device(torch.device(device))
    used = profile_from(readings) if profile is None else profile
    return Facts(
        device=_device(readings, used),
        memory=_memory(readings, used),
        versions=_versions(readings, system),
        flags=read_flags(is_gpu(device)),
        platform=_platform(env, system),
        kitchen=read_kitchen(import_packages),
        folders=read_folders(environ, home, system) if disk else (),
        history_lines=read_history_lines(find_user_dir("data", environ, system)) if disk else None,
        pool=PoolFacts(held_bytes=held_bytes, keep_bytes=keep_bytes),
        tuned_entries=read_tuned_entries(find_user_dir("cache", environ, system)) if disk else None,
    )


def _device(readings: device_readers.Readings, profile: DeviceProfile) -> DeviceFacts:
    on_gpu = is_gpu(profile.name)
    node = _or_none(lambda: device_readers.find_node(None, device_readers.SYS))
    kernel_gfx = readings.driver_gfx or (None if node is None else node.gfx)
    return DeviceFacts(
        name=profile.name,
        kind=profile.kind,
        model=readings.product,
        gfx=profile.gfx,
        kernel_gfx=kernel_gfx,
        family=profile.family,
        unified_memory=profile.unified_memory,
        compute_units=profile.compute_units,
        native_dtypes=profile.native_dtypes,
        strategy=profile.strategy,
        layout=profile.layout,
        batch_cap=profile.batch_cap,
        attention=profile.attention,
        convolution=profile.convolution,
        built_for=_or_none(lambda: tuple(gpu_api().get_arch_list())) if on_gpu else None,
        capability=readings.capability,
        gpu_visible=_or_none(lambda: bool(gpu_api().is_available())),
    )


def _memory(readings: device_readers.Readings, profile: DeviceProfile) -> MemoryFacts:
    swap = read_swap(device_readers.PROC)
    host, carve_out, gtt, runtime = readings.host, readings.carve_out, readings.gtt, readings.device_pool
    return MemoryFacts(
        host_total_bytes=_total(host),
        host_available_bytes=None if host is None else host.free_bytes,
        swap_total_bytes=_total(swap),
        swap_used_bytes=_used(swap),
        carve_out_total_bytes=_total(carve_out),
        carve_out_used_bytes=_used(carve_out),
        gtt_total_bytes=_total(gtt),
        gtt_used_bytes=_used(gtt),
        torch_total_bytes=_total(runtime),
        torch_free_bytes=None if runtime is None else runtime.free_bytes,
        budget_bytes=profile.budget_bytes,
        budget_reason=profile.budget_reason,
        invalid_readings=profile.invalid_readings,
    )


def _versions(readings: device_readers.Readings, system: str) -> VersionFacts:
    under = readings.versions
    return VersionFacts(
        halo_vae=__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        hip=torch.version.hip,
        rocm=under.rocm,
        miopen=under.miopen,
        cuda=torch.version.cuda,
        cudnn=under.cudnn,
        system={"win32": "Windows", "linux": "Linux", "darwin": "Darwin"}.get(system, system),
        kernel=platform.release() or None,
        driver=under.driver,
        comfy_kitchen=_or_none(read_kitchen_version),
        comfyui=_or_none(read_comfyui_version),
    )


def _platform(environ: Mapping[str, str], system: str) -> PlatformFacts:
    linux = system == "linux"
    return PlatformFacts(
        wsl=linux and ("microsoft" in platform.release().lower() or "WSL_DISTRO_NAME" in environ),
        cpu=read_cpu_model(),
        cpu_count=os.cpu_count(),
        kfd=_access(KFD) if linux else None,
    )


def read_flags(on_gpu: bool) -> FlagFacts:
    """Torch's flags now. Reading some of them raises where two of torch's interfaces were mixed: those are None."""
    cudnn: Any = torch.backends.cudnn
    cuda: Any = torch.backends.cuda
    return FlagFacts(
        cudnn_enabled=_or_none(lambda: bool(cudnn.enabled)),
        cudnn_benchmark=_or_none(lambda: bool(cudnn.benchmark)),
        cudnn_deterministic=_or_none(lambda: bool(cudnn.deterministic)),
        float32_convolution=_float32(lambda: cudnn.conv.fp32_precision, lambda: cudnn.allow_tf32),
        float32_matmul=_float32(lambda: cuda.matmul.fp32_precision, lambda: cuda.matmul.allow_tf32),
        sdpa_flash=_or_none(lambda: bool(cuda.flash_sdp_enabled())),
        sdpa_mem_efficient=_or_none(lambda: bool(cuda.mem_efficient_sdp_enabled())),
        sdpa_math=_or_none(lambda: bool(cuda.math_sdp_enabled())),
        sdpa_cudnn=_or_none(lambda: bool(cuda.cudnn_sdp_enabled())),
        fp16_accumulation=_or_none(lambda: bool(cuda.matmul.allow_fp16_accumulation)),
        fp16_reduced_sums=_or_none(lambda: bool(cuda.matmul.allow_fp16_reduced_precision_reduction)),
        bf16_reduced_sums=_or_none(lambda: bool(cuda.matmul.allow_bf16_reduced_precision_reduction)),
        blas=_or_none(lambda: str(cuda.preferred_blas_library()).rpartition(".")[2].lower()) if on_gpu else None,
        threads=_or_none(torch.get_num_threads),
        interop_threads=_or_none(torch.get_num_interop_threads),
    )


def read_swap(proc: Path) -> PoolReading | None:
    """Free and total swap. Source: /proc/meminfo."""
    try:
        text = (proc / "meminfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = {name: int(kib) * 1024 for name, kib in re.findall(r"^(Swap\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    if "SwapTotal" not in found or "SwapFree" not in found:
        return None
    return PoolReading(free_bytes=found["SwapFree"], total_bytes=found["SwapTotal"])


def _float32(new: Callable[[], Any], old: Callable[[], Any]) -> str | None:
    """Since torch 2.9 the new interface is the one that never raises; older ones have only the other."""
    precision = _or_none(new)
    if precision is not None:
        return str(precision)
    allowed = _or_none(old)
    return None if allowed is None else "tf32" if allowed else "ieee"


def _access(node: Path) -> DriverAccess:
    if not os.path.exists(node):
        return "absent"
    return "open" if os.access(node, os.R_OK | os.W_OK) else "denied"


def _total(pool: PoolReading | None) -> int | None:
    return None if pool is None else pool.total_bytes


def _used(pool: PoolReading | None) -> int | None:
    if pool is None or pool.total_bytes is None or pool.free_bytes is None:
        return None
    return pool.total_bytes - pool.free_bytes


def _or_none(read: Callable[[], T]) -> T | None:
    """What a reader gives; None where torch, the driver or a package raises, of whatever kind."""
    try:
        return read()
    except Exception:
        return None
