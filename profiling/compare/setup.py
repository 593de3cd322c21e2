"""Reads what an installation of PyTorch is made of; runs inside it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ...optim.accelerator import GPU, gpu_api, gpu_count, has_gpu
from ..environment import EnvVariable, read_environment
from .records import Setup

T = TypeVar("T")

VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUDA_VISIBLE_DEVICES", "DNNL_MAX_CPU_ISA", "GOMP_CPU_AFFINITY", "HIP_VISIBLE_DEVICES",
    "KMP_AFFINITY", "LD_PRELOAD", "MALLOC_ARENA_MAX", "MALLOC_CONF", "MKL_DEBUG_CPU_TYPE", "MKL_DYNAMIC",
    "OPENBLAS_NUM_THREADS", "PYTORCH_MIOPEN_SUGGEST_NHWC", "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_NO_HIP_MEMORY_CACHING", "ROCR_VISIBLE_DEVICES", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
"""Beside those of a record's environment."""
_FOLDERS = re.compile(r"(?:/[\w.+~@-]+)+/")
_PLAIN = re.compile(r"[\w.,:=+-]{1,64}")


def read_setup() -> Setup:
    """The setup of this process's torch; on a machine with a GPU, of its first."""
    import numpy
    import safetensors

    on_gpu = has_gpu()
    build = without_folders(str(torch.__config__.show()))
    parallel = without_folders(str(torch.__config__.parallel_info()))
    return Setup(
        environment=read_environment(GPU if on_gpu else "cpu"), numpy=str(numpy.__version__),
        safetensors=str(safetensors.__version__), build=build, parallel=parallel, has_gpu=on_gpu,
        gpus=tuple(map(_gpu_name, range(gpu_count()))) if on_gpu else (),
        has_mkl=_or_none(lambda: bool(torch.backends.mkl.is_available())),  # type: ignore[no-untyped-call]
        has_onednn=_or_none(_has_onednn),
        has_openmp=_or_none(lambda: bool(torch.backends.openmp.is_available())),  # type: ignore[no-untyped-call]
        cpu_capability=_or_none(lambda: str(torch.backends.cpu.get_cpu_capability())),
        interop_threads=torch.get_num_interop_threads(),
        gpu_library_on=bool(torch.backends.cudnn.enabled) if on_gpu else None,
        allocator=_or_none(lambda: str(gpu_api().get_allocator_backend())) if on_gpu else None,
        float32_matmul=_or_none(torch.get_float32_matmul_precision),
        deterministic=_or_none(torch.are_deterministic_algorithms_enabled),
        variables=read_further(os.environ), **parse_build(build),
    )  # fmt: skip


def without_folders(text: str) -> str:
    """The text with "…/" for the folders of absolute paths: where somebody built torch is nobody's business."""
    return _FOLDERS.sub("…/", text)


def parse_build(text: str) -> dict[str, str | None]:
    """What `torch.__config__.show()` says of libraries and compiler, by field of `Setup`."""
    wanted = {
        "blas": r"\bBLAS_INFO=([\w.-]+)",
        "lapack": r"\bLAPACK_INFO=([\w.-]+)",
        "mkl": r"Math Kernel Library Version (\S+)",
        "onednn": r"(?:MKL-DNN|oneDNN) v([\w.]+)",
        "build_type": r"\bBUILD_TYPE=(\w+)",
        "compiler": r"^\s*-\s*((?:GCC|clang|MSVC)\s+\S+)",
    }
    found = {name: re.search(pattern, text, re.MULTILINE) for name, pattern in wanted.items()}
    return {name: None if match is None else match[1] for name, match in found.items()}


def read_further(environ: Mapping[str, str]) -> tuple[EnvVariable, ...]:
    """The variables of `VARIABLES` that are set; a value that may hold a path reads "(set)"."""
    found = ((name, environ[name]) for name in VARIABLES if name in environ)
    return tuple(EnvVariable(name=n, value=v if _PLAIN.fullmatch(v) else "(set)") for n, v in found)


def _gpu_name(index: int) -> str:
    return _or_none(lambda: str(gpu_api().get_device_name(index))) or "unknown"


def _has_onednn() -> bool:
    backend: Any = torch.backends.mkldnn
    return bool(backend.is_available()) and bool(getattr(backend, "enabled", True))


def _or_none(read: Callable[[], T]) -> T | None:
    """None where this release of torch has no such thing, or its driver raises."""
    try:
        return read()
    except Exception:
        return None
