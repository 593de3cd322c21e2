"""A stand-in for the package comfy_kitchen: its three calls written down plainly, and a note of each one.

With the package installed, `install` may wrap it instead, so that the same checks look at its own numbers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)

from halo_vae.optim.kernels import kitchen

NAME = "comfy_kitchen"


@dataclass
class Heard:
    """What was asked of the package."""

    statistics: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of maps whose statistics were taken."""
    staged: list[tuple[tuple[int, ...], bool]] = field(default_factory=list)
    """(shape of the window, statistics were given) of each call with a norm."""
    padded: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of windows that were padded only."""
    convolved: list[tuple[tuple[int, ...], bool]] = field(default_factory=list)
    """(shape of the input, a residual was given)."""


def fp16_conv3d(x, weight, bias=None, residual=None, stride=1, out=None):
    y = F.conv3d(x, weight, bias, stride=stride)
    y = y if residual is None else y + residual
    return y if out is None else out.copy_(y)


def group_norm_stats3d(x, num_groups=32, eps=1e-6):
    frames = x.transpose(1, 2).flatten(0, 1).unflatten(1, (num_groups, -1)).flatten(2).float()
    return torch.stack((frames.mean(-1), (frames.var(-1, correction=0) + eps).rsqrt()), -1)


def group_norm_silu_pad3d(
    x, weight=None, bias=None, num_groups=32, eps=1e-6, pad=(0, 0, 0, 0, 0), silu=True, zero_pad=False, out=None,
    stats=None,
):  # fmt: skip
    y = x.float()
    if weight is not None:
        rows = group_norm_stats3d(x, num_groups, eps) if stats is None else stats
        mean, rstd = (part.view(x.shape[0], x.shape[2], -1).transpose(1, 2) for part in rows.unbind(-1))
        each = x.shape[1] // num_groups
        y = (y - mean.repeat_interleave(each, 1)[..., None, None]) * rstd.repeat_interleave(each, 1)[..., None, None]
        y = y * weight.float()[:, None, None, None] + bias.float()[:, None, None, None]
    y = F.silu(y) if silu else y
    y = F.pad(y.to(x.dtype), (*pad[:4], 0, 0), mode="constant" if zero_pad else "reflect")
    y = F.pad(y, (0, 0, 0, 0, pad[4], 0))
    return y if out is None else out.copy_(y)


PLAIN = (fp16_conv3d, group_norm_silu_pad3d, group_norm_stats3d)


def install(monkeypatch: pytest.MonkeyPatch, *, real: bool = False) -> Heard:
    """Put a package in place that notes what is asked of it; `real` hands it on to the installed one."""
    calls: dict[str, Any] = {f.__name__: f for f in PLAIN}
    if real:
        package = pytest.importorskip(NAME)
        calls = {name: getattr(package, name) for name in calls}
    heard, module = Heard(), ModuleType(NAME)

    def conv(x, weight, bias=None, residual=None, stride=1, out=None):
        assert kitchen.call_refusals(x, weight, bias, residual, out) == []
        heard.convolved.append((tuple(x.shape), residual is not None))
        return calls["fp16_conv3d"](x, weight, bias, residual, stride, out)

    def stage(
        x, weight=None, bias=None, num_groups=32, eps=1e-6, pad=(0, 0, 0, 0, 0), silu=True, zero_pad=False, out=None,
        stats=None,
    ):  # fmt: skip
        assert zero_pad
        if weight is None:
            heard.padded.append(tuple(x.shape))
        else:
            heard.staged.append((tuple(x.shape), stats is not None))
        return calls["group_norm_silu_pad3d"](x, weight, bias, num_groups, eps, pad, silu, zero_pad, out, stats)

    def statistics(x, num_groups=32, eps=1e-6):
        heard.statistics.append(tuple(x.shape))
        return calls["group_norm_stats3d"](x, num_groups, eps)

    for name, call in zip(sorted(calls), (conv, stage, statistics), strict=True):
        setattr(module, name, call)
    monkeypatch.setitem(sys.modules, NAME, module)
    return heard
