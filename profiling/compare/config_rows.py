"""Configurations of installations side by side: one row per setting, and whether they differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..bench.report_parts import Cell, Column, Table
from .records import Comparison, Setup

NOT_THERE = "–"
_LONG = ("CXX_FLAGS", "CUDA_FLAGS")
_FLAG_LIMIT = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRow:
    """One setting in every installation, in their order."""

    label: str
    values: tuple[str | None, ...]
    """None = not there or not known, and for installations that told nothing of themselves."""
    differs: bool


Read = Callable[[Setup], object]

_SETTINGS: tuple[tuple[str, Read], ...] = (
    ("Python", lambda s: s.environment.python),
    ("torch", lambda s: s.environment.torch),
    ("numpy", lambda s: s.numpy),
    ("safetensors", lambda s: s.safetensors),
    ("CPU", lambda s: s.environment.cpu),
    ("cores", lambda s: s.environment.cpu_count),
    ("GPU", lambda s: ", ".join(s.gpus) or None),
    ("architecture", lambda s: s.environment.device_arch or s.environment.machine),
    ("system", lambda s: s.environment.os),
    ("driver", lambda s: s.environment.driver),
    ("built for CUDA", lambda s: s.environment.cuda),
    ("built for HIP", lambda s: s.environment.hip),
    ("ROCm", lambda s: s.environment.rocm),
    ("MIOpen", lambda s: s.environment.miopen),
    ("cuDNN", lambda s: s.environment.cudnn),
    ("cuDNN or MIOpen on", lambda s: s.gpu_library_on),
    ("GPU allocator", lambda s: s.allocator),
    ("BLAS", lambda s: s.blas),
    ("LAPACK", lambda s: s.lapack),
    ("MKL", lambda s: s.mkl),
    ("MKL usable", lambda s: s.has_mkl),
    ("oneDNN", lambda s: s.onednn),
    ("oneDNN usable", lambda s: s.has_onednn),
    ("OpenMP", lambda s: s.has_openmp),
    ("parallel backend", lambda s: parallel_backend(s.parallel)),
    ("threads", lambda s: s.environment.threads),
    ("interop threads", lambda s: s.interop_threads),
    ("CPU capability", lambda s: s.cpu_capability),
    ("compiler", lambda s: s.compiler),
    ("build type", lambda s: s.build_type),
    ("float32 matmul", lambda s: s.float32_matmul),
    ("deterministic", lambda s: s.deterministic),
)


def config_rows(comparison: Comparison) -> tuple[ConfigRow, ...]:
    """The settings, the environment variables that are set anywhere, and the build settings that differ."""
    setups = tuple(comparison.setup_of(name) for name in comparison.installations)
    found = ((label, [None if s is None else _word(read(s)) for s in setups]) for label, read in _SETTINGS)
    settings = (_row(label, values, setups) for label, values in found)
    return (*settings, *_variable_rows(setups), *_build_rows(setups))


def config_table(comparison: Comparison) -> Table:
    """The rows as a table; what differs is marked."""
    rows = config_rows(comparison)
    return Table(
        columns=(Column(title="setting"), *(Column(title=name) for name in comparison.installations), Column(title="")),
        rows=tuple(
            (Cell(text=row.label), *(Cell(text=value or NOT_THERE) for value in row.values),
             Cell(text="differs" if row.differs else ""))
            for row in rows if any(value is not None for value in row.values)
        ),
        caption="As each installation tells it. Variables are those that change speed or results; a value that may be "
        "a path reads (set). Where OMP_WAIT_POLICY and MIOPEN_FIND_MODE were not set, they are for the runs.",
    )  # fmt: skip


def variables_of(setup: Setup) -> dict[str, str]:
    """All variables that matter and are set, by name."""
    return {v.name: v.value for v in (*setup.environment.variables, *setup.variables)}


def parallel_backend(info: str) -> str | None:
    """ "OpenMP", from `torch.__config__.parallel_info()`."""
    found = re.search(r"ATen parallel backend:\s*(.+)", info)
    return None if found is None else found[1].strip()


def build_settings(text: str) -> dict[str, str]:
    """The names and values after "Build settings:" in `torch.__config__.show()`."""
    line = next((part for part in text.splitlines() if "Build settings:" in part), "")
    pairs = re.findall(r"([A-Z][A-Z0-9_]*)=(.*?)(?=, [A-Z][A-Z0-9_]*=|,?\s*$)", line.partition("Build settings:")[2])
    return {name: value.strip() for name, value in pairs}


def _variable_rows(setups: tuple[Setup | None, ...]) -> Iterator[ConfigRow]:
    found = [None if s is None else variables_of(s) for s in setups]
    for name in sorted({name for one in found if one is not None for name in one}):
        yield _row(name, [None if one is None else one.get(name) for one in found], setups)


def _build_rows(setups: tuple[Setup | None, ...]) -> Iterator[ConfigRow]:
    found = [None if s is None else build_settings(s.build) for s in setups]
    for name in sorted({name for one in found if one is not None for name in one}):
        values = [None if one is None else one.get(name) for one in found]
        row = _row(f"build: {name}", values, setups)
        if not row.differs or name in ("TORCH_VERSION", "BLAS_INFO", "LAPACK_INFO", "BUILD_TYPE"):
            continue
        yield row if name not in _LONG else ConfigRow(label=row.label, values=_only_own(row.values), differs=True)


def _only_own(values: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """Of long lists of flags those that not all have."""
    lists = [value.split() for value in values if value is not None]
    common = set(lists[0]).intersection(*lists[1:]) if len(lists) == len(values) else set()
    own = ([] if value is None else [flag for flag in value.split() if flag not in common] for value in values)
    return tuple(None if value is None else _shortened(flags) for value, flags in zip(values, own, strict=True))


def _shortened(flags: list[str]) -> str:
    more = len(flags) - _FLAG_LIMIT
    return " ".join(flags[:_FLAG_LIMIT]) + (f" and {more} more" if more > 0 else "") or "no others"


def _row(label: str, values: list[str | None], setups: tuple[Setup | None, ...]) -> ConfigRow:
    """Installations that told nothing of themselves differ from nobody."""
    known = {value for value, setup in zip(values, setups, strict=True) if setup is not None}
    return ConfigRow(label=label, values=tuple(values), differs=len(known) > 1)


def _word(value: object) -> str | None:
    if value is None:
        return None
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
