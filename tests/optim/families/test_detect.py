"""What is no picture decoder of ours is refused with the evidence, never lowered to something near it."""

from __future__ import annotations

import pytest
import torch

from halo_vae.optim.errors import UnknownDecoderError
from halo_vae.optim.families import FAMILIES, detect, lower
from halo_vae.optim.families.keys import PREFIXES, Keys
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.goldens import GOLDEN_FAMILY, VIDEO_GOLDENS, golden
from halo_vae.tests.optim.families.layouts import Shapes, hunyuan_image, kl_diffusers, kl_ldm, specs, taesd

KNOWN = {
    "kl": kl_ldm(4, (64, 32), embed=4),
    "hunyuan_image": hunyuan_image(32, (64, 32)),
    "taesd": taesd(4, 16),
}
KL = kl_ldm(4, (64, 32))
UNKNOWN: dict[str, Shapes] = {
    # name of the decoder: the names and shapes that give it away
    "wan_like": {"decoder.middle.0.residual.0.gamma": (8, 1, 1, 1), "decoder.middle.0.residual.0.beta": (8, 1, 1, 1)},
    "ltx_encoder": {"encoder.down_blocks.0.res_blocks.0.conv1.conv.weight": (512, 512, 3, 3, 3)},
    "hunyuan_video_flat": {name.replace("conv_in", "conv_in.conv"): shape for name, shape in KL.items()},
    "kl_with_5d": KL | {"decoder.conv_in.weight": (64, 32, 3, 3, 3)},
    "svd_with_attention_in_time": KL | {"decoder.mid.block_1.mix_factor": (1,), "decoder.mid.attn_1.mix_factor": (1,)},
    "svd_diffusers": {"decoder.mid_block.resnets.0.spatial_res_block.conv1.weight": (64, 64, 3, 3)},
    "vq": KL | {"quantize.embedding.weight": (8192, 4)},
    "movq": KL | {"decoder.norm_out.norm_layer.weight": (32,)},
    "allegro": kl_diffusers(4, (64, 32)) | {"decoder.temp_conv_in.weight": (64, 64, 3, 1, 1)},
    "scaled_fp8": KL | {"decoder.conv_in.weight_scale": ()},
    "taesd_by_another_name": {"decoder.1.weight": (64, 16, 3, 3), "decoder.3.conv.0.weight": (64, 64, 3, 3)},
    "encoder_only": {"encoder.conv_in.weight": (128, 3, 3, 3), "quant_conv.weight": (8, 8, 1, 1)},
    "audio": {"decoder.layers.1.layers.0.beta": (2048,)},
    "nothing": {},
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_decoder_is_refused_with_the_keys_and_families_named(name: str) -> None:
    shapes = {"text_model.embeddings.weight": (8, 8), **UNKNOWN[name]} if UNKNOWN[name] else {}
    for call in (detect, lower):
        with pytest.raises(UnknownDecoderError) as caught:
            call(specs(shapes))
        assert caught.value.families == tuple(family.name for family in FAMILIES)
        assert all(word in str(caught.value) for word in (*caught.value.families, "blended"))
        if shapes:
            decoders = [key for key in shapes if "decoder" in key]
            assert caught.value.keys_seen[: len(decoders)] == tuple(decoders[:6])
            assert caught.value.keys_seen[0] in str(caught.value)
        else:
            assert "no tensors at all" in str(caught.value)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_each_decoder_is_one_family_only_under_every_prefix(name: str, prefix: str) -> None:
    shapes = specs(KNOWN[name], prefix=prefix)
    assert detect(shapes) == lower(shapes).family == name
    assert [family.name for family in FAMILIES if family.detect(Keys(shapes, prefix))] == [name]


@pytest.mark.parametrize("name", VIDEO_GOLDENS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_each_clip_decoder_is_one_family_only_under_every_prefix(name: str, prefix: str) -> None:
    g = golden(name)
    shapes = MappingWeights({prefix + key: tensor for key, tensor in g.weights.items()}).specs
    assert detect(shapes) == lower(shapes, hints=g.hints).family == GOLDEN_FAMILY[name]
    assert [family.name for family in FAMILIES if family.detect(Keys(shapes, prefix))] == [GOLDEN_FAMILY[name]]


def test_order_of_the_tensors_does_not_matter() -> None:
    for shapes in KNOWN.values():
        forward = specs(shapes)
        backward = dict(reversed(forward.items()))
        assert lower(forward) == lower(backward)


def test_stored_dtype_does_not_matter() -> None:
    half = specs(KL)
    wide = {name: type(spec)(shape=spec.shape, dtype=torch.float32) for name, spec in half.items()}
    assert lower(half) == lower(wide)
