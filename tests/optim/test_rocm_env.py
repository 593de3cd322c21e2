"""What MIOpen's variables mean, and who is told to set them: the user and child processes, never this process."""

from __future__ import annotations

import pytest

from halo_vae.optim.rocm_env import child_environment, find_mode, lines_to_export

SPELLINGS = [
    ("1", "NORMAL"), ("normal", "NORMAL"), ("2", "FAST"), (" fast ", "FAST"), ("3", "HYBRID"), ("HYBRID", "HYBRID"),
    ("5", "DYNAMIC_HYBRID"), ("Dynamic_Hybrid", "DYNAMIC_HYBRID"), ("6", "TRUST_VERIFY"), ("7", "TRUST_VERIFY_FULL"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "name"), SPELLINGS)
def test_every_spelling_of_a_mode(value: str, name: str) -> None:
    mode = find_mode({"MIOPEN_FIND_MODE": value})
    assert (mode.value, mode.name) == (value, name)
    assert "unknown" not in mode.meaning


@pytest.mark.parametrize("value", ["bogus", "", "0", "4", "8", "FAST,HYBRID"])
def test_an_unknown_mode_is_told_with_the_known_ones(value: str) -> None:
    mode = find_mode({"MIOPEN_FIND_MODE": value})
    assert (mode.value, mode.name) == (value, None)
    assert "unknown to MIOpen" in mode.meaning
    assert "2 or FAST" in mode.meaning


def test_no_mode() -> None:
    mode = find_mode({"PATH": "x"})
    assert (mode.value, mode.name) == (None, None)
    assert mode.meaning.startswith("not set")


def test_line_of_the_shell_of_the_system() -> None:
    assert [line.line for line in lines_to_export({}, "7.1.0")] == ["export MIOPEN_FIND_MODE=FAST"]
    assert [line.line for line in lines_to_export({}, "7.1.0", "Windows")] == ["set MIOPEN_FIND_MODE=FAST"]


def test_line_says_whether_miopen_is_known_to_be_on() -> None:
    assert lines_to_export({"COMFYUI_ENABLE_MIOPEN": "1"}, "7.1.0")[0].reason.startswith("MIOpen is on")
    assert lines_to_export({"COMFYUI_ENABLE_MIOPEN": "0"}, "7.1.0")[0].reason.startswith("where MIOpen is on")


@pytest.mark.parametrize(("purpose", "mode"), [("bench", "FAST"), ("tune", "NORMAL")])
def test_children_get_a_mode_and_the_parents_mapping_does_not(purpose: str, mode: str) -> None:
    environ = {"PATH": "x"}
    assert child_environment(environ, purpose) == {"PATH": "x", "MIOPEN_FIND_MODE": mode}  # type: ignore[arg-type]
    assert environ == {"PATH": "x"}
    own = {"MIOPEN_FIND_MODE": "hybrid"}
    assert child_environment(own, purpose) == own  # type: ignore[arg-type]
