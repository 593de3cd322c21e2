"""The 3-D decoders of Hunyuan against the reference, whole and damaged."""

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
from halo_vae.optim.video.ops import ClipAttention, ClipConv, ClipNorm, is_video
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.goldens import golden
from halo_vae.tests.optim.families.clip_checks import (
    TOLERANCE,
    declared_sizes,
    decode_clips,
    golden_shapes,
    one_tensor_less,
)
from halo_vae.tests.optim.families.layouts import Shapes, hunyuan_image, kl_ldm, random_weights, specs
from halo_vae.tests.optim.video.reference import Interpreter

GOLDENS = ("hunyuan_video", "hunyuan15", "hunyuan_refiner")
UNREAD = ("temb_proj",)
"""Tensors that files may carry and no decode reads."""


def _convs(program: Program) -> dict[str, ClipConv]:
    return {op.name: op for op in program.ops if isinstance(op, ClipConv)}


def _norms(program: Program) -> list[tuple[int, ClipNorm]]:
    """(frames per latent frame, norm) of each norm, in the order they run."""
    return [
        (program.values[op.inputs[0]].scale[0], op.norm)
        for op in program.ops
        if isinstance(op, (ClipConv, ClipAttention)) and op.norm is not None
    ]


def _to_diffusers(name: str) -> str:
    """The name that a tensor of HunyuanVideo 1.0 has in diffusers."""
    name = name.replace("mid.block_1", "mid_block.resnets.0").replace("mid.block_2", "mid_block.resnets.1")
    for part, theirs in (("norm", "group_norm"), ("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("proj_out", "to_out.0")):
        name = name.replace(f"mid.attn_1.{part}.", f"mid_block.attentions.0.{theirs}.")
    name = name.replace("decoder.norm_out", "decoder.conv_norm_out").replace("nin_shortcut", "conv_shortcut")
    name = re.sub(r"up\.(\d)\.block", lambda m: f"up_blocks.{3 - int(m[1])}.resnets", name)
    return re.sub(r"up\.(\d)\.upsample", lambda m: f"up_blocks.{3 - int(m[1])}.upsamplers.0", name)


def _families(shapes: Shapes) -> list[str]:
    return [family.name for family in FAMILIES if family.detect(Keys(specs(shapes)))]


def _repeating(widths: tuple[int, ...], times: tuple[int, ...], *, z: int, padded: bool) -> Shapes:
    """Shapes of a decoder with repeated shortcuts. widths: lowest first; times: frames of one at each level's end."""
    shapes: Shapes = {}
    end = ".conv" if padded else ""

    def conv(name: str, read: int, out: int, k: int = 3) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, read, k, k, k), (out,)

    def norm(name: str, c: int) -> None:
        shapes.update({f"{name}.gamma": (c, 1, 1, 1)} if padded else {f"{name}.weight": (c,), f"{name}.bias": (c,)})

    def res(name: str, read: int, out: int) -> None:
        norm(f"{name}.norm1", read)
        conv(f"{name}.conv1{end}", read, out)
        norm(f"{name}.norm2", out)
        conv(f"{name}.conv2{end}", out, out)

    conv(f"decoder.conv_in{end}", z, widths[0])
    for part in ("block_1", "block_2"):
        res(f"decoder.mid.{part}", widths[0], widths[0])
    norm("decoder.mid.attn_1.norm", widths[0])
    for part in ("q", "k", "v", "proj_out"):
        conv(f"decoder.mid.attn_1.{part}", widths[0], widths[0], 1)
    for level, width in enumerate(widths):
        res(f"decoder.up.{level}.block.0", width, width)
        if level < len(times):
            following = widths[min(level + 1, len(widths) - 1)]
            conv(f"decoder.up.{level}.upsample.conv{end}", width, 4 * times[level] * following)
    norm("decoder.norm_out", widths[-1])
    conv(f"decoder.conv_out{end}", widths[-1], 3)
    return shapes


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_is_decoded_as_by_the_reference(name: str) -> None:
    g = golden(name)
    program = lower(MappingWeights(g.weights).specs)
    assert detect(MappingWeights(g.weights).specs) == program.family == name
    assert is_video(program)
    assert (program.latent_channels, program.out_channels) == (int(g.metadata["latent_channels"]), 3)
    first = "bfloat16" if name == "hunyuan_video" else "float16"
    assert program.working_dtypes[0] == first
    assert set(program.working_dtypes) == {"float16", "bfloat16", "float32"}
    for case, latents in g.latents.items():
        clips = decode_clips(program, g.weights, latents)
        assert clips.shape == g.expected[case].shape, case
        assert (clips - g.expected[case]).abs().max().item() <= TOLERANCE, case
        assert clips.shape[2] == output_frames(program, latents.shape[2])
        assert clips.shape[3:] == tuple(n * program.scale[1] for n in latents.shape[3:])


def test_frame_counts_are_the_published_ones() -> None:
    for name, counts in zip(GOLDENS, ((1, 5, 9, 13), (1, 5, 9, 13), (1, 8, 12, 16)), strict=True):
        program = lower(specs(golden_shapes(name)))
        assert tuple(output_frames(program, frames) for frames in (1, 2, 3, 4)) == counts, name


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
    with torch.no_grad():
        run.run(g.latents["batch2"][:1, :, :, :2, :3])
    assert read == set(golden_shapes(name, without=UNREAD))


def test_statistics_of_hunyuan_video_are_of_two_latent_frames_after_the_middle() -> None:
    program = lower(specs(golden_shapes("hunyuan_video")))
    norms = _norms(program)
    in_middle = norms[:5]
    assert {(rate, norm.scope) for rate, norm in in_middle} == {(1, 0)}
    after = [(rate, norm.scope, norm.scope_offset) for rate, norm in norms[5:]]
    assert after == sorted(after)
    assert set(after) == {(1, 2, 0), (2, 4, 1), (4, 8, 3)}
    assert after[-1] == (4, 8, 3)
    assert {norm.groups for _, norm in norms} == {32}


def test_refiner_takes_statistics_of_the_whole_clip_and_sees_both_neighbours() -> None:
    program = lower(specs(golden_shapes("hunyuan_refiner")))
    assert {norm.scope for _, norm in _norms(program)} == {0}
    spatial = [op for op in _convs(program).values() if op.kernel == (3, 3, 3)]
    assert {(op.front, op.back, op.time_border, op.border) for op in spatial} == {(1, 1, "zero", "zero")}
    assert [op.name for op in spatial if op.last_of_one] == ["decoder.conv_out"]


@pytest.mark.parametrize("name", ["hunyuan_video", "hunyuan15"])
def test_causal_decoders_repeat_the_first_frame_and_the_edge(name: str) -> None:
    convs = _convs(lower(specs(golden_shapes(name)))).values()
    spatial = [op for op in convs if op.kernel == (3, 3, 3)]
    assert {(op.front, op.back, op.time_border, op.border) for op in spatial} == {(2, 0, "replicate", "replicate")}


@pytest.mark.parametrize("levels", [2, 3, 4, 5])
def test_last_two_upsamplings_of_hunyuan_video_double_the_frames(levels: int) -> None:
    shapes = golden_shapes("hunyuan_video", without=["decoder.up."])
    one = {key: shape for key, shape in golden_shapes("hunyuan_video").items() if "decoder.up.3." in key}
    for level in range(levels):
        named = {key.replace("up.3", f"up.{level}"): shape for key, shape in one.items()}
        shapes |= {key: shape for key, shape in named.items() if level or "upsample" not in key}
    shapes |= {"decoder.norm_out.weight": (64,), "decoder.norm_out.bias": (64,)}
    shapes |= {"decoder.conv_out.conv.weight": (3, 64, 3, 3, 3)}
    program = lower(specs(shapes))
    assert program.scale == (2 ** min(2, levels - 1), 2 ** (levels - 1), 2 ** (levels - 1))
    ups = [(op.name, op.upsample_time) for op in _convs(program).values() if op.upsample == 2]
    expected = [
        (f"decoder.up.{level}.upsample.conv.conv", "first_single" if level <= 2 else "none")
        for level in range(levels - 1, 0, -1)
    ]
    assert ups == expected


@pytest.mark.parametrize("padded", [True, False])
def test_which_levels_double_frames_is_read_from_the_channels_they_give(padded: bool) -> None:
    shapes = _repeating((64, 64, 32, 32), (2, 1, 2), z=16, padded=padded)
    program = lower(specs(shapes))
    assert program.family == ("hunyuan15" if padded else "hunyuan_refiner")
    assert program.scale == (4, 8, 8)
    ups = [op for op in _convs(program).values() if "upsample" in op.name]
    assert [(op.unpack.t, op.first_frame) for op in ups if op.unpack] == [
        (2, "single" if padded else "same"), (1, "same"), (2, "single" if padded else "same"),
    ]  # fmt: skip
    assert [op.skip.repeat for op in ups if op.skip] == [8, 2, 8]
    first = next(iter(_convs(program).values()))
    assert first.skip is not None
    assert first.skip.repeat == 4
    latent = torch.randn(1, 16, 2, 2, 3, generator=torch.Generator().manual_seed(0))
    clip = decode_clips(program, random_weights(shapes), latent)
    assert clip.shape == (1, 3, 5 if padded else 8, 16, 24)
    assert clip.isfinite().all()
    assert declared_sizes(program, (2, 2, 3))[program.output] == clip.shape[1:]


def test_as_many_upsamplings_as_levels_are_lowered() -> None:
    program = lower(specs(_repeating((32, 32), (2, 1), z=32, padded=True)))
    assert program.scale == (2, 4, 4)


def test_diffusers_names_of_hunyuan_video_give_the_same_clip() -> None:
    g = golden("hunyuan_video")
    renamed = {}
    for name, tensor in g.weights.items():
        linear = "attn_1" in name and tensor.ndim == 5
        renamed[_to_diffusers(name)] = tensor.flatten(1) if linear else tensor
    assert len(renamed) == len(g.weights)
    assert _families({key: tuple(tensor.shape) for key, tensor in renamed.items()}) == ["hunyuan_video"]
    latent = g.latents["batch2"][:1, :, :, :3, :4]
    theirs = decode_clips(lower(MappingWeights(renamed).specs), renamed, latent)
    assert torch.equal(theirs, decode_clips(lower(MappingWeights(g.weights).specs), g.weights, latent))


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("prefix", ["first_stage_model.", "vae."])
def test_decoder_inside_a_checkpoint_is_found_and_its_ops_carry_full_names(name: str, prefix: str) -> None:
    shapes = golden_shapes(name)
    other = specs({"model.diffusion_model.decoder.weight": (2, 2, 3, 3, 3)})
    encoder = specs({"encoder.conv_in.conv.weight": (8, 3, 3, 3, 3)}, prefix=prefix)
    program = lower({**other, **encoder, **specs(shapes, prefix=prefix)})
    plain = lower(specs(shapes))
    assert [op.name for op in program.ops] == [prefix + op.name for op in plain.ops]
    assert program.values == plain.values


@pytest.mark.parametrize("name", [*GOLDENS, "diffusers"])
def test_any_missing_tensor_is_named(name: str) -> None:
    family = "hunyuan_video" if name == "diffusers" else name
    shapes = golden_shapes(family, without=UNREAD)
    shapes = {_to_diffusers(key): shape for key, shape in shapes.items()} if name == "diffusers" else shapes
    for gone, rest in one_tensor_less(shapes):
        assert _families(rest) == [family], gone
        with pytest.raises(WeightsError, match="incomplete") as caught:
            lower(specs(rest, prefix="vae."))
        assert f"'vae.{gone}'" in str(caught.value)


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("gone", ["up.1.block.1", "up.1.upsample", "up.2", "mid.attn_1", "norm_out"])
def test_missing_part_is_named(name: str, gone: str) -> None:
    rest = golden_shapes(name, without=[f"decoder.{gone}."])
    assert _families(rest) == [name]
    with pytest.raises(WeightsError, match=rf"'decoder\.{re.escape(gone)}\.[^']*'; the file is incomplete"):
        lower(specs(rest))


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "says"),
    [
        ("hunyuan_video", "decoder.up.1.block.0.conv1.conv.weight", (32, 48, 3, 3, 3), "reads 48 channels"),
        ("hunyuan_video", "decoder.up.3.block.0.norm1.bias", (63,), r"shape \[63\]"),
        ("hunyuan_video", "decoder.mid.attn_1.q.weight", (64, 64, 3, 1, 1), r"\[64, 64\] is expected"),
        ("hunyuan_video", "decoder.conv_in.conv.weight", (64, 16, 3, 3), "5 axes"),
        ("hunyuan15", "decoder.up.0.upsample.conv.conv.weight", (192, 32, 3, 3, 3), "four or eight times the 32"),
        ("hunyuan15", "decoder.conv_in.conv.weight", (32, 24, 3, 3, 3), "24 cannot be added"),
        ("hunyuan15", "decoder.mid.block_1.norm1.gamma", (32, 2, 1, 1), "one value for each of 32"),
        ("hunyuan_refiner", "decoder.conv_out.weight", (3, 32, 3, 2, 2), "odd square"),
        ("hunyuan_refiner", "decoder.conv_out.bias", (4,), r"shape \[4\]"),
    ],
)
def test_misshapen_tensor_is_named_with_its_shape(name: str, tensor: str, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(WeightsError, match=says) as caught:
        lower(specs(golden_shapes(name) | {tensor: shape}))
    assert tensor.removesuffix(".weight") in str(caught.value)


@pytest.mark.parametrize("name", ["hunyuan_video", "hunyuan_refiner"])
def test_group_count_is_a_hint(name: str) -> None:
    program = lower(specs(golden_shapes(name)), hints={"norm_groups": "16", "format": "pt"})
    assert {norm.groups for _, norm in _norms(program)} == {16}
    with pytest.raises(WeightsError, match="channels, which 24 groups do not divide"):
        lower(specs(golden_shapes(name)), hints={"norm_groups": "24"})


def test_picture_decoders_with_the_same_names_stay_theirs() -> None:
    assert _families(kl_ldm(4, (64, 32))) == ["kl"]
    assert _families(hunyuan_image(32, (64, 32))) == ["hunyuan_image"]


def test_a_decoder_with_one_unknown_part_is_refused() -> None:
    for name in GOLDENS:
        for extra in ("decoder.up.0.attn.0.q.weight", "decoder.mid.block_1.mix_factor"):
            with pytest.raises(UnknownDecoderError):
                detect(specs(golden_shapes(name) | {extra: (1,)}))
