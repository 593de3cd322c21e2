"""Float32 in full for one decode, in processes that have set torch's old and new precisions in any order before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halo_vae.optim.scope import BackendFlags, backend_scope
from halo_vae.tests.flags import has_precisions, state


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not hasattr(os, "fork"):
        pytest.skip("the probe forks, which this system cannot")
    root = tmp_path_factory.mktemp("path")
    (root / "halo_vae").symlink_to(Path(__file__).resolve().parents[2], target_is_directory=True)
    search = filter(None, [os.environ.get("PYTHONPATH")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "from halo_vae.tests.optim.flag_probe import main; main()"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(root), *search)), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_float32_is_in_full_within_a_scope_whatever_was_set_before(histories: dict[str, Any]) -> None:
    names = ("cuda.matmul", "cuda.conv", "mkldnn.matmul", "mkldnn.conv")
    read = "float32_matmul_precision"
    for history, seen in histories.items():
        for inside in seen["inside"]:
            if has_precisions():
                assert {inside[name] for name in names} <= {"ieee", "none"}, history
            else:
                assert (inside["cudnn.allow_tf32"], inside[read]) == (False, "highest"), history


def test_float32_is_as_before_afterwards_also_where_old_and_new_settings_were_mixed(histories: dict[str, Any]) -> None:
    for history, seen in histories.items():
        assert seen["after"] == [seen["before"]] * 4, history
    rounded = {history for history, seen in histories.items() if seen["inside"] != seen["after"]}
    assert set(histories) - rounded <= {"old cudnn", "new conv"}  # torch itself starts with TF32 convolutions
    if has_precisions():
        refused = [h for h, s in histories.items() if "raises" in s["before"].values()]
        assert len(refused) >= 3  # histories after which torch refuses to tell allow_tf32 are among them


def test_what_follows_another_setting_goes_on_following_it(histories: dict[str, Any]) -> None:
    for history, seen in histories.items():
        assert seen["later"] == seen["untouched"], history


def test_float32_on_the_cpu_leaves_the_gpus_settings_alone() -> None:
    before = state()
    with backend_scope(BackendFlags(float32=("mkldnn",))) as in_force:
        inside = state()
        assert in_force.changes == ()
    assert inside == before


def in_full(backend: str) -> bool:
    """True where convolutions and products of a backend are not rounded."""
    now = state()
    if has_precisions():
        return {now[f"{backend}.matmul"], now[f"{backend}.conv"]} <= {"ieee", "none"}
    return now["float32_matmul_precision"] == "highest" and (backend == "mkldnn" or now["cudnn.allow_tf32"] is False)


@pytest.mark.parametrize("backends", [("cuda", "mkldnn"), ("mkldnn", "cuda")])
def test_backends_of_nested_scopes_add_up(backends: tuple[Any, Any]) -> None:
    outer, inner = backends
    before = state()
    assert not in_full("cuda")
    with backend_scope(BackendFlags(float32=(outer,))):
        with backend_scope(BackendFlags(float32=(inner,))):
            assert in_full("cuda")
            assert in_full("mkldnn")
        assert in_full(outer)
    assert state() == before
