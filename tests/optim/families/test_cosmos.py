"""The Cosmos tokenizer's decoder against its golden, whole and damaged."""

from __future__ import annotations

import pytest

from halo_vae.optim.errors import WeightsError
from halo_vae.optim.families import cosmos, lower
from halo_vae.optim.families.keys import Keys
from halo_vae.optim.program import Program
from halo_vae.optim.video.frames import output_frames
from halo_vae.optim.video.ops import ClipAttention, ClipConv, ClipScale
from halo_vae.optim.weights import TensorSpec
from halo_vae.tests.goldens import golden
from halo_vae.tests.optim.families.clip_checks import (
    assert_golden_is_decoded,
    assert_missing_tensors_are_named,
    program_of,
    specs_of,
)

WAVELETS = ("decoder.unpatcher3d.wavelets", "decoder.unpatcher3d._arange")


def _lower(specs: dict[str, TensorSpec]) -> Program:
    return cosmos.FAMILY.lower(Keys(specs), {})


def test_golden_is_decoded_as_by_the_reference() -> None:
    assert_golden_is_decoded("cosmos", cosmos.FAMILY)


def test_frames_and_scale() -> None:
    program = program_of("cosmos")
    assert [output_frames(program, t) for t in (1, 2, 3, 16)] == [1, 9, 17, 121]
    assert program.values[program.output].scale == (8, 8, 8)
    assert program.working_dtypes == ("bfloat16", "float32")


def test_program_is_what_the_layout_says() -> None:
    program = program_of("cosmos")
    scale, *rest = program.ops
    assert isinstance(scale, ClipScale)
    assert (scale.scale, scale.shift, scale.period, scale.before) == ("latent_std", "latent_mean", 16, 2.0)
    assert [op.scope for op in rest if isinstance(op, ClipAttention)] == ["frame", "past"]
    convs = [op for op in rest if isinstance(op, ClipConv)]
    assert {op.time_border for op in convs if op.kernel[0] == 3} == {"replicate"}
    assert {op.kernel for op in convs} == {(1, 1, 1), (1, 3, 3), (3, 1, 1)}
    assert [(op.upsample_time, op.upsample) for op in convs if op.skip and op.skip.upsampled] == [
        ("first_single", 1), ("none", 2),
    ]  # fmt: skip
    assert all(op.norm is None or (op.norm.groups, op.norm.scope) == (1, 1) for op in convs)


def test_spatial_doubling_alone_is_read_from_the_names() -> None:
    shapes = {name: spec for name, spec in specs_of(golden("cosmos")).items() if "upsample.conv1." not in name}
    program = _lower(shapes)
    assert program.values[program.output].scale == (4, 8, 8)


def test_missing_tensor_is_named() -> None:
    assert_missing_tensors_are_named("cosmos", cosmos.FAMILY, spare=WAVELETS)


def test_wavelets_are_not_needed() -> None:
    whole = specs_of(golden("cosmos"))
    bare = {name: spec for name, spec in whole.items() if name not in WAVELETS}
    assert lower(bare) == lower(whole)


def test_latents_without_statistics_are_only_doubled() -> None:
    bare = {name: spec for name, spec in specs_of(golden("cosmos")).items() if not name.startswith("latent_")}
    scale = _lower(bare).ops[0]
    assert isinstance(scale, ClipScale)
    assert (scale.scale, scale.shift, scale.before) == (None, None, 2.0)


def test_statistics_that_do_not_fit_the_latent_are_refused() -> None:
    shapes = specs_of(golden("cosmos"))
    dtype = shapes["latent_std"].dtype
    with pytest.raises(WeightsError, match="'latent_std' has 250 values"):
        _lower(shapes | {"latent_std": TensorSpec(shape=(250,), dtype=dtype)})
    with pytest.raises(WeightsError, match="'latent_mean' has shape"):
        _lower(shapes | {"latent_mean": TensorSpec(shape=(16,), dtype=dtype)})


def test_discrete_tokenizer_is_not_taken() -> None:
    shapes = specs_of(golden("cosmos"))
    assert not cosmos.FAMILY.detect(Keys(shapes | {"quantizer._levels": shapes["latent_std"]}))
