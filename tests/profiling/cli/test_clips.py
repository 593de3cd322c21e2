"""Clips as files: names, frames, and what is left behind when something goes wrong."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from halo_vae.profiling.cli import clips
from halo_vae.profiling.cli.clips import ClipFiles, ClipTargets, NpyClip, clip_targets
from halo_vae.profiling.cli.command import CommandError, ExitCode
from halo_vae.profiling.cli.outputs import Format


def targets_in(folder: Path, n_clips: int = 1, n_frames: int = 5, fmt: Format = "npy") -> ClipTargets:
    return clip_targets(folder, "cat", n_clips, n_frames, fmt, Fraction(24))


def frames_of(n: int, size: int = 4) -> torch.Tensor:
    return torch.rand(n, size, size, 3, generator=torch.Generator().manual_seed(n))


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# Each row: clips, frames, format, the names.
NAMES = [
    (1, 2, "png", ["cat_00000.png", "cat_00001.png"]),
    (1, 1, "png", ["cat.png"]),  # one frame is a picture
    (2, 2, "png", ["cat_00000_00000.png", "cat_00000_00001.png", "cat_00001_00000.png", "cat_00001_00001.png"]),
    (1, 5, "npy", ["cat.npy"]),
    (1, 5, "mp4", ["cat.mp4"]),
    (2, 5, "webm", ["cat_00000.webm", "cat_00001.webm"]),
]


@pytest.mark.parametrize(("n_clips", "n_frames", "fmt", "wanted"), NAMES)
def test_names(n_clips: int, n_frames: int, fmt: Format, wanted: list[str]) -> None:
    assert [p.name for p in targets_in(Path("out"), n_clips, n_frames, fmt).paths] == wanted


def test_a_stem_with_dots_keeps_them() -> None:
    (path,) = clip_targets(Path("out"), "take.2", 1, 5, "mp4", Fraction(24)).paths
    assert path == Path("out/take.2.mp4")
    assert clip_targets(Path("out"), "take.2", 2, 5, "npy", Fraction(24)).paths[1] == Path("out/take.2_00001.npy")


@pytest.mark.parametrize("sizes", [(15,), (1,) * 15, (4, 4, 4, 3), (7, 0, 8)])
def test_frames_arrive_in_any_portions(sizes: tuple[int, ...], tmp_path: Path) -> None:
    frames, memory, first = frames_of(15), torch.empty(15, 4, 4, 3), 0
    with ClipFiles(targets_in(tmp_path, n_clips=3), force=False) as files:
        for part in frames.split(list(sizes)):
            files.take(first, memory[: len(part)].copy_(part))
            memory.fill_(9)  # memory that the caller uses again
            first += len(part)
        assert [n for n in names(tmp_path) if not n.startswith(".")] == []  # no name before all is written
    assert names(tmp_path) == ["cat_00000.npy", "cat_00001.npy", "cat_00002.npy"]
    for clip in range(3):
        array = np.load(tmp_path / f"cat_{clip:05d}.npy")
        assert array.dtype == np.float32
        assert np.array_equal(array, frames[5 * clip : 5 * clip + 5].numpy())


def test_png_frames_are_pictures(tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    frames = frames_of(5)
    with ClipFiles(targets_in(tmp_path, fmt="png"), force=False) as files:
        files.take(0, frames[:3])
        files.take(3, frames[3:])
    assert names(tmp_path) == [f"cat_{i:05d}.png" for i in range(5)]
    pixels = np.array(image_module.open(tmp_path / "cat_00004.png"))
    assert np.array_equal(pixels, (255.0 * frames[4].numpy()).astype(np.uint8))


def test_a_decode_that_begins_again_writes_no_frame_twice(tmp_path: Path) -> None:
    frames = frames_of(5)
    with ClipFiles(targets_in(tmp_path), force=False) as files:
        files.take(0, frames[:3])
        files.take(0, frames[:2])
        files.take(2, frames[2:])
    assert np.array_equal(np.load(tmp_path / "cat.npy"), frames.numpy())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("fmt", ["npy", "png"])
def test_a_stopped_decode_leaves_no_file_and_the_old_one_alone(
    error: BaseException, fmt: Format, tmp_path: Path
) -> None:
    targets = targets_in(tmp_path, n_clips=2, fmt=fmt)
    targets.paths[0].write_bytes(b"mine")
    with pytest.raises(type(error)) as caught, ClipFiles(targets, force=True) as files:  # noqa: PT012
        files.take(0, frames_of(7))  # one clip is whole, one is half
        raise error
    assert caught.value is error
    assert names(tmp_path) == [targets.paths[0].name]
    assert targets.paths[0].read_bytes() == b"mine"


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: NpyClip, frames: NDArray[np.float32]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(clips.NpyClip, "write", full)
    with (
        pytest.raises(CommandError, match=r"cannot write .*cat\.npy \(No space left on device\)") as caught,
        ClipFiles(targets_in(tmp_path), force=False) as files,
    ):
        files.take(0, frames_of(5))
    assert caught.value.exit_code is ExitCode.FAILED
    assert names(tmp_path) == []


def test_a_folder_that_is_gone_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot write"), ClipFiles(targets_in(tmp_path / "gone"), force=False):
        pass


def test_a_file_made_meanwhile_is_kept(tmp_path: Path) -> None:
    def decode() -> None:
        with ClipFiles(targets_in(tmp_path), force=False) as files:
            files.take(0, frames_of(5))
            (tmp_path / "cat.npy").write_bytes(b"theirs")

    with pytest.raises(CommandError, match="--force"):
        decode()
    assert names(tmp_path) == ["cat.npy"]
    assert (tmp_path / "cat.npy").read_bytes() == b"theirs"


def test_missing_frames_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4 of 5 frames"), ClipFiles(targets_in(tmp_path), force=False) as files:
        files.take(0, frames_of(4))
    assert names(tmp_path) == []


def test_a_gap_is_refused(tmp_path: Path) -> None:
    with ClipFiles(targets_in(tmp_path, n_frames=2), force=False) as files:
        files.take(0, frames_of(2))
        with pytest.raises(ValueError, match="frame 3 came where 2 is due"):
            files.take(3, frames_of(1))


@pytest.mark.parametrize("fmt", ["npy", "png"])
def test_memory_does_not_grow_with_the_clip(fmt: Format, tmp_path: Path) -> None:
    if fmt == "png":
        pytest.importorskip("PIL.Image")
    frames = frames_of(1, size=64)

    def peak(n: int) -> int:
        folder = tmp_path / str(n)
        folder.mkdir()
        tracemalloc.start()
        with ClipFiles(targets_in(folder, n_frames=n, fmt=fmt), force=False) as files:
            for i in range(n):
                files.take(i, frames)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(4)  # imports and caches
    assert peak(80) - peak(8) < 8 * frames.numel()  # two frames of 72 that came more
