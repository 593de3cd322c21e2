"""How a result that is not finite is repaired, and what cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.optim import executor
from halo_vae.optim import pictures as pictures_module
from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.errors import LatentError, NonFiniteError
from halo_vae.optim.plan import OpPlan
from halo_vae.tests.optim.helpers import (
    EVERY_DTYPE,
    HOT,
    HOTTER,
    PROFILE,
    Recorder,
    decode_raw,
    decoder_of,
    golden_decoder,
    hot_decoder,
    latent,
    max_diff,
    profile,
    reference,
    settings,
    small_weights,
    tolerance,
)

ALL = EVERY_DTYPE
FAST16 = ("float16", "bfloat16")


def nan_decoder(op: str) -> Decoder:
    weights = small_weights()
    weights[f"{op}.weight"] = weights[f"{op}.weight"].clone()
    weights[f"{op}.weight"].view(-1)[5] = float("nan")
    decoder = decoder_of(weights)
    decoder.program = replace(decoder.program, working_dtypes=ALL)
    return decoder


def deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check for finite results once per pass until one was not, as on a GPU."""
    real = pictures_module.RunContext

    def context(**given: Any) -> executor.RunContext:
        return real(**(given | {"check_each_op": len(given["observer"].plans) > 1}))

    monkeypatch.setattr(pictures_module, "RunContext", context)


def force_not_finite(monkeypatch: pytest.MonkeyPatch, hit: Callable[[OpPlan], bool], times: int = 1) -> list[str]:
    """The check reports the first `times` steps that `hit` chooses as not finite; gives their names."""
    real, seen = executor.PassRunner._is_finite, []

    def check(self: executor.PassRunner, step: OpPlan) -> Tensor:
        if len(seen) < times and hit(step):
            seen.append(step.name)
            for v in [o.output for o in (step.op, step.partner) if o is not None and o.output != self.program.output]:
                self.value(v).fill_(float("nan"))
            return torch.tensor(False)
        return real(self, step)

    monkeypatch.setattr(executor.PassRunner, "_is_finite", check)
    return seen


# -- overflow


@pytest.mark.parametrize("plan", ["strips", "tiles"])
@pytest.mark.parametrize("mode", ["fp16", "mixed"])
def test_an_overflow_is_redone_wider_and_remembered(plan: str, mode: str) -> None:
    decoder, z = hot_decoder(HOT), latent(1, 4, 11, 9)
    engine = Engine(profile=profile(native_dtypes=FAST16))
    given = {"precision_mode": mode, "plan": plan, "tile_size": 16}
    expected = reference(decoder, z)
    raw, heard = decode_raw(engine, decoder, z, **given)
    assert max_diff(raw, expected) <= tolerance("fp16" if mode == "mixed" else "bf16", expected)
    assert [(name, dtype) for name, dtype, _ in heard.redone] == [(HOT, "float16")]
    assert heard.redone[0][2] > 0
    assert [(f.kind, f.where, f.given, f.used) for f in heard.fallbacks] == [("non_finite", HOT, "float16", "float32")]
    assert heard.dtype_of(HOT) == "float32"
    assert {r.dtype for r in heard.ops if r.name != HOT} == {"float16"}
    assert len(heard.plans) == 1

    again, second = decode_raw(engine, decoder, z, **given)
    assert second.redone == second.fallbacks == []
    assert second.dtype_of(HOT) == "float32"
    assert {r.dtype for r in second.ops if r.name != HOT} == {"float16"}
    assert max_diff(again, expected) <= tolerance("fp16" if mode == "mixed" else "bf16", expected)


def test_what_is_remembered_belongs_to_these_weights_and_this_dtype() -> None:
    engine, z = Engine(profile=PROFILE), latent(1, 4, 6, 5)
    decode_raw(engine, hot_decoder(HOT), z, precision_mode="fp16")
    _, same_weights = decode_raw(engine, hot_decoder(HOT), z, precision_mode="fp16")
    assert same_weights.redone == []
    _, other_dtype = decode_raw(engine, hot_decoder(HOT), z, precision_mode="bf16")
    assert other_dtype.dtype_of(HOT) == "bfloat16"
    _, others = decode_raw(engine, hot_decoder(HOT, seed=1), z, precision_mode="fp16")
    assert len(others.redone) == 1
    engine.widened.clear()
    _, forgotten = decode_raw(engine, hot_decoder(HOT), z, precision_mode="fp16")
    assert len(forgotten.redone) == 1


def test_two_overflows_are_repaired_in_one_decode() -> None:
    decoder, z = hot_decoder(HOT, HOTTER), latent(2, 4, 6, 5)
    expected = reference(decoder, z)
    raw, heard = decode_raw(Engine(profile=PROFILE), decoder, z, precision_mode="fp16")
    assert [name for name, *_ in heard.redone] == [HOT, HOTTER]
    assert max_diff(raw, expected) <= tolerance("bf16", expected)


def test_later_passes_of_a_batch_do_not_try_again_what_overflowed() -> None:
    decoder, z = hot_decoder(HOT), latent(3, 4, 6, 5)
    engine = Engine(profile=profile(batch_cap=1))
    raw, heard = decode_raw(engine, decoder, z, precision_mode="fp16")
    expected = reference(decoder, z)
    assert heard.passes == [(1, 1)] * 3
    assert [name for name, *_ in heard.redone] == [HOT]
    assert len(heard.fallbacks) == 1
    assert [report.dtype for report in heard.ops if report.name == HOT] == ["float32"] * 3
    assert max_diff(raw, expected) <= tolerance("bf16", expected)


def test_an_overflow_in_the_last_pass_only_is_repaired() -> None:
    z = latent(3, 4, 6, 5)
    weights = small_weights()
    weights["decoder.conv_in.weight"] = weights["decoder.conv_in.weight"] * 300
    decoder = decoder_of(weights)
    decoder.program = replace(decoder.program, working_dtypes=ALL)
    z = z * torch.tensor([0.01, 0.01, 1000.0]).view(3, 1, 1, 1)
    raw, heard = decode_raw(Engine(profile=profile(batch_cap=1)), decoder, z, precision_mode="fp16")
    assert heard.redone[0][0] == "decoder.conv_in"
    n_ops = heard.started[0][1]
    assert {report.dtype for report in heard.ops[: 2 * n_ops]} == {"float16"}
    expected = reference(decoder, z)
    assert max_diff(raw, expected) <= tolerance("bf16", expected)


def test_the_guard_can_be_turned_off() -> None:
    with pytest.raises(NonFiniteError, match=f"{HOT} is not finite in float16.*adaptive precision") as caught:
        decode_raw(
            Engine(profile=PROFILE), hot_decoder(HOT), latent(1, 4, 6, 5),
            precision_mode="fp16", adaptive_precision=False,
        )  # fmt: skip
    assert (caught.value.op, caught.value.dtype) == (HOT, "float16")


@pytest.mark.parametrize("plan", ["strips", "tiles"])
def test_an_overflow_found_at_the_end_of_a_pass_starts_the_decode_again(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deferred(monkeypatch)
    decoder, z = hot_decoder(HOT, HOTTER), latent(3, 4, 11, 9)
    engine = Engine(profile=profile(batch_cap=2))
    expected = reference(decoder, z)
    raw, heard = decode_raw(engine, decoder, z, precision_mode="fp16", plan=plan, tile_size=16)
    assert max_diff(raw, expected) <= tolerance("bf16", expected)
    assert [name for name, *_ in heard.redone] == [HOT, HOTTER]
    assert len(heard.fallbacks) == 2
    assert len(heard.plans) == 2  # the first attempt found one at its end, the second looked at each op
    done = [done for done, _ in heard.steps]
    assert done == sorted(done)
    assert heard.steps[-1] == (1000, 1000)
    again, second = decode_raw(engine, decoder, z, precision_mode="fp16", plan=plan, tile_size=16)
    assert (second.redone, len(second.plans)) == ([], 1)
    assert torch.equal(raw, again)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "at the end of a pass"])
@pytest.mark.parametrize("mode", ["residual", "narrow", "tail", "pixel", "no"])
def test_a_bad_result_in_place_starts_the_decode_again(mode: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if late:
        deferred(monkeypatch)
    seen = force_not_finite(monkeypatch, lambda step: step.in_place == mode and step.dtype == "bfloat16")
    decoder, z = hot_decoder(), latent(2, 4, 11, 9)
    engine = Engine(profile=PROFILE)
    plan = "tiles" if mode == "pixel" else "strips"
    raw, heard = decode_raw(engine, decoder, z, precision_mode="bf16", plan=plan, tile_size=16)
    expected = reference(decoder, z)
    assert len(seen) == 1
    assert max_diff(raw, expected) <= tolerance("bf16", expected)
    assert [(name, dtype) for name, dtype, _ in heard.redone] == [(seen[0], "bfloat16")]
    assert heard.dtype_of(seen[0]) == "float32"
    assert len(heard.plans) == (1 if mode == "no" and not late else 2)
    done = [done for done, _ in heard.steps]
    assert done == sorted(done)
    assert heard.steps[-1] == (1000, 1000)


def test_a_retry_never_moves_progress_back(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [HOT, "decoder.conv_out", "decoder.mid.attn_1"]
    force_not_finite(monkeypatch, lambda step: step.name in names and step.dtype == "bfloat16", times=9)
    decoder, z = hot_decoder(), latent(1, 4, 11, 9)
    raw, heard = decode_raw(Engine(profile=PROFILE), decoder, z, precision_mode="bf16", tile_size=16)
    assert {name for name, *_ in heard.redone} == set(names)
    done = [done for done, _ in heard.steps]
    assert done == sorted(done)
    assert {total for _, total in heard.steps} == {1000}
    assert done[-1] == 1000
    assert done.count(1000) == 1
    expected = reference(decoder, z)
    assert max_diff(raw, expected) <= tolerance("bf16", expected)


def test_work_done_twice_counts_once() -> None:
    class AtOps(Recorder):
        def op_done(self, report: Any) -> None:
            super().op_done(report)
            shown.append(self.steps[-1][0])

    shown: list[int] = []
    heard, decoder, z = AtOps(), hot_decoder(HOT), latent(1, 4, 6, 5)
    Engine(profile=PROFILE).decode(decoder, z, settings(precision_mode="fp16"), observer=heard)
    assert len(heard.redone) == 1
    total, done = heard.plan.macs, 0
    for report, at in zip(heard.ops, shown, strict=True):
        done += report.macs
        assert abs(at - 1000 * done / total) <= 2, report.name


@pytest.mark.parametrize("late", [False, True], ids=["at once", "at the end of a pass"])
def test_every_op_of_a_large_decoder_may_fail_once(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if late:
        deferred(monkeypatch)
    force_not_finite(monkeypatch, lambda step: step.dtype == "bfloat16", times=10**6)
    decoder, z = golden_decoder("kl_sd"), latent(1, 4, 2, 3)
    raw, heard = decode_raw(Engine(profile=PROFILE), decoder, z, precision_mode="bf16")
    expected = reference(decoder, z)
    assert {name for name, *_ in heard.redone} == {op.name for op in decoder.program.ops}
    assert len(heard.redone) > 32
    assert max_diff(raw, expected) <= tolerance("bf16", expected)


# -- what cannot be repaired


@pytest.mark.parametrize("late", [False, True], ids=["at once", "at the end of a pass"])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "mixed"])
@pytest.mark.parametrize("op", [HOT, "decoder.conv_out", "decoder.up.1.block.0.conv2"])
def test_broken_weights_are_an_error_that_names_the_op(
    op: str, mode: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:
        deferred(monkeypatch)
    engine, z = Engine(profile=PROFILE), latent(1, 4, 6, 5)
    with pytest.raises(NonFiniteError, match=re.escape(f"{op} is not finite even in float32")) as caught:
        decode_raw(engine, nan_decoder(op), z, precision_mode=mode)
    assert (caught.value.op, caught.value.dtype) == (op, "float32")
    good, _ = decode_raw(engine, hot_decoder(), z)
    assert max_diff(good, reference(hot_decoder(), z)) <= 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("mode", ["auto", "fp16"])
def test_a_bad_latent_is_refused_before_anything_runs(value: float, mode: str) -> None:
    z = latent(2, 4, 6, 5)
    z[1, 2, 3, 4] = value
    heard = Recorder()
    engine = Engine(profile=PROFILE)
    with pytest.raises(LatentError, match="the latent itself holds NaN or inf"):
        engine.decode(hot_decoder(), z, settings(precision_mode=mode), observer=heard)
    assert heard.plans == heard.started == heard.tiles == heard.requests == []
