"""Decodes clips by ComfyUI's own video VAE objects and by each of our decode nodes.

The host builds its VAEs at their published width; here its classes are handed narrower numbers while it does, so that
every line of its own remains and a clip takes a moment. After the two paths may come the kinds to do; all without any.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from common import answer, filled, fingerprint, here, latent, manners, session, start

ASKED = sys.argv[3:]
start([])

import comfy.sd  # noqa: E402
import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402

from halo_vae.nodes.actions import decode, decode_tiled, decode_video  # noqa: E402

SEED = 7
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A video VAE as the host makes it of a file."""

    build: Callable[[], Any]
    """The VAE object."""
    clip: Shape
    """A latent [C, T, h, w]."""
    lengths: tuple[int, ...] = ()
    """Other numbers of latent frames to decode."""
    one_by_one: bool = False
    """The host decodes no batch of such clips."""


@contextmanager
def narrowed(*changes: tuple[Any, str, dict[str, Any]]) -> Iterator[None]:
    """Each (owner, name of a class in it, options): that class is built with these options instead of the given."""
    with ExitStack() as undo:
        for owner, name, options in changes:
            kind = getattr(owner, name)
            undo.callback(setattr, owner, name, kind)
            setattr(owner, name, lambda *args, kind=kind, options=options, **given: kind(*args, **given | options))
        yield


def vae_of(file: dict[str, Any], metadata: dict[str, str] | None = None) -> Any:
    """The host's VAE of a file, which holds at least what the host tells the kind by; other weights are drawn."""
    vae = comfy.sd.VAE(sd={k: t.clone() for k, t in file.items()}, metadata=metadata, dtype=torch.float32)
    kept = {name: t.clone() for name, t in vae.first_stage_model.state_dict().items() if name in file}
    model = filled(vae.first_stage_model)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("gamma", "latent_std")):
                tensor.copy_(1.0 + 0.1 * tensor)
    model.load_state_dict({name: t for name, t in kept.items() if t.any()}, strict=False)
    return vae


def empty(*shape: int) -> Any:
    return torch.zeros(shape)


def wan21(width: int = 16, pictures: int = 3) -> Any:
    import comfy.ldm.wan.vae as host

    file = {
        "decoder.middle.0.residual.0.gamma": empty(4 * width, 1, 1, 1), "decoder.head.0.gamma": empty(width, 1, 1, 1),
        "encoder.conv1.weight": empty(width, pictures, 3, 3, 3),
        "decoder.head.2.weight": empty(pictures, width, 3, 3, 3),
    }  # fmt: skip
    with narrowed((host, "WanVAE", {"dim": width})):
        return vae_of(file)


def wan22(width: int = 16) -> Any:
    import comfy.ldm.wan.vae2_2 as host

    file = {
        "decoder.middle.0.residual.0.gamma": empty(4 * width, 1, 1, 1),
        "decoder.upsamples.0.upsamples.0.residual.2.weight": empty(4 * width, 4 * width, 3, 3, 3),
    }
    with narrowed((host, "WanVAE", {"dim": width, "dec_dim": width})):
        return vae_of(file)


def hunyuan(width: int = 32) -> Any:
    """HunyuanVideo 1.0."""
    kind = comfy.sd.AutoencoderKL

    def narrow(ddconfig: dict[str, Any], **given: Any) -> Any:
        return kind(ddconfig={**ddconfig, "ch": width}, **given)

    file = {
        "decoder.conv_in.conv.weight": empty(4 * width, 16, 3, 3, 3),
        "post_quant_conv.weight": empty(16, 16, 1, 1, 1),
    }
    comfy.sd.AutoencoderKL = narrow
    try:
        return vae_of(file)
    finally:
        comfy.sd.AutoencoderKL = kind


def hunyuan_new(key: str, width: int = 32) -> Any:
    """HunyuanVideo 1.5, or the refiner of HunyuanImage, told apart by the name of one tensor."""
    kind, wide = comfy.sd.AutoencodingEngine, (1, 2, 4, 8, 8)

    def narrow(**configs: Any) -> Any:
        for config in configs.values():
            if "block_out_channels" in config.get("params", {}):
                config["params"]["block_out_channels"] = [width * times for times in wide]
        return kind(**configs)

    comfy.sd.AutoencodingEngine = narrow
    try:
        return vae_of({key: empty(8 * width, 32, 3, 3, 3)})
    finally:
        comfy.sd.AutoencodingEngine = kind


def mochi(width: int = 32) -> Any:
    import comfy.ldm.genmo.vae.model as host

    inner = {"base_channels": width, "channel_multipliers": [1, 1, 1, 2], "num_res_blocks": [1, 1, 4, 1, 1]}
    with narrowed((host, "Decoder", inner)):
        return vae_of({"decoder.blocks.2.blocks.3.stack.5.weight": empty(width, width, 3, 3, 3)})


def cosmos(width: int = 8) -> Any:
    import comfy.ldm.cosmos.vae as host

    with narrowed((host, "CausalContinuousVideoTokenizer", {"channels": width})):
        return vae_of({"decoder.unpatcher3d.wavelets": torch.full((2,), 0.5**0.5)})


def cogvideox(widths: tuple[int, ...] = (32, 64, 32, 32)) -> Any:
    import comfy.ldm.cogvideo.vae as host

    file = {
        "decoder.conv_in.conv.weight": empty(widths[-1], 16, 3, 3, 3),
        "decoder.mid_block.resnets.0.norm1.norm_layer.weight": empty(widths[-1]),
        "encoder.conv_out.conv.weight": empty(32, widths[-1], 3, 3, 3),
    }
    with narrowed((host, "AutoencoderKLCogVideoX", {"block_out_channels": widths, "layers_per_block": 1})):
        return vae_of(file)


def ltx(name: str) -> Any:
    """A golden's weights, and its layout as a real file carries it."""
    with safe_open(str(here("golden") / f"{name}.safetensors"), framework="pt") as file:
        weights = {key[2:]: file.get_tensor(key) for key in file.keys() if key.startswith("w:")}  # noqa: SIM118
        config = json.loads(file.metadata()["config"])
    return vae_of(weights, {"config": json.dumps(config if "vae" in config else {"vae": config})})


LTX_NOISE = {
    "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128, "norm_layer": "pixel_norm", "patch_size": 4,
    "latent_log_var": "uniform", "encoder_blocks": [["res_x", {"num_layers": 1}]], "encoder_base_channels": 8,
    "decoder_base_channels": 4,
    "decoder_blocks": [
        ["res_x", {"num_layers": 1, "inject_noise": True}], ["compress_all", {"residual": True, "multiplier": 2}],
        ["res_x", {"num_layers": 2, "inject_noise": True}], ["compress_all", {"residual": True, "multiplier": 2}],
        ["res_x", {"num_layers": 1}], ["compress_all", {"residual": True, "multiplier": 2}],
        ["res_x", {"num_layers": 1, "inject_noise": True}],
    ],
    "causal_decoder": False, "timestep_conditioning": True,
}  # fmt: skip
LTX_SPLIT = LTX_NOISE | {
    "decoder_blocks": [
        ["res_x", {"num_layers": 1}], ["compress_space", {"multiplier": 2}], ["compress_time", {"multiplier": 1}],
        ["res_x_y", {"multiplier": 2}], ["compress_all", {"residual": True, "multiplier": 2}],
        ["res_x", {"num_layers": 1}], ["compress_all", {"residual": True, "multiplier": 2}],
    ],
    "causal_decoder": True, "timestep_conditioning": False, "spatial_padding_mode": "zeros",
}  # fmt: skip


def ltx_of(config: dict[str, Any], first: int = 32) -> Any:
    """Drawn weights of a layout; `first` is the width of its first block."""
    name = "decoder.up_blocks.0.res_blocks.0.conv1.conv.weight"
    statistics = {"std-of-means": latent(128).abs() + 0.5, "mean-of-means": latent(128, seed=3) * 0.2}
    file = {f"per_channel_statistics.{part}": tensor for part, tensor in statistics.items()}
    return vae_of({name: empty(first, first, 3, 3, 3), **file}, {"config": json.dumps({"vae": config})})


def taehv(first: Any, pictures: int = 3) -> Any:
    return vae_of({"decoder.22.bias": empty(pictures), "decoder.1.weight": first})


def svd() -> Any:
    return vae_of({"decoder.mid.block_1.mix_factor": empty(1)})


KINDS = {
    "wan21": Kind(build=wan21, clip=(16, 3, 6, 5), lengths=(2,)),
    "wan21 with alpha": Kind(build=partial(wan21, pictures=4), clip=(16, 2, 4, 5)),
    "wan22": Kind(build=wan22, clip=(48, 3, 3, 4), lengths=(2,)),
    "hunyuan": Kind(build=hunyuan, clip=(16, 3, 4, 5), lengths=(2,)),
    "hunyuan15": Kind(build=partial(hunyuan_new, "decoder.conv_in.conv.weight"), clip=(32, 3, 3, 4), lengths=(2,)),
    "refiner": Kind(build=partial(hunyuan_new, "decoder.conv_in.weight"), clip=(32, 3, 3, 4), lengths=(2,)),
    "mochi": Kind(build=mochi, clip=(12, 3, 4, 5), lengths=(2,)),
    "cosmos": Kind(build=cosmos, clip=(16, 3, 4, 5), lengths=(2,)),
    "cogvideox": Kind(build=cogvideox, clip=(16, 3, 4, 5), lengths=(2, 4)),
    "ltx": Kind(build=partial(ltx, "ltx_plain"), clip=(128, 3, 3, 2), lengths=(2,)),
    "ltx causal": Kind(build=partial(ltx, "ltx_causal"), clip=(128, 3, 3, 2)),
    "ltx conditioned": Kind(build=partial(ltx, "ltx_timestep"), clip=(128, 3, 3, 2), one_by_one=True),
    "ltx with noise": Kind(build=partial(ltx_of, LTX_NOISE), clip=(128, 3, 3, 2), one_by_one=True),
    "ltx split": Kind(build=partial(ltx_of, LTX_SPLIT), clip=(128, 3, 3, 2)),
    "taehv": Kind(build=partial(taehv, empty(256, 16, 3, 3).half()), clip=(16, 3, 6, 5), lengths=(2,)),
    "taehv unscaled": Kind(build=partial(taehv, empty(256, 16, 3, 3)), clip=(16, 3, 6, 5)),
    "taehv ltx2": Kind(build=partial(taehv, empty(256, 128, 3, 3), pictures=48), clip=(128, 2, 3, 2)),
    "svd": Kind(build=svd, clip=(4, 3, 4, 3)),
}  # fmt: skip
NODES: dict[str, Callable[..., Any]] = {"video": decode_video, "decode": decode, "tiled": decode_tiled}
SMALL = {"tile_size": 32, "chunk_frames": 2}


def cases(kind: Kind, name: str) -> Iterator[tuple[str, Any, Any, list[tuple[str, dict[str, Any]]]]]:
    """Name, latent, the latent that the host is given, and the nodes with settings that decode it."""
    channels, frames, *sides = kind.clip
    each: list[tuple[str, dict[str, Any]]] = [(node, {}) for node in NODES]
    if name == "svd":  # its frames come as a batch of pictures
        z = latent(frames, channels, *sides)
        yield "clip", z, z, [*each, ("video", SMALL)]
        return
    for batch, length in ((1, frames), (2, frames), *((1, n) for n in (1, *kind.lengths))):
        z = latent(batch, channels, length, *sides)
        whole = (batch, length) == (1, frames)
        yield f"{batch} of {length}", z, z, [*each, ("video", SMALL)] if whole else each[:1]
    z = latent(1, channels, *sides)
    yield "picture", z, z.unsqueeze(2), each


def stock_of(vae: Any, z: Any, one_by_one: bool) -> Any:
    """What the host's VAE Decode gives, its random numbers begun anew."""
    torch.manual_seed(SEED)
    with torch.inference_mode():
        images = torch.cat([vae.decode(part) for part in (z.split(1) if one_by_one else (z,))]).float()
    return images.reshape(-1, *images.shape[-3:])


def facts_of(name: str, kind: Kind) -> dict[str, Any]:
    """How far each decode is from the host's own, and what is said of the VAE."""
    vae, ours = kind.build(), session()
    errors: dict[str, Any] = {}
    same = True
    for case, z, as_stock, nodes in cases(kind, name):
        expected = stock_of(vae, as_stock, kind.one_by_one)
        ours.host.load(vae, 0)
        before = fingerprint(vae), manners(vae)
        for node, settings in nodes:
            torch.manual_seed(SEED)
            with torch.inference_mode():
                done = NODES[node](ours, {"samples": z}, vae, precision_mode="fp32", **settings)
            label = f"{case}, {node}{' small' if settings else ''}"
            plan, same_shape = done.record.plan, done.images.shape == expected.shape
            errors[label] = {
                "error": float((done.images.float() - expected).abs().max()) if same_shape else None,
                "spread": float(expected.std()), "shape": list(done.images.shape), "stock shape": list(expected.shape),
                "method": plan.method, "n_chunks": plan.n_chunks, "inference": done.images.is_inference(),
            }  # fmt: skip
        same = same and before == (fingerprint(vae), manners(vae))
    opened = ours.decoders.of(vae)
    family = None if opened.decoder is None else opened.decoder.program.family
    return {"family": family, "reason": opened.reason, "same": same, "cases": errors}


facts: dict[str, Any] = {}
for name, kind in KINDS.items():
    if ASKED and name not in ASKED:
        continue
    try:
        facts[name] = facts_of(name, kind)
    except Exception:
        facts[name] = {"failed": traceback.format_exc()[-2000:]}
    sys.stderr.write(f"{name}: {json.dumps(facts[name])}\n")
    gc.collect()
answer(facts)
