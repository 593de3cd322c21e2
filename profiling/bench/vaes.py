"""Which VAE is timed: a file, a published structure with seeded random weights, or the small one that is bundled."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .cases import SCALE_PX, BenchError, CaseFamily

if TYPE_CHECKING:
    from torch import Tensor

TINY = "tiny"
_BUNDLED = Path(__file__).resolve().parents[1] / "demo_data" / "tiny_kl_vae.safetensors"
_NAME = re.compile(r"(sd|flux|wan21)(?:/(\d+))?")
NAMES = "sd, flux, wan21, each also as NAME/N for an N-th of its width, or tiny"
_SD_WIDTH, _WAN_WIDTH = 128, 96
_TINY_WAN = 24
"""The width that "tiny" stands for where clips are decoded, as a share of Wan 2.1's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeFile:
    """A VAE that lies in a file, as processes are given it."""

    path: Path
    label: str
    """As results name it: "random:sd", "random:wan21/4", "tiny", or the hash of a file's."""
    family: CaseFamily
    latent_channels: int
    note: str | None = None
    """What tells it from a published VAE."""


def prepare_vae(word: str, family: CaseFamily, seed: int, folder: Path) -> VaeFile | None:
    """The VAE that a name or a path stands for, where it is one of `family`; else None.

    Random weights are written to `folder`; equal seeds give equal weights. BenchError for a word that is neither a name
    nor a file, or a file whose VAE no case is made for. OSError where the file cannot be written.
    """
    if word == TINY:
        return _tiny(family, seed, folder)
    match = _NAME.fullmatch(word)
    if match is None:
        return _from_file(Path(word), family)
    structure, share = match[1], int(match[2] or 1)
    if (structure == "wan21") != (family == "wan21"):
        return None
    label = f"random:{structure}" + (f"/{share}" if share > 1 else "")
    path = folder / f"{structure}-{share}-{seed}.safetensors"
    if not path.exists():
        _save(_weights(structure, share, seed), path)
    note = None if share == 1 else f"1/{share} of the width of {structure}"
    channels = {"sd": 4, "flux": 16, "wan21": 16}[structure]
    return VaeFile(path=path, label=label, family=family, latent_channels=channels, note=note)


def _tiny(family: CaseFamily, seed: int, folder: Path) -> VaeFile | None:
    if family == "wan21":
        return prepare_vae(f"wan21/{_TINY_WAN}", family, seed, folder)
    if not _BUNDLED.is_file():
        raise BenchError("the bundled VAE was not installed with the package; install it again")
    return VaeFile(path=_BUNDLED, label=TINY, family=family, latent_channels=4, note="the small bundled VAE")


def _weights(structure: str, share: int, seed: int) -> Mapping[str, Tensor]:
    import torch

    from .plain.kl import NORM_GROUPS, random_sd_weights
    from .plain.wan import random_wan_weights

    full, least = (_WAN_WIDTH, 2) if structure == "wan21" else (_SD_WIDTH, NORM_GROUPS)
    if share < 1 or full % share or full // share < least:
        allowed = ", ".join(str(n) for n in range(1, full + 1) if full % n == 0 and full // n >= least)
        raise BenchError(f"{structure}/{share} has no whole width; divide by one of {allowed}")
    if structure == "wan21":
        found = random_wan_weights(dim=full // share, seed=seed)
        # ComfyUI reads the number of picture channels from the encoder, which no decode uses
        return {**found, "encoder.conv1.weight": torch.zeros(full // share, 3, 3, 3, 3)}
    found = random_sd_weights(seed, ch=full // share, z=16 if structure == "flux" else 4)
    # Flux's autoencoder begins with the decoder's own convolution
    return {k: w for k, w in found.items() if structure != "flux" or not k.startswith("post_quant_conv.")}


def _save(weights: Mapping[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(weights), str(path))
    except SafetensorError as error:
        raise BenchError(f"the random weights cannot be written ({error}); free space on the disk") from error


def _from_file(path: Path, family: CaseFamily) -> VaeFile | None:
    """A user's file. BenchError where it does not exist, is of no family known here, or of one without cases."""
    from ...optim.families import lower
    from ...optim.video.ops import is_video
    from ...optim.weights import FileWeights

    if not path.exists():
        raise BenchError(f"there is no VAE {str(path)!r}; give a safetensors file, or one of {NAMES}")
    weights = FileWeights(path)
    program = lower(weights.specs, hints=weights.metadata)
    clips = is_video(program)
    if clips and program.family != "wan21":
        raise BenchError(f"{path.name} holds a {program.family} decoder; the video cases are made for Wan 2.1's")
    if program.scale[1:] != (SCALE_PX, SCALE_PX):
        made = program.scale[1]
        raise BenchError(f"{path.name} makes {made} pixels of each latent one; the cases are made for {SCALE_PX}")
    if clips != (family == "wan21"):
        return None
    return VaeFile(
        path=path.resolve(), label=weights.content_hash, family=family, latent_channels=program.latent_channels
    )


def find_vaes(
    words: tuple[str, ...], families: tuple[CaseFamily, ...], seed: int, folder: Path,
    tell: Callable[[str], None] = lambda what: None,
) -> dict[CaseFamily, VaeFile]:  # fmt: skip
    """The VAE of each family: the first of `words` that is one, else full-size random weights. BenchError, OSError."""
    defaults: dict[CaseFamily, str] = {"kl": "sd", "wan21": "wan21"}
    found: dict[CaseFamily, VaeFile] = {}
    for family in dict.fromkeys(families):
        for word in (*words, defaults[family]):
            tell(f"preparing the VAE {word}")
            vae = prepare_vae(word, family, seed, folder)
            if vae is not None:
                found[family] = vae
                break
    return found
