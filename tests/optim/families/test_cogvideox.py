"""The CogVideoX decoder against its golden, whole and damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halo_vae.optim.errors import WeightsError
from halo_vae.optim.families import cogvideox
from halo_vae.optim.families.keys import Keys
from halo_vae.optim.program import Program
from halo_vae.optim.video.frames import output_frames
from halo_vae.optim.video.ops import ClipConv
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
    assert_golden_is_decoded("cogvideox", cogvideox.FAMILY)


def test_frames_depend_on_whether_the_latent_frames_are_odd() -> None:
    program = program_of("cogvideox")
    assert [output_frames(program, t) for t in (1, 2, 3, 4, 5, 13)] == [1, 8, 9, 16, 17, 49]
    assert program.values[program.output].scale == (4, 8, 8)
    assert program.working_dtypes == ("bfloat16", "float16", "float32")


def _with_scope(program: Program, scope: int) -> Program:
    """The same decoder with another scope for the norms of the last levels."""
    ops = []
    for op in program.ops:
        if isinstance(op, ClipConv) and op.norm and op.norm.scope == cogvideox.SCOPE:
            ops.append(replace(op, norm=replace(op.norm, scope=scope)))
        else:
            ops.append(op)
    return replace(program, ops=tuple(ops))


@pytest.mark.parametrize("scope", [0, 1, 2, 8])
def test_other_statistics_are_not_what_the_reference_does(scope: int) -> None:
    g, program = golden("cogvideox"), program_of("cogvideox")
    assert largest_error(_with_scope(program, scope), g, "a") > 100 * TOLERANCE


def test_program_is_what_the_layout_says() -> None:
    convs = [op for op in program_of("cogvideox").ops if isinstance(op, ClipConv)]
    norms = [(op.name, op.norm) for op in convs if op.norm]
    assert all(norm.latent is not None and norm.groups == 32 for _, norm in norms)
    late = [name for name, norm in norms if norm.scope == 4]
    assert late == [name for name, _ in norms if name.startswith(("decoder.up_blocks.2", "decoder.up_blocks.3"))] + [
        "decoder.conv_out.conv"
    ]
    assert {norm.scope for _, norm in norms} == {0, 4}
    assert [op.upsample_time for op in convs if op.upsample == 2] == ["odd_single", "odd_single", "none"]
    assert {op.time_border for op in convs if op.kernel[0] == 3} == {"replicate"}


def test_missing_tensor_is_named() -> None:
    assert_missing_tensors_are_named("cogvideox", cogvideox.FAMILY)


@pytest.mark.parametrize("gone", ["decoder.up_blocks.3.", "decoder.up_blocks.1.resnets.1.", "decoder.mid_block."])
def test_missing_block_is_named(gone: str) -> None:
    shapes = {name: spec for name, spec in specs_of(golden("cogvideox")).items() if not name.startswith(gone)}
    with pytest.raises(WeightsError, match=gone.replace(".", r"\.")):
        cogvideox.FAMILY.lower(Keys(shapes), {})


def test_too_few_blocks_are_refused() -> None:
    shapes = {
        name: spec
        for name, spec in specs_of(golden("cogvideox")).items()
        if not name.startswith(("decoder.up_blocks.1.", "decoder.up_blocks.2.", "decoder.up_blocks.3."))
    }
    with pytest.raises(WeightsError, match="hold 2 blocks below"):
        cogvideox.FAMILY.lower(Keys(shapes), {})


def test_file_with_a_convolution_before_the_decoder_is_not_taken() -> None:
    shapes = specs_of(golden("cogvideox"))
    assert not cogvideox.FAMILY.detect(Keys(shapes | {"post_quant_conv.weight": shapes["decoder.conv_in.conv.weight"]}))


def test_group_count_can_be_hinted() -> None:
    program = cogvideox.FAMILY.lower(Keys(specs_of(golden("cogvideox"))), {"norm_groups": "16"})
    assert {op.norm.groups for op in program.ops if isinstance(op, ClipConv) and op.norm} == {16}
