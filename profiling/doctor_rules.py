"""Combinations that are known to be slow, to fail or to give wrong pictures, as a table: condition, advice, reference.

A condition is a function of facts alone. It says what was seen, and gives None where a fact that it needs is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..optim.gfx import STRIX_HALO, is_strix_halo
from ..optim.rocm_env import COMFYUI_SWITCH, FIND_MODE, find_mode
from .doctor_facts import Facts
from .doctor_variables import KNOWN, value_of
from .render.units import format_bytes

Severity = Literal["error", "warning", "note"]
Environ = Mapping[str, str]
Check = Callable[[Facts, Environ], str | None]

STRIX_HALO_MODELS = ("8060S", "8050S", "8040S")
"""Marketing names of its GPUs."""
MIOPEN_STAYS_ON = ("gfx803", "gfx900", "gfx906", "gfx1010", "gfx1011", "gfx1012", "gfx1030", "gfx1031")
"""Chips on which ComfyUI 0.20 leaves MIOpen on."""
GIB = 1 << 30
SMALL_CARVE_OUT = 4 * GIB
SMALL_REACH = 16 * GIB
"""Memory in reach of an APU's GPU below which large VAEs and their models do not fit side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table."""

    id: str
    severity: Severity
    """error: decodes fail or come out wrong; warning: they are likely to be slow or to fail; note: good to know."""
    title: str
    """What is wrong in one line, without figures, values or paths."""
    check: Check
    advice: str
    reference: str
    """Address of a public page."""


def _hip(f: Facts) -> bool:
    return f.versions.hip is not None


def _no_kernels(f: Facts, env: Environ) -> str | None:
    gfx, built = f.device.gfx, f.device.built_for
    if not _hip(f) or gfx is None or not built:
        return None
    names = {arch.lower().split(":")[0] for arch in built}
    generic = any(n.endswith("-generic") and gfx.startswith(n.split("-")[0]) for n in names)
    return None if gfx in names or generic else f"{gfx} is not among {', '.join(sorted(names))}"


def _old_rocm(f: Facts, env: Environ) -> str | None:
    version = _numbers(f.versions.hip)
    if version is None or version >= (7, 0) or not _is_strix_halo(f) or STRIX_HALO in (f.device.built_for or ()):
        return None
    return f"built for ROCm {f.versions.hip}"


def _cpu_build(f: Facts, env: Environ) -> str | None:
    v = f.versions
    seen = f.device.kernel_gfx is not None and v.hip is None and v.cuda is None
    return f"torch {v.torch} beside an AMD GPU ({f.device.kernel_gfx})" if seen else None


def _no_gpu(f: Facts, env: Environ) -> str | None:
    if not _hip(f) or f.device.gpu_visible is not False:
        return None
    return {"denied": "/dev/kfd may not be opened", "absent": "there is no /dev/kfd"}.get(f.platform.kfd or "", "")


def _gfx_override(f: Facts, env: Environ) -> str | None:
    value = value_of(env, "HSA_OVERRIDE_GFX_VERSION")
    if not _hip(f) or value is None or value == "11.5.1" or not _is_strix_halo(f):
        return None
    return f"HSA_OVERRIDE_GFX_VERSION={value}"


def _benchmark(f: Facts, env: Environ) -> str | None:
    return "torch.backends.cudnn.benchmark is True" if _hip(f) and f.flags.cudnn_benchmark else None


def _enforced_search(f: Facts, env: Environ) -> str | None:
    value = value_of(env, "MIOPEN_FIND_ENFORCE")
    if not _hip(f) or value is None or value.lower() in ("none", "1"):
        return None
    return f"MIOPEN_FIND_ENFORCE={value}" if value.lower() in (KNOWN["MIOPEN_FIND_ENFORCE"].values or {}) else None


def _find_mode(f: Facts, env: Environ) -> str | None:
    mode = find_mode(env)
    return f"{FIND_MODE}={mode.value}" if _hip(f) and mode.value is not None and mode.name is None else None


def _miopen_off(f: Facts, env: Environ) -> str | None:
    if not _hip(f) or f.device.kind != "hip":
        return None
    if f.flags.cudnn_enabled is False:
        return "torch.backends.cudnn.enabled is False"
    gfx = f.device.gfx
    off = value_of(env, COMFYUI_SWITCH) != "1" and f.versions.comfyui is not None
    if off and gfx is not None and gfx not in MIOPEN_STAYS_ON:
        return f"ComfyUI {f.versions.comfyui} does so on {gfx}"
    return None


def _miopen_value(f: Facts, env: Environ) -> str | None:
    value = value_of(env, COMFYUI_SWITCH)
    return f"COMFYUI_ENABLE_MIOPEN={value}" if _hip(f) and value not in (None, "0", "1") else None


def _uncached(f: Facts, env: Environ) -> str | None:
    names = ["PYTORCH_NO_CUDA_MEMORY_CACHING"] + (["PYTORCH_NO_HIP_MEMORY_CACHING"] if _hip(f) else [])
    found = [n for n in names if n in env]
    return f"{found[0]} is set" if found and f.device.kind in ("hip", "cuda") else None


def _expandable(f: Facts, env: Environ) -> str | None:
    version = _numbers(f.versions.hip)
    if version is None or version >= (7, 0):
        return None
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in env.get(name, "").lower().replace(" ", ""):
            return f"{name} asks for expandable_segments on ROCm {f.versions.hip}"
    return None


def _small_reach(f: Facts, env: Environ) -> str | None:
    reach, host = _reach(f), f.memory.host_total_bytes
    if reach is None or host is None or reach >= SMALL_REACH or host < reach:
        return None
    return f"{_pools(f)}, beside {format_bytes(host)} of the host"


def _half_gtt(f: Facts, env: Environ) -> str | None:
    m = f.memory
    reach = _reach(f)
    if reach is None or reach < SMALL_REACH or m.carve_out_total_bytes is None or m.gtt_total_bytes is None:
        return None
    if m.host_total_bytes is None or m.carve_out_total_bytes > SMALL_CARVE_OUT:
        return None
    # the kernel's default is half of the host's memory; what the host calls its total is a little less than that
    return _pools(f) if m.gtt_total_bytes <= 0.55 * m.host_total_bytes else None


def _torch_sees_less(f: Facts, env: Environ) -> str | None:
    carve_out, seen = f.memory.carve_out_total_bytes, f.memory.torch_total_bytes
    if not _is_apu(f) or carve_out is None or seen is None or seen >= 0.75 * carve_out:
        return None
    return f"torch counts {format_bytes(seen)} where the carve-out alone has {format_bytes(carve_out)}"


def _invalid(f: Facts, env: Environ) -> str | None:
    return "; ".join(f.memory.invalid_readings) or None


def _attention(f: Facts, env: Environ) -> str | None:
    fused = f.flags.sdpa_flash or f.flags.sdpa_mem_efficient
    return "fused attention is on" if f.device.kind == "hip" and fused else None


def _conv3d(f: Facts, env: Environ) -> str | None:
    version, cudnn = _numbers(f.versions.torch), f.versions.cudnn
    if f.device.kind != "cuda" or version is None or version < (2, 9) or cudnn is None or not cudnn.isdigit():
        return None
    return f"torch {f.versions.torch} with cuDNN {cudnn}" if 91000 <= int(cudnn) < 91500 else None


def _emulated_bf16(f: Facts, env: Environ) -> str | None:
    found = f.device.capability
    old = f.device.kind == "cuda" and found is not None and found < (8, 0)
    return f"compute capability {found[0]}.{found[1]}" if old and found is not None else None


def _one_thread(f: Facts, env: Environ) -> str | None:
    n = f.platform.cpu_count
    one = f.device.kind == "cpu" and f.flags.threads == 1 and value_of(env, "OMP_NUM_THREADS") == "1"
    return f"OMP_NUM_THREADS=1 on {n} logical processors" if one and n is not None and n > 1 else None


def _wsl(f: Facts, env: Environ) -> str | None:
    return "no /sys/class/drm for the GPU" if f.platform.wsl and _hip(f) else None


def _is_strix_halo(f: Facts) -> bool:
    """By the kernel's word, else by the GPU's name or torch's word, which an override may have changed."""
    if f.device.kernel_gfx is not None:
        return is_strix_halo(f.device.kernel_gfx)
    named = any(name in (f.device.model or "") for name in STRIX_HALO_MODELS)
    return named or is_strix_halo(f.device.gfx)


def _numbers(version: str | None) -> tuple[int, ...] | None:
    """Major and minor number of a version; None where it has none."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return None if found is None else (int(found[1]), int(found[2]))


def _is_apu(f: Facts) -> bool:
    return f.device.unified_memory and f.device.kind == "hip"


def _reach(f: Facts) -> int | None:
    """Bytes that an APU's GPU can reach."""
    carve_out, gtt = f.memory.carve_out_total_bytes, f.memory.gtt_total_bytes
    return carve_out + gtt if _is_apu(f) and carve_out is not None and gtt is not None else None


def _pools(f: Facts) -> str:
    m = f.memory
    return f"a carve-out of {format_bytes(m.carve_out_total_bytes)} and {format_bytes(m.gtt_total_bytes)} of GTT"


_GITHUB = "https://github.com"
_MIOPEN_VARIABLES = "https://rocm.docs.amd.com/projects/MIOpen/en/latest/reference/env_variables.html"
_TTM = (
    "raise the limit with the kernel parameter ttm.pages_limit=N, in pages of 4 KiB (GiB × 262144), "
    "or give the GPU a larger carve-out in the firmware's settings"
)

RULES: tuple[Rule, ...] = (
    Rule(
        id="no_kernels", severity="error", check=_no_kernels,
        title="this torch has no kernels for the GPU",
        advice="install a torch that was built for this architecture",
        reference=f"{_GITHUB}/pytorch/pytorch/issues/164346",
    ),
    Rule(
        id="old_rocm", severity="warning", check=_old_rocm,
        title="this torch's ROCm is older than the one with which PyTorch began to build for gfx1151",
        advice="install a torch for ROCm 7.0 or newer, or AMD's own build for gfx1151",
        reference=f"{_GITHUB}/pytorch/pytorch/pull/167299",
    ),
    Rule(
        id="cpu_build", severity="warning", check=_cpu_build,
        title="this torch was built for the CPU, so the GPU is not used",
        advice="install a ROCm build of torch into this environment to use the GPU",
        reference="https://pytorch.org/get-started/locally/",
    ),
    Rule(
        id="no_gpu", severity="warning", check=_no_gpu,
        title="this torch was built for ROCm, but sees no GPU",
        advice="check that the amdgpu driver is loaded, that this user is in the groups render and video, and "
        "that no *_VISIBLE_DEVICES variable hides the GPU",
        reference="https://rocm.docs.amd.com/projects/install-on-linux/en/docs-6.2.2/install/prerequisites.html",
    ),
    Rule(
        id="gfx_override", severity="warning", check=_gfx_override,
        title="HSA_OVERRIDE_GFX_VERSION makes ROCm take this gfx1151 for another chip",
        advice="unset it; it is a way around builds without kernels for gfx1151, so use one that has them",
        reference=f"{_GITHUB}/pytorch/pytorch/issues/164346",
    ),
    Rule(
        id="benchmark", severity="warning", check=_benchmark,
        title="cudnn.benchmark is on, which under ROCm searches exhaustively for each new convolution shape",
        advice="switch it off (in ComfyUI: start without --fast autotune)",
        reference=f"{_GITHUB}/unslothai/unsloth/issues/11636",
    ),
    Rule(
        id="enforced_search", severity="warning", check=_enforced_search,
        title="MIOPEN_FIND_ENFORCE has MIOpen tune, or clear its database, in every run",
        advice="unset it after the run that it was meant for",
        reference=_MIOPEN_VARIABLES,
    ),
    Rule(
        id="find_mode", severity="warning", check=_find_mode,
        title="MIOPEN_FIND_MODE has a value that MIOpen does not know",
        advice="give FAST, or another of the names on the page below, or unset it",
        reference=_MIOPEN_VARIABLES,
    ),
    Rule(
        id="miopen_off", severity="note", check=_miopen_off,
        title="MIOpen is off in ComfyUI, so convolutions run as matrix products with a large workspace",
        advice="to compare, start ComfyUI after: export COMFYUI_ENABLE_MIOPEN=1",
        reference=f"{_GITHUB}/Comfy-Org/ComfyUI/pull/11366",
    ),
    Rule(
        id="miopen_value", severity="warning", check=_miopen_value,
        title="COMFYUI_ENABLE_MIOPEN has a value that ComfyUI ignores",
        advice="give it the value 1, the only one that switches MIOpen on",
        reference=f"{_GITHUB}/Comfy-Org/ComfyUI/pull/11366",
    ),
    Rule(
        id="uncached", severity="warning", check=_uncached,
        title="torch's caching allocator is switched off, so each allocation goes to the driver",
        advice="unset the variable; any value, also 0, switches the allocator off",
        reference=f"{_GITHUB}/pytorch/pytorch/issues/185826",
    ),
    Rule(
        id="expandable", severity="note", check=_expandable,
        title="expandable_segments has no effect in torch for ROCm older than 7.0",
        advice="leave it out, or use a torch for ROCm 7.0 or newer",
        reference=f"{_GITHUB}/pytorch/pytorch/pull/179930",
    ),
    Rule(
        id="small_reach", severity="warning", check=_small_reach,
        title="the GPU can reach only a small part of this machine's memory",
        advice=_TTM,
        reference=f"{_GITHUB}/ROCm/TheRock/issues/519",
    ),
    Rule(
        id="half_gtt", severity="note", check=_half_gtt,
        title="the GPU can reach half of this machine's memory, the kernel's default",
        advice=f"where models and VAE do not fit together, {_TTM}",
        reference=f"{_GITHUB}/ROCm/legacy-rocm-build/issues/5595",
    ),
    Rule(
        id="torch_sees_less", severity="warning", check=_torch_sees_less,
        title="torch sees less memory than the GPU's carve-out has",
        advice="update kernel and ROCm, or take a small carve-out and let the GPU map system memory",
        reference=f"{_GITHUB}/ROCm/legacy-rocm-build/issues/5444",
    ),
    Rule(
        id="invalid_reading", severity="warning", check=_invalid,
        title="memory figures of the driver are missing or cannot be true",
        advice="none is needed here, the budget leaves such figures out; other programs may trust them",
        reference=f"{_GITHUB}/Comfy-Org/ComfyUI/issues/2431",
    ),
    Rule(
        id="attention", severity="note", check=_attention,
        title="torch's fused attention on ROCm has failed or gone wrong on heads as wide as a VAE's",
        advice="none is needed here: decodes on ROCm compute attention by matrix products unless tuned otherwise",
        reference=f"{_GITHUB}/pytorch/pytorch/issues/148850",
    ),
    Rule(
        id="conv3d", severity="warning", check=_conv3d,
        title="torch from 2.9 on with cuDNN 9.10 to 9.14 runs 16-bit 3-D convolutions slowly and in much memory",
        advice="install nvidia-cudnn 9.15 or newer, or a torch that brings it",
        reference=f"{_GITHUB}/pytorch/pytorch/issues/166643",
    ),
    Rule(
        id="emulated_bf16", severity="note", check=_emulated_bf16,
        title="this GPU has no bfloat16 of its own, so torch emulates it slowly",
        advice="use --precision fp16, mixed or fp32 rather than bf16",
        reference=f"{_GITHUB}/pytorch/pytorch/pull/148322",
    ),
    Rule(
        id="one_thread", severity="warning", check=_one_thread,
        title="OMP_NUM_THREADS=1 leaves decodes on the CPU one thread",
        advice="unset it, or give --threads; it is a way around slow loading of models on some machines",
        reference=f"{_GITHUB}/Comfy-Org/ComfyUI/issues/4104",
    ),
    Rule(
        id="wsl", severity="note", check=_wsl,
        title="under WSL the kernel tells nothing of the GPU's memory pools",
        advice="none is needed; carve-out and GTT stay unknown and the runtime's figure counts",
        reference="https://rocm.docs.amd.com/projects/amdsmi/en/develop/how-to/amdsmi-wsl-mode.html",
    ),
)  # fmt: skip
"""Known combinations, the worst first where several fit."""
