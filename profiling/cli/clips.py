"""Clips as files, written while they are decoded and named when all of them are whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from .command import CommandError, ExitCode
from .movies import Movie
from .outputs import Format, encode_png, target_paths

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class ClipWriter(Protocol):
    """Takes one clip's frames in order."""

    def write(self, frames: NDArray[np.float32]) -> None:
        """Add frames [n, H, W, C] in 0-1."""

    def close(self) -> None:
        """All frames are there: finish the file."""

    def discard(self) -> None:
        """Let go of the file in whatever state it is; called once, also after `close`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipTargets:
    """What one latent's clips are written to."""

    clips: tuple[tuple[Path, ...], ...]
    """For each clip its files: one per frame for png, otherwise one."""
    n_frames: int
    """Frames per clip."""
    fmt: Format
    fps: Fraction
    """For mp4 and webm."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files."""
        return tuple(path for clip in self.clips for path in clip)


def clip_targets(folder: Path, stem: str, n_clips: int, n_frames: int, fmt: Format, fps: Fraction) -> ClipTargets:
    """`<stem>.mp4` for one clip, `<stem>_00000.mp4` and on for several; png: `<clip>_00000.png` for each frame."""
    stems = [path.stem for path in target_paths(folder, stem, n_clips, fmt)]
    if fmt == "png":
        clips = tuple(target_paths(folder, name, n_frames, fmt) for name in stems)
    else:
        clips = tuple((folder / f"{name}.{fmt}",) for name in stems)
    return ClipTargets(clips=clips, n_frames=n_frames, fmt=fmt, fps=fps)


class ClipFiles:
    """Writes clips under hidden names in the folder of their targets and renames them when the block ends well.

    A block that is left by an exception leaves no file. Example:
        with ClipFiles(targets, force=False) as files:
            decode_frames(..., on_frames=files.take)
    """

    def __init__(self, targets: ClipTargets, *, force: bool) -> None:
        """`force` lets files that exist be replaced."""
        self._targets, self._force = targets, force
        self._next = 0
        self._writer: ClipWriter | None = None
        self._hidden: Path | None = None

    def __enter__(self) -> ClipFiles:
        """Make the hidden folder. CommandError if the disk refuses."""
        with _disk_errors(self._targets.paths[0]):
            self._hidden = Path(tempfile.mkdtemp(prefix=".halo-vae-", dir=self._targets.paths[0].parent))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Give the files their names, or remove them."""
        try:
            if kind is None:
                self._commit()
        finally:
            self._clear()

    def take(self, first: int, frames: Tensor) -> None:
        """Write frames [n, H, W, C], float32 in 0-1, of which the first is number `first` of all clips.

        Frames taken before are passed over, so that a decode may begin again. CommandError if the disk refuses.
        """
        n_frames = self._targets.n_frames
        if first > self._next:
            raise ValueError(f"frame {first} came where {self._next} is due; frames are handed out in order")
        array = frames[self._next - first :].cpu().float().numpy()
        while len(array):
            clip, frame = divmod(self._next, n_frames)
            part = array[: n_frames - frame]
            with _disk_errors(self._targets.clips[clip][0]):
                self._write(clip, part)
                if frame + len(part) == n_frames:
                    self._finish()
            self._next += len(part)
            array = array[len(part) :]

    def _write(self, clip: int, part: NDArray[np.float32]) -> None:
        if self._writer is None:
            self._writer = self._open(clip)
        self._writer.write(part)

    def _open(self, clip: int) -> ClipWriter:
        targets, hidden = self._targets, self._hidden
        if hidden is None:
            raise ValueError("the files are not open; enter the block first")
        at = [hidden / path.name for path in targets.clips[clip]]
        if targets.fmt == "png":
            return PngFrames(at)
        if targets.fmt == "npy":
            return NpyClip(at[0], targets.n_frames)
        return Movie(at[0], targets.fmt, targets.fps)

    def _finish(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            finally:
                writer.discard()

    def _commit(self) -> None:
        wanted = self._targets.n_frames * len(self._targets.clips)
        if self._next != wanted:
            raise ValueError(f"{self._next} of {wanted} frames were handed out")
        for path in self._targets.paths:
            if path.exists() and not self._force:  # made by somebody else meanwhile
                raise CommandError(f"{path} exists; use --force to overwrite it or choose another -o")
        for path in self._targets.paths:
            with _disk_errors(path):
                os.replace(self._in_hidden(path), path)

    def _in_hidden(self, path: Path) -> Path:
        if self._hidden is None:
            raise ValueError("the files are not open; enter the block first")
        return self._hidden / path.name

    def _clear(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(Exception):  # the file goes anyway, and what went wrong before is on its way
                writer.discard()
        if self._hidden is not None:
            shutil.rmtree(self._hidden, ignore_errors=True)
            self._hidden = None


class PngFrames:
    """One PNG per frame."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """One path for each frame of the clip."""
        self._paths = list(paths)

    def write(self, frames: NDArray[np.float32]) -> None:
        """See ClipWriter."""
        for frame in frames:
            self._paths.pop(0).write_bytes(encode_png(frame))

    def close(self) -> None:
        """See ClipWriter."""

    def discard(self) -> None:
        """See ClipWriter."""


class NpyClip:
    """One array [frames, H, W, C], float32, written frame by frame behind its header."""

    def __init__(self, path: Path, n_frames: int) -> None:
        """The header is written with the first frame, whose size it names."""
        self._n_frames = n_frames
        self._file = path.open("wb")
        self._started = False

    def write(self, frames: NDArray[np.float32]) -> None:
        """See ClipWriter."""
        import numpy as np

        if not self._started:
            shape = (self._n_frames, *frames.shape[1:])
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(self._file, header)
            self._started = True
        self._file.write(np.ascontiguousarray(frames, dtype="<f4").data)

    def close(self) -> None:
        """See ClipWriter."""
        self._file.close()

    def discard(self) -> None:
        """See ClipWriter."""
        self._file.close()


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turns what the system refuses into one sentence."""
    try:
        yield
    except OSError as e:
        message = f"cannot write {path} ({e.strerror or e}); free space or choose another folder with -o"
        raise CommandError(message, exit_code=ExitCode.FAILED) from e
