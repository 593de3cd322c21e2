"""Video files: what a player reads back, odd sizes, rates, and clear words where PyAV is missing."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from halo_vae.profiling.cli import movies
from halo_vae.profiling.cli.clips import ClipFiles, clip_targets
from halo_vae.profiling.cli.command import CommandError, ExitCode
from halo_vae.profiling.cli.movies import Movie, MovieFormat, check_movie_format, read_fps
from halo_vae.profiling.cli.outputs import MOVIE_FORMATS, pixels_of

LEAST_PSNR = 38.0
"""dB against the 8-bit frames: both encoders give 41 to 43 here, halved colour resolution included."""


def moving(n: int = 17, height: int = 48, width: int = 80, channels: int = 3) -> torch.Tensor:
    """Smooth colours that move: what any encoder should keep."""
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    planes = [torch.stack([(x + 0.02 * i) / 1.5, y, (x + y) / 2 + 0 * i], dim=-1)[..., :channels] for i in range(n)]
    return torch.stack(planes)


def read_back(path: Path) -> tuple[NDArray[np.uint8], Any]:
    """Frames [n, H, W, 3] and the facts of the stream."""
    av = pytest.importorskip("av", reason="PyAV is not installed")
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        facts = SimpleNamespace(
            rate=stream.average_rate, codec=context.name, pixels=context.pix_fmt, matrix=int(context.colorspace)
        )
        frames = [f.reformat(format="rgb24", src_colorspace="ITU709").to_ndarray() for f in container.decode(video=0)]
    return np.stack(frames), facts


def psnr(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> float:
    return float(10 * np.log10(255**2 / ((a.astype(float) - b.astype(float)) ** 2).mean()))


@pytest.mark.parametrize("fmt", MOVIE_FORMATS)
def test_a_player_reads_what_was_written(fmt: MovieFormat, tmp_path: Path) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    frames = moving()
    with ClipFiles(clip_targets(tmp_path, "a", 1, 17, fmt, Fraction(24000, 1001)), force=False) as files:
        for first in range(0, 17, 4):
            files.take(first, frames[first : first + 4])
    assert [p.name for p in tmp_path.iterdir()] == [f"a.{fmt}"]
    read, facts = read_back(tmp_path / f"a.{fmt}")
    assert read.shape == (17, 48, 80, 3)
    assert psnr(read, pixels_of(frames.numpy())) > LEAST_PSNR
    assert facts.rate == Fraction(24000, 1001)
    assert (facts.codec, facts.pixels, facts.matrix) == ("h264" if fmt == "mp4" else "vp9", "yuv420p", 1)


@pytest.mark.parametrize("fmt", MOVIE_FORMATS)
def test_odd_sizes_repeat_their_last_row_and_column(fmt: MovieFormat, tmp_path: Path) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    frames = moving(5, 47, 79)
    movie = Movie(tmp_path / "a", fmt, Fraction(16))
    movie.write(frames.numpy())
    movie.close()
    read, facts = read_back(tmp_path / "a")
    assert read.shape == (5, 48, 80, 3)
    assert facts.rate == 16
    assert psnr(read[:, :47, :79], pixels_of(frames.numpy())) > LEAST_PSNR
    assert np.abs(read[:, 47].astype(int) - read[:, 46]).max() < 12  # the same row twice, but for the encoder


def test_grey_frames_are_grey(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    movie = Movie(tmp_path / "a", "mp4", Fraction(16))
    movie.write(moving(3, channels=1).numpy())
    movie.close()
    read, _ = read_back(tmp_path / "a")
    assert np.abs(read[..., 0].astype(int) - read[..., 2]).max() <= 3


def test_other_channels_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    with pytest.raises(CommandError, match="4 channels and mp4 takes 1 or 3; use --format npy"):
        Movie(tmp_path / "a", "mp4", Fraction(16)).write(np.zeros((1, 4, 4, 4), np.float32))


@pytest.mark.parametrize("fmt", MOVIE_FORMATS)
def test_a_stopped_decode_leaves_no_video(fmt: MovieFormat, tmp_path: Path) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    targets = clip_targets(tmp_path, "a", 2, 17, fmt, Fraction(24))
    with pytest.raises(KeyboardInterrupt), ClipFiles(targets, force=False) as files:  # noqa: PT012
        files.take(0, torch.cat([moving(), moving(9)]))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_what_the_disk_says_is_passed_on(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    movie = Movie(tmp_path / "gone" / "a", "mp4", Fraction(16))
    movie.write(moving(1).numpy())  # the encoder keeps the first frames, so nothing was opened yet
    with pytest.raises(OSError, match="No such file"):
        movie.close()
    movie.discard()


@pytest.mark.parametrize("fmt", MOVIE_FORMATS)
def test_without_pyav_the_extra_is_named(fmt: MovieFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movies, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match=r"pip install 'halo-vae\[video\]'.*--format png") as caught:
        check_movie_format(fmt)
    assert caught.value.exit_code is ExitCode.FAILED


def test_a_pyav_without_the_encoder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    check_movie_format("mp4")
    monkeypatch.setitem(movies.CODECS, "mp4", movies.Codec(encoder="no_such_encoder", options={}))
    with pytest.raises(CommandError, match="no no_such_encoder encoder"):
        check_movie_format("mp4")


# Each row: what was given, the family, the rate.
RATES = [
    (None, "wan21", Fraction(16)),
    (None, "wan22", Fraction(24)),  # its model makes 24
    (None, "ltx", Fraction(24)),
    ("30", "wan21", Fraction(30)),
    ("23.976", "ltx", Fraction(2997, 125)),
    ("24000/1001", "ltx", Fraction(24000, 1001)),
]


@pytest.mark.parametrize(("text", "family", "rate"), RATES)
def test_rates(text: str | None, family: str, rate: Fraction) -> None:
    assert read_fps(text, family) == rate


@pytest.mark.parametrize("text", ["0", "-1", "fast", "1/0", "inf", "nan", "241", ""])
def test_wrong_rates_are_refused(text: str) -> None:
    with pytest.raises(CommandError, match="give frames per second up to 240"):
        read_fps(text, "ltx")
