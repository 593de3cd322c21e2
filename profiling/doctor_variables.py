"""Environment variables that change decodes: what each means, which values it knows, and names that look misspelt."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..optim.rocm_env import COMFYUI_SWITCH, FIND_MODE, find_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A variable that the doctor knows."""

    meaning: str
    values: Mapping[str, str] | None = None
    """Meaning of each value it knows, in lower case; None where any value may be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A known variable that is set."""

    name: str
    value: str | None
    """None in a redacted report."""
    meaning: str
    value_meaning: str | None
    """What that value means; None where values are free."""
    value_known: bool | None
    """False for a value that the variable's owner does not know; None where values are free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownVariable:
    """A variable of a family that matters, under a name that the doctor does not know."""

    name: str
    similar: str | None
    """The known name it resembles; None where it resembles none and may well be right."""


_BOOLEAN = {"0": "off", "1": "on"}
_FIND_ENFORCE = {
    "none": "as the program asks; the default", "1": "NONE, the default",
    "db_update": "tune every shape again and overwrite the database", "2": "DB_UPDATE: tune every shape again",
    "search": "tune every shape that is not in the database", "3": "SEARCH: tune every new shape",
    "search_db_update": "tune every shape, known or not", "4": "SEARCH_DB_UPDATE: tune every shape",
    "db_clean": "delete the tuned values of each shape", "5": "DB_CLEAN: delete tuned values",
}  # fmt: skip
_ALLOCATOR = "options of torch's caching allocator"

KNOWN: Mapping[str, Known] = {
    COMFYUI_SWITCH: Known(
        meaning="keep MIOpen on in ComfyUI, which turns it off on most AMD chips",
        values={"1": "MIOpen stays on"},
    ),
    "CUDA_VISIBLE_DEVICES": Known(meaning="GPUs that torch may see; HIP honours it as well"),
    "GPU_MAX_HW_QUEUES": Known(meaning="hardware queues that HIP spreads streams over"),
    "HALO_VAE_CACHE_DIR": Known(meaning="folder of what can be made again, such as tuned choices"),
    "HALO_VAE_COMFYUI": Known(meaning="checkouts that this package's own tests run"),
    "HALO_VAE_DATA_DIR": Known(meaning="folder of the history of decodes"),
    "HALO_VAE_PROFILE": Known(
        meaning="how much the nodes record",
        values={"off": "plan, outcome and wall time", "summary": "the default", "per_op": "each operation's time too"},
    ),
    "HIP_LAUNCH_BLOCKING": Known(meaning="wait for every kernel; for debugging, and slow", values=_BOOLEAN),
    "HIP_VISIBLE_DEVICES": Known(meaning="GPUs that HIP programs may see"),
    "HSA_ENABLE_SDMA": Known(meaning="copy with the DMA engines (the default) or with kernels", values=_BOOLEAN),
    "HSA_OVERRIDE_GFX_VERSION": Known(meaning="the chip that ROCm takes every AMD GPU for"),
    "HSA_XNACK": Known(meaning="page faults of the GPU: allows memory to move on demand", values=_BOOLEAN),
    "KMP_BLOCKTIME": Known(meaning="milliseconds that Intel's OpenMP threads spin before they sleep"),
    "MIOPEN_CUSTOM_CACHE_DIR": Known(meaning="folder of MIOpen's compiled kernels"),
    "MIOPEN_DISABLE_CACHE": Known(meaning="compile MIOpen's kernels anew in each process"),
    "MIOPEN_ENABLE_LOGGING": Known(meaning="print each call to MIOpen", values=_BOOLEAN),
    "MIOPEN_FIND_ENFORCE": Known(meaning="have MIOpen tune although nobody asked for it", values=_FIND_ENFORCE),
    FIND_MODE: Known(meaning="how MIOpen chooses a kernel for a shape that is new to it"),
    "MIOPEN_LOG_LEVEL": Known(meaning="how much MIOpen prints"),
    "MIOPEN_SYSTEM_DB_PATH": Known(meaning="folder of the databases that came with MIOpen"),
    "MIOPEN_USER_DB_PATH": Known(meaning="folder of what MIOpen's searches found"),
    "MKL_NUM_THREADS": Known(meaning="threads of Intel's math library"),
    "OMP_NUM_THREADS": Known(meaning="threads inside one operation on the CPU"),
    "OMP_WAIT_POLICY": Known(
        meaning="what idle CPU threads do", values={"active": "spin", "passive": "sleep"},
    ),
    "PYTORCH_ALLOC_CONF": Known(meaning=_ALLOCATOR),
    "PYTORCH_CUDA_ALLOC_CONF": Known(meaning=f"{_ALLOCATOR}; HIP builds honour it as well"),
    "PYTORCH_HIP_ALLOC_CONF": Known(meaning=f"{_ALLOCATOR} on ROCm"),
    "PYTORCH_MIOPEN_SUGGEST_NHWC": Known(meaning="let convolutions run in channels_last on ROCm", values=_BOOLEAN),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Known(meaning="no caching allocator, whatever the value"),
    "PYTORCH_NO_HIP_MEMORY_CACHING": Known(meaning="no caching allocator on ROCm, whatever the value"),
    "PYTORCH_TUNABLEOP_ENABLED": Known(meaning="time matrix products of each new shape", values=_BOOLEAN),
    "ROCR_VISIBLE_DEVICES": Known(meaning="GPUs that ROCm's runtime shows to any program"),
    "TORCH_BLAS_PREFER_HIPBLASLT": Known(meaning="matrix products by hipBLASLt instead of rocBLAS", values=_BOOLEAN),
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": Known(
        meaning="AOTriton's attention on chips where it is experimental", values=_BOOLEAN
    ),
}  # fmt: skip
"""By name. Sources: MIOpen, ROCm and PyTorch's pages on environment variables; ComfyUI pull request 11366."""

_FAMILIES = re.compile(
    r"(MIOPEN|HSA|HIP|ROCR|OMP|HALO_VAE)_|TORCH_(BLAS|ROCM)|PYTORCH_(\w*ALLOC|MIOPEN|NO_|HIP|TUNABLEOP)|COMFYUI_ENABLE"
)
_OWN = "HALO_VAE_"
_SIMILAR = 0.85


def read_known(environ: Mapping[str, str]) -> tuple[Variable, ...]:
    """The known variables that are set, by name."""
    return tuple(_read(name, environ) for name in sorted(KNOWN) if name in environ)


def find_unknown(environ: Mapping[str, str]) -> tuple[UnknownVariable, ...]:
    """Set variables of the families above that are not known, by name. Upper and lower case count as spelling."""
    names = sorted(n for n in environ if n not in KNOWN and _FAMILIES.match(n.upper()))
    return tuple(UnknownVariable(name=n, similar=_similar(n)) for n in names)


def value_of(environ: Mapping[str, str], name: str) -> str | None:
    """A variable's value without spaces around it; None where it is not set or empty."""
    return environ.get(name, "").strip() or None


def _read(name: str, environ: Mapping[str, str]) -> Variable:
    known, value = KNOWN[name], environ[name]
    meaning: str | None = None
    is_known: bool | None = None
    if name == FIND_MODE:
        mode = find_mode(environ)
        meaning, is_known = mode.meaning, mode.name is not None
    elif known.values is not None:
        meaning = known.values.get(value.strip().lower())
        is_known = meaning is not None
    return Variable(name=name, value=value, meaning=known.meaning, value_meaning=meaning, value_known=is_known)


def _similar(name: str) -> str | None:
    found = difflib.get_close_matches(name.upper(), KNOWN, n=1, cutoff=_SIMILAR)
    if not found and name.upper().startswith(_OWN):  # nobody else has names like ours
        found = difflib.get_close_matches(name.upper(), [n for n in KNOWN if n.startswith(_OWN)], n=1, cutoff=0.0)
    return found[0] if found else None
