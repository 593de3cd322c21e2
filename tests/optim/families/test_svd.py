"""The Stable Video Diffusion decoder against its golden, whole and damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halo_vae.optim.errors import WeightsError
from halo_vae.optim.families import kl, svd
from halo_vae.optim.families.keys import Keys
from halo_vae.optim.video.frames import output_frames
from halo_vae.optim.video.ops import ClipAttention, ClipConv
from halo_vae.optim.weights import TensorSpec
from halo_vae.tests.goldens import golden
from halo_vae.tests.optim.families.clip_checks import (
    TOLERANCE,
    assert_golden_is_decoded,
    assert_missing_tensors_are_named,
    largest_error,
    program_of,
    specs_of,
)


def test_golden_is_decoded_as_by_the_reference() -> None:
    assert_golden_is_decoded("svd", svd.FAMILY)


def test_frames_and_scale() -> None:
    program = program_of("svd")
    assert [output_frames(program, t) for t in (1, 2, 14, 25)] == [1, 2, 14, 25]
    assert program.values[program.output].scale == (1, 8, 8)
    assert program.working_dtypes == ("bfloat16", "float32")


def test_statistics_along_time_are_the_whole_clips() -> None:
    g, program = golden("svd"), program_of("svd")
    ops = tuple(
        replace(op, norm=replace(op.norm, scope=1)) if isinstance(op, ClipConv) and op.norm else op
        for op in program.ops
    )
    assert largest_error(replace(program, ops=ops), g, "a") > 100 * TOLERANCE
    assert largest_error(replace(program, ops=ops), g, "one_frame") <= TOLERANCE


def test_program_is_what_the_layout_says() -> None:
    ops = program_of("svd").ops
    assert [op.scope for op in ops if isinstance(op, ClipAttention)] == ["frame"]
    convs = [op for op in ops if isinstance(op, ClipConv)]
    in_time = [op for op in convs if op.kernel == (3, 1, 1)]
    assert {(op.front, op.back, op.time_border) for op in in_time} == {(1, 1, "zero")}
    assert in_time[-1] is convs[-1]
    assert convs[-1].name == "decoder.conv_out.time_mix_conv"
    for op in convs:
        scope, eps = (0, 1e-5) if "time_stack" in op.name else (1, 1e-6)
        assert op.norm is None or (op.norm.scope, op.norm.eps) == (scope, eps)
    gains = {op.name: op.gain for op in convs if op.gain}
    blocks = 2 + 2 * 4
    assert len(gains) == blocks
    assert all(gain == name.replace("time_stack.out_layers.3", "mix_factor") for name, gain in gains.items())


def test_missing_tensor_is_named() -> None:
    assert_missing_tensors_are_named("svd", svd.FAMILY)


@pytest.mark.parametrize("gone", ["decoder.up.1.", "decoder.up.2.block.1.", "decoder.mid.block_2.time_stack."])
def test_missing_block_is_named(gone: str) -> None:
    shapes = {name: spec for name, spec in specs_of(golden("svd")).items() if not name.startswith(gone)}
    with pytest.raises(WeightsError, match=gone.replace(".", r"\.")):
        svd.FAMILY.lower(Keys(shapes), {})


def test_share_that_is_not_a_scalar_is_refused() -> None:
    shapes = specs_of(golden("svd"))
    shapes["decoder.mid.block_1.mix_factor"] = TensorSpec(shape=(64,), dtype=shapes["decoder.conv_in.bias"].dtype)
    with pytest.raises(WeightsError, match=r"mix_factor' has shape \[64\]"):
        svd.FAMILY.lower(Keys(shapes), {})


def test_picture_decoder_and_clip_decoder_are_told_apart() -> None:
    clip, picture = Keys(specs_of(golden("svd"))), Keys(specs_of(golden("kl_sd")))
    assert (svd.FAMILY.detect(clip), svd.FAMILY.detect(picture)) == (True, False)
    assert (kl.FAMILY.detect(clip), kl.FAMILY.detect(picture)) == (False, True)


def test_file_with_a_convolution_before_the_decoder_is_not_taken() -> None:
    shapes = specs_of(golden("svd"))
    assert not svd.FAMILY.detect(Keys(shapes | {"post_quant_conv.weight": shapes["decoder.conv_in.weight"]}))
