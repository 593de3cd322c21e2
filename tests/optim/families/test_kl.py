"""KL decoders of odd widths and depths, in both namings, whole and damaged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from halo_vae.optim.errors import WeightsError
from halo_vae.optim.families import detect, lower
from halo_vae.optim.kernels.eager import run_eager
from halo_vae.optim.program import Attention, Conv, Pointwise, Program, Rearrange
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.goldens import golden
from halo_vae.tests.optim.families.layouts import Shapes, kl_diffusers, kl_ldm, random_weights, specs

CASES = [
    (4, (512, 512, 256, 128), 2),  # SD 1/2, SDXL
    (16, (512, 512, 256, 128), 2),  # SD3, Flux
    (4, (512, 256, 128), 2),  # x4 upscaler: three levels
    (5, (96, 160, 32), 0),  # one block a level, widths that shrink and grow
    (7, (64,), 3),  # a single level never upsamples
    (3, (32, 32, 32, 32, 32), 1),  # five levels, x16
]


def _convs(program: Program) -> list[Conv]:
    return [op for op in program.ops if isinstance(op, Conv)]


def _check_structure(program: Program, z: int, widths: Sequence[int], n_res: int) -> None:
    assert (program.family, program.latent_channels, program.out_channels) == ("kl", z, 3)
    assert program.scale == (1, 2 ** (len(widths) - 1), 2 ** (len(widths) - 1))
    ups = [op for op in _convs(program) if op.upsample == 2]
    assert [op.out_channels for op in ups] == list(widths[:-1])
    shortcuts = [op for op in _convs(program) if op.kernel == (1, 1, 1) and "quant" not in op.name]
    assert len(shortcuts) == sum(a != b for a, b in pairwise(widths))
    second = [op for op in _convs(program) if op.residual is not None]
    assert len(second) == 2 + len(widths) * (n_res + 1)


@pytest.mark.parametrize(("z", "widths", "n_res"), CASES)
def test_ldm_names_give_back_the_hyperparameters_built(z: int, widths: tuple[int, ...], n_res: int) -> None:
    shapes = kl_ldm(z, widths, n_res=n_res)
    assert detect(specs(shapes)) == "kl"
    _check_structure(lower(specs(shapes)), z, widths, n_res)
    assert sum(isinstance(op, Attention) for op in lower(specs(shapes)).ops) == 1


@pytest.mark.parametrize(("z", "widths", "n_res"), CASES)
@pytest.mark.parametrize("attention", ["to", "old", ""])
def test_diffusers_names_give_back_the_hyperparameters_built(
    z: int, widths: tuple[int, ...], n_res: int, attention: str
) -> None:
    program = lower(specs(kl_diffusers(z, widths, n_res=n_res, attention=attention)))
    _check_structure(program, z, widths, n_res)
    assert sum(isinstance(op, Attention) for op in program.ops) == (1 if attention else 0)


def test_both_namings_of_the_same_weights_give_the_same_picture() -> None:
    ldm, diffusers = golden("kl_sd").weights, golden("kl_diffusers").weights
    assert len(ldm) == len(diffusers)
    latent = golden("kl_sd").latents["a"][:, :, :5, :7]
    renamed = {}
    for name, tensor in ldm.items():
        new = name.replace("mid.block_1", "mid_block.resnets.0").replace("mid.block_2", "mid_block.resnets.1")
        new = new.replace("norm_out", "conv_norm_out").replace("nin_shortcut", "conv_shortcut")
        for part, old in (
            ("norm", "group_norm"),
            ("q", "query"),
            ("k", "key"),
            ("v", "value"),
            ("proj_out", "proj_attn"),
        ):
            new = new.replace(f"mid.attn_1.{part}.", f"mid_block.attentions.0.{old}.")
        for level in range(4):
            new = new.replace(f"up.{level}.block.", f"up_blocks.{3 - level}.resnets.")
            new = new.replace(f"up.{level}.upsample.", f"up_blocks.{3 - level}.upsamplers.0.")
        renamed[new] = tensor
    assert set(renamed) & {name for name in diffusers if "attentions" not in name} > {"decoder.conv_norm_out.weight"}
    pictures = [run_eager(lower(w.specs), w, latent) for w in (MappingWeights(ldm), MappingWeights(renamed))]
    assert torch.equal(*pictures)


def test_post_quant_conv_sets_the_latent_channels_wherever_it_lies() -> None:
    shapes = kl_ldm(8, (64, 32), embed=5)
    moved = {f"decoder.{k}" if k.startswith("post_quant") else k: shape for k, shape in shapes.items()}
    for layout in (shapes, moved):
        program = lower(specs(layout))
        assert program.latent_channels == 5
        assert program.ops[0].name.endswith("post_quant_conv")
    assert lower(specs(kl_ldm(8, (64, 32)))).ops[0].name == "decoder.conv_in"


def test_latent_batch_norm_comes_before_the_unpacking_and_quadruples_the_channels() -> None:
    shapes = kl_ldm(8, (64, 32), embed=6) | {"bn.running_mean": (24,), "bn.running_var": (24,)}
    program = lower(specs(shapes | {"bn.num_batches_tracked": ()}))
    assert (program.latent_channels, program.scale) == (24, (1, 4, 4))
    first, second, third = program.ops[:3]
    assert isinstance(first, Pointwise)
    assert isinstance(second, Rearrange)
    assert isinstance(third, Conv)
    assert (first.kind, first.eps, second.order, third.in_channels) == ("denormalize", 1e-4, "channel_major", 6)


def test_shortcut_is_its_own_op_right_after_the_first_convolution_and_reads_the_block_input() -> None:
    program = lower(specs(kl_ldm(4, (64, 32), n_res=0)))
    names = [op.name for op in program.ops]
    at = names.index("decoder.up.0.block.0.nin_shortcut")
    conv1, shortcut, conv2 = program.ops[at - 1 : at + 2]
    assert (conv1.name, conv2.name) == ("decoder.up.0.block.0.conv1", "decoder.up.0.block.0.conv2")
    assert shortcut.inputs == (conv1.inputs[0],)
    assert conv2.inputs == (conv1.output, shortcut.output)


def test_attention_inside_a_level_follows_its_block() -> None:
    shapes = kl_ldm(4, (32, 32), n_res=0)
    extra = {name.replace("mid.attn_1", "up.1.attn.0"): s for name, s in shapes.items() if "attn" in name}
    names = [op.name for op in lower(specs(shapes | extra)).ops]
    assert names[names.index("decoder.up.1.block.0.conv2") + 1] == "decoder.up.1.attn.0"


@pytest.mark.parametrize(
    "shapes",
    [
        kl_ldm(4, (64, 32, 32), n_res=1, embed=4) | {"bn.running_mean": (16,), "bn.running_var": (16,)},
        kl_diffusers(4, (64, 32, 32), n_res=1),
        kl_diffusers(4, (64, 32), n_res=0, attention="old"),
    ],
    ids=["ldm", "diffusers", "older_diffusers"],
)
def test_any_missing_tensor_is_named(shapes: Shapes) -> None:
    for gone in shapes:
        rest = {name: shape for name, shape in shapes.items() if name != gone}
        with pytest.raises(WeightsError, match="incomplete") as caught:
            lower(specs(rest, prefix="vae."))
        assert f"'vae.{gone}'" in str(caught.value)


def test_missing_block_and_missing_level_are_named() -> None:
    whole = kl_diffusers(4, (64, 32, 32), n_res=1)
    for gone in ("decoder.up_blocks.1.resnets.1.", "decoder.up_blocks.2."):
        rest = {name: shape for name, shape in whole.items() if not name.startswith(gone)}
        with pytest.raises(WeightsError, match=gone.replace(".", r"\.")):
            lower(specs(rest))


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("decoder.up.1.block.0.conv1.weight", (64, 48, 3, 3), "reads 48 channels"),
        ("decoder.up.1.block.0.conv2.weight", (96, 64, 3, 3), r"shape \[64\], but \[96\]"),
        ("decoder.up.1.block.1.norm1.bias", (63,), r"shape \[63\]"),
        ("decoder.conv_out.weight", (3, 32, 4, 4), "odd square"),
        ("decoder.mid.attn_1.q.weight", (32, 64), r"\[64, 64\] is expected"),
        ("decoder.conv_in.weight", (64, 4), "4 axes"),
    ],
)
def test_misshapen_tensor_is_named_with_its_shape(name: str, shape: tuple[int, ...], says: str) -> None:
    shapes = kl_ldm(4, (64, 32), n_res=1) | {name: shape}
    with pytest.raises(WeightsError, match=says) as caught:
        lower(specs(shapes))
    assert "decoder." in str(caught.value)


def test_channels_that_32_groups_do_not_divide_need_the_hint() -> None:
    shapes = kl_ldm(4, (24, 12), n_res=0)
    with pytest.raises(WeightsError, match="24 channels, which 32 groups do not divide"):
        lower(specs(shapes))
    program = lower(specs(shapes), hints={"norm_groups": "4", "format": "pt"})
    assert {op.norm.groups for op in _convs(program) if op.norm is not None} == {4}
    for wrong in ("0", "four"):
        with pytest.raises(WeightsError, match="norm_groups"):
            lower(specs(shapes), hints={"norm_groups": wrong})


def test_odd_decoder_runs_and_its_maps_have_the_declared_sizes() -> None:
    shapes = kl_ldm(5, (96, 32, 64), n_res=0, embed=3, out=4)
    weights = MappingWeights(random_weights(shapes))
    program = lower(weights.specs)
    picture = run_eager(program, weights, torch.randn(2, 3, 3, 5, generator=torch.Generator().manual_seed(1)))
    assert picture.shape == (2, 4, 12, 20)
    assert picture.isfinite().all()
