"""RF: ROCm, MIOpen and global flags."""

from __future__ import annotations

import ast
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halo_vae.nodes.decode_latent import decode_latent
from halo_vae.optim import scope
from halo_vae.optim.decode import Engine
from halo_vae.optim.device import DeviceProfile, describe_device
from halo_vae.optim.rocm_env import child_environment, find_mode, lines_to_export
from halo_vae.optim.settings import DecodeSettings
from halo_vae.tests.cases.exact import exact_kl
from halo_vae.tests.cases.support import Recorder
from halo_vae.tests.fixtures import ConvDec, FakeVAE, Logged, latent
from halo_vae.tests.flags import PREFIXES, booleans, given, state

ROOT = Path(__file__).resolve().parents[2]
PRECISIONS = ("auto", "fp32", "bf16", "fp16", "mixed")
WANTED = {"leave": None, "on": True, "off": False}


def gfx1151() -> DeviceProfile:
    """This CPU under the name and the rules of the chip."""
    return replace(describe_device("cpu"), kind="hip", family="rdna3.5", gfx="gfx1151", convolution="direct")


@pytest.fixture(autouse=True)
def nobody_warned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Warnings of once per process come once per test; no scope stays open."""
    monkeypatch.setattr(scope, "_REGISTRY", scope._Registry())
    yield
    assert scope._REGISTRY.entries == []


class Looks(Logged):
    """Notes the flags at each call of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = ConvDec(), list[dict[str, bool]]()

    def run(self, z: torch.Tensor) -> torch.Tensor:
        self.seen.append(booleans())
        weights = ((w.to(z.dtype), b.to(z.dtype)) for w, b in zip(self.inner.w, self.inner.b, strict=True))
        for i, (w, b) in enumerate(weights):
            if i > 0:
                z = torch.nn.functional.silu(z).repeat_interleave(2, -1).repeat_interleave(2, -2)
            z = torch.nn.functional.conv2d(z, w, b, padding=1)
        return z


def flags_within(method: str, **asked: Any) -> list[dict[str, bool]]:
    """The flags while a decode runs: at each call of an opaque decoder, at each tile of an exact one."""
    chosen = DecodeSettings(method=method, tile_size=64, **asked)  # type: ignore[arg-type]
    z = {"samples": latent((1, 4, 12, 12))}
    if method == "blended":
        model = Looks()
        decode_latent(z, FakeVAE(model), chosen, profile=gfx1151())
        return model.seen
    seen: list[dict[str, bool]] = []
    heard = Recorder(on_tile=lambda i, n: seen.append(booleans()))
    decoder, engine = exact_kl(), Engine(profile=gfx1151())
    decode_latent(z, FakeVAE(ConvDec()), chosen, decoder=decoder, engine=engine, observer=heard)
    return seen


# -- RF-1


@pytest.mark.parametrize("enabled", [True, False])  # ComfyUI turns it off on AMD
@pytest.mark.parametrize("miopen", ["leave", "on", "off"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("method", ["exact", "blended"])
def test_rf_1_flags_are_as_before_after_a_decode(method: str, precision: str, miopen: str, enabled: bool) -> None:
    with given(cudnn=enabled, fp16_reduced_sums=True, bf16_reduced_sums=True, sdpa_flash=True):
        before = state()
        within = flags_within(method, precision_mode=precision, cudnn=miopen)
        assert state() == before
    assert len(within) > 3
    wanted = WANTED[miopen]
    assert {flags["cudnn"] for flags in within} == {enabled if wanted is None else wanted}
    for flags in within:
        assert not flags["fp16_reduced_sums"]
        assert not flags["bf16_reduced_sums"]
        assert not flags.get("fp16_accumulation", False)
        # the tiny decoder's head of 32 is safe with every kernel; of an opaque decoder nothing is known
        assert flags["sdpa_flash"] is (method == "exact")
        assert flags["sdpa_math"]


@pytest.mark.parametrize("name", ["fp16_reduced_sums", "bf16_reduced_sums", "sdpa_math", "sdpa_flash", "benchmark"])
@pytest.mark.parametrize("initial", [True, False])
def test_rf_1_flags_are_as_before_whatever_they_were(name: str, initial: bool) -> None:
    with given(**{name: initial}):
        before = state()
        flags_within("blended")
        flags_within("exact")
        assert state() == before


# -- RF-3

PRESETS: list[dict[str, Any]] = [
    {}, {"precision_mode": "fp16"}, {"precision_mode": "mixed"}, {"plan": "strips"}, {"plan": "tiles"},
    {"cudnn": "on"}, {"cudnn": "off"}, {"kernel_backend": "torch"}, {"tensor_layout_optimization": False},
    {"batch_optimization": False, "memory_prefetching": False, "advanced_caching": False},
]  # fmt: skip


@pytest.mark.parametrize("method", ["exact", "blended"])
def test_rf_3_the_search_is_never_switched_on(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    with given(benchmark=False):
        for preset in PRESETS:
            within = flags_within(method, **preset)
            assert len(within) > 3
            assert {flags["benchmark"] for flags in within} == {False}, preset
            assert not booleans()["benchmark"]


def test_rf_3_a_search_that_the_user_switched_on_stays_on_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    with given(benchmark=True, cudnn=True), caplog.at_level(logging.WARNING):
        for method in ("exact", "blended"):
            for preset in PRESETS:
                within = flags_within(method, **preset)
                assert {flags["benchmark"] for flags in within} == {True}, preset
                assert booleans()["benchmark"]
    assert len([r for r in caplog.records if "cudnn.benchmark is on" in r.getMessage()]) == 1


# -- RF-4

FIND_MODES = [  # set to, name, word in its meaning
    (None, None, "not set"), ("2", "FAST", "without a search"), ("HYBRID", "HYBRID", "database"),
    ("normal", "NORMAL", "minutes"), ("bogus", None, "unknown"),
]  # fmt: skip


@pytest.mark.parametrize("hip", ["7.1.0", None])
@pytest.mark.parametrize("switch", [None, "1"])
@pytest.mark.parametrize(("value", "name", "word"), FIND_MODES)
def test_rf_4_the_users_mode_is_kept_and_explained(
    value: str | None, name: str | None, word: str, switch: str | None, hip: str | None
) -> None:
    environ = {"PATH": "x"}
    environ |= {} if value is None else {"MIOPEN_FIND_MODE": value}
    environ |= {} if switch is None else {"COMFYUI_ENABLE_MIOPEN": switch}
    before = dict(environ)
    mode = find_mode(environ)
    assert (mode.value, mode.name) == (value, name)
    assert word in mode.meaning
    lines = [line.line for line in lines_to_export(environ, hip)]
    assert lines == (["export MIOPEN_FIND_MODE=FAST"] if value is None and hip is not None else [])
    tuned, benched = child_environment(environ, "tune"), child_environment(environ, "bench")
    assert environ == before
    assert (tuned.pop("MIOPEN_FIND_MODE"), benched.pop("MIOPEN_FIND_MODE")) == (
        (value, value) if value is not None else ("NORMAL", "FAST")
    )
    before.pop("MIOPEN_FIND_MODE", None)
    assert tuned == benched == before


@pytest.mark.parametrize("method", ["exact", "blended"])
@pytest.mark.parametrize("value", [None, "2", "bogus"])
@pytest.mark.parametrize("hip", ["7.1.0", None])
def test_rf_4_a_decode_writes_no_variable(
    method: str, value: str | None, hip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.delenv("MIOPEN_FIND_MODE", raising=False)
    if value is not None:
        monkeypatch.setenv("MIOPEN_FIND_MODE", value)
    before = dict(os.environ)
    flags_within(method, cudnn="on")
    assert dict(os.environ) == before


def environment_writes(source: str) -> list[int]:
    """Lines that change the environment of their own process."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            written: ast.expr = node.value
        elif isinstance(node, ast.AugAssign):
            written = node.target
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            named = node.func.attr in ("setdefault", "update", "pop", "clear", "popitem", "__setitem__")
            written = node.func.value if named else node.func
        else:
            continue
        if ast.unparse(written) in ("os.environ", "environ", "os.putenv", "os.unsetenv"):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "source",
    [
        "os.environ['MIOPEN_FIND_MODE'] = '2'", "os.environ.setdefault('A', 'b')", "os.putenv('A', 'b')",
        "del os.environ['A']", "os.environ |= {'A': 'b'}", "def f():\n    os.environ.update(A='b')",
    ],
)  # fmt: skip
def test_rf_4_the_search_for_writes_finds_them(source: str) -> None:
    assert len(environment_writes(source)) == 1


def test_rf_4_no_file_writes_the_environment() -> None:
    files = [ROOT / "__init__.py", *(p for d in ("nodes", "optim", "profiling") for p in (ROOT / d).rglob("*.py"))]
    assert len(files) > 100
    assert {str(p.relative_to(ROOT)): environment_writes(p.read_text("utf-8")) for p in files} == {
        str(p.relative_to(ROOT)): [] for p in files
    }


# -- RF-10

IMPORTS = textwrap.dedent(
    """
    import importlib, json, logging, os, sys, warnings
    import torch
    from halo_vae.tests.flags import state

    def everything():
        return state() | {
            "all variables": dict(os.environ),
            "root logger": [logging.root.level, [repr(h) for h in logging.root.handlers]],
            "warning filters": [repr(f) for f in warnings.filters],
            "path": list(sys.path),
        }

    before = everything()
    for name in NAMES:
        importlib.import_module(name)
    after = everything()
    print(json.dumps({
        "changed": {k: [str(before[k]), str(after[k])] for k in before if before[k] != after[k]},
        "loaded": [n for n in NAMES if n in sys.modules],
    }))
    """
)


def modules_without_a_host() -> list[str]:
    """Every module of the package but those that import a host at once."""
    hosted = {"comfy_host", "extension"}
    files = [p for d in ("optim", "profiling", "nodes") for p in sorted((ROOT / d).rglob("*.py"))]
    parts = [p.relative_to(ROOT).with_suffix("").parts for p in files]
    plain = [p[:-1] if p[-1] == "__init__" else p for p in parts if p[-1] not in {"__main__"} | hosted]
    return [".".join(("halo_vae", *p)) for p in plain]


@pytest.mark.parametrize(
    "variables", [{}, {"MIOPEN_FIND_MODE": "bogus", "PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:64"}]
)
def test_rf_10_an_import_changes_nothing(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "halo_vae").symlink_to(ROOT, target_is_directory=True)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(PREFIXES)}
    names = modules_without_a_host()
    assert {"halo_vae.optim.decode", "halo_vae.nodes.session", "halo_vae.profiling.cli.app"} <= set(names)
    search = filter(None, [os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.replace("NAMES", repr(names))],
        env=environ | variables | {"PYTHONPATH": os.pathsep.join((str(tmp_path), *search))}, cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["changed"] == {}
    assert seen["loaded"] == names
