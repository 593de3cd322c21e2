"""TAEHV of every published latent: goldens, the hint for its latents, damaged files, and TAESD kept apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from halo_vae.optim.errors import WeightsError
from halo_vae.optim.families import FAMILIES, detect, lower, taehv, taesd
from halo_vae.optim.families.keys import Keys
from halo_vae.optim.program import Program
from halo_vae.optim.video.frames import output_frames
from halo_vae.optim.video.ops import ClipConv, ClipScale
from halo_vae.optim.weights import TensorSpec
from halo_vae.tests.goldens import golden
from halo_vae.tests.optim.families import layouts
from halo_vae.tests.optim.families.clip_checks import (
    assert_golden_is_decoded,
    assert_missing_tensors_are_named,
    program_of,
    specs_of,
)
from halo_vae.tests.optim.families.layouts import Shapes, specs
from halo_vae.tests.optim.video.reference import Interpreter

GOLDENS = ("taehv", "taehv_wan", "taehv32")
SIZES = {16: (1, 2, 2, 1), 32: (1, 2, 2, 2), 48: (1, 2, 2, 2), 128: (2, 2, 2, 4)}
"""By latent channels: frames that each maker makes of one, and pixels per side of the last convolution."""


def published(channels: int, widths: tuple[int, int, int, int] = (256, 128, 64, 64)) -> Shapes:
    """Shapes of the decoder for latents of that many channels."""
    *frames, pixels = SIZES[channels]

    def conv(number: object, read: int, out: int, *, bias: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"decoder.{number}.weight", (out, read, 3, 3)
        if bias:
            yield f"decoder.{number}.bias", (out,)

    shapes: Shapes = dict(conv(1, channels, widths[0]))
    for stage, (c, made) in enumerate(zip(widths[:3], frames, strict=True)):
        first = 3 + 6 * stage
        for number in range(first, first + 3):
            for part, read in ((0, 2 * c), (2, c), (4, c)):
                shapes |= dict(conv(f"{number}.conv.{part}", read, c))
        shapes[f"decoder.{first + 4}.conv.weight"] = (made * c, c, 1, 1)
        shapes |= dict(conv(first + 5, c, widths[stage + 1], bias=False))
    return shapes | dict(conv(22, widths[3], 3 * pixels**2))


def stored_as(shapes: Shapes, dtype: torch.dtype) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape=shape, dtype=dtype) for name, shape in shapes.items()}


def before(program: Program) -> float:
    """What the latent is multiplied by."""
    first = program.ops[0]
    return first.before if isinstance(first, ClipScale) else 1.0


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_is_decoded_as_by_the_reference(name: str) -> None:
    assert_golden_is_decoded(name, taehv.FAMILY)
    assert [family.name for family in FAMILIES if family.detect(Keys(specs_of(golden(name))))] == ["taehv"]


@pytest.mark.parametrize("name", GOLDENS)
def test_missing_tensors_are_named(name: str) -> None:
    assert_missing_tensors_are_named(name, taehv.FAMILY)


@pytest.mark.parametrize("channels", SIZES)
def test_published_sizes(channels: int) -> None:
    shapes = published(channels)
    program = lower(specs(shapes))
    text = repr(program)
    assert [key for key in shapes if f"'{key}'" not in text] == []
    assert (program.family, program.latent_channels, program.out_channels) == ("taehv", channels, 3)
    long = channels == 128
    assert program.scale == {16: (4, 8, 8), 128: (8, 32, 32)}.get(channels, (4, 16, 16))
    assert [output_frames(program, t) for t in (1, 2, 3)] == ([1, 9, 17] if long else [1, 5, 9])
    acts = {act for op in program.ops if isinstance(op, ClipConv) for act in (op.act, op.post_act)}
    assert acts == {"none", "tanh3", "leaky_relu" if channels == 32 else "relu"}


def test_published_files_with_an_encoder_are_found_under_a_prefix() -> None:
    shapes = published(48) | {"encoder.0.weight": (64, 12, 3, 3), "encoder.4.conv.0.weight": (64, 128, 3, 3)}
    program = lower(specs(shapes, prefix="vae."))
    assert all(op.name.startswith("vae.decoder.") for op in program.ops)


def test_the_file_tells_what_the_latent_is_multiplied_by() -> None:
    half, brain, full = torch.float16, torch.bfloat16, torch.float32
    assert before(lower(stored_as(published(16), half))) == 0.476986
    assert [before(lower(stored_as(published(16), dtype))) for dtype in (brain, full)] == [1.0, 1.0]
    assert [before(lower(stored_as(published(32), dtype))) for dtype in (half, brain, full)] == [1.03682] * 3
    assert [before(lower(stored_as(published(c), half))) for c in (48, 128)] == [1.0, 1.0]


def test_the_hint_outweighs_the_file() -> None:
    for channels in SIZES:
        for text, value in (("0.476986", 0.476986), ("1", 1.0), ("1.0", 1.0), ("2e-1", 0.2)):
            assert before(lower(specs(published(channels)), hints={"latent_scale": text})) == value


def test_the_hint_is_what_the_latent_is_multiplied_by() -> None:
    g = golden("taehv_wan")
    doubled = lower(specs_of(g), hints={"latent_scale": "2"})
    with torch.no_grad():
        expected = Interpreter(program_of("taehv_wan"), dict(g.weights)).run(g.latents["a"] * 2)
        assert torch.equal(Interpreter(doubled, dict(g.weights)).run(g.latents["a"]), expected)
    assert (expected - g.expected["a"]).abs().max().item() > 1e-2


@pytest.mark.parametrize("text", ["", "much", "0", "-1", "nan", "inf"])
def test_a_hint_that_is_no_factor_is_refused(text: str) -> None:
    with pytest.raises(WeightsError, match="latent_scale"):
        lower(specs(published(16)), hints={"latent_scale": text})


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("7.conv.weight", (36 + 1, 36, 1, 1), "no whole number of frames of 36"),
        ("22.weight", (5, 12, 3, 3), "no square of pixels"),
        ("3.conv.0.weight", (36, 71, 3, 3), "two frames"),
        ("3.conv.0.weight", (36, 36, 3, 3), "reads 18 channels, but its input has 36"),
        ("14.weight", (24, 24, 3), "4 axes"),
        ("22.bias", (4,), "shape"),
    ],
)
def test_misshapen_tensors_are_named(name: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(WeightsError, match=words) as caught:
        lower(specs(published(16, (36, 24, 12, 12)) | {f"decoder.{name}": shape}))
    assert f"'decoder.{name}'" in str(caught.value)


@pytest.mark.parametrize("gone", ["3.", "17.", "19.", "7.", "20.", "22.", "1."])
def test_layers_missing_as_a_whole_are_named(gone: str) -> None:
    shapes = {key: shape for key, shape in published(16).items() if not key.startswith(f"decoder.{gone}")}
    assert detect(specs(shapes)) == "taehv"
    with pytest.raises(WeightsError, match="incomplete") as caught:
        lower(specs(shapes))
    assert f"'decoder.{gone}" in str(caught.value)


def test_picture_and_clip_decoders_are_kept_apart() -> None:
    pictures = [layouts.taesd(4, 16), layouts.taesd(4, 16, scope=""), layouts.taesd(4, 16, scope="decoder.")]
    assert not any(taehv.FAMILY.detect(Keys(specs(shapes))) for shapes in pictures)
    for channels in SIZES:
        for shapes in (
            published(channels),
            {key.removeprefix("decoder."): s for key, s in published(channels).items()},
        ):
            assert not taesd.FAMILY.detect(Keys(specs(shapes)))
