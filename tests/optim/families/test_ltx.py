"""LTX-Video of every build: goldens, published layouts without a config, configs that are refused, and its noise."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.optim.errors import UnknownDecoderError, WeightsError
from halo_vae.optim.families import FAMILIES, detect, lower, ltx
from halo_vae.optim.families.keys import Keys
from halo_vae.optim.program import Program
from halo_vae.optim.video.frames import output_frames
from halo_vae.optim.video.ops import ClipConv, ClipScale
from halo_vae.tests.goldens import golden
from halo_vae.tests.optim.families.clip_checks import TOLERANCE, largest_error, specs_of
from halo_vae.tests.optim.families.layouts import Shapes, specs
from halo_vae.tests.optim.video.reference import Interpreter

GOLDENS = ("ltx_plain", "ltx_causal", "ltx_timestep", "ltx_noise", "ltx_split")
SEED = 7
"""Of torch's global generator, just before each decode of a golden that draws noise."""


def config_of(name: str) -> dict[str, Any]:
    """The decoder's part of the golden's config."""
    config: dict[str, Any] = json.loads(golden(name).metadata["config"])
    return config.get("vae", config)


def program_of(name: str, **changes: Any) -> Program:
    """The golden's decoder, its config changed."""
    return lower(specs_of(golden(name)), hints={"config": json.dumps({"vae": config_of(name) | changes})})


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_is_decoded_as_by_the_reference(name: str) -> None:
    g = golden(name)
    program = lower(specs_of(g), hints=g.metadata)
    assert detect(specs_of(g)) == program.family == "ltx"
    assert [family.name for family in FAMILIES if family.detect(Keys(specs_of(g)))] == ["ltx"]
    assert (program.latent_channels, program.out_channels) == (128, 3)
    for case in g.latents:
        torch.manual_seed(SEED)
        assert largest_error(program, g, case) <= TOLERANCE, case


@pytest.mark.parametrize("name", GOLDENS)
def test_every_tensor_of_the_decoder_is_used(name: str) -> None:
    text = repr(program_of(name))
    assert [key for key in golden(name).weights if f"'{key}'" not in text] == []


def test_config_may_be_the_whole_files_or_the_decoders_alone() -> None:
    inner = config_of("ltx_split")
    shapes = specs_of(golden("ltx_split"))
    whole = lower(shapes, hints={"config": json.dumps({"vae": inner, "transformer": {"layers": 28}})})
    assert whole == lower(shapes, hints={"config": json.dumps(inner)}) == program_of("ltx_split")


def test_a_prefix_and_the_encoder_change_nothing_but_the_names() -> None:
    shapes = specs_of(golden("ltx_timestep"))
    hints = golden("ltx_timestep").metadata
    inside = {f"vae.{key}": spec for key, spec in shapes.items()}
    inside["vae.encoder.down_blocks.1.conv.conv.bias"] = shapes["decoder.conv_in.conv.bias"]
    program = lower(inside, hints=hints)
    assert all(op.name.startswith("vae.") for op in program.ops)
    assert repr(program).replace("'vae.", "'") == repr(lower(shapes, hints=hints))


# -- published layouts, written as Lightricks' configs list them: in the encoder's order

PLAIN = ("res 4", "up", "to 2", "res 3", "up", "to 2", "res 3", "up", "res 3", "res 4")
NOISY = ("res 5", "up", "res 6", "up", "res 7", "up", "res 8")
LEAN = ("res 5", "up", "res 5", "up", "res 5", "up", "res 5")


def published(blocks: Sequence[str], base: int, *, halving: bool, noise: int = 0, conditioned: bool = False) -> Shapes:
    """Shapes of a decoder; `noise`: so many of the last blocks of res blocks to be listed first add noise."""
    c = base * 2 ** sum(block == "to 2" or (halving and block == "up") for block in blocks)
    shapes: Shapes = {f"per_channel_statistics.{part}-of-means": (128,) for part in ("std", "mean")}

    def conv(name: str, read: int, out: int) -> None:
        shapes[f"{name}.conv.weight"], shapes[f"{name}.conv.bias"] = (out, read, 3, 3, 3), (out,)

    def res(name: str, read: int, out: int) -> None:
        conv(f"{name}.conv1", read, out)
        conv(f"{name}.conv2", out, out)

    def embedder(name: str, width: int) -> None:
        for number, read in ((1, 256), (2, width)):
            shapes[f"{name}.timestep_embedder.linear_{number}.weight"] = (width, read)
            shapes[f"{name}.timestep_embedder.linear_{number}.bias"] = (width,)

    conv("decoder.conv_in", 128, c)
    for number, block in enumerate(reversed(blocks)):
        name = f"decoder.up_blocks.{number}"
        if block == "up":
            conv(f"{name}.conv", c, 8 * c // (2 if halving else 1))
            c //= 2 if halving else 1
        elif block == "to 2":
            res(name, c, c // 2)
            shapes |= {f"{name}.norm3.norm.weight": (c,), f"{name}.norm3.norm.bias": (c,)}
            shapes |= {f"{name}.conv_shortcut.weight": (c // 2, c, 1, 1, 1), f"{name}.conv_shortcut.bias": (c // 2,)}
            c //= 2
        else:
            if conditioned:
                embedder(f"{name}.time_embedder", 4 * c)
            for layer in range(int(block.removeprefix("res "))):
                inner = f"{name}.res_blocks.{layer}"
                res(inner, c, c)
                if conditioned:
                    shapes[f"{inner}.scale_shift_table"] = (4, c)
                if sum(other.startswith("res") for other in blocks[: len(blocks) - number]) <= noise:
                    shapes |= {f"{inner}.per_channel_scale{n}": (c, 1, 1) for n in (1, 2)}
    if conditioned:
        embedder("decoder.last_time_embedder", 2 * c)
        shapes |= {"decoder.last_scale_shift_table": (2, c), "decoder.timestep_scale_multiplier": ()}
    conv("decoder.conv_out", c, 3 * 16)
    return shapes


PUBLISHED: Mapping[str, Shapes] = {
    "0.9.0": published(PLAIN, 128, halving=False),
    "0.9.1": published(NOISY, 128, halving=True, noise=3, conditioned=True),
    "0.9.5": published(LEAN, 128, halving=True, conditioned=True)
    | {"encoder.down_blocks.1.conv.conv.bias": (64,)},
}  # fmt: skip


@pytest.mark.parametrize("version", PUBLISHED)
@pytest.mark.parametrize("hints", [{}, {"config": ""}, {"config": '{"transformer": {}}'}, {"config": '{"vae": null}'}])
def test_published_decoders_need_no_config(version: str, hints: dict[str, str]) -> None:
    shapes = PUBLISHED[version]
    program = lower(specs(shapes), hints=hints)
    text = repr(program)
    assert [key for key in shapes if key.startswith(("decoder.", "per_")) and f"'{key}'" not in text] == []
    assert (program.latent_channels, program.out_channels, program.scale) == (128, 3, (8, 32, 32))
    assert [output_frames(program, t) for t in (1, 2, 3, 16)] == [1, 9, 17, 121]
    convs = [op for op in program.ops if isinstance(op, ClipConv)]
    assert sum(op.noise is not None for op in convs) == (2 * (5 + 6 + 7) if version == "0.9.1" else 0)
    assert {op.border for op in convs if op.kernel[1] == 3} == {"reflect"}
    assert {(op.front, op.back) for op in convs if op.kernel[0] == 3} == {(1, 1)}
    scale = program.ops[0]
    assert isinstance(scale, ClipScale)
    assert scale.noise_share == (0.0 if version == "0.9.0" else 0.025)


def test_without_a_config_an_error_says_which_layout_was_taken() -> None:
    with pytest.raises(WeightsError, match=r"without the hint config .*0\.9\.0"):
        lower(specs_of(golden("ltx_split")))


# -- damaged files


@pytest.mark.parametrize("name", GOLDENS)
def test_missing_tensors_are_named(name: str) -> None:
    whole = specs_of(golden(name))
    for gone in whole:
        keys = Keys({key: spec for key, spec in whole.items() if key != gone})
        assert ltx.FAMILY.detect(keys), gone
        with pytest.raises(WeightsError, match="incomplete") as caught:
            ltx.FAMILY.lower(keys, golden(name).metadata)
        assert f"'{gone}'" in str(caught.value)


@pytest.mark.parametrize("name", ["ltx_plain", "ltx_noise"])
def test_tensors_of_another_width_are_named(name: str) -> None:
    whole = specs_of(golden(name))
    for changed, spec in whole.items():
        shape = (spec.shape[0] + 1, *spec.shape[1:]) if spec.shape else (2,)
        damaged = whole | {changed: type(spec)(shape=shape, dtype=spec.dtype)}
        with pytest.raises(WeightsError) as caught:
            lower(damaged, hints=golden(name).metadata)
        # a width that two tensors tell may be blamed on either
        assert changed.rsplit(".", 3)[0] in str(caught.value) or "up_blocks" in str(caught.value), changed


def test_weights_of_a_deeper_decoder_than_the_config_lists_are_refused() -> None:
    blocks = config_of("ltx_plain")["decoder_blocks"]
    with pytest.raises(WeightsError, match=r"hold 9 blocks .*lists 8"):
        program_of("ltx_plain", decoder_blocks=blocks[1:])
    whole = specs_of(golden("ltx_plain"))
    name = "decoder.up_blocks.0.res_blocks.{}.conv1.conv.weight"
    with pytest.raises(WeightsError, match=r"hold 2 of decoder\.up_blocks\.0\.res_blocks.*lists 1"):
        lower(whole | {name.format(1): whole[name.format(0)]}, hints=golden("ltx_plain").metadata)


def test_other_decoders_with_up_blocks_are_not_mistaken() -> None:
    names = ("resnets.0.conv1.conv.weight", "resnets.0.conv1.weight", "upsamplers.0.conv.conv.weight")
    assert not ltx.FAMILY.detect(Keys(specs({f"decoder.up_blocks.0.{name}": (8, 8, 3, 3, 3) for name in names})))
    with pytest.raises(UnknownDecoderError):
        detect(specs({"encoder.down_blocks.0.res_blocks.0.conv1.conv.weight": (8, 8, 3, 3, 3)}))


# -- configs


@pytest.mark.parametrize("text", ["{", "not json", '{"vae": {"dims": 3}', "\N{REPLACEMENT CHARACTER}"])
def test_broken_json_is_said_to_be_broken(text: str) -> None:
    with pytest.raises(WeightsError, match="config is not valid JSON"):
        lower(specs_of(golden("ltx_plain")), hints={"config": text})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_layer": "group_norm"}, 'norm_layer is "group_norm".*pixel_norm'),
        ({"norm_layer": "layer_norm"}, 'norm_layer is "layer_norm".*pixel_norm'),
        ({"dims": [2, 1]}, r"dims is \[2, 1\]"),
        ({"spatial_padding_mode": "circular"}, 'spatial_padding_mode is "circular".*reflect'),
        ({"spatial_padding_mode": ["zeros"]}, r'spatial_padding_mode is \["zeros"\]'),
        ({"patch_size": 0}, "patch_size is 0"),
        ({"patch_size": [4, 4]}, "patch_size is"),
        ({"causal_decoder": "yes"}, 'causal_decoder is "yes"'),
        ({"timestep_conditioning": True, "decode_timestep": "0.05"}, "decode_timestep"),
        ({"timestep_conditioning": True, "decode_noise_scale": None}, "decode_noise_scale is null"),
        ({"decoder_blocks": []}, "decoder_blocks"),
        ({"decoder_blocks": None}, "decoder_blocks are null"),
        ({"decoder_blocks": {"res_x": 1}}, "decoder_blocks"),
        ({"decoder_blocks": [["res_x"]]}, "block"),
        ({"decoder_blocks": ["res_x"]}, 'block "res_x"'),
        ({"decoder_blocks": [["attn_res_x", {"num_layers": 1}]]}, "attn_res_x.*compress_time"),
        ({"decoder_blocks": [["compress_all_x_y", 1]]}, "compress_all_x_y"),
        ({"decoder_blocks": [[["res_x"], 1]]}, "block"),
        ({"decoder_blocks": [["res_x", {}]]}, "num_layers null"),
        ({"decoder_blocks": [["res_x", 0]]}, "num_layers 0"),
        ({"decoder_blocks": [["res_x", {"num_layers": 1, "inject_noise": 1}]]}, "inject_noise is 1"),
    ],
)
def test_configs_of_another_build_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(WeightsError, match=words):
        program_of("ltx_plain", **changes)


def test_config_that_holds_no_fields_is_refused() -> None:
    for text in ('{"vae": [1]}', "[]", "3", "null"):
        with pytest.raises(WeightsError, match="config holds"):
            lower(specs_of(golden("ltx_plain")), hints={"config": text})


def test_a_config_without_a_norm_means_another_norm() -> None:
    config = config_of("ltx_plain")
    del config["norm_layer"]
    with pytest.raises(WeightsError, match="group_norm"):
        lower(specs_of(golden("ltx_plain")), hints={"config": json.dumps(config)})


def test_older_configs_name_the_blocks_once() -> None:
    config = config_of("ltx_plain")
    config["blocks"] = config.pop("decoder_blocks")
    assert lower(specs_of(golden("ltx_plain")), hints={"config": json.dumps(config)}) == program_of("ltx_plain")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("mode", "border"), [("reflect", "reflect"), ("zeros", "zero"), ("replicate", "replicate")])
def test_borders_follow_the_config(causal: bool, mode: str, border: str) -> None:
    program = program_of("ltx_plain", causal_decoder=causal, spatial_padding_mode=mode)
    wide = [op for op in program.ops if isinstance(op, ClipConv) and op.kernel == (3, 3, 3)]
    assert {(op.front, op.back, op.border, op.time_border) for op in wide} == {
        ((2, 0) if causal else (1, 1)) + (border, "replicate")
    }


def test_split_doublings_count_their_frames() -> None:
    program = program_of("ltx_split")
    assert program.scale == (4, 16, 16)
    assert [output_frames(program, t) for t in (1, 2, 5)] == [1, 5, 17]


# -- noise


def decode(program: Program, name: str, case: str, seed: int, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        return Interpreter(program, dict(weights or golden(name).weights), generator).run(golden(name).latents[case])


@pytest.mark.parametrize("name", ["ltx_timestep", "ltx_noise"])
def test_the_seed_decides_the_noise(name: str) -> None:
    program = program_of(name)
    first, again, other = (decode(program, name, "one_frame", seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert (first - other).abs().max().item() > 1e-3


def test_noise_in_convolutions_is_scaled_by_its_tensors() -> None:
    weights = dict(golden("ltx_noise").weights)
    silent = {key: torch.zeros_like(t) if "per_channel_scale" in key else t for key, t in weights.items()}
    blocks = [[kind, fields | {"inject_noise": False}] for kind, fields in config_of("ltx_noise")["decoder_blocks"]]
    program, plain = program_of("ltx_noise"), program_of("ltx_noise", decoder_blocks=blocks)
    assert not any(isinstance(op, ClipConv) and op.noise for op in plain.ops)
    expected = decode(plain, "ltx_noise", "a", 3)
    assert torch.equal(decode(program, "ltx_noise", "a", 3, silent), expected)
    assert (decode(program, "ltx_noise", "a", 3) - expected).abs().max().item() > 1e-2


def test_without_its_share_of_noise_and_of_scales_every_seed_gives_one_picture() -> None:
    program = program_of("ltx_timestep", decode_noise_scale=0.0)
    assert torch.equal(*(decode(program, "ltx_timestep", "one_frame", seed) for seed in (1, 2)))


def test_the_timestep_conditions_the_picture() -> None:
    usual, other = (
        decode(program_of("ltx_timestep", decode_timestep=t), "ltx_timestep", "one_frame", 1) for t in (0.05, 0.5)
    )
    assert torch.equal(usual, decode(program_of("ltx_timestep"), "ltx_timestep", "one_frame", 1))
    assert (usual - other).abs().max().item() > 1e-3
