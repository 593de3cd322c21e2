"""Lowers the causal video fixture by hand, so that the exact engine streams what it has no family for."""

from __future__ import annotations

import torch
from torch import Tensor

from halo_vae.optim.decode import Decoder
from halo_vae.optim.program import Op, Program, Value
from halo_vae.optim.video.ops import ClipConv, Unpack
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.fixtures import CausalDec

PAIR = Unpack(t=2, order="tchw")
"""The first half of the channels is the earlier frame."""


def exact_causal(model: CausalDec) -> Decoder:
    """F5: causal convolutions in time, two of which double the frames but the first; then nearest x8 as three
    doublings by identity convolutions."""
    weights = {f"c{i}": w[..., None, None] for i, w in enumerate(model.w)}
    weights |= {f"u{i}": w[..., None, None] for i, w in enumerate(model.up)}
    channels = model.out.shape[1]
    same = torch.nn.functional.pad(torch.eye(3)[..., None, None], (1, 1, 1, 1))
    weights |= {"out": model.out[..., None, None, None], "same": same[:, :, None]}
    ops: list[Op] = []
    values = [Value(channels=channels, scale=(1, 1, 1))]

    def add(name: str, weight: str, out: int, scale: tuple[int, int, int], **fields: object) -> None:
        given = {"act": "none", "front": weights[weight].shape[2] - 1} | fields
        ops.append(
            ClipConv(
                name=name, inputs=(len(ops),), output=len(ops) + 1, weight=weight, bias=None,
                in_channels=values[-1].channels, out_channels=weights[weight].shape[0],
                kernel=tuple(weights[weight].shape[2:]), **given,  # type: ignore[arg-type]
            )
        )  # fmt: skip
        values.append(Value(channels=out, scale=scale))

    add("c0", "c0", channels, (1, 1, 1), post_act="silu")
    for i in range(2):
        frames = 2 ** (i + 1)
        add(f"u{i}", f"u{i}", channels, (frames, 1, 1), unpack=PAIR, first_frame="drop")
        add(f"c{i + 1}", f"c{i + 1}", channels, (frames, 1, 1), post_act="silu")
    add("project", "out", 3, (4, 1, 1))
    for i in range(1, 4):
        add(f"double{i}", "same", 3, (4, 2**i, 2**i), upsample=2)
    program = Program(family="F5", ops=tuple(ops), values=tuple(values), working_dtypes=("bfloat16", "float32"))
    return Decoder(weights=MappingWeights(weights), program=program, loaded_dtype=torch.float32)


def tensors_of(decoder: Decoder) -> dict[str, Tensor]:
    """Every weight of a decoder by name."""
    return {name: decoder.weights.get(name, torch.float32, torch.device("cpu")) for name in decoder.weights.specs}
