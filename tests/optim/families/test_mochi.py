"""Mochi: its golden, both namings, the published size, and damaged files."""

from __future__ import annotations

import pytest
import torch

from halo_vae.optim.errors import WeightsError
from halo_vae.optim.families import FAMILIES, detect, lower, mochi
from halo_vae.optim.families.keys import Keys
from halo_vae.optim.video.frames import output_frames
from halo_vae.optim.video.ops import ClipConv
from halo_vae.optim.weights import TensorSpec
from halo_vae.tests.goldens import golden
from halo_vae.tests.optim.families.clip_checks import (
    assert_golden_is_decoded,
    assert_missing_tensors_are_named,
    program_of,
    specs_of,
)
from halo_vae.tests.optim.families.layouts import Shapes, specs
from halo_vae.tests.optim.video.reference import Interpreter


def published() -> Shapes:
    """Shapes of genmo's decoder, below `decoder.`."""
    shapes: Shapes = {"decoder.blocks.0.0.weight": (768, 12, 1, 1, 1), "decoder.blocks.0.0.bias": (768,)}

    def res(name: str, c: int) -> None:
        for norm, conv in ((0, 2), (3, 5)):
            shapes[f"{name}.stack.{norm}.weight"] = shapes[f"{name}.stack.{norm}.bias"] = (c,)
            shapes[f"{name}.stack.{conv}.weight"], shapes[f"{name}.stack.{conv}.bias"] = (c, c, 3, 3, 3), (c,)

    for i in range(3):
        res(f"decoder.blocks.0.{i + 1}", 768)
        res(f"decoder.blocks.4.{i}", 128)
    for number, (read, made, frames, layers) in enumerate(((768, 512, 3, 6), (512, 256, 2, 4), (256, 128, 1, 3)), 1):
        for i in range(layers):
            res(f"decoder.blocks.{number}.blocks.{i}", read)
        name, out = f"decoder.blocks.{number}.proj", made * frames * 4
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, read), (out,)
    return shapes | {"decoder.output_proj.weight": (3, 128), "decoder.output_proj.bias": (3,)}


def test_golden_is_decoded_as_by_the_reference() -> None:
    assert_golden_is_decoded("mochi", mochi.FAMILY)
    assert [family.name for family in FAMILIES if family.detect(Keys(specs_of(golden("mochi"))))] == ["mochi"]


def test_missing_tensors_are_named() -> None:
    assert_missing_tensors_are_named("mochi", mochi.FAMILY)


def test_every_tensor_of_the_decoder_is_used() -> None:
    text = repr(program_of("mochi"))
    assert [key for key in golden("mochi").weights if f"'{key}'" not in text] == []


def test_published_size() -> None:
    shapes = published()
    program = lower(specs(shapes))
    text = repr(program)
    assert [key for key in shapes if f"'{key}'" not in text] == []
    assert (program.family, program.latent_channels, program.out_channels) == ("mochi", 12, 3)
    assert program.scale == (6, 8, 8)
    assert [output_frames(program, t) for t in (1, 2, 3, 28)] == [1, 7, 13, 163]
    convs = [op for op in program.ops if isinstance(op, ClipConv)]
    assert {(op.border, op.time_border, op.front, op.back) for op in convs if op.kernel == (3, 3, 3)} == {
        ("replicate", "replicate", 2, 0)
    }
    assert {(op.norm.groups, op.norm.scope, op.norm.eps) for op in convs if op.norm} == {(32, 1, 1e-5)}
    assert [(op.unpack.t, op.first_frame) for op in convs if op.unpack] == [(3, "drop"), (2, "drop"), (1, "same")]


def test_file_of_the_decoder_alone_gives_the_same_program() -> None:
    whole = program_of("mochi")
    bare = {key.removeprefix("decoder."): spec for key, spec in specs_of(golden("mochi")).items()}
    assert detect(bare) == "mochi"
    assert repr(lower(bare)) == repr(whole).replace("'decoder.", "'")
    assert_bare_missing_is_named(bare)


def assert_bare_missing_is_named(bare: dict[str, TensorSpec]) -> None:
    for gone in bare:
        with pytest.raises(WeightsError, match="incomplete") as caught:
            lower({key: spec for key, spec in bare.items() if key != gone})
        assert f"'{gone}'" in str(caught.value)


def test_encoder_alone_is_not_mistaken() -> None:
    assert not mochi.FAMILY.detect(Keys(specs({"layers.0.weight": (64, 15), "layers.1.stack.0.weight": (64,)})))
    assert not mochi.FAMILY.detect(Keys(specs({"encoder.layers.1.stack.2.weight": (64, 64, 3, 3, 3)})))


@pytest.mark.parametrize(
    "gone", ["blocks.4.", "blocks.2.", "blocks.0.", "blocks.1.proj.", "blocks.1.blocks.", "output_proj."]
)
def test_parts_missing_as_a_whole_are_named(gone: str) -> None:
    shapes = {key: shape for key, shape in published().items() if not key.startswith(f"decoder.{gone}")}
    with pytest.raises(WeightsError, match="incomplete") as caught:
        lower(specs(shapes))
    assert f"'decoder.{gone}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("blocks.1.proj.weight", (512 * 12 + 4, 768), "no whole number of frames"),
        ("blocks.1.proj.weight", (512, 768), "no whole number of frames"),
        ("blocks.1.proj.weight", (512 * 12, 760), "reads 760 channels, but its input has 768"),
        ("blocks.1.proj.weight", (512 * 12, 768, 1, 1), "2 axes"),
        ("blocks.0.1.stack.0.weight", (767,), "shape"),
        ("blocks.4.2.stack.5.bias", (3,), "shape"),
        ("blocks.0.0.weight", (768, 12, 1, 1), "5 axes"),
    ],
)
def test_misshapen_tensors_are_named(name: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(WeightsError, match=words) as caught:
        lower(specs(published() | {f"decoder.{name}": shape}))
    assert f"'decoder.{name}'" in str(caught.value)


@pytest.mark.parametrize("name", ["blocks.4.0.attn_block.norm.weight", "output_norm.weight"])
def test_parts_that_no_known_decoder_has_are_refused(name: str) -> None:
    with pytest.raises(WeightsError, match=r"attention|output norm"):
        lower(specs(published() | {f"decoder.{name}": (128,)}))


def test_groups_follow_the_hint() -> None:
    program = lower(specs_of(golden("mochi")), hints={"norm_groups": "16"})
    assert {op.norm.groups for op in program.ops if isinstance(op, ClipConv) and op.norm} == {16}


def test_statistics_are_each_frames_own() -> None:
    """A frame's picture does not depend on the frames after it."""
    g = golden("mochi")
    latent = g.latents["a"]
    with torch.no_grad():
        long, short = (Interpreter(program_of("mochi"), dict(g.weights)).run(latent[:, :, :n]) for n in (3, 2))
    assert (long[:, :, : short.shape[2]] - short).abs().max().item() <= 1e-5
