"""The doctor's report as a function of facts: every rule with what sets it off and what does not."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest

from halo_vae.profiling.doctor import Finding, Report, diagnose
from halo_vae.profiling.doctor_facts import Facts, KitchenBackend
from halo_vae.profiling.doctor_rules import RULES, Severity
from halo_vae.profiling.doctor_variables import KNOWN
from halo_vae.profiling.render.doctor import render_report, warning_rows
from halo_vae.tests.profiling.doctor_fakes import (
    CPU,
    CUDA,
    GIB,
    MACHINES,
    SMALL_CARVE_OUT,
    STRIX_HALO,
    WINDOWS,
    change,
)

Environ = dict[str, str]
GFX1100 = change(
    STRIX_HALO, device={"gfx": "gfx1100", "kernel_gfx": "gfx1100", "model": "RX 7900", "unified_memory": False}
)  # fmt: skip
OLD_ROCM = change(STRIX_HALO, versions={"hip": "6.3.42134"}, device={"built_for": None})
IN_COMFYUI = change(STRIX_HALO, versions={"comfyui": "0.20.1"})


def memory(facts: Facts, **sizes: Any) -> Facts:
    return change(facts, memory=sizes)


def found(facts: Facts, environ: Environ | None = None) -> dict[str, Finding]:
    return {f.id: f for f in diagnose(facts, environ or {}).findings}


CASES: dict[str, tuple[list[tuple[Facts, Environ]], list[tuple[Facts, Environ]]]] = {
    # id: facts that set the rule off, and their neighbours that must not
    "no_kernels": (
        [(change(STRIX_HALO, device={"built_for": ("gfx1030", "gfx1100")}), {})],
        [
            (change(STRIX_HALO, device={"built_for": ()}), {}),  # torch cannot say
            (change(STRIX_HALO, device={"built_for": ("gfx1151:xnack-",)}), {}),
            (change(STRIX_HALO, device={"built_for": ("gfx11-generic",)}), {}),
            (change(CUDA, device={"built_for": ("sm_70",)}), {}),
        ],
    ),
    "old_rocm": (
        [(OLD_ROCM, {}), (change(OLD_ROCM, device={"kernel_gfx": None, "gfx": "gfx1100"}), {})],  # known by its name
        [
            (change(OLD_ROCM, device={"built_for": ("gfx1151",)}), {}),  # somebody built it all the same
            (change(GFX1100, versions={"hip": "6.3.42134"}), {}),
            (change(OLD_ROCM, versions={"hip": "7.0.1"}), {}),
        ],
    ),
    "cpu_build": (
        [(change(CPU, device={"kernel_gfx": "gfx1151"}), {})],
        [(CPU, {}), (change(CUDA, device={"kernel_gfx": "gfx1036"}), {})],  # a desktop CPU's own small GPU
    ),
    "no_gpu": (
        [
            (change(STRIX_HALO, device={"gpu_visible": False}, platform={"kfd": k}), {})
            for k in ("denied", "absent", None)
        ],
        [(CPU, {}), (change(STRIX_HALO, device={"gpu_visible": None}), {})],
    ),
    "gfx_override": (
        [
            (STRIX_HALO, {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}),
            (change(STRIX_HALO, device={"gfx": "gfx1100"}), {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}),  # it worked
            (change(WINDOWS, device={"gfx": "gfx1100"}), {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}),
        ],
        [
            (STRIX_HALO, {"HSA_OVERRIDE_GFX_VERSION": "11.5.1"}),  # says what is
            (STRIX_HALO, {"HSA_OVERRIDE_GFX_VERSION": ""}),
            (GFX1100, {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}),
            (change(GFX1100, device={"kernel_gfx": "gfx1103"}), {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}),
        ],
    ),
    "benchmark": (
        [(change(STRIX_HALO, flags={"cudnn_benchmark": True}), {})],
        [
            (change(CUDA, flags={"cudnn_benchmark": True}), {}),
            (change(STRIX_HALO, flags={"cudnn_benchmark": None}), {}),
        ],
    ),
    "enforced_search": (
        [(STRIX_HALO, {"MIOPEN_FIND_ENFORCE": v}) for v in ("3", "search", "SEARCH_DB_UPDATE", "5")],
        [(STRIX_HALO, {"MIOPEN_FIND_ENFORCE": v}) for v in ("1", "NONE", "bogus", "")]
        + [(CPU, {"MIOPEN_FIND_ENFORCE": "3"})],
    ),
    "find_mode": (
        [(STRIX_HALO, {"MIOPEN_FIND_MODE": "bogus"})],
        [(STRIX_HALO, {"MIOPEN_FIND_MODE": v}) for v in ("2", "HYBRID", "normal")] + [(STRIX_HALO, {})],
    ),
    "miopen_off": (
        [
            (change(STRIX_HALO, flags={"cudnn_enabled": False}), {}),
            (IN_COMFYUI, {}),
            (IN_COMFYUI, {"COMFYUI_ENABLE_MIOPEN": "0"}),
        ],
        [
            (IN_COMFYUI, {"COMFYUI_ENABLE_MIOPEN": "1"}),
            (change(IN_COMFYUI, device={"gfx": "gfx1030"}), {}),
            (change(CUDA, flags={"cudnn_enabled": False}), {}),
        ],
    ),
    "miopen_value": (
        [(STRIX_HALO, {"COMFYUI_ENABLE_MIOPEN": "true"})],
        [(STRIX_HALO, {"COMFYUI_ENABLE_MIOPEN": v}) for v in ("1", "0", "")]
        + [(CUDA, {"COMFYUI_ENABLE_MIOPEN": "true"})],
    ),
    "uncached": (
        [
            (STRIX_HALO, {"PYTORCH_NO_HIP_MEMORY_CACHING": "1"}),
            (STRIX_HALO, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}),
            (CUDA, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
        ],
        [(CUDA, {"PYTORCH_NO_HIP_MEMORY_CACHING": "1"}), (CPU, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})],
    ),
    "expandable": (
        [
            (OLD_ROCM, {name: "max_split_size_mb:512, expandable_segments:True"})
            for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        ],
        [
            (OLD_ROCM, {"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:False"}),
            (STRIX_HALO, {"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"}),
            (CUDA, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ],
    ),
    "small_reach": (
        [(memory(SMALL_CARVE_OUT, gtt_total_bytes=15 * GIB, host_total_bytes=31 * GIB), {})],
        [
            (STRIX_HALO, {}),
            (SMALL_CARVE_OUT, {}),
            (memory(SMALL_CARVE_OUT, gtt_total_bytes=None), {}),
            (memory(SMALL_CARVE_OUT, gtt_total_bytes=7 * GIB, host_total_bytes=7 * GIB), {}),  # that is all there is
            (memory(GFX1100, gtt_total_bytes=1 * GIB, carve_out_total_bytes=8 * GIB), {}),  # a card
        ],
    ),
    "half_gtt": (
        [(memory(SMALL_CARVE_OUT, gtt_total_bytes=62 * GIB), {})],
        [
            (SMALL_CARVE_OUT, {}),
            (STRIX_HALO, {}),
            (memory(SMALL_CARVE_OUT, gtt_total_bytes=15 * GIB), {}),
            (WINDOWS, {}),
        ],
    ),
    "torch_sees_less": (
        [(memory(STRIX_HALO, torch_total_bytes=15 * GIB), {})],
        [
            (STRIX_HALO, {}),
            (memory(STRIX_HALO, torch_total_bytes=None), {}),
            (memory(GFX1100, torch_total_bytes=GIB), {}),
        ],
    ),
    "invalid_reading": (
        [(memory(STRIX_HALO, invalid_readings=("HIP: 2**64 - 1 bytes free of 536870912",)), {})],
        [(STRIX_HALO, {})],
    ),
    "attention": (
        [
            (change(STRIX_HALO, flags={"sdpa_flash": True}), {}),
            (change(STRIX_HALO, flags={"sdpa_mem_efficient": True}), {}),
        ],
        [
            (STRIX_HALO, {}),
            (change(CUDA, flags={"sdpa_flash": True}), {}),
            (change(STRIX_HALO, flags={"sdpa_flash": None}), {}),
        ],
    ),
    "conv3d": (
        [(change(CUDA, versions={"torch": "2.9.1+cu128", "cudnn": n}), {}) for n in ("91002", "91400")],
        [
            (CUDA, {}),
            (change(CUDA, versions={"torch": "2.9.1", "cudnn": "91500"}), {}),
            (change(CUDA, versions={"torch": "2.8.0", "cudnn": "91002"}), {}),
            (change(CUDA, versions={"torch": "2.9.1", "cudnn": None}), {}),
            (change(STRIX_HALO, versions={"torch": "2.9.1", "cudnn": "91002"}), {}),
        ],
    ),
    "emulated_bf16": (
        [(change(CUDA, device={"capability": (7, 5)}), {})],
        [(CUDA, {}), (change(CUDA, device={"capability": None}), {}), (STRIX_HALO, {})],
    ),
    "one_thread": (
        [(change(CPU, flags={"threads": 1}), {"OMP_NUM_THREADS": "1"})],
        [
            (change(CPU, flags={"threads": 1}), {}),  # somebody's --threads 1
            (CPU, {"OMP_NUM_THREADS": "1"}),  # --threads has overruled it
            (change(CPU, flags={"threads": 1}, platform={"cpu_count": 1}), {"OMP_NUM_THREADS": "1"}),
            (change(STRIX_HALO, flags={"threads": 1}), {"OMP_NUM_THREADS": "1"}),
        ],
    ),
    "wsl": (
        [(change(WINDOWS, platform={"wsl": True}, versions={"system": "Linux"}), {})],
        [(STRIX_HALO, {}), (change(CPU, platform={"wsl": True}), {})],
    ),
}


def test_every_rule_has_cases_and_a_public_page() -> None:
    assert sorted(CASES) == sorted(rule.id for rule in RULES)
    for rule in RULES:
        assert rule.reference.startswith("https://"), rule.id
        assert rule.severity in get_args(Severity)
        assert rule.advice
        assert "\n" not in rule.title + rule.advice


@pytest.mark.parametrize("rule", CASES)
def test_rule(rule: str) -> None:
    bad, good = CASES[rule]
    for facts, environ in bad:
        assert rule in found(facts, environ), (rule, environ)
    for facts, environ in good:
        assert rule not in found(facts, environ), (rule, environ)


@pytest.mark.parametrize("name", MACHINES)
def test_well_kept_machines_have_no_warnings(name: str) -> None:
    report = diagnose(MACHINES[name], {})
    assert report.findings == ()
    assert not report.has_errors
    assert warning_rows(report) == ()


def unknown(value: Any) -> Any:
    """A copy in which all that may be unknown is."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    kinds = {name: get_args(kind) for name, kind in get_type_hints(type(value)).items()}
    new = {f.name: None if type(None) in kinds[f.name] else unknown(getattr(value, f.name)) for f in fields(value)}
    return replace(value, **new)


@pytest.mark.parametrize("hip", [None, "7.2.53211"])
@pytest.mark.parametrize("name", MACHINES)
def test_what_is_unknown_is_neither_judged_nor_zero(name: str, hip: str | None) -> None:
    facts = change(unknown(MACHINES[name]), versions={"hip": hip})
    report = diagnose(facts, {"HSA_OVERRIDE_GFX_VERSION": "11.0.0", "OMP_NUM_THREADS": "1"})
    assert report.findings == ()
    text = render_report(report)
    assert "unknown" in text
    assert " 0 B" not in text
    assert "None" not in text
    sizes = {name: n for name, n in report.to_json()["memory"].items() if name.endswith("_bytes")}
    assert set(sizes.values()) == {None}


def test_errors_come_first() -> None:
    facts = change(STRIX_HALO, device={"built_for": ("gfx1100",)}, flags={"cudnn_benchmark": True, "sdpa_flash": True})
    report = diagnose(facts, {})
    assert [f.severity for f in report.findings] == ["error", "warning", "note"]
    assert report.has_errors
    assert [row.label for row in warning_rows(report)] == ["error", "warning"]
    assert all("\n" not in row.value for row in warning_rows(report))


def test_report_in_words() -> None:
    text = render_report(diagnose(STRIX_HALO, {"HSA_OVERRIDE_GFX_VERSION": "11.0.0", "MIOPEN_FIND_MODE": "2"}))
    for words in (
        "gfx1151", "APU", "40 compute units", "64.0 GiB", "limited by what HIP calls free", "7.2.53211", "12 records",
        "/home/me/.config/miopen", "not there yet", "HSA_OVERRIDE_GFX_VERSION=11.0.0", "164346", "without a search",
        "fp16_conv3d", "hipblaslt",
    ):  # fmt: skip
        assert words in text, words
    assert "nothing here is known to be bad" in render_report(diagnose(STRIX_HALO, {}))


def test_variables_are_explained() -> None:
    environ = {
        "MIOPEN_FIND_MODE": "bogus", "COMFYUI_ENABLE_MIOPEN": "1", "PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:512",
        "MIOPEN_FIND_MOED": "2", "HALO_VAE_PROFILES": "off", "halo_vae_data_dir": "x", "MIOPEN_DEBUG_CONV_GEMM": "0",
        "HOME": "/home/me", "OMPI_COMM_WORLD": "1", "SECRET_TOKEN": "abc",
    }  # fmt: skip
    report = diagnose(STRIX_HALO, environ)
    assert {v.name: v.value_known for v in report.variables} == {
        "MIOPEN_FIND_MODE": False,
        "COMFYUI_ENABLE_MIOPEN": True,
        "PYTORCH_HIP_ALLOC_CONF": None,
    }
    assert all(v.meaning for v in report.variables)
    assert {u.name: u.similar for u in report.unknown_variables} == {
        "MIOPEN_FIND_MOED": "MIOPEN_FIND_MODE",
        "HALO_VAE_PROFILES": "HALO_VAE_PROFILE",
        "halo_vae_data_dir": "HALO_VAE_DATA_DIR",
        "MIOPEN_DEBUG_CONV_GEMM": None,
    }
    text = render_report(report)
    assert "is MIOPEN_FIND_MODE meant?" in text
    assert "abc" not in text


def test_every_known_variable_has_a_meaning_of_one_line() -> None:
    for name, known in KNOWN.items():
        assert 0 < len(known.meaning) < 90, name
        assert "\n" not in known.meaning
        assert all(key == key.lower() for key in known.values or {})


def test_line_to_export_is_printed_where_it_is_unset() -> None:
    assert "export MIOPEN_FIND_MODE=FAST" in render_report(diagnose(STRIX_HALO, {}))
    assert "set MIOPEN_FIND_MODE=FAST" in render_report(diagnose(WINDOWS, {}))
    for facts, environ in ((STRIX_HALO, {"MIOPEN_FIND_MODE": "NORMAL"}), (CUDA, {}), (CPU, {})):
        assert diagnose(facts, environ).exports == ()


def test_json_is_one_object_of_all_facts() -> None:
    line = diagnose(STRIX_HALO, {"OMP_NUM_THREADS": "8"}).to_json()
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    assert (line["schema_version"], line["kind"]) == (1, "doctor")
    assert line["device"]["gfx"] == "gfx1151"
    assert line["memory"]["gtt_total_bytes"] == 31 * GIB
    assert line["variables"][0]["value"] == "8"
    assert set(line) == {
        "schema_version", "kind", "device", "memory", "versions", "flags", "platform", "kitchen", "folders",
        "history_lines", "pool", "tuned_entries", "variables", "unknown_variables", "exports", "findings",
    }  # fmt: skip


MARK = "sentinel"


def marked() -> Report:
    """A report with a mark in every path and every value of a variable, and with as many findings as fit together."""
    environ = dict.fromkeys(KNOWN, f"{MARK}-value") | {"HALO_VAE_NEW": f"{MARK}-value"}
    facts = change(
        STRIX_HALO, memory={"invalid_readings": (f"HIP memory: cannot open /{MARK}/lib",)},
        kitchen={
            "reason": f"/{MARK}/lib.so: not found",
            "backends": (KitchenBackend(name="hip", available=False, reason=f"/{MARK}/x.so"),),
        },
    )  # fmt: skip
    folders = tuple(replace(f, path=f"/home/{MARK}/{f.purpose}") for f in facts.folders)
    return diagnose(replace(facts, folders=folders), environ)


def test_redacted_report_holds_no_path_and_no_value() -> None:
    whole, redacted = marked(), marked().redacted()
    assert {"find_mode", "gfx_override", "uncached", "miopen_value"} <= {f.id for f in whole.findings}
    assert MARK in json.dumps(whole.to_json())
    assert MARK in render_report(whole)
    lines = " ".join(row.value for row in warning_rows(redacted))
    for text in (json.dumps(redacted.to_json()), render_report(redacted), lines):
        assert MARK not in text
        assert "/home" not in text


def test_redacted_report_keeps_what_helps() -> None:
    whole, redacted = marked(), marked().redacted()
    assert [f.id for f in redacted.findings] == [f.id for f in whole.findings]
    assert [v.name for v in redacted.variables] == sorted(KNOWN)
    assert redacted.facts.memory.carve_out_total_bytes == 64 * GIB
    assert [f.bytes for f in redacted.facts.folders] == [f.bytes for f in whole.facts.folders]
    assert set(redacted.to_json()) == set(whole.to_json())
    assert redacted.redacted() == redacted
