"""Which dtype computes what, and how a result that is not finite is repaired."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.optim import executor
from halo_vae.optim.decode import Engine
from halo_vae.optim.precision import WidenedOps, choose_dtypes
from halo_vae.tests.optim.helpers import (
    EVERY_DTYPE,
    PROFILE,
    decode_raw,
    decoder_of,
    hot_decoder,
    kl_program,
    latent,
    max_diff,
    profile,
    reference,
    settings,
    small_weights,
    tolerance,
)

ALL = EVERY_DTYPE
NO_HALF = ("bfloat16", "float32")
FAST16, FASTB, SLOW = ("float16", "bfloat16"), ("bfloat16", "float32"), ("float32",)
PROGRAM = kl_program(64, 32, n_res=1)


# -- the rule

RULE = [
    # native, device, allowed, edge -> stream, compute
    ("float32", FASTB, NO_HALF, 512, "float32", "float32"),  # small: as loaded
    ("float32", FASTB, NO_HALF, 513, "float32", "bfloat16"),  # between: mixed
    ("float32", FASTB, NO_HALF, 1023, "float32", "bfloat16"),
    ("float32", FASTB, NO_HALF, 1024, "bfloat16", "bfloat16"),  # large: narrow
    ("float32", FAST16, ALL, 1024, "float16", "float16"),
    ("float32", FAST16, ALL, 1023, "float32", "float16"),
    ("float32", FAST16, NO_HALF, 1023, "float32", "float16"),  # a guarded convolution may be float16 anyway
    ("float32", FAST16, NO_HALF, 1024, "bfloat16", "bfloat16"),  # but the stream may not
    ("float32", FAST16, ("float32",), 1024, "float32", "float32"),  # nothing narrower is known to work
    ("float32", SLOW, ALL, 4096, "float32", "float32"),  # no gain
    ("bfloat16", FASTB, NO_HALF, 512, "bfloat16", "bfloat16"),
    ("bfloat16", FAST16, ALL, 513, "bfloat16", "bfloat16"),  # already as narrow
    ("bfloat16", FAST16, ALL, 4096, "bfloat16", "bfloat16"),
    ("bfloat16", SLOW, ALL, 4096, "bfloat16", "bfloat16"),  # never wider than loaded
    ("float16", FASTB, ALL, 100, "float16", "float16"),
    ("float16", FASTB, ALL, 4096, "float16", "float16"),
    ("float16", SLOW, NO_HALF, 4096, "float16", "float16"),
]  # fmt: skip


@pytest.mark.parametrize(("native", "device", "allowed", "edge", "stream", "compute"), RULE)
def test_auto_goes_by_the_longer_edge(
    native: str, device: tuple[str, ...], allowed: tuple[str, ...], edge: int, stream: str, compute: str
) -> None:
    program = replace(PROGRAM, working_dtypes=allowed)
    decision = choose_dtypes("auto", program, native, profile(native_dtypes=device), edge, WidenedOps(), "h")
    assert (decision.dtypes.native, decision.dtypes.stream, decision.dtypes.compute) == (native, stream, compute)
    assert decision.fallback is None
    assert decision.choice.reason


@pytest.mark.parametrize(
    ("mode", "allowed", "device", "stream", "compute"),
    [
        ("fp32", NO_HALF, FAST16, "float32", "float32"),
        ("bf16", NO_HALF, SLOW, "bfloat16", "bfloat16"),
        ("fp16", ALL, SLOW, "float16", "float16"),
        ("fp16", NO_HALF, FAST16, "bfloat16", "bfloat16"),  # not known to survive it
        ("fp16", ("float32",), FAST16, "float32", "float32"),
        ("mixed", NO_HALF, FAST16, "float32", "float16"),
        ("mixed", NO_HALF, FASTB, "float32", "bfloat16"),
        ("mixed", NO_HALF, SLOW, "float32", "float32"),
    ],
)
def test_what_is_asked_for_is_done_or_said_to_be_replaced(
    mode: Any, allowed: tuple[str, ...], device: tuple[str, ...], stream: str, compute: str
) -> None:
    program = replace(PROGRAM, working_dtypes=allowed)
    decision = choose_dtypes(mode, program, "float32", profile(native_dtypes=device), 64, WidenedOps(), "h")
    assert (decision.dtypes.stream, decision.dtypes.compute) == (stream, compute)
    replaced = mode == "fp16" and compute != "float16"
    assert (decision.fallback is not None) == replaced
    if decision.fallback is not None:
        assert (decision.fallback.kind, decision.fallback.given, decision.fallback.used) == (
            "dtype",
            "float16",
            compute,
        )


def test_a_replaced_dtype_is_reported_once_per_decode() -> None:
    decoder = decoder_of(small_weights())
    decoder.program = replace(decoder.program, working_dtypes=NO_HALF)
    _, heard = decode_raw(Engine(profile=PROFILE), decoder, latent(1, 4, 5, 6), precision_mode="fp16")
    assert [(f.kind, f.given, f.used) for f in heard.fallbacks] == [("dtype", "float16", "bfloat16")]


@pytest.mark.parametrize(
    ("width", "stream", "conv"),
    [
        (256, "float32", "float32"),
        (257, "float32", "bfloat16"),
        (511, "float32", "bfloat16"),
        (512, "bfloat16", "bfloat16"),
    ],
)
@pytest.mark.parametrize("wide", [True, False])
def test_the_engine_goes_by_the_longer_edge_in_pixels(width: int, stream: str, conv: str, wide: bool) -> None:
    size = (1, width) if wide else (width, 1)
    engine, decoder = Engine(profile=PROFILE), hot_decoder()
    plan = engine.plan(decoder, (1, 4, *size), settings(precision_mode="auto"))
    assert (plan.dtypes.stream, plan.dtypes.compute) == (stream, conv)


# -- arithmetic is what the record says


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "mixed"])
@pytest.mark.parametrize("plan", ["strips", "tiles"])
def test_convolutions_are_computed_in_the_reported_dtype(mode: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"fp32": torch.float32, "fp16": torch.float16}.get(mode, torch.bfloat16)
    given: set[tuple[torch.dtype, torch.dtype]] = set()
    real = executor.kernels.convolve

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        given.add((x.dtype, weight.dtype))
        return real(x, weight, bias)

    monkeypatch.setattr(executor.kernels, "convolve", convolve)
    decoder, z = hot_decoder(), latent(2, 4, 11, 9)
    device = profile(convolution="direct")
    raw, heard = decode_raw(Engine(profile=device), decoder, z, precision_mode=mode, plan=plan, tile_size=16)
    name = str(wanted).removeprefix("torch.")
    assert given == {(wanted, wanted)}
    assert {shape.dtype for _, shape in heard.convs} == {report.dtype for report in heard.ops} == {name}
    assert {dtype for *_, dtype in heard.tiles} == {name}
    assert {report.native_dtype for report in heard.ops} == {"float32"}
    expected = reference(decoder, z)
    error = max_diff(raw, expected)
    assert error <= tolerance(mode, expected)
    assert error > 1e-5 or mode == "fp32"  # it did round
    assert heard.fallbacks == []


def test_mixed_rounds_less_than_narrow_throughout() -> None:
    decoder, z = hot_decoder(), latent(1, 4, 16, 16)
    expected = reference(decoder, z)
    errors = {
        mode: float((decode_raw(Engine(profile=PROFILE), decoder, z, precision_mode=mode)[0] - expected).std())
        for mode in ("mixed", "bf16", "fp16")
    }
    assert errors["mixed"] < 0.9 * errors["bf16"]
    assert errors["fp16"] < 0.5 * errors["bf16"]


def test_memory_of_widened_ops() -> None:
    widened = WidenedOps()
    assert widened.of("a", "float16") == frozenset()
    widened.remember("a", "float16", "x")
    widened.remember("a", "float16", "y")
    assert widened.of("a", "float16") == {"x", "y"}
    assert widened.of("a", "bfloat16") == widened.of("b", "float16") == frozenset()
    widened.clear()
    assert widened.of("a", "float16") == frozenset()
