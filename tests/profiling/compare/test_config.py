"""Configurations side by side, and what in them may explain a difference."""

from __future__ import annotations

from typing import Any

import pytest

from halo_vae.profiling.compare.causes import causes_of
from halo_vae.profiling.compare.config_rows import build_settings, config_rows, config_table
from halo_vae.profiling.compare.records import Setup
from halo_vae.profiling.compare.setup import VARIABLES, parse_build, read_further, read_setup, without_folders
from halo_vae.profiling.environment import EnvVariable
from halo_vae.tests.profiling.compare.comparisons import BUILD, comparison, setup


def keys(one: Setup, reference: Setup) -> list[tuple[str, str]]:
    found = causes_of(comparison([], {"ref": reference, "one": one}))
    return [(cause.key, cause.installation) for cause in found]


def variable(name: str, value: str) -> EnvVariable:
    return EnvVariable(name=name, value=value)


def test_alike_installations_have_no_causes() -> None:
    assert keys(setup(), setup()) == []
    assert not any(row.differs for row in config_rows(comparison([], {"a": setup(), "b": setup()})))


GPU = {"has_gpu": True, "gpu_library_on": True}
ROCM = {"hip": "6.4", "miopen": "3.4"}


@pytest.mark.parametrize(
    ("key", "one"),
    [
        ("no_onednn", setup(has_onednn=False)),
        ("slow_blas", setup(blas="generic")),
        ("other_blas", setup(blas="open")),
        ("no_openmp", setup(has_openmp=False)),
        ("no_openmp", setup(parallel="ATen parallel backend: native thread pool")),
        ("too_many_threads", setup({"threads": 8})),
        ("other_threads", setup({"threads": 1})),
        ("plain_vectors", setup(cpu_capability="DEFAULT")),
        ("other_vectors", setup(cpu_capability="AVX512")),
        ("debug_build", setup(build_type="Debug")),
        ("gpu_library_off", setup(ROCM, has_gpu=True, gpu_library_on=False)),
        ("gpu_library_missing", setup({"hip": "6.4"}, **GPU)),
        ("other_miopen", setup(ROCM, **GPU)),
        ("other_gpu_build", setup(ROCM, **GPU)),
        ("other_cudnn", setup({"cuda": "12.8", "cudnn": "91002"}, **GPU)),
        ("chip_override", setup({"variables": (variable("HSA_OVERRIDE_GFX_VERSION", "11.0.0"),)})),
        ("no_caching", setup(variables=(variable("PYTORCH_NO_HIP_MEMORY_CACHING", "1"),))),
        ("other_allocation", setup({"variables": (variable("PYTORCH_HIP_ALLOC_CONF", "a:1"),)})),
        ("other_allocator", setup(allocator="cudaMallocAsync")),
        ("other_variables", setup({"variables": (variable("OMP_NUM_THREADS", "1"),)})),
        ("deterministic", setup(deterministic=True)),
        ("other_onednn", setup(onednn="3.12.0")),
        ("other_mkl", setup(mkl=None)),
        ("other_matmul", setup(float32_matmul="high")),
        ("other_compiler", setup(compiler="clang 19")),
    ],
)
def test_causes_are_pointed_out(key: str, one: Setup) -> None:
    assert (key, "one") in keys(one, setup())


def test_faults_of_the_reference_are_pointed_out_too() -> None:
    assert ("no_onednn", "ref") in keys(setup(), setup(has_onednn=False))


def test_causes_name_the_reference() -> None:
    found = causes_of(comparison([], {"ref": setup(), "one": setup(onednn="3.12.0")}))
    assert found[0].sentence.startswith("one has oneDNN 3.12.0, ref 3.7.1: ")


def test_installation_without_a_setup_differs_from_nobody() -> None:
    rows = config_rows(comparison([], {"a": setup(), "gone": "no such file"}))
    assert not any(row.differs for row in rows)
    assert {len(row.values) for row in rows} == {2}


def test_variables_and_build_settings_that_differ_are_rows() -> None:
    one = setup(
        {"variables": (variable("OMP_NUM_THREADS", "4"),)}, build=BUILD.replace("-O2 -Wall", "-O2 -mavx2"),
        variables=(variable("LD_PRELOAD", "(set)"),),
    )  # fmt: skip
    rows = {row.label: row for row in config_rows(comparison([], {"a": setup(), "b": one}))}
    assert rows["OMP_NUM_THREADS"].values == (None, "4")
    assert rows["LD_PRELOAD"].values == (None, "(set)")
    assert rows["build: CXX_FLAGS"].values == ("-Wall", "-mavx2")
    assert "build: BLAS_INFO" not in rows
    table = config_table(comparison([], {"a": setup(), "b": one}))
    assert [c.text for row in table.rows if row[0].text == "OMP_NUM_THREADS" for c in row][1:] == ["–", "4", "differs"]


def test_build_text_is_parsed() -> None:
    assert parse_build(BUILD) == {
        "blas": "mkl", "lapack": "mkl", "mkl": "2024.2-Product", "onednn": "3.7.1", "build_type": "Release",
        "compiler": "GCC 13.3",
    }  # fmt: skip
    assert set(parse_build("").values()) == {None}
    assert build_settings(BUILD)["CUDA_FLAGS"] == "-DA=1 -DB"
    assert build_settings(BUILD)["LAPACK_INFO"] == "mkl"
    assert build_settings("nothing") == {}


def test_folders_of_whoever_built_torch_are_not_told() -> None:
    text = "CXX_COMPILER=/home/me/gcc/bin/c++, CXX_FLAGS= -I/home/me/include -O2, at::x ATen/Parallel C:/me/x/cl.exe"
    shown = "CXX_COMPILER=…/c++, CXX_FLAGS= -I…/include -O2, at::x ATen/Parallel C:…/cl.exe"
    assert without_folders(text) == shown


def test_values_that_may_be_paths_are_not_told() -> None:
    assert read_further({"LD_PRELOAD": "/opt/secret.so", "MKL_DYNAMIC": "FALSE", "HOME": "/home/me"}) == (
        variable("LD_PRELOAD", "(set)"), variable("MKL_DYNAMIC", "FALSE"),
    )  # fmt: skip
    assert list(VARIABLES) == sorted(VARIABLES)


def test_own_setup_is_read() -> None:
    import torch

    found: Any = read_setup()
    assert found.environment.torch == torch.__version__
    assert found.environment.threads == torch.get_num_threads()
    assert found.has_onednn is torch.backends.mkldnn.is_available()
    assert "PyTorch built with" in found.build
