"""The frame around the commands: help, exit codes, and that asking for help costs nothing."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

import halo_vae
from halo_vae.optim import errors
from halo_vae.optim.settings import DecodeSettings, KernelBackend, Method, PrecisionMode, Strategy
from halo_vae.profiling.cli import app, options
from halo_vae.profiling.cli.command import ExitCode, command_name
from halo_vae.profiling.cli.progress import ProgressBar

ROOT = Path(halo_vae.__file__).resolve().parent
DOCS = ROOT / "docs" / "cli.md"


@pytest.mark.parametrize("command", [command_name(c) for c in app.COMMANDS])
def test_every_command_has_help(command: str, halo: Callable[..., Any]) -> None:
    ended = halo(command, "--help")
    assert ended.code == 0
    assert "exit codes" in ended.out
    assert command in halo("--help").out


def test_version_is_told(halo: Callable[..., Any]) -> None:
    ended = halo("--version")
    assert (ended.code, ended.out) == (0, f"halo-vae {halo_vae.__version__}\n")


def test_choices_are_those_of_the_settings() -> None:
    assert tuple(m for m in get_args(Method) if m != "stock") == options.METHODS  # stock needs a host
    assert get_args(PrecisionMode) == options.PRECISIONS
    assert get_args(Strategy) == options.STRATEGIES
    assert get_args(KernelBackend) == options.BACKENDS


def test_kernel_flags_reach_the_settings() -> None:
    args = app.build_parser().parse_args(["demo", "--kernel-backend", "shifted_gemm", "--fp16-accumulation"])
    assert options.settings_from(args) == DecodeSettings(kernel_backend="shifted_gemm", fp16_accumulation=True)


def test_without_flags_the_settings_are_the_defaults() -> None:
    args = app.build_parser().parse_args(["demo"])
    assert options.settings_from(args) == DecodeSettings()


@pytest.mark.parametrize("argv", [(), ("paint",), ("decode",), ("decode", "a.latent", "--tile-size", "big")])
def test_usage_errors_are_exit_code_2(argv: tuple[str, ...], halo: Callable[..., Any]) -> None:
    ended = halo(*argv)
    assert ended.code == 2
    assert "error:" in ended.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.LatentError("x"), ExitCode.BAD_INPUT),
        (errors.SettingsError("x"), ExitCode.BAD_INPUT),
        (errors.WeightsError("x"), ExitCode.BAD_INPUT),
        (errors.UnknownDecoderError("x", keys_seen=(), families=()), ExitCode.BAD_INPUT),
        (errors.PlanError("x"), ExitCode.FAILED),
        (errors.NonFiniteError("x", op="a", dtype="float16"), ExitCode.FAILED),
        (errors.DecodeCancelled("x"), ExitCode.CANCELLED),
        (OSError(28, "x"), ExitCode.FAILED),
        (RuntimeError("CUDA out of memory"), ExitCode.FAILED),
        (RuntimeError("size mismatch"), None),  # a fault of ours: show the traceback
        (KeyError("x"), None),
    ],
)
def test_classify_knows_whose_fault_it_is(error: Exception, code: ExitCode | None) -> None:
    assert app.classify(error) is code


def test_faults_of_ours_are_not_hidden(halo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setattr(app.COMMANDS[-1], "run", fail, raising=False)
    with pytest.raises(KeyError):
        halo(command_name(app.COMMANDS[-1]))


def python(tmp_path: Path, code: str, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that finds the package by its name."""
    (tmp_path / "path").mkdir(exist_ok=True)
    link = tmp_path / "path" / "halo_vae"
    if not link.exists():
        link.symlink_to(ROOT, target_is_directory=True)
    env = os.environ | {"PYTHONPATH": str(link.parent)} | env
    return subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=tmp_path, env=env,
        capture_output=True, text=True, encoding="utf-8", check=False, timeout=300,
    )  # fmt: skip


def test_help_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, json\nfrom halo_vae.profiling.cli import main\nmain(['decode', '--help'])\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    loaded = json.loads(python(tmp_path, code).stdout.splitlines()[-1])
    assert {"torch", "numpy", "PIL", "tqdm"} & set(loaded) == set()


def test_module_is_the_command_line(tmp_path: Path) -> None:
    code = "import runpy; runpy.run_module('halo_vae.profiling', run_name='__main__', alter_sys=True)"
    assert "usage: halo-vae" in python(tmp_path, code, "--help").stdout


def test_plain_terminals_get_plain_characters(tmp_path: Path, vae: Path) -> None:
    code = "import sys\nfrom halo_vae.profiling.cli import main\nsys.exit(main(sys.argv[1:]))"
    done = python(tmp_path, code, "plan", "--vae", str(vae), "--size", "64x64", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "Halo VAE" in done.stdout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    for stream, drawn in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with ProgressBar("cat") as bar:
            bar.progress(300, 1000)
            bar.progress(1000, 1000)
        assert ("cat" in stream.getvalue()) is drawn
        assert bool(stream.getvalue()) is drawn


def test_docs_name_every_command_flag_and_exit_code() -> None:
    text = DOCS.read_text("utf-8")
    parser = app.build_parser()
    (commands,) = (a for a in parser._actions if a.choices)
    assert commands.choices is not None
    for name, sub in dict(commands.choices).items():
        assert f"halo-vae {name}" in text
        flags = {option for action in sub._actions for option in action.option_strings if option.startswith("--")}
        assert {f for f in flags - {"--help"} if f"`{f}" not in text} == set()
    for code in ExitCode:
        assert f"| {code.value} |" in text
