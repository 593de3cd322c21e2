"""Names of AMD GPUs: what the driver calls a chip, and the family whose defaults it takes."""

from __future__ import annotations

import re
from typing import Literal

Family = Literal["rdna2", "rdna3", "rdna3.5", "rdna4", "cdna", "cuda", "cpu", "other"]

STRIX_HALO = "gfx1151"

_NAME = re.compile(r"gfx[0-9]+[a-f]?")
_FAMILIES: dict[Family, tuple[str, ...]] = {
    "rdna2": ("gfx1030", "gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036"),
    "rdna3": ("gfx1100", "gfx1101", "gfx1102", "gfx1103"),
    "rdna3.5": ("gfx1150", "gfx1151", "gfx1152", "gfx1153"),
    "rdna4": ("gfx1200", "gfx1201"),
    "cdna": ("gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950"),
}
"""Whole names, never prefixes: gfx11 is no chip, and gfx1150 is not gfx1151. Source: LLVM's AMDGPU processor table."""
_APUS = {"gfx1033", "gfx1035", "gfx1036", "gfx1103", *_FAMILIES["rdna3.5"]}
"""Chips that exist only inside a processor. gfx942 is both a card and an APU, and so is not here."""
_BY_NAME = {name: family for family, names in _FAMILIES.items() for name in names}


def parse_gfx(text: str | None) -> str | None:
    """The base name of an architecture string: lower case, without features such as ":xnack-". None where it has none.

    "gfx90a:sramecc+:xnack-" is "gfx90a".
    """
    base = (text or "").strip().lower().partition(":")[0]
    return base if _NAME.fullmatch(base) else None


def gfx_of_target(version: int) -> str | None:
    """The name that belongs to a gfx_target_version of the kernel driver: 110501 is gfx1151, 90010 gfx90a.

    Two decimal digits each of minor version and stepping; in the name the stepping is one hexadecimal digit.
    """
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor}{stepping:x}" if major > 0 and minor < 10 and stepping < 16 else None


def family_of(gfx: str | None) -> Family:
    """The family of a base name; `other` for a chip that is not in the table."""
    return _BY_NAME.get(gfx or "", "other")


def is_apu(gfx: str | None) -> bool:
    """True for a chip that exists only inside a processor, and so shares the host's memory."""
    return gfx in _APUS


def is_strix_halo(gfx: str | None) -> bool:
    """True for gfx1151 alone."""
    return gfx == STRIX_HALO
