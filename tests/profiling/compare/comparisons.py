"""Setups, rounds and whole comparisons as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from halo_vae.profiling.bench.results import RunFacts
from halo_vae.profiling.compare.cases import CompareCase, case_of
from halo_vae.profiling.compare.records import Comparison, DeviceKind, Measured, Round, Setup, SetupRead
from halo_vae.profiling.environment import Environment

STARTED = "2026-01-31T12:00:00+00:00"
BUILD = """PyTorch built with:
  - GCC 13.3
  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605 for Intel(R) 64
  - Intel(R) MKL-DNN v3.7.1 (Git Hash 8d26)
  - Build settings: BLAS_INFO=mkl, BUILD_TYPE=Release, CUDA_FLAGS= -DA=1 -DB, CXX_FLAGS= -O2 -Wall, LAPACK_INFO=mkl, """
PARALLEL = "ATen/Parallel:\n\tat::get_num_threads() : 2\nATen parallel backend: OpenMP\n"
QUIET = RunFacts(load_before=0.0, load_after=0.1, cores=2, wait_policy="passive", clock_drift_ns=0, run_ns=1000)


def environment(**changes: Any) -> Environment:
    base = Environment(
        python="3.12.0", torch="2.9.1", cuda=None, hip=None, miopen=None, cudnn=None, os="Linux", machine="x86_64",
        cpu="a CPU", cpu_count=2, threads=2, device="cpu", device_arch=None, variables=(),
    )  # fmt: skip
    return replace(base, **changes)


def setup(env: Mapping[str, Any] | None = None, **changes: Any) -> Setup:
    base = Setup(
        environment=environment(**(env or {})), numpy="2.4", safetensors="0.8", build=BUILD, parallel=PARALLEL,
        has_gpu=False, blas="mkl", lapack="mkl", mkl="2024.2", onednn="3.7.1", has_mkl=True, has_onednn=True,
        has_openmp=True, build_type="Release", compiler="GCC 13.3", cpu_capability="AVX2", interop_threads=2,
        float32_matmul="highest", deterministic=False,
    )  # fmt: skip
    return replace(base, **changes)


def measured(ms: float, **changes: Any) -> Measured:
    ns = round(ms * 1e6)
    base = Measured(
        ns=ns, cpu_ns=2 * ns, iterations=1, warm_up_ns=ns, dtype="fp32", threads=2, peak_bytes=100 << 20,
        look=(0.0, 0.5), facts=QUIET,
    )  # fmt: skip
    return replace(base, **changes)


def rounds(
    name: str, times_ms: Sequence[float], case: str = "tiny", device: DeviceKind = "cpu", **changes: Any
) -> list[Round]:
    return [
        Round(
            installation=name, case=case, device=device, round=i, status="ok", started_at=STARTED,
            latent_shape=(1, 4, 8, 8), measured=measured(ms, **changes),
        )
        for i, ms in enumerate(times_ms)
    ]  # fmt: skip


def failed(
    name: str, status: Any = "crashed", error: str = "ended by SIGSEGV", n: int = 0, case: str = "tiny"
) -> Round:
    return Round(
        installation=name, case=case, device="cpu", round=n, status=status, started_at=STARTED, error=error,
        latent_shape=(1, 4, 8, 8),
    )  # fmt: skip


def comparison(
    taken: Sequence[Round], setups: Mapping[str, Setup | str], cases: Sequence[str] = ("tiny",), **changes: Any
) -> Comparison:
    """A string in place of a setup is why there is none."""
    names, found = tuple(setups), tuple(map(case_of, cases))
    reads = tuple(
        SetupRead(installation=name, status="failed", error=one) if isinstance(one, str)
        else SetupRead(installation=name, setup=one)
        for name, one in setups.items()
    )  # fmt: skip
    base = Comparison(
        host="box", started_at=STARTED, reference=names[0], installations=names, cases=found, devices=("cpu",),
        rounds_asked=5, setups=reads, rounds=tuple(taken),
    )  # fmt: skip
    return replace(base, **changes)


__all__ = ["QUIET", "CompareCase", "comparison", "environment", "failed", "measured", "rounds", "setup"]
