"""The difference of two pictures as a picture whose colours mean the same in every one."""

from __future__ import annotations

import torch
from torch import Tensor

DECADES = (-6, -5, -4, -3, -2, -1, 0)
"""Powers of ten of the differences that the colours stand for, darkest first."""
COLOURS = (
    ("black", (0.00, 0.00, 0.00)),
    ("indigo", (0.14, 0.10, 0.42)),
    ("purple", (0.46, 0.13, 0.55)),
    ("red", (0.82, 0.26, 0.33)),
    ("orange", (0.96, 0.56, 0.16)),
    ("yellow", (0.99, 0.87, 0.42)),
    ("white", (1.00, 1.00, 1.00)),
)
"""One per decade; each is brighter than the one before, so that the order is seen without telling colours apart."""
BROKEN = ("cyan", (0.00, 0.90, 1.00))
"""Where a difference is inf or nan; in no mixture of the others."""


def heat_map(picture: Tensor, reference: Tensor) -> Tensor:
    """[B, H, W, 3] float32 on the CPU: the largest difference of a pixel's channels, one map per picture or frame.

    Pictures are [B, H, W, C] of equal shape. The scale is logarithmic and fixed, so maps may be compared with each
    other, and equal pictures are black. ValueError for different shapes.
    """
    if picture.shape != reference.shape:
        one, other = tuple(picture.shape), tuple(reference.shape)
        raise ValueError(f"the pictures are {one} and {other}; equal shapes are needed")
    made = torch.empty(*picture.shape[:-1], 3)
    for i in range(len(picture)):  # one at a time: a clip's worth of temporaries would be large
        ours, theirs = (p[i].detach().to("cpu", torch.float32) for p in (picture, reference))
        made[i] = colour((ours - theirs).abs().amax(-1))
    return made


def colour(difference: Tensor) -> Tensor:
    """Colours [..., 3] of differences [...]."""
    ramp = torch.tensor([rgb for _, rgb in COLOURS])
    level = (torch.log10(difference.to(torch.float32)) - DECADES[0]).clamp(0, len(ramp) - 1).nan_to_num(0)
    below = level.floor().long().clamp_max(len(ramp) - 2)
    made = torch.lerp(ramp[below], ramp[below + 1], (level - below)[..., None])
    broken = ~torch.isfinite(difference)
    made[broken] = torch.tensor(BROKEN[1])
    return made


def legend() -> tuple[tuple[str, str], ...]:
    """Colour and meaning, darkest first, as a person reads them."""
    steps = {-3: "a quarter of a step of 8 bits (1/255)", -2: "2.5 steps of 8 bits"}
    rows = []
    for power, (name, _) in zip(DECADES, COLOURS, strict=True):
        value = f"1e{power}" if power else "1"
        note = f": {steps[power]}" if power in steps else ""
        rows.append((name, f"{'at most ' if power == DECADES[0] else ''}{value}{note}"))
    return (*rows, (BROKEN[0], "inf or nan"))
