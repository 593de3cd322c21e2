"""What in a configuration may explain a difference in speed: rules as data, each a sentence about one installation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...optim.rocm_env import COMFYUI_SWITCH
from .config_rows import parallel_backend, variables_of
from .records import Comparison, Setup

_ALLOCATORS = (
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_NO_HIP_MEMORY_CACHING", "MALLOC_ARENA_MAX", "MALLOC_CONF", "LD_PRELOAD",
)  # fmt: skip
_FAST_BLAS = ("mkl", "accelerate", "flexiblas", "open", "openblas", "nvpl", "blis", "eigen", "armpl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One likely reason."""

    key: str
    installation: str
    sentence: str


Rule = Callable[[Setup, Setup], str | None]
"""(an installation, the reference) to a sentence without its subject, or None."""


def causes_of(comparison: Comparison) -> tuple[Cause, ...]:
    """All that is found, by rule: faults of one installation, the reference too, then what differs from it."""
    reference = comparison.setup_of(comparison.reference)
    setups = [(name, setup) for name in comparison.installations if (setup := comparison.setup_of(name)) is not None]
    return (*_faults(setups), *(_differences(setups, comparison.reference, reference) if reference else ()))


def _faults(setups: list[tuple[str, Setup]]) -> Iterator[Cause]:
    for key, rule in _FAULTS:
        for name, setup in setups:
            if (text := rule(setup, setup)) is not None:
                yield Cause(key=key, installation=name, sentence=f"{name} {text}")


def _differences(setups: list[tuple[str, Setup]], ref_name: str, reference: Setup) -> Iterator[Cause]:
    for key, rule in _DIFFERENCES:
        for name, setup in setups:
            if name != ref_name and (text := rule(setup, reference)) is not None:
                yield Cause(key=key, installation=name, sentence=f"{name} {text.replace('REFERENCE', ref_name)}")


# -- faults of one


def _no_onednn(s: Setup, _: Setup) -> str | None:
    if s.has_onednn is not False:
        return None
    return "has no usable oneDNN: convolutions on its CPU run on torch's own kernels, which are usually slower"


def _slow_blas(s: Setup, _: Setup) -> str | None:
    if s.blas is None or s.blas.lower() in _FAST_BLAS:
        return None
    return f"multiplies matrices with {s.blas}, which may be a plain BLAS: check that MKL or OpenBLAS is there"


def _no_openmp(s: Setup, _: Setup) -> str | None:
    backend = parallel_backend(s.parallel)
    if s.has_openmp is not False and (backend is None or "OpenMP" in backend):
        return None
    return f"was built without OpenMP (parallel backend {backend or 'unknown'}): its operations may run on fewer cores"


def _too_many_threads(s: Setup, _: Setup) -> str | None:
    cores = s.environment.cpu_count
    if cores is None or s.environment.threads <= cores:
        return None
    return f"runs {s.environment.threads} threads on {cores} cores, which get in each other's way; lower --threads"


def _plain_vectors(s: Setup, _: Setup) -> str | None:
    if s.cpu_capability not in ("DEFAULT", "NO AVX"):
        return None
    return "uses no wide vectors (CPU capability DEFAULT): look at ATEN_CPU_CAPABILITY and at the build"


def _debug_build(s: Setup, _: Setup) -> str | None:
    return "is a debug build, which is slow" if (s.build_type or "").lower() == "debug" else None


def _gpu_library_off(s: Setup, _: Setup) -> str | None:
    if s.gpu_library_on is not False:
        return None
    if s.environment.hip is None:
        return "has cuDNN turned off: convolutions on its GPU run on torch's own kernels"
    switch = f"; in ComfyUI, {COMFYUI_SWITCH}=1 keeps it on"
    return f"has MIOpen turned off: convolutions on its GPU run on torch's own kernels{switch}"


def _gpu_library_missing(s: Setup, _: Setup) -> str | None:
    if not s.has_gpu or s.environment.miopen or s.environment.cudnn:
        return None
    return f"finds no {'MIOpen' if s.environment.hip else 'cuDNN'} on its GPU"


def _chip_override(s: Setup, _: Setup) -> str | None:
    value = variables_of(s).get("HSA_OVERRIDE_GFX_VERSION")
    return None if value is None else f"takes its GPU for another chip (HSA_OVERRIDE_GFX_VERSION={value})"


def _no_caching(s: Setup, _: Setup) -> str | None:
    names = [n for n in variables_of(s) if n in ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")]
    return f"allocates from the driver each time ({names[0]} is set), which is slow" if names else None


def _deterministic(s: Setup, _: Setup) -> str | None:
    return "allows deterministic algorithms only, some of which are slower" if s.deterministic else None


_FAULTS: tuple[tuple[str, Rule], ...] = (
    ("no_onednn", _no_onednn), ("slow_blas", _slow_blas), ("no_openmp", _no_openmp),
    ("too_many_threads", _too_many_threads), ("plain_vectors", _plain_vectors), ("debug_build", _debug_build),
    ("gpu_library_off", _gpu_library_off), ("gpu_library_missing", _gpu_library_missing),
    ("chip_override", _chip_override), ("no_caching", _no_caching), ("deterministic", _deterministic),
)  # fmt: skip


# -- differences from the reference


def _other(read: Callable[[Setup], object], what: str, effect: str) -> Rule:
    def rule(s: Setup, reference: Setup) -> str | None:
        mine, its = read(s), read(reference)
        return None if mine == its else f"has {what} {mine or 'none'}, REFERENCE {its or 'none'}: {effect}"

    return rule


def _other_threads(s: Setup, reference: Setup) -> str | None:
    mine, its = s.environment.threads, reference.environment.threads
    if mine == its:
        return None
    return f"runs {mine} threads, REFERENCE {its}: give both the same with --threads before comparing them"


def _other_gpu_build(s: Setup, reference: Setup) -> str | None:
    mine, its = _built_for(s), _built_for(reference)
    if mine == its:
        return None
    return f"is built for {mine}, REFERENCE for {its}: the processes load other libraries, which shows in their memory"


def _built_for(s: Setup) -> str:
    kind = "HIP" if s.environment.hip else "CUDA" if s.environment.cuda else None
    return f"{kind} {s.environment.hip or s.environment.cuda}" if kind else "CPUs only"


def _other_allocation(s: Setup, reference: Setup) -> str | None:
    mine, its = variables_of(s), variables_of(reference)
    names = [name for name in _ALLOCATORS if mine.get(name) != its.get(name)]
    if not names:
        return None
    told = ", ".join(f"{n} is {mine.get(n, 'not set')} and not {its.get(n, 'not set')}" for n in names)
    return f"allocates memory under other settings than REFERENCE: {told}"


def _other_variables(s: Setup, reference: Setup) -> str | None:
    mine, its = variables_of(s), variables_of(reference)
    names = [n for n in sorted(mine.keys() | its.keys()) if mine.get(n) != its.get(n) and n not in _ALLOCATORS]
    if not names:
        return None
    told = ", ".join(f"{n} is {mine.get(n, 'not set')} and not {its.get(n, 'not set')}" for n in names)
    return f"runs under other variables than REFERENCE: {told}"


_DIFFERENCES: tuple[tuple[str, Rule], ...] = (
    ("other_blas", _other(lambda s: s.blas, "BLAS", "matrix products run on other kernels")),
    ("other_mkl", _other(lambda s: s.mkl, "MKL", "matrix products run on other kernels")),
    ("other_onednn", _other(lambda s: s.onednn, "oneDNN", "convolutions on the CPU run on other kernels")),
    ("other_threads", _other_threads),
    (
        "other_vectors",
        _other(lambda s: s.cpu_capability, "CPU capability", "torch's own kernels use vectors of another width"),
    ),
    ("other_gpu_build", _other_gpu_build),
    ("other_miopen", _other(lambda s: s.environment.miopen, "MIOpen", "convolutions on the GPU run on other kernels")),
    ("other_cudnn", _other(lambda s: s.environment.cudnn, "cuDNN", "convolutions on the GPU run on other kernels")),
    ("other_allocator", _other(lambda s: s.allocator, "GPU allocator", "memory is handed out in another way")),
    ("other_allocation", _other_allocation),
    (
        "other_matmul",
        _other(lambda s: s.float32_matmul, "float32 matmul precision", "float32 may be rounded on the way"),
    ),
    ("other_compiler", _other(lambda s: s.compiler, "compiler", "torch's own kernels are other machine code")),
    ("other_variables", _other_variables),
)  # fmt: skip
