"""`halo-vae demo`: the first thing a new user runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halo_vae.profiling.cli import demo
from halo_vae.profiling.store import HistoryStore

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "demo"


def test_demo_gives_the_pictures_of_an_untiled_decode(halo: Callable[..., Any], tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    ended = halo("demo", "-o", tmp_path / "out", "--precision", "fp32", "--plan", "tiles", "--tile-size", 160)
    assert ended.code == 0, ended.err
    names = sorted(p.name for p in GOLDEN.glob("*.png"))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == names
    for name in names:
        ours, theirs = (np.array(image_module.open(d / name)).astype(int) for d in (tmp_path / "out", GOLDEN))
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() <= 1  # rounding at a step of the 255 may differ
    for words in ("Phases", "predicted peak", "cache hits", "astronaut.png"):
        assert words in ended.out
    assert len(HistoryStore().read().records) == len(names)


def test_demo_refuses_to_overwrite(halo: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "cat.npy").write_bytes(b"mine")
    ended = halo("demo", "-o", tmp_path, "--format", "npy")
    assert ended.code == 2
    assert [p.name for p in tmp_path.iterdir()] == ["cat.npy"]


def test_demo_without_its_files_says_so(
    halo: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "DATA", tmp_path)
    ended = halo("demo", "-o", tmp_path / "out")
    assert ended.code != 0
    assert "install it again" in ended.err
