"""Caches of a run's own: every variable leads into its folder, and the user's caches are touched on request only."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halo_vae.optim.files import user_dir
from halo_vae.optim.tuning import FILE_NAME
from halo_vae.profiling.bench.isolation import FOLDERS, empty_caches, purge, real_caches
from halo_vae.profiling.bench.page_cache import bring_in, drop, resident_pages


def test_every_cache_lies_below_the_runs_folder(tmp_path: Path) -> None:
    environ = empty_caches(tmp_path / "run").environment({"PATH": "/bin", "MIOPEN_USER_DB_PATH": "/home/me/db"})
    for name in FOLDERS:
        assert Path(environ[name]).parent == tmp_path / "run"
        assert list(Path(environ[name]).iterdir()) == []
    assert environ["PATH"] == "/bin"
    assert environ["MIOPEN_FIND_MODE"] == "FAST"
    assert user_dir("cache", environ) == tmp_path / "run" / "halo-vae"  # the tuning store's
    assert user_dir("data", environ) == tmp_path / "run" / "history"


def test_what_the_user_set_stays_where_it_is_no_cache(tmp_path: Path) -> None:
    given = {"MIOPEN_FIND_MODE": "NORMAL", "OMP_WAIT_POLICY": "active"}
    environ = empty_caches(tmp_path / "run").environment(given)
    assert {name: environ[name] for name in given} == given


def test_keys_of_two_runs_differ_and_a_copy_keeps_its_own(tmp_path: Path) -> None:
    first, second = empty_caches(tmp_path / "a"), empty_caches(tmp_path / "b")
    assert first.prefix != second.prefix
    (first.root / "triton" / "kernel").write_text("x")
    copy = first.copy(tmp_path / "c")
    assert copy.prefix == first.prefix
    assert (tmp_path / "c" / "triton" / "kernel").read_text() == "x"
    copy.remove()
    assert not (tmp_path / "c").exists()
    assert (first.root / "triton" / "kernel").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="names POSIX folders")
def test_real_caches_are_found_and_emptied_but_for_what_is_spared(tmp_path: Path) -> None:
    for name in ("cache", "db", "kernels", "triton", "inductor", "history"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "cache" / FILE_NAME).write_text("{}")
    (tmp_path / "cache" / "bench.lock").write_text("{}")
    environ = {
        "HALO_VAE_CACHE_DIR": str(tmp_path / "cache"), "HALO_VAE_DATA_DIR": str(tmp_path / "history"),
        "MIOPEN_USER_DB_PATH": str(tmp_path / "db"), "MIOPEN_CUSTOM_CACHE_DIR": str(tmp_path / "kernels"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }  # fmt: skip
    found = real_caches(environ)
    assert sorted(path.name for path in found) == ["cache", "db", "inductor", "kernels", "triton"]
    assert purge(found, frozenset({"bench.lock"})) == ()
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["bench.lock"]
    assert all(list((tmp_path / name).iterdir()) == [] for name in ("db", "kernels", "triton", "inductor"))
    assert (tmp_path / "history" / "file").exists()


def test_purge_does_not_follow_links_and_tells_what_it_could_not_do(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "link").symlink_to(tmp_path / "mine")
    (failure,) = purge((tmp_path / "cache", tmp_path / "none"))
    assert "none" in failure
    assert (tmp_path / "mine" / "file").exists()
    assert list((tmp_path / "cache").iterdir()) == []


# -- the page cache


def test_file_is_brought_in(tmp_path: Path) -> None:
    path = tmp_path / "vae"
    path.write_bytes(b"x" * 50_000)
    bring_in(path)
    assert resident_pages(path) in (None, -(-50_000 // mmap.PAGESIZE))


def test_dropped_is_said_only_where_no_page_is_left(tmp_path: Path) -> None:
    path = tmp_path / "vae"
    path.write_bytes(b"x" * 50_000)
    bring_in(path)
    said = drop(path)
    assert said in ("dropped", "unverified")  # a file system of memory keeps its pages
    assert (said == "dropped") == (resident_pages(path) == 0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="maps a file in another process")
def test_file_that_another_process_maps_is_not_said_to_be_dropped(tmp_path: Path) -> None:
    path = tmp_path / "vae"
    path.write_bytes(b"x" * 50_000)
    code = (
        "import mmap, sys\nfile = open(sys.argv[1], 'r+b')\nmapped = mmap.mmap(file.fileno(), 0)\n"
        "total = sum(mapped[::4096])\nprint('mapped', flush=True)\nsys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"mapped\n"
        assert drop(path) == "unverified"
    finally:
        holder.communicate()


def test_system_without_fadvise_or_mincore_is_unverified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "vae"
    path.write_bytes(b"x")
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert drop(path) == "unverified"


def test_mincore_that_fails_is_unverified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "vae"
    path.write_bytes(b"x")
    monkeypatch.setattr("halo_vae.profiling.bench.page_cache.resident_pages", lambda path: None)
    assert drop(path) == "unverified"


def test_empty_file_has_no_pages(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert resident_pages(tmp_path / "empty") == 0
