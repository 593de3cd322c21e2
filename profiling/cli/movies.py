"""Clips as mp4 and webm, frame by frame: what is held does not grow with the clip."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .command import CommandError, ExitCode
from .outputs import pixels_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MovieFormat = Literal["mp4", "webm"]
DEFAULT_FPS: dict[str, int] = {"wan21": 16}
"""By family: Wan 2.1's models make 16 frames per second."""
USUAL_FPS = 24
MAX_FPS = 240
_BT709 = 1
"""Number of BT.709 in ITU-T H.273, for primaries, transfer and matrix alike."""
_LIMITED_RANGE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """An encoder and how hard it tries."""

    encoder: str
    options: dict[str, str]


CODECS: dict[MovieFormat, Codec] = {
    "mp4": Codec(encoder="libx264", options={"crf": "18", "preset": "medium"}),
    # b = 0: quality alone decides, as crf means it
    "webm": Codec(encoder="libvpx-vp9", options={"crf": "24", "b": "0", "row-mt": "1", "cpu-used": "4"}),
}


def check_movie_format(fmt: MovieFormat) -> None:
    """CommandError if videos cannot be written here."""
    if find_spec("av") is None:
        raise CommandError(
            f"{fmt} files need PyAV; install it (pip install 'halo-vae[video]') or use --format png or npy",
            exit_code=ExitCode.FAILED,
        )
    import av

    encoder = CODECS[fmt].encoder
    try:
        av.codec.Codec(encoder, "w")
    except ValueError as e:
        raise CommandError(
            f"this build of PyAV has no {encoder} encoder; install the one from the package index or use --format png",
            exit_code=ExitCode.FAILED,
        ) from e


def read_fps(text: str | None, family: str) -> Fraction:
    """Frames per second: what was given, such as 24, 23.976 or 24000/1001, or what the family's models make.

    CommandError for anything else.
    """
    if text is None:
        return Fraction(DEFAULT_FPS.get(family, USUAL_FPS))
    try:
        fps = Fraction(text).limit_denominator(10_000)
    except (ValueError, ZeroDivisionError):
        fps = Fraction(0)
    if not 0 < fps <= MAX_FPS:
        raise CommandError(f"--fps is {text!r}; give frames per second up to {MAX_FPS}, e.g. 24 or 24000/1001")
    return fps


class Movie:
    """One video file, H.264 or VP9 in 8 bits, yuv420p with BT.709 colours.

    That format has one colour sample for four pixels, so where height or width is odd the last row or column is
    repeated once: any player can show the file.
    """

    def __init__(self, path: Path, fmt: MovieFormat, fps: Fraction) -> None:
        """Nothing is written before the first frame."""
        self._path, self._fmt, self._fps = path, fmt, fps
        self._container: Any = None
        self._stream: Any = None

    def write(self, frames: NDArray[np.float32]) -> None:
        """Add frames [n, H, W, C], C being 1 or 3, in 0-1. CommandError for other channels, OSError from the disk."""
        import av
        import numpy as np

        pixels = pixels_of(frames)
        n, height, width, channels = pixels.shape
        if channels not in (1, 3):
            raise CommandError(f"the frames have {channels} channels and {self._fmt} takes 1 or 3; use --format npy")
        pixels = np.pad(pixels, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        if channels == 1:
            pixels = np.repeat(pixels, 3, axis=3)
        if self._container is None:
            self._open(height + height % 2, width + width % 2)
        for i in range(n):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels[i]), format="rgb24")
            self._encode(frame.reformat(format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG"))

    def close(self) -> None:
        """Write what the encoder still holds, and the file's index."""
        if self._container is not None:
            self._encode(None)
            with _system_errors():
                self._container.close()
            self._container = None

    def discard(self) -> None:
        """Let go of the file, finished or not; it may be removed then."""
        container, self._container = self._container, None
        if container is not None:
            container.close()

    def _open(self, height: int, width: int) -> None:
        import av

        codec = CODECS[self._fmt]
        with _system_errors():
            self._container = av.open(str(self._path), "w", format=self._fmt)
        stream = self._container.add_stream(codec.encoder, rate=self._fps, options=codec.options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        context = stream.codec_context
        context.color_primaries = context.color_trc = context.colorspace = _BT709
        context.color_range = _LIMITED_RANGE
        self._stream = stream

    def _encode(self, frame: Any) -> None:
        with _system_errors():
            for packet in self._stream.encode(frame):
                self._container.mux(packet)


@contextmanager
def _system_errors() -> Iterator[None]:
    """FFmpeg's errors as the system's: most are what the disk said."""
    import av

    try:
        yield
    except av.error.FFmpegError as e:
        raise OSError(e.errno, e.strerror or str(e)) from e
