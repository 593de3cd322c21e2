"""Picture files: names, pixel values, and what is left behind when something goes wrong."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from halo_vae.profiling.cli import outputs
from halo_vae.profiling.cli.command import CommandError, ExitCode


def test_target_paths_number_several_pictures() -> None:
    folder = Path("out")
    assert outputs.target_paths(folder, "cat", 1, "png") == (folder / "cat.png",)
    assert outputs.target_paths(folder, "cat", 2, "npy") == (folder / "cat_00000.npy", folder / "cat_00001.npy")


def test_check_targets_keeps_what_exists(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"mine")
    targets = outputs.target_paths(tmp_path, "a", 1, "png")
    with pytest.raises(CommandError, match="--force") as caught:
        outputs.check_targets(targets, force=False)
    assert caught.value.exit_code is ExitCode.BAD_INPUT
    outputs.check_targets(targets, force=True)


def test_check_targets_sees_two_latents_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="two latents"):
        outputs.check_targets([tmp_path / "a.png", tmp_path / "a.png"], force=True)


def test_check_targets_never_replaces_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.raises(CommandError, match="is a folder"):
        outputs.check_targets([tmp_path / "a.png"], force=True)


def test_prepare_folder_makes_parents_and_leaves_no_probe(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    outputs.prepare_folder(folder)
    assert list(folder.iterdir()) == []


def test_prepare_folder_refuses_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(CommandError, match="cannot write to"):
            outputs.prepare_folder(folder)


def test_png_cuts_as_comfyui_saves() -> None:
    image_module = pytest.importorskip("PIL.Image")
    # 0.999 * 255 = 254.745 becomes 254, not 255; values outside 0-1 are clipped.
    values = torch.tensor([0.0, 0.5, 0.999, 1.0, -0.2, 1.3]).reshape(1, 2, 3).numpy()
    pixels = np.array(image_module.open(io.BytesIO(outputs.encode_png(values))))
    assert pixels.tolist() == [[[0, 127, 254], [255, 0, 255]]]


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_png_takes_grey_colour_and_alpha(channels: int, mode: str) -> None:
    image_module = pytest.importorskip("PIL.Image")
    picture = image_module.open(io.BytesIO(outputs.encode_png(np.full((2, 3, channels), 0.5, np.float32))))
    assert (picture.mode, picture.size) == (mode, (3, 2))


def test_png_refuses_other_channels() -> None:
    pytest.importorskip("PIL.Image")
    with pytest.raises(CommandError, match="2 channels"):
        outputs.encode_png(np.zeros((2, 3, 2), np.float32))


def test_png_without_pillow_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match="pillow") as caught:
        outputs.check_format("png")
    assert caught.value.exit_code is ExitCode.FAILED
    outputs.check_format("npy")


def test_npy_keeps_every_bit() -> None:
    image = torch.rand(3, 4, 3).numpy()
    read = np.load(io.BytesIO(outputs.encode_npy(image)))
    assert read.dtype == np.float32
    assert np.array_equal(read, image)


def test_write_pictures_writes_each_to_its_file(tmp_path: Path) -> None:
    images = torch.rand(2, 3, 4, 3)
    targets = outputs.target_paths(tmp_path, "a", 2, "npy")
    outputs.write_pictures(images, targets, "npy")
    assert sorted(tmp_path.iterdir()) == list(targets)
    assert torch.equal(torch.from_numpy(np.stack([np.load(p) for p in targets])), images)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_write_leaves_the_old_file_alone(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    real = Path.write_bytes

    def half(self: Path, data: bytes) -> int:
        real(self, data[: len(data) // 2])
        raise error

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(type(error)):
        outputs.write_atomically(path, b"new and longer")
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]
    assert path.read_bytes() == b"old"


def test_whole_file_is_written_before_the_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "a.png", []
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        seen.append((Path(source).read_bytes(), path.exists()))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    outputs.write_atomically(path, b"data")
    assert seen == [(b"data", False)]
    assert path.read_bytes() == b"data"
