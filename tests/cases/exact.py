"""Lowers two fixtures by hand, so that the exact engine decodes what it has no family for."""

from __future__ import annotations

import torch
from torch import Tensor

from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.families import lower
from halo_vae.optim.program import Conv, Norm, Op, Program, Value
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.cases.support import Recorder
from halo_vae.tests.fixtures import ConvDec, NormDec
from halo_vae.tests.goldens import golden

DTYPES = ("float16", "bfloat16", "float32")


def exact_conv(model: ConvDec) -> Decoder:
    """F2: a 3x3 convolution, then SiLU, nearest x2 and another, as often as it doubles."""
    weights = dict(model.state_dict())
    ops: list[Op] = []
    values = [Value(channels=weights["w.0"].shape[1], scale=(1, 1, 1))]
    for i in range(model.ups + 1):
        c_out, c_in = weights[f"w.{i}"].shape[:2]
        ops.append(
            Conv(
                name=f"conv{i}", inputs=(i,), output=i + 1, weight=f"w.{i}", bias=f"b.{i}", in_channels=c_in,
                out_channels=c_out, kernel=(1, 3, 3), act="silu" if i else "none", upsample=2 if i else 1,
            )
        )  # fmt: skip
        values.append(Value(channels=c_out, scale=(1, 2**i, 2**i)))
    return _decoder("F2", ops, values, weights)


def exact_norm(model: NormDec) -> Decoder:
    """F3: GroupNorm and a 1x1 convolution, then nearest x8 as three doublings by identity convolutions."""
    weights = {k: v.detach() for k, v in model.state_dict().items()}
    weights |= {"w": weights["w"][:, :, None, None], "identity": torch.eye(3)[:, :, None, None]}
    norm = Norm(weight="norm.weight", bias="norm.bias", groups=1, eps=model.norm.eps)
    ops: list[Op] = [
        Conv(
            name="project", inputs=(0,), output=1, weight="w", bias=None, in_channels=4, out_channels=3,
            kernel=(1, 1, 1), norm=norm,
        )
    ]  # fmt: skip
    values = [Value(channels=4, scale=(1, 1, 1)), Value(channels=3, scale=(1, 1, 1))]
    for i in range(1, 4):
        ops.append(
            Conv(
                name=f"double{i}", inputs=(i,), output=i + 1, weight="identity", bias=None, in_channels=3,
                out_channels=3, kernel=(1, 1, 1), upsample=2,
            )
        )  # fmt: skip
        values.append(Value(channels=3, scale=(1, 2**i, 2**i)))
    return _decoder("F3", ops, values, weights)


def exact_kl() -> Decoder:
    """A tiny KL decoder of the SD family, with GroupNorm and middle attention, x8."""
    weights = MappingWeights(golden("kl_sd").weights)
    return Decoder(weights=weights, program=lower(weights.specs), loaded_dtype=torch.float32)


def _decoder(family: str, ops: list[Op], values: list[Value], weights: dict[str, Tensor]) -> Decoder:
    program = Program(family=family, ops=tuple(ops), values=tuple(values), working_dtypes=DTYPES)
    return Decoder(weights=MappingWeights(weights), program=program, loaded_dtype=torch.float32)


def exact_settings(tile_px: int = 768, plan: str = "auto", **more: object) -> DecodeSettings:
    """Exact settings; `plan` is strips, tiles or auto. In float32, as `auto` may choose a narrower dtype by size."""
    given = {"method": "exact", "tile_size": tile_px, "plan": plan, "precision_mode": "fp32"} | more
    return DecodeSettings(**given)  # type: ignore[arg-type]


def decode_raw(decoder: Decoder, z: Tensor, chosen: DecodeSettings) -> tuple[Tensor, Recorder]:
    """The picture before any finish, [B, C, H, W], and what happened."""
    heard = Recorder()
    raw = Engine().decode(decoder, z, chosen, observer=heard, finish=lambda x: x)
    return raw.movedim(-1, 1), heard
