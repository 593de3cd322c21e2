"""Pictures as files: named after their latent, never half-written, never over another file unless asked."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .command import CommandError, ExitCode

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

Format = Literal["png", "npy", "mp4", "webm"]
PICTURE_FORMATS: tuple[Format, ...] = ("png", "npy")
MOVIE_FORMATS: tuple[Format, ...] = ("mp4", "webm")
FORMATS = PICTURE_FORMATS + MOVIE_FORMATS
_PNG_CHANNELS = (1, 3, 4)
_CHANNELS: dict[Format, tuple[int, ...]] = {"png": _PNG_CHANNELS, "mp4": (1, 3), "webm": (1, 3)}
"""What a format takes; npy takes any."""


def target_paths(folder: Path, stem: str, n: int, fmt: Format) -> tuple[Path, ...]:
    """`<stem>.png` for one picture, `<stem>_00000.png` and on for several."""
    if n == 1:
        return (folder / f"{stem}.{fmt}",)
    return tuple(folder / f"{stem}_{i:05d}.{fmt}" for i in range(n))


def check_targets(targets: Sequence[Path], *, force: bool) -> None:
    """CommandError if two pictures want one name, or a file would be lost that may not be."""
    seen: set[Path] = set()
    for path in targets:
        if path in seen:
            raise CommandError(f"two latents would both be written to {path}; decode one of them to another folder")
        seen.add(path)
        if path.is_dir():
            raise CommandError(f"{path} is a folder where a picture would be written; choose another -o")
        if path.exists() and not force:
            raise CommandError(f"{path} exists; use --force to overwrite it or choose another -o")


def check_format(fmt: Format) -> None:
    """CommandError if the package that writes this format is not installed."""
    if fmt == "png" and find_spec("PIL") is None:
        raise CommandError(
            "PNG files need pillow; install it (pip install 'halo-vae[cli]') or use --format npy",
            exit_code=ExitCode.FAILED,
        )


def check_channels(fmt: Format, channels: int) -> None:
    """CommandError if pictures of so many channels are none for this format."""
    taken = _CHANNELS.get(fmt, (channels,))
    if channels in taken:
        return
    fitting = " or ".join(f for f in PICTURE_FORMATS if channels in _CHANNELS.get(f, (channels,)))
    raise CommandError(
        f"this decoder's pictures have {channels} channels and {fmt} takes {' or '.join(map(str, taken))}; use "
        f"--format {fitting}"
    )


def prepare_folder(folder: Path) -> None:
    """Create the folder and prove that a file can be written in it. CommandError if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise CommandError(f"cannot write to {folder} ({e.strerror or e}); choose another folder with -o") from e


def write_pictures(images: Tensor, targets: Sequence[Path], fmt: Format) -> None:
    """Write images [B, H, W, C], float32 in 0-1, one file each. CommandError if the disk refuses."""
    for image, path in zip(images.numpy(), targets, strict=True):
        data = encode_png(image) if fmt == "png" else encode_npy(image)
        try:
            write_atomically(path, data)
        except OSError as e:
            message = f"cannot write {path} ({e.strerror or e}); free space or choose another folder with -o"
            raise CommandError(message, exit_code=ExitCode.FAILED) from e


def pixels_of(images: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Values in 0-1 as 8-bit ones: scaled by 255 and cut, not rounded, as ComfyUI's Save Image does."""
    import numpy as np

    pixels: NDArray[np.uint8] = np.clip(255.0 * images, 0, 255).astype(np.uint8)
    return pixels


def encode_png(image: NDArray[np.float32]) -> bytes:
    """A picture [H, W, C] as PNG; see `pixels_of`."""
    from PIL import Image

    channels = image.shape[-1]
    if channels not in _PNG_CHANNELS:
        raise CommandError(f"the picture has {channels} channels and PNG takes 1, 3 or 4; use --format npy")
    pixels = pixels_of(image)
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def encode_npy(image: NDArray[np.float32]) -> bytes:
    """A picture [H, W, C] as npy, float32 in 0-1."""
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, image, allow_pickle=False)
    return buffer.getvalue()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file under a name of its own and rename it: whoever looks sees the old file, the new one, or none."""
    temporary = path.with_name(f".halo-vae-{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        # After the rename there is nothing left to remove; after a failure or Ctrl-C there is.
        temporary.unlink(missing_ok=True)
