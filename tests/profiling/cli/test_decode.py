"""`halo-vae decode` from files to files: pictures, names, records, and every way it may end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from halo_vae.optim.decode import Engine, open_decoder
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.weights import FileWeights
from halo_vae.profiling.cli.inputs import read_latent
from halo_vae.profiling.cli.progress import ProgressBar
from halo_vae.profiling.record import DecodeRecord
from halo_vae.profiling.store import HistoryStore

Run = Callable[..., "Ended"]  # noqa: F821 (the fixture's type)
MakeLatent = Callable[..., Path]


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def test_decode_writes_what_the_engine_gives(halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    latent, out = latent_file(), tmp_path / "out"
    ended = halo("decode", latent, "--vae", vae, "-o", out, "--format", "npy", "--device", "cpu")
    assert ended.code == 0, ended.err
    assert names(out) == ["small.npy"]
    assert ended.out.splitlines() == [str(out / "small.npy")]
    decoder = open_decoder(FileWeights(vae))
    wanted = Engine().decode(decoder, read_latent(latent), DecodeSettings())
    assert np.array_equal(np.load(out / "small.npy"), wanted[0].numpy())
    assert wanted.shape == (1, 40, 56, 3)


def test_png_and_npy_are_one_picture(halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    for fmt in ("png", "npy"):
        assert halo("decode", latent_file(), "--vae", vae, "-o", tmp_path / "out", "--format", fmt).code == 0
    values = np.load(tmp_path / "out" / "small.npy")
    pixels = np.array(image_module.open(tmp_path / "out" / "small.png"))
    assert np.array_equal(pixels, np.clip(255.0 * values, 0, 255).astype(np.uint8))
    assert pixels.std() > 1  # a picture, not a flat field


def test_batches_and_several_files(halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    one, three = latent_file("one.latent"), latent_file("three.latent", (3, 4, 5, 7))
    ended = halo("decode", one, three, "--vae", vae, "-o", tmp_path / "out", "--format", "npy")
    assert ended.code == 0, ended.err
    assert names(tmp_path / "out") == ["one.npy", "three_00000.npy", "three_00001.npy", "three_00002.npy"]
    pictures = [np.load(tmp_path / "out" / f"three_{i:05d}.npy") for i in range(3)]
    assert not np.allclose(pictures[0], pictures[1])


def test_one_frame_clip_is_a_picture(halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    clip = latent_file("clip.latent", (1, 4, 1, 5, 7))
    assert halo("decode", clip, "--vae", vae, "-o", tmp_path / "out", "--format", "npy").code == 0
    assert names(tmp_path / "out") == ["clip.npy"]


def test_json_is_one_record_per_line(halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    latents = [latent_file(f"{n}.latent") for n in "ab"]
    ended = halo("decode", *latents, "--vae", vae, "-o", tmp_path / "out", "--format", "npy", "--json")
    records = [DecodeRecord.from_json(json.loads(line)) for line in ended.out.splitlines()]
    assert [r.image_shape for r in records] == [(1, 40, 56, 3)] * 2
    assert all(str(tmp_path / "out" / f"{n}.npy") in ended.err for n in "ab")
    assert HistoryStore().read().records == tuple(records)


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (("--method", "exact"), "method", "exact"),
        (("--method", "blended"), "method", "blended"),
        (("--precision", "fp32"), "precision_mode", "fp32"),
        (("--plan", "tiles"), "plan", "tiles"),
        (("--tile-size", "32"), "tile_size", 32),
        (("--overlap", "16"), "overlap", 16),
        (("--chunk-frames", "8"), "chunk_frames", 8),
        (("--chunk-overlap", "3"), "chunk_overlap", 3),
        (("--cudnn", "off"), "cudnn", "off"),
        (("--seed", "5"), "seed", 5),
    ],
)
def test_flags_reach_the_decode(
    flags: tuple[str, str], field: str, value: object,
    halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path,
) -> None:  # fmt: skip
    ended = halo("decode", latent_file(), "--vae", vae, "-o", tmp_path / "out", "--format", "npy", "--json", *flags)
    assert ended.code == 0, ended.err
    record = DecodeRecord.from_json(json.loads(ended.out))
    assert getattr(record.request.settings, field) == value


def test_threads_are_set(
    halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    arguments = ("decode", latent_file(), "--vae", vae, "-o", tmp_path / "out", "--format", "npy")
    assert halo(*arguments, "--threads", 3).code == 0
    assert asked == [3]
    assert halo(*arguments, "--force", "--threads", 0).code == 2
    assert asked == [3]


def test_blended_says_that_it_is_approximate(halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    latent = latent_file("wide.latent", (1, 4, 6, 24))
    flags = ("--vae", vae, "--format", "npy", "--json")
    tiled = halo("decode", latent, *flags, "-o", tmp_path / "b", "--method", "blended", "--tile-size", 64)
    exact = halo("decode", latent, *flags, "-o", tmp_path / "e", "--method", "exact")
    plan = DecodeRecord.from_json(json.loads(tiled.out)).plan
    assert plan is not None
    assert (plan.method, plan.approximate, plan.tile_grid[1] > 1) == ("blended", True, True)
    difference = np.abs(np.load(tmp_path / "b" / "wide.npy") - np.load(tmp_path / "e" / "wide.npy"))
    assert exact.code == 0
    assert 0 < difference.mean() < 0.2  # near it, and not it: its tiles see their own statistics


def test_blended_of_one_tile_is_exact(halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    for method in ("blended", "exact"):
        flags = ("--vae", vae, "-o", tmp_path / method, "--format", "npy", "--method", method)
        assert halo("decode", latent_file(), *flags).code == 0
    pictures = [np.load(tmp_path / m / "small.npy") for m in ("blended", "exact")]
    assert np.abs(pictures[0] - pictures[1]).max() <= 1e-5


# -- what is refused: one sentence, exit code 2, nothing written


def _vae_without(vae: Path, path: Path, key: str) -> Path:
    tensors = load_file(vae)
    del tensors[key]
    save_file(tensors, path)
    return path


BAD = [  # case, sentence
    ("missing latent", "does not exist"),
    ("missing vae", "does not exist"),
    ("a latent as the vae", "small.latent is not a VAE"),
    ("vae lacks a tensor", "decoder.conv_in.weight"),
    ("truncated vae", "truncated"),
    ("wrong channels", "16 channels"),
    ("three axes", "[4, 5, 7]"),
    ("empty batch", "empty"),
    ("nan", "NaN"),
    ("long clip", "as this kl decoder makes pictures and no clips"),
    ("tile 1", "tile_size is 1"),
    ("tile -1", "tile_size is -1"),
    ("overlap", "overlap is -8"),
    ("seed", "seed is -2"),
    ("threads", "--threads is 0"),
    ("device", "nonsense"),
    ("gpu that is not there", "cuda:99"),
    ("output is a file", "cannot write to"),
    ("target exists", "--force"),
    ("one name twice", "two latents"),
]


def bad_arguments(case: str, vae: Path, latent_file: MakeLatent, tmp: Path) -> list[object]:
    latent, out, flags = latent_file(), tmp / "out", []
    if case == "missing latent":
        latent = tmp / "none.latent"
    elif case == "missing vae":
        vae = tmp / "none.safetensors"
    elif case == "a latent as the vae":
        vae = latent
    elif case == "vae lacks a tensor":
        vae = _vae_without(vae, tmp / "vae.safetensors", "decoder.conv_in.weight")
    elif case == "truncated vae":
        (tmp / "vae.safetensors").write_bytes(vae.read_bytes()[:-1000])
        vae = tmp / "vae.safetensors"
    elif case == "wrong channels":
        latent = latent_file("flux.latent", (1, 16, 5, 7))
    elif case == "three axes":
        latent = latent_file("flat.latent", (4, 5, 7))
    elif case == "empty batch":
        latent = latent_file("none.latent", (0, 4, 5, 7))
    elif case == "nan":
        np.save(tmp / "nan.npy", np.full((1, 4, 5, 7), np.nan, np.float32))
        latent = tmp / "nan.npy"
    elif case == "long clip":
        latent = latent_file("clip.latent", (1, 4, 3, 5, 7))
    elif case == "output is a file":
        out = tmp / "file" / "below"
        (tmp / "file").write_bytes(b"mine")
    elif case == "target exists":
        out.mkdir()
        (out / "small.npy").write_bytes(b"mine")
    elif case == "one name twice":
        np.save(tmp / "small.npy", np.zeros((1, 4, 5, 7), np.float32))
        flags = [tmp / "small.npy"]
    else:
        words = {"tile 1": ("--tile-size", 1), "tile -1": ("--tile-size", -1), "overlap": ("--overlap", -8)}
        words |= {"seed": ("--seed", -2), "threads": ("--threads", 0), "device": ("--device", "nonsense")}
        flags = list((words | {"gpu that is not there": ("--device", "cuda:99")})[case])
    # the good latent first: nothing of it may be written either
    return ["decode", latent_file("good.latent"), latent, "--vae", vae, "-o", out, "--format", "npy", *flags]


@pytest.mark.parametrize(("case", "says"), BAD)
def test_bad_input_is_one_sentence(
    case: str, says: str, halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path
) -> None:
    arguments = bad_arguments(case, vae, latent_file, tmp_path)
    if case == "one name twice":  # the extra latent belongs with the others
        arguments.insert(1, arguments.pop())
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    ended = halo(*arguments)
    assert ended.code == 2, ended.err
    assert says in ended.err
    assert ended.err.startswith("halo-vae: ")
    assert ended.err.count("\n") == 1
    assert ended.out == ""
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert HistoryStore().read().records == ()


# -- how it may end otherwise


def test_force_overwrites(halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    (tmp_path / "small.npy").write_bytes(b"old")
    ended = halo("decode", latent_file(), "--vae", vae, "-o", tmp_path, "--format", "npy", "--force")
    assert ended.code == 0, ended.err
    assert np.load(tmp_path / "small.npy").shape == (40, 56, 3)


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [(KeyboardInterrupt(), 130, "interrupted"), (MemoryError(), 1, "out_of_memory")],
)
def test_stopped_halfway_leaves_no_file(
    error: BaseException, code: int, status: str,
    halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def stop(self: ProgressBar, done: int, total: int) -> None:
        if done * 2 > total:
            raise error

    monkeypatch.setattr(ProgressBar, "progress", stop)
    ended = halo("decode", latent_file(), "--vae", vae, "-o", tmp_path / "out", "--format", "npy")
    assert ended.code == code
    assert names(tmp_path / "out") == []
    assert ended.out == ""
    assert [r.status.value for r in HistoryStore().read().records] == [status]


def test_full_disk_is_a_failure(
    halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    ended = halo("decode", latent_file(), "--vae", vae, "-o", tmp_path / "out", "--format", "npy")
    assert ended.code == 1
    assert f"cannot write {tmp_path / 'out' / 'small.npy'} (No space left on device)" in ended.err
    assert names(tmp_path / "out") == []


def test_unwritable_history_is_a_warning(
    halo: Run, vae: Path, latent_file: MakeLatent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("HALO_VAE_DATA_DIR", str(tmp_path / "file" / "below"))
    ended = halo("decode", latent_file(), "--vae", vae, "-o", tmp_path / "out", "--format", "npy")
    assert ended.code == 0
    assert "history" in ended.err
    assert names(tmp_path / "out") == ["small.npy"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the system has no SIGKILL")
def test_killed_while_writing_leaves_no_half_picture(vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        write = Path.write_bytes
        def half(self, data):
            write(self, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        Path.write_bytes = half
        from halo_vae.profiling.cli import main
        main(sys.argv[1:])
        """
    )
    import halo_vae

    # the package under its own name, wherever this run has it from
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "halo_vae").symlink_to(Path(halo_vae.__file__).resolve().parent, target_is_directory=True)
    arguments = ["decode", latent_file(), "--vae", vae, "-o", tmp_path / "out", "--format", "npy"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "path")}, capture_output=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [n for n in names(tmp_path / "out") if not n.startswith(".")] == []
