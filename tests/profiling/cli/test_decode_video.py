"""`halo-vae decode` and `halo-vae plan` of clips: frames, files, chunks, and every way it may end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from halo_vae.optim.decode import Engine, open_decoder
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.weights import FileWeights
from halo_vae.profiling.cli import movies
from halo_vae.profiling.cli.inputs import read_latent
from halo_vae.profiling.cli.outputs import pixels_of
from halo_vae.profiling.cli.progress import ProgressBar
from halo_vae.profiling.record import DecodeRecord
from halo_vae.profiling.store import HistoryStore
from halo_vae.tests.goldens import golden

Run = Callable[..., Any]
MakeLatent = Callable[..., Path]
CLIP = (1, 16, 3, 4, 5)
"""9 frames of 32 x 40 pixels."""
ON_CPU = ("--device", "cpu", "--precision", "fp32")


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def decoded(vae: Path, latent: Path, **settings: Any) -> torch.Tensor:
    """The engine's own frames."""
    asked = DecodeSettings(precision_mode="fp32", **settings)
    return Engine().decode(open_decoder(FileWeights(vae)), read_latent(latent), asked)


def test_npy_is_one_array_of_frames(halo: Run, video_vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    latent, out = latent_file("clip.latent", CLIP), tmp_path / "out"
    ended = halo("decode", latent, "--vae", video_vae, "-o", out, "--format", "npy", "--json", *ON_CPU)
    assert ended.code == 0, ended.err
    assert names(out) == ["clip.npy"]
    frames = np.load(out / "clip.npy")
    assert frames.shape == (9, 32, 40, 3)
    assert np.array_equal(frames, decoded(video_vae, latent).numpy())
    record = DecodeRecord.from_json(json.loads(ended.out))
    assert (record.image_shape, record.request.latent_shape) == ((9, 32, 40, 3), CLIP)
    assert HistoryStore().read().records == (record,)


def test_png_is_one_file_per_frame(halo: Run, video_vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    latent, out = latent_file("clip.latent", CLIP), tmp_path / "out"
    ended = halo("decode", latent, "--vae", video_vae, "-o", out, *ON_CPU)
    assert ended.code == 0, ended.err
    assert names(out) == [f"clip_{i:05d}.png" for i in range(9)]
    assert ended.out.splitlines() == [str(out / name) for name in names(out)]
    pixels = np.stack([np.array(image_module.open(out / name)) for name in names(out)])
    assert np.array_equal(pixels, pixels_of(decoded(video_vae, latent).numpy()))


def test_mp4_of_a_batch_is_one_video_per_clip(
    halo: Run, video_vae: Path, latent_file: MakeLatent, tmp_path: Path
) -> None:
    av = pytest.importorskip("av", reason="PyAV is not installed")
    latent, out = latent_file("two.latent", (2, *CLIP[1:])), tmp_path / "out"
    ended = halo("decode", latent, "--vae", video_vae, "-o", out, "--format", "mp4", *ON_CPU)
    assert ended.code == 0, ended.err
    assert names(out) == ["two_00000.mp4", "two_00001.mp4"]
    wanted = pixels_of(decoded(video_vae, latent).numpy()).reshape(2, 9, 32, 40, 3).astype(float)
    for clip, name in enumerate(names(out)):
        with av.open(str(out / name)) as container:
            assert container.streams.video[0].average_rate == 16  # what Wan 2.1 makes
            frames = [
                f.reformat(format="rgb24", src_colorspace="ITU709").to_ndarray() for f in container.decode(video=0)
            ]
        errors = [((np.stack(frames) - wanted[other]) ** 2).mean() for other in range(2)]
        assert np.stack(frames).shape == (9, 32, 40, 3)
        assert errors[clip] < errors[1 - clip] / 4  # noise compresses badly, but it is this clip


def test_fps_is_the_videos(halo: Run, video_vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="PyAV is not installed")
    latent, out = latent_file("clip.latent", CLIP), tmp_path / "out"
    arguments = ("decode", latent, "--vae", video_vae, "-o", out, "--format", "webm", *ON_CPU)
    assert halo(*arguments, "--fps", "30").code == 0
    with av.open(str(out / "clip.webm")) as container:
        assert container.streams.video[0].average_rate == 30


def test_chunk_frames_cut_the_clip_and_change_nothing(
    halo: Run, video_vae: Path, latent_file: MakeLatent, tmp_path: Path
) -> None:
    latent = latent_file("clip.latent", (1, 16, 4, 4, 5))
    frames, records = [], []
    for n in (4, 64):
        out = tmp_path / str(n)
        flags = ("--format", "npy", "--json", "--chunk-frames", n, *ON_CPU)
        ended = halo("decode", latent, "--vae", video_vae, "-o", out, *flags)
        assert ended.code == 0, ended.err
        frames.append(np.load(out / "clip.npy"))
        records.append(DecodeRecord.from_json(json.loads(ended.out)))
    assert np.abs(frames[0] - frames[1]).max() <= 1e-5
    cut, whole = records
    assert cut.plan is not None
    assert whole.plan is not None
    assert (cut.plan.n_chunks, cut.plan.boundaries) == (4, (1, 5, 9))
    assert cut.plan.carried_bytes > 0
    assert [b.frame for b in cut.boundaries] == [1, 5, 9]
    assert (whole.plan.n_chunks, whole.boundaries) == (1, ())


def test_pictures_are_clips_of_one_frame(halo: Run, video_vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    latents = [latent_file("one.latent", (1, 16, 4, 5)), latent_file("two.latent", (2, 16, 4, 5))]
    ended = halo("decode", *latents, "--vae", video_vae, "-o", tmp_path / "out", "--format", "npy", *ON_CPU)
    assert ended.code == 0, ended.err
    assert names(tmp_path / "out") == ["one.npy", "two_00000.npy", "two_00001.npy"]
    assert np.load(tmp_path / "out" / "two_00001.npy").shape == (1, 32, 40, 3)


def test_a_batch_is_the_frames_of_one_clip_where_the_family_has_it_so(
    halo: Run, latent_file: MakeLatent, tmp_path: Path
) -> None:
    vae = tmp_path / "svd.safetensors"
    save_file(dict(golden("svd").weights), vae)
    latent = latent_file("clip.latent", (3, 4, 4, 5))
    ended = halo("decode", latent, "--vae", vae, "-o", tmp_path / "out", "--format", "npy", *ON_CPU)
    assert ended.code == 0, ended.err
    frames = np.load(tmp_path / "out" / "clip.npy")
    clip = read_latent(latent).movedim(0, 1)[None]
    wanted = Engine().decode(open_decoder(FileWeights(vae)), clip, DecodeSettings(precision_mode="fp32"))
    assert frames.shape == (3, 32, 40, 3)
    assert np.array_equal(frames, wanted.numpy())


def test_blended_clips_are_written_too(halo: Run, video_vae: Path, latent_file: MakeLatent, tmp_path: Path) -> None:
    latent, out = latent_file("clip.latent", CLIP), tmp_path / "out"
    flags = ("--format", "npy", "--method", "blended", "--json", *ON_CPU)
    ended = halo("decode", latent, "--vae", video_vae, "-o", out, *flags)
    assert ended.code == 0, ended.err
    assert np.load(out / "clip.npy").shape == (9, 32, 40, 3)
    record = DecodeRecord.from_json(json.loads(ended.out))
    assert record.plan is not None
    assert record.plan.method == "blended"


@pytest.mark.parametrize("fmt", ["png", "npy", "mp4", "webm"])
@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (MemoryError(), 1)])
def test_stopped_halfway_leaves_no_file(
    fmt: str, error: BaseException, code: int,
    halo: Run, video_vae: Path, latent_file: MakeLatent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if fmt in ("mp4", "webm"):
        pytest.importorskip("av", reason="PyAV is not installed")

    def stop(self: ProgressBar, done: int, total: int) -> None:
        if done * 10 > total * 9:  # most frames are out
            raise error

    monkeypatch.setattr(ProgressBar, "progress", stop)
    latent, out = latent_file("clip.latent", CLIP), tmp_path / "out"
    flags = ("--format", fmt, "--chunk-frames", 1, *ON_CPU)
    assert halo("decode", latent, "--vae", video_vae, "-o", out, *flags).code == code
    assert names(out) == []


def test_an_existing_video_is_kept_unless_forced(
    halo: Run, video_vae: Path, latent_file: MakeLatent, tmp_path: Path
) -> None:
    (tmp_path / "clip.npy").write_bytes(b"mine")
    latent = latent_file("clip.latent", CLIP)
    arguments = ("decode", latent, "--vae", video_vae, "-o", tmp_path, "--format", "npy", *ON_CPU)
    ended = halo(*arguments)
    assert (ended.code, "--force" in ended.err) == (2, True)
    assert (tmp_path / "clip.npy").read_bytes() == b"mine"
    assert halo(*arguments, "--force").code == 0
    assert np.load(tmp_path / "clip.npy").shape == (9, 32, 40, 3)


# Each row: arguments, whether the VAE is of videos, the sentence.
BAD = [
    (("--fps", "24"), True, "--fps goes with --format mp4 or webm"),
    (("--format", "mp4", "--fps", "0"), True, "give frames per second"),
    (("--format", "mp4"), False, "this kl decoder makes pictures; use png or npy"),
]


@pytest.mark.parametrize(("flags", "video", "says"), BAD)
def test_bad_input_is_one_sentence(
    flags: tuple[str, ...], video: bool, says: str,
    halo: Run, vae: Path, video_vae: Path, latent_file: MakeLatent, tmp_path: Path,
) -> None:  # fmt: skip
    if "mp4" in flags:
        pytest.importorskip("av", reason="PyAV is not installed")
    latent = latent_file("clip.latent", CLIP) if video else latent_file()
    ended = halo("decode", latent, "--vae", video_vae if video else vae, "-o", tmp_path / "out", *flags)
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.err
    assert names(tmp_path / "out") == []


def test_channels_that_a_format_has_not_are_told_before_anything_is_written(
    halo: Run, video_vae: Path, latent_file: MakeLatent, tmp_path: Path
) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    weights = dict(golden("wan21").weights)
    for name in ("decoder.head.2.weight", "decoder.head.2.bias"):
        weights[name] = torch.cat([weights[name], weights[name][:1]])
    save_file(weights, tmp_path / "alpha.safetensors")
    latent, out = latent_file("clip.latent", CLIP), tmp_path / "out"
    ended = halo("decode", latent, "--vae", tmp_path / "alpha.safetensors", "-o", out, "--format", "mp4")
    assert (ended.code, ended.out) == (2, "")
    assert "4 channels and mp4 takes 1 or 3; use --format png or npy" in ended.err
    assert not out.exists()


def test_a_clip_without_its_batch_is_told_so(
    halo: Run, video_vae: Path, latent_file: MakeLatent, tmp_path: Path
) -> None:
    ended = halo("decode", latent_file("clip.latent", CLIP[1:]), "--vae", video_vae, "-o", tmp_path / "out")
    assert ended.code == 2
    assert "a clip has five dimensions: is this one [1, 16, 3, 4, 5]?" in ended.err


def test_blended_chunks_warn_of_nothing_that_no_flag_asks_for(
    halo: Run, video_vae: Path, latent_file: MakeLatent, tmp_path: Path
) -> None:
    latent = latent_file("clip.latent", CLIP)
    flags = ("--format", "npy", "--method", "blended", "--chunk-frames", "5", *ON_CPU)
    ended = halo("decode", latent, "--vae", video_vae, "-o", tmp_path / "out", *flags)
    assert ended.code == 0, ended.err
    assert "WARNING" not in ended.err
    assert np.load(tmp_path / "out" / "clip.npy").shape == (9, 32, 40, 3)


def test_without_pyav_nothing_is_decoded(
    halo: Run, video_vae: Path, latent_file: MakeLatent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(movies, "find_spec", lambda name: None)
    latent, out = latent_file("clip.latent", CLIP), tmp_path / "out"
    ended = halo("decode", latent, "--vae", video_vae, "-o", out, "--format", "mp4")
    assert ended.code == 1
    assert "halo-vae[video]" in ended.err
    assert names(out) == []


# -- plan


def plan_json(halo: Run, vae: Path, *argv: object) -> dict[str, Any]:
    ended = halo("plan", "--vae", vae, "--json", *ON_CPU, *argv)
    assert ended.code == 0, ended.err
    line: dict[str, Any] = json.loads(ended.out)
    return line


def test_a_clip_is_planned_as_it_is_decoded(
    halo: Run, video_vae: Path, latent_file: MakeLatent, tmp_path: Path
) -> None:
    latent = latent_file("clip.latent", (2, 16, 4, 4, 5))
    flags = ("--chunk-frames", 4)
    planned = plan_json(halo, video_vae, latent, *flags)
    by_size = plan_json(halo, video_vae, "--size", "40x32", "--frames", 13, "--batch", 2, *flags)
    assert planned == by_size
    assert planned["image_shape"] == [26, 32, 40, 3]
    assert planned["plan"]["macs"] == 2 * sum(op["macs"] for op in planned["ops"])
    assert planned["plan"]["n_tiles"] == 2 * sum(op["n_tiles"] for op in planned["ops"])
    out = ("-o", tmp_path / "out", "--format", "npy", "--json", *ON_CPU)
    ended = halo("decode", latent, "--vae", video_vae, *out, *flags)
    record = DecodeRecord.from_json(json.loads(ended.out))
    assert record.plan is not None
    assert (record.plan.n_chunks, record.plan.carried_bytes) == (4, planned["plan"]["carried_bytes"])


def test_text_shows_chunks_and_carried_state(halo: Run, video_vae: Path) -> None:
    ended = halo("plan", "--vae", video_vae, "--size", "40x32", "--frames", 13, "--chunk-frames", 4)
    assert ended.code == 0, ended.err
    for words in ("4 chunks of at most 4 frames", "new chunks at frame 1, 5, 9", "carried state", "1×16×4×4×5"):
        assert words in ended.out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--frames", "5"), "--size WxH"),
        (("--size", "40x32", "--frames", "7"), "try 5"),  # the lower of two as near
        (("--size", "40x32", "--frames", "0"), "give 1 to 4096"),
        (("none.latent", "--frames", "5"), "--frames goes with --size"),
    ],
)
def test_bad_sizes_are_exit_code_2(argv: tuple[str, ...], says: str, halo: Run, video_vae: Path) -> None:
    ended = halo("plan", "--vae", video_vae, *argv)
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.err


def test_frames_need_a_video_vae(halo: Run, vae: Path) -> None:
    ended = halo("plan", "--vae", vae, "--size", "40x32", "--frames", "5")
    assert ended.code == 2
    assert "--frames is for video VAEs" in ended.err
