"""Wan 2.1 and 2.2 decoders against the reference, in two namings, whole and damaged."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from halo_vae.optim.errors import UnknownDecoderError, WeightsError
from halo_vae.optim.families import FAMILIES, detect, lower
from halo_vae.optim.families.keys import Keys
from halo_vae.optim.program import Program
from halo_vae.optim.video.frames import output_frames
from halo_vae.optim.video.ops import ClipAttention, ClipConv, is_video
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.goldens import golden
from halo_vae.tests.optim.families.clip_checks import (
    TOLERANCE,
    declared_sizes,
    decode_clips,
    golden_shapes,
    one_tensor_less,
)
from halo_vae.tests.optim.families.layouts import Shapes, random_weights, specs
from halo_vae.tests.optim.video.reference import Interpreter

GOLDENS = ("wan21", "wan22")


def _convs(program: Program) -> dict[str, ClipConv]:
    return {op.name: op for op in program.ops if isinstance(op, ClipConv)}


def _to_diffusers(name: str) -> str:
    """The name that the same tensor has in diffusers."""
    name = re.sub(r"^conv2\.", "post_quant_conv.", name)
    name = name.replace("decoder.conv1.", "decoder.conv_in.").replace("decoder.head.0.", "decoder.norm_out.")
    name = name.replace("decoder.head.2.", "decoder.conv_out.").replace("middle.0.", "mid_block.resnets.0.")
    name = name.replace("middle.1.", "mid_block.attentions.0.").replace("middle.2.", "mid_block.resnets.1.")
    level = re.match(r"decoder\.upsamples\.(\d+)\.upsamples\.(\d+)\.", name)
    flat = re.match(r"decoder\.upsamples\.(\d+)\.(?!upsamples)", name)
    if level:
        inner = "upsampler" if level[2] == "3" else f"resnets.{level[2]}"
        name = name.replace(level[0], f"decoder.up_blocks.{level[1]}.{inner}.")
    elif flat:
        number, block = divmod(int(flat[1]), 4)
        inner = "upsamplers.0" if block == 3 else f"resnets.{block}"
        name = name.replace(flat[0], f"decoder.up_blocks.{number}.{inner}.")
    for ours, theirs in (("residual.0", "norm1"), ("residual.2", "conv1"), ("residual.3", "norm2")):
        name = name.replace(ours, theirs)
    return name.replace("residual.6", "conv2").replace("shortcut", "conv_shortcut")


def _renamed(name: str) -> dict[str, Tensor]:
    return {_to_diffusers(key): tensor for key, tensor in golden(name).weights.items()}


def _families(shapes: Shapes) -> list[str]:
    return [family.name for family in FAMILIES if family.detect(Keys(specs(shapes)))]


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_is_decoded_as_by_the_reference(name: str) -> None:
    g = golden(name)
    program = lower(MappingWeights(g.weights).specs)
    assert detect(MappingWeights(g.weights).specs) == program.family == name
    assert is_video(program)
    assert (program.latent_channels, program.out_channels) == (int(g.metadata["latent_channels"]), 3)
    assert program.working_dtypes == ("bfloat16", "float16", "float32")
    for case, latents in g.latents.items():
        clips = decode_clips(program, g.weights, latents)
        assert clips.shape == g.expected[case].shape, case
        assert (clips - g.expected[case]).abs().max().item() <= TOLERANCE, case
        assert clips.shape[2] == output_frames(program, latents.shape[2]) == 4 * latents.shape[2] - 3
        assert clips.shape[3:] == tuple(n * program.scale[1] for n in latents.shape[3:])


@pytest.mark.parametrize("name", GOLDENS)
def test_every_tensor_is_read_and_no_other(name: str) -> None:
    g = golden(name)
    read: set[str] = set()

    class Recorder(dict[str, Tensor]):
        def __getitem__(self, key: str) -> Tensor:
            read.add(key)
            return super().__getitem__(key)

    run = Interpreter(lower(MappingWeights(g.weights).specs), dict(g.weights))
    run.w = Recorder(run.w)
    run.run(g.latents["batch2"][:1])
    assert read == set(g.weights)


@pytest.mark.parametrize("name", GOLDENS)
def test_diffusers_names_of_the_same_weights_give_the_same_program_and_clip(name: str) -> None:
    g, renamed = golden(name), _renamed(name)
    assert len(renamed) == len(g.weights)
    assert _families({key: tuple(tensor.shape) for key, tensor in renamed.items()}) == [name]
    program = lower(MappingWeights(renamed).specs)
    ours = decode_clips(lower(MappingWeights(g.weights).specs), g.weights, g.latents["batch2"][:1])
    assert torch.equal(decode_clips(program, renamed, g.latents["batch2"][:1]), ours)


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("prefix", ["first_stage_model.", "vae."])
def test_decoder_inside_a_checkpoint_is_found_and_its_ops_carry_full_names(name: str, prefix: str) -> None:
    shapes = golden_shapes(name)
    other = specs({"model.diffusion_model.decoder.weight": (2, 2, 3, 3, 3)})
    encoder = specs({"encoder.conv1.weight": (8, 3, 3, 3, 3), "conv1.weight": (32, 32, 1, 1, 1)}, prefix=prefix)
    program = lower({**other, **encoder, **specs(shapes, prefix=prefix)})
    plain = lower(specs(shapes))
    assert [op.name for op in program.ops] == [prefix + op.name for op in plain.ops]
    assert program.values == plain.values


def test_wan21_ops_carry_state_dict_names_in_the_order_they_run() -> None:
    program = lower(specs(golden_shapes("wan21")))
    names = [op.name for op in program.ops]
    assert names[:4] == ["conv2", "decoder.conv1", "decoder.middle.0.residual.2", "decoder.middle.0.residual.6"]
    at = names.index("decoder.upsamples.3.time_conv")
    assert names[at + 1 : at + 5] == [
        "decoder.upsamples.3.resample.1", "decoder.upsamples.4.residual.2", "decoder.upsamples.4.shortcut",
        "decoder.upsamples.4.residual.6",
    ]  # fmt: skip
    attentions = [op for op in program.ops if isinstance(op, ClipAttention)]
    assert [(op.name, op.scope) for op in attentions] == [("decoder.middle.1", "frame")]
    assert program.values[program.ops[at].output].scale == (2, 1, 1)


def test_levels_that_double_frames_are_those_with_a_time_convolution() -> None:
    for name in GOLDENS:
        shapes = golden_shapes(name)
        doubling = sorted(key.removesuffix(".weight") for key in shapes if key.endswith("time_conv.weight"))
        rates = {len(doubling): (4, len(doubling))}
        spatial = {key: shape for key, shape in shapes.items() if not key.startswith(doubling[0])}
        rates[len(doubling) - 1] = (2, len(doubling) - 1)
        for layout, (rate, count) in zip((shapes, spatial), rates.values(), strict=True):
            program = lower(specs(layout))
            assert program.scale[0] == rate
            assert sum(op.first_frame == "bypass" for op in _convs(program).values()) == count
            assert output_frames(program, 3) == 2 * rate + 1


def test_shortcuts_of_wan22_repeat_the_level_input_to_fill_all_offsets() -> None:
    convs = _convs(lower(specs(golden_shapes("wan22"))))
    skips = [op.skip for op in convs.values() if op.name.endswith("resample.1")]
    assert [(s.repeat, s.unpack.t, s.unpack.s) for s in skips if s and s.unpack] == [(8, 2, 2), (8, 2, 2), (2, 1, 2)]
    inputs = [op.inputs[1] for op in convs.values() if op.name.endswith("resample.1")]
    firsts = [convs[f"decoder.upsamples.{level}.upsamples.0.residual.2"].inputs[0] for level in range(3)]
    assert inputs == firsts


def test_pictures_with_alpha_and_other_latents_widths_and_no_conv2() -> None:
    shapes = golden_shapes("wan21", without=["conv2"])
    shapes |= {"decoder.head.2.weight": (4, 8, 3, 3, 3), "decoder.head.2.bias": (4,)}
    shapes |= {"decoder.conv1.weight": (32, 6, 3, 3, 3)}
    program = lower(specs(shapes))
    assert (program.latent_channels, program.out_channels) == (6, 4)
    assert program.ops[0].name == "decoder.conv1"
    latent = torch.randn(1, 6, 3, 2, 3, generator=torch.Generator().manual_seed(0))
    clip = decode_clips(program, random_weights(shapes), latent)
    assert clip.shape == (1, 4, 9, 16, 24)
    assert clip.isfinite().all()
    assert declared_sizes(program, (3, 2, 3))[program.output] == clip.shape[1:]


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("diffusers", [False, True], ids=["own", "diffusers"])
def test_any_missing_tensor_is_named(name: str, diffusers: bool) -> None:
    shapes = golden_shapes(name)
    shapes = {_to_diffusers(key): shape for key, shape in shapes.items()} if diffusers else shapes
    for gone, rest in one_tensor_less(shapes):
        assert _families(rest) == [name], gone
        with pytest.raises(WeightsError, match="incomplete") as caught:
            lower(specs(rest, prefix="vae."))
        assert f"'vae.{gone}'" in str(caught.value)


@pytest.mark.parametrize("gone", ["upsamples.5", "upsamples.14", "upsamples.12", "middle.1", "head"])
def test_missing_part_of_wan21_is_named(gone: str) -> None:
    rest = golden_shapes("wan21", without=[f"decoder.{gone}."])
    with pytest.raises(WeightsError, match=rf"'decoder\.{re.escape(gone)}\.[^']*'; the file is incomplete"):
        lower(specs(rest))


@pytest.mark.parametrize("gone", ["up_blocks.1.resnets.2", "up_blocks.3", "up_blocks.0.upsamplers"])
def test_missing_part_of_diffusers_is_named(gone: str) -> None:
    shapes = {_to_diffusers(key): shape for key, shape in golden_shapes("wan21").items()}
    rest = {key: shape for key, shape in shapes.items() if not key.startswith(f"decoder.{gone}.")}
    with pytest.raises(WeightsError, match=rf"'decoder\.{re.escape(gone)}\.[^']*'; the file is incomplete"):
        lower(specs(rest))


@pytest.mark.parametrize("gone", ["upsamples.1.upsamples.2", "upsamples.3", "upsamples.1.upsamples.3"])
def test_missing_part_of_wan22_is_named(gone: str) -> None:
    rest = golden_shapes("wan22", without=[f"decoder.{gone}."])
    with pytest.raises(WeightsError, match=rf"'decoder\.{re.escape(gone)}\.[^']*'; the file is incomplete"):
        lower(specs(rest))


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("decoder.upsamples.3.time_conv.weight", (32, 32, 3, 1, 1), r"shape \[64\], but \[32\]"),
        ("decoder.upsamples.4.residual.2.weight", (32, 32, 3, 3, 3), "reads 32 channels, but its input has 16"),
        ("decoder.upsamples.3.resample.1.weight", (16, 32, 2, 2), "odd square"),
        ("decoder.middle.0.residual.3.gamma", (31, 1, 1, 1), r"shape \[31, 1, 1, 1\]"),
        ("decoder.middle.1.to_qkv.weight", (64, 32, 1, 1), r"\[96, 32\] is expected"),
        ("decoder.conv1.weight", (32, 16, 2, 3, 3), "2 frames at a time"),
        ("decoder.head.2.weight", (3, 8, 3, 3), "5 axes"),
        ("decoder.head.2.bias", (4,), r"shape \[4\]"),
    ],
)
def test_misshapen_tensor_is_named_with_its_shape(name: str, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(WeightsError, match=says) as caught:
        lower(specs(golden_shapes("wan21") | {name: shape}))
    assert "decoder." in str(caught.value)


def test_shortcut_of_wan22_that_cannot_fill_the_offsets_is_refused() -> None:
    name = "decoder.upsamples.2.upsamples.3.resample.1"
    shapes = golden_shapes("wan22") | {f"{name}.weight": (15, 16, 3, 3), f"{name}.bias": (15,)}
    with pytest.raises(WeightsError, match="32 cannot be added"):
        lower(specs(shapes))


def test_a_decoder_with_one_unknown_part_is_refused() -> None:
    for name in GOLDENS:
        for extra in ("decoder.upsamples.0.to_qkv.weight", "decoder.conv1.weight_scale"):
            with pytest.raises(UnknownDecoderError):
                detect(specs(golden_shapes(name) | {extra: (1,)}))
