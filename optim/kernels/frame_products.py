"""Adds up the products of a group of output frames, whatever the kernel that multiplies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .frame_groups import Group, Product

Multiply = Callable[[Product, Tensor, int], object]
"""Writes a product into a tensor, or adds it there where the number is 1 and not 0."""


def add_up(group: Group, multiply: Multiply, first: Tensor, second: Tensor, spare: Tensor) -> None:
    """Sums of a group's first outputs and, for pairs, of their second ones; `spare` has the size of one of them."""
    started = {"first": 0, "second": 0}
    differ = any(p.target == "difference" for p in group.products)
    for p in group.products:
        if p.target == "difference":
            multiply(p, spare, 0)
            torch.sub(first, spare, out=second)
            first.add_(spare)
        elif p.target == "second":
            multiply(p, second, started["second"])
            started["second"] = 1
        else:
            multiply(p, first, started["first"])
            started["first"] = 1
            if p.target == "both":
                started["second"] = 1
                if not differ:
                    second.copy_(first)
    if not started["first"]:
        first.zero_()
    if group.pair and not started["second"]:
        second.zero_()
