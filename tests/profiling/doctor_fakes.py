"""Facts of machines that nobody has at hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from halo_vae.profiling.doctor_facts import (
    DeviceFacts,
    Facts,
    FlagFacts,
    FolderFacts,
    KitchenBackend,
    KitchenFacts,
    KitchenFunction,
    MemoryFacts,
    PlatformFacts,
    PoolFacts,
    VersionFacts,
)

GIB = 1 << 30

STRIX_HALO = Facts(
    device=DeviceFacts(
        name="cuda:0", kind="hip", model="Radeon 8060S Graphics", gfx="gfx1151", kernel_gfx="gfx1151",
        family="rdna3.5", unified_memory=True, compute_units=40, native_dtypes=("float16", "bfloat16"),
        strategy="tiles", layout="contiguous", batch_cap=8, attention="matmul", convolution="direct",
        built_for=("gfx1100", "gfx1151"), capability=None, gpu_visible=True,
    ),
    memory=MemoryFacts(
        host_total_bytes=62 * GIB, host_available_bytes=50 * GIB, swap_total_bytes=8 * GIB, swap_used_bytes=0,
        carve_out_total_bytes=64 * GIB, carve_out_used_bytes=2 * GIB, gtt_total_bytes=31 * GIB,
        gtt_used_bytes=1 * GIB, torch_total_bytes=64 * GIB, torch_free_bytes=62 * GIB, budget_bytes=62 * GIB,
        budget_reason="limited by what HIP calls free", invalid_readings=(),
    ),
    versions=VersionFacts(
        halo_vae="0.1.0", python="3.12.3", torch="2.12.0+rocm7.2", hip="7.2.53211", rocm="7.2.0", miopen="3005001",
        cuda=None, cudnn=None, system="Linux", kernel="6.17.0", driver="Linux 6.17.0", comfy_kitchen="0.2.40",
        comfyui=None,
    ),
    flags=FlagFacts(
        cudnn_enabled=True, cudnn_benchmark=False, cudnn_deterministic=False, float32_convolution="tf32",
        float32_matmul="none", sdpa_flash=False, sdpa_mem_efficient=False, sdpa_math=True, sdpa_cudnn=False,
        fp16_accumulation=False, fp16_reduced_sums=True, bf16_reduced_sums=True, blas="hipblaslt", threads=16,
        interop_threads=16,
    ),
    platform=PlatformFacts(wsl=False, cpu="AMD RYZEN AI MAX+ 395", cpu_count=32, kfd="open"),
    kitchen=KitchenFacts(
        installed=True, importable=True, reason=None, functions=(KitchenFunction(name="fp16_conv3d", present=True),),
        backends=(KitchenBackend(name="cuda", available=False, reason="CUDA not available on this system"),),
    ),
    folders=(
        FolderFacts(purpose="history", path="/home/me/.local/share/halo-vae", exists=True, bytes=2048, files=2),
        FolderFacts(purpose="MIOpen user db", path="/home/me/.config/miopen", exists=False, bytes=None, files=None),
    ),
    history_lines=12,
    pool=PoolFacts(held_bytes=None, keep_bytes=256 << 20),
)  # fmt: skip
"""A Strix Halo on which all is well: a carve-out of half its memory, and a torch of its own."""


def change(facts: Facts, **parts: dict[str, Any]) -> Facts:
    """The facts with some fields of some parts replaced."""
    return replace(facts, **{name: replace(getattr(facts, name), **fields) for name, fields in parts.items()})


SMALL_CARVE_OUT = change(
    STRIX_HALO,
    memory={
        "carve_out_total_bytes": GIB // 2, "carve_out_used_bytes": GIB // 8, "host_total_bytes": 125 * GIB,
        "gtt_total_bytes": 120 * GIB, "torch_total_bytes": 120 * GIB,
    },
)  # fmt: skip
"""Nearly all memory is the host's, and the GPU may map nearly all of it."""
CUDA = change(
    STRIX_HALO,
    device={
        "kind": "cuda", "model": "Some GPU", "gfx": None, "kernel_gfx": None, "family": "cuda", "unified_memory": False,
        "built_for": ("sm_80", "sm_90"), "capability": (8, 9), "attention": "sdpa",
    },
    versions={"torch": "2.10.0+cu128", "hip": None, "rocm": None, "miopen": None, "cuda": "12.8", "cudnn": "91701"},
    memory={"carve_out_total_bytes": None, "gtt_total_bytes": None},
)  # fmt: skip
CPU = change(
    STRIX_HALO,
    device={
        "name": "cpu", "kind": "cpu", "model": None, "gfx": None, "kernel_gfx": None, "family": "cpu",
        "built_for": None, "gpu_visible": False, "compute_units": None,
    },
    versions={"torch": "2.12.0+cpu", "hip": None, "rocm": None, "miopen": None, "driver": None},
    memory={
        "carve_out_total_bytes": None, "carve_out_used_bytes": None, "gtt_total_bytes": None, "gtt_used_bytes": None,
        "torch_total_bytes": None, "torch_free_bytes": None,
    },
    platform={"kfd": "absent"},
)  # fmt: skip
WINDOWS = change(
    STRIX_HALO,
    device={"kernel_gfx": None},
    memory={
        "carve_out_total_bytes": None, "carve_out_used_bytes": None, "gtt_total_bytes": None, "gtt_used_bytes": None,
        "swap_total_bytes": None, "swap_used_bytes": None,
    },
    versions={"system": "Windows", "kernel": "11", "driver": None},
    platform={"kfd": None},
)  # fmt: skip
MACHINES = {"strix halo": STRIX_HALO, "small carve-out": SMALL_CARVE_OUT, "cuda": CUDA, "cpu": CPU, "windows": WINDOWS}
