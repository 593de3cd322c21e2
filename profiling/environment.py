"""What the figures of a record depend on: software, machine, threads and flags. No path, no user name, no host name."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .codec import encode

VARIABLES = (
    "COMFYUI_ENABLE_MIOPEN",
    "CUBLAS_WORKSPACE_CONFIG",
    "HSA_OVERRIDE_GFX_VERSION",
    "KMP_BLOCKTIME",
    "MIOPEN_FIND_ENFORCE",
    "MIOPEN_FIND_MODE",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_TUNABLEOP_ENABLED",
    "TORCH_BLAS_PREFER_HIPBLASLT",
)
"""Environment variables that change results or speed; no other is read."""
_PLAIN = re.compile(r"[\w.,:=+-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVariable:
    """One variable of the allow-list that is set."""

    name: str
    value: str
    """Its value, or "(set)" where that is not a plain word (it might hold a path)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Fingerprint of where a decode ran. None = not there, or not to be found out."""

    python: str
    torch: str
    cuda: str | None
    hip: str | None
    miopen: str | None
    """Version that torch reports; only on a ROCm build with a device."""
    cudnn: str | None
    """Version that torch reports; only on a CUDA build with a device."""
    os: str
    """System and release ("Linux 6.8.0")."""
    machine: str
    """CPU architecture ("x86_64")."""
    cpu: str | None
    """Model name of the CPU."""
    cpu_count: int | None
    """Logical processors."""
    threads: int
    """Threads torch uses inside one op."""
    device: str
    """Name of the decode's device ("cpu", or what the driver calls the GPU)."""
    device_arch: str | None
    """Architecture of a GPU ("gfx1151", "sm_90"), without features such as ":xnack-"."""
    variables: tuple[EnvVariable, ...]
    device_family: str | None = None
    """Family whose defaults the device takes ("rdna3.5", "cuda", "cpu"); None in records that are older than it."""
    compute_units: int | None = None
    rocm: str | None = None
    """Version of the ROCm that torch was built for, else of the installed one."""
    driver: str | None = None
    """Version of the GPU's kernel driver; of the kernel where the driver is a part of it."""


def environment_id(environment: Environment) -> str:
    """12 hex digits, equal for equal environments."""
    text = json.dumps(encode(environment), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_environment(device: str = "cpu") -> Environment:
    """The environment of decodes on `device` now. Slow parts are read once per process."""
    import torch

    return _read(device, torch.get_num_threads(), read_variables(os.environ))


def read_variables(environ: Mapping[str, str]) -> tuple[EnvVariable, ...]:
    """The allow-listed variables that are set, by name."""
    found = ((name, environ[name]) for name in VARIABLES if name in environ)
    return tuple(EnvVariable(name=n, value=v if _PLAIN.fullmatch(v) else "(set)") for n, v in found)


def read_cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Model name of the CPU, or None. Source: /proc/cpuinfo, elsewhere platform.processor()."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as f:
            for line in f:
                key, _, value = line.partition(":")
                if key.strip().lower() in ("model name", "cpu model") and value.strip():
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or None


@functools.lru_cache(maxsize=16)
def _read(device: str, threads: int, variables: tuple[EnvVariable, ...]) -> Environment:
    import torch

    from ..optim.device import profile_from
    from ..optim.device_readers import read_device, read_versions
    from ..optim.gfx import parse_gfx
    from .memory import accelerator_facts

    name, arch = accelerator_facts(device)
    profile = profile_from(read_device(torch.device(device)))
    versions = read_versions()
    on_gpu = arch is not None
    return Environment(
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=versions.cuda,
        hip=versions.hip,
        miopen=versions.miopen if on_gpu else None,
        cudnn=versions.cudnn if on_gpu else None,
        os=f"{platform.system()} {platform.release()}".strip(),
        machine=platform.machine(),
        cpu=read_cpu_model(),
        cpu_count=os.cpu_count(),
        threads=threads,
        device=name,
        device_arch=parse_gfx(arch) or arch,
        variables=variables,
        device_family=profile.family,
        compute_units=profile.compute_units,
        rocm=versions.rocm,
        driver=versions.driver if on_gpu else None,
    )
