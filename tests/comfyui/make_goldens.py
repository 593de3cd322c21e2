"""Makes tests/golden files of video decoders: tiny seeded decoders and what ComfyUI's own modules decode with them.

    HALO_VAE_COMFYUI="CHECKOUT=PYTHON" python tests/comfyui/make_goldens.py [NAME ...]

runs the first checkout named there on its own Python, on the CPU, and writes the goldens of those names (all without
any). Each host module is built at a small width; its weights are seeded random numbers rounded to 16 bits, so that the
file holds exactly what was decoded with. The last convolution is scaled so that the first case has a deviation near
a half. Nothing of the host's is copied: only its classes are called.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "HALO_VAE_COMFYUI"
GOLDEN_DIR = Path(__file__).resolve().parent.parent / "golden"
Shape = tuple[int, int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One golden file."""

    family: str
    facts: str
    build: Callable[[], Any]
    """The host's module, with `decode`."""
    cases: dict[str, Shape]
    """Latents [B, C, T, h, w]."""
    last: str
    """The convolution that is scaled."""
    keep: tuple[str, ...] = ("decoder.",)
    """Prefixes of the tensors that belong to the decoder."""
    extra: Callable[[], dict[str, Any]] = dict
    """Tensors that real files hold though the module does not save them."""
    dtype: str = "float16"
    """What the weights are rounded to and stored in."""
    frames_in_batch: bool = False
    """The module takes the frames of one clip as its batch [T, C, h, w]."""
    config: dict[str, Any] | None = None
    """What a real file says of its layout, as JSON under "vae"."""
    noise_seed: int | None = None
    """Seed of torch's global generator, set just before each decode."""


def mochi() -> Any:
    from comfy.ldm.genmo.vae.model import Decoder

    return wrapped(
        Decoder(
            out_channels=3, base_channels=32, channel_multipliers=[1, 1, 1, 2], temporal_expansions=[1, 2, 3],
            spatial_expansions=[2, 2, 2], num_res_blocks=[1, 1, 4, 1, 1], latent_dim=12, has_attention=[False] * 5,
            padding_mode="replicate", output_norm=False, nonlinearity="silu", output_nonlinearity="silu", causal=True,
        )
    )  # fmt: skip


def cosmos() -> Any:
    from comfy.ldm.cosmos.vae import CausalContinuousVideoTokenizer

    return CausalContinuousVideoTokenizer(
        z_channels=16, latent_channels=16, z_factor=1, resolution=1024, in_channels=3, out_channels=3, channels=8,
        channels_mult=[2, 4, 4], num_res_blocks=1, attn_resolutions=[32], dropout=0.0, patch_size=4, num_groups=1,
        temporal_compression=8, spacial_compression=8,
    )  # fmt: skip


def cosmos_wavelets() -> dict[str, Any]:
    import torch

    return {
        "decoder.unpatcher3d.wavelets": torch.full((2,), 0.5**0.5).half(),
        "decoder.unpatcher3d._arange": torch.arange(2),
    }


def cogvideox() -> Any:
    from comfy.ldm.cogvideo.vae import AutoencoderKLCogVideoX

    return AutoencoderKLCogVideoX(block_out_channels=(32, 64, 32, 32), latent_channels=16, layers_per_block=1)


def svd() -> Any:
    from comfy.ldm.modules.temporal_ae import VideoDecoder

    return wrapped(
        VideoDecoder(
            double_z=True, z_channels=4, resolution=256, in_channels=3, out_ch=3, ch=32, ch_mult=[1, 1, 1, 2],
            num_res_blocks=1, attn_resolutions=[], dropout=0.0, video_kernel_size=[3, 1, 1], alpha=0.0,
        )
    )  # fmt: skip


def taehv(latent_channels: int, latent_format: str | None) -> Any:
    """The host builds one width only: its parts are given narrower numbers while it does."""
    import comfy.latent_formats
    from comfy.taesd import taehv as host

    narrow = {256: 36, 128: 24, 64: 12}
    conv, mem, grow = host.conv, host.MemBlock, host.TGrow

    def n(width: int) -> int:
        return narrow.get(width, width)

    class Mem(mem):  # type: ignore[misc, valid-type]
        def __init__(self, n_in: int, n_out: int, act: Any) -> None:
            super().__init__(n(n_in), n(n_out), act)

    class Grow(grow):  # type: ignore[misc, valid-type]
        def __init__(self, width: int, stride: int) -> None:
            super().__init__(n(width), stride)

    host.conv = lambda n_in, n_out, **options: conv(n(n_in), n(n_out), **options)
    host.MemBlock, host.TGrow = Mem, Grow
    kind = getattr(comfy.latent_formats, latent_format) if latent_format else None
    try:
        return host.TAEHV(latent_channels=latent_channels, latent_format=kind)
    finally:
        host.conv, host.MemBlock, host.TGrow = conv, mem, grow


LTX = {
    "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128, "norm_layer": "pixel_norm", "patch_size": 4,
    "latent_log_var": "uniform", "use_quant_conv": False, "encoder_blocks": [["res_x", {"num_layers": 1}]],
    "encoder_base_channels": 8, "decoder_base_channels": 4,
}  # fmt: skip
LTX_NOISE = LTX | {
    "decoder_blocks": [
        ["res_x", {"num_layers": 1, "inject_noise": True}], ["compress_all", {"residual": True, "multiplier": 2}],
        ["res_x", {"num_layers": 2, "inject_noise": True}], ["compress_all", {"residual": True, "multiplier": 2}],
        ["res_x", {"num_layers": 1, "inject_noise": False}],
    ],
    "causal_decoder": False, "timestep_conditioning": True,
}  # fmt: skip
LTX_SPLIT = LTX | {
    "decoder_blocks": [
        ["res_x", {"num_layers": 1}], ["compress_space", {"multiplier": 2}], ["res_x_y", {"multiplier": 2}],
        ["compress_time", {"multiplier": 1}], ["res_x", {"num_layers": 2}],
        ["compress_all", {"residual": True, "multiplier": 2}],
    ],
    "causal_decoder": True, "spatial_padding_mode": "zeros",
}  # fmt: skip


def ltx(config: dict[str, Any]) -> Any:
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return VideoVAE(config=config)


def wrapped(decoder: Any) -> Any:
    """A module that holds the decoder under its name in checkpoints."""
    import torch

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = decoder

        def decode(self, z: torch.Tensor) -> torch.Tensor:
            return decoder(z)  # type: ignore[no-any-return]

    return Holder()


RECIPES = {
    "mochi": Recipe(
        family="mochi", facts="Mochi layout: replicate borders, GroupNorm per frame; 6 T - 5 frames", build=mochi,
        cases={"a": (1, 12, 3, 5, 7), "one_frame": (1, 12, 1, 5, 3), "batch2": (2, 12, 2, 4, 5)},
        last="decoder.output_proj",
    ),
    "taehv": Recipe(
        family="taehv",
        facts="TAEHV, 16 channels; stored in float16, so the host multiplies latents by HunyuanVideo's 0.476986 "
        "first; the host takes the result as the picture in 0 to 1 and neither rescales nor clamps it; 4 T - 3 frames",
        build=lambda: taehv(16, "HunyuanVideo"),
        cases={"a": (1, 16, 3, 5, 7), "one_frame": (1, 16, 1, 5, 3), "batch2": (2, 16, 2, 4, 5)}, last="decoder.22",
    ),
    "taehv_wan": Recipe(
        family="taehv",
        facts="TAEHV, 16 channels; not stored in float16, so the host takes latents as they come; it takes the result "
        "as the picture in 0 to 1 and neither rescales nor clamps it; 4 T - 3 frames",
        build=lambda: taehv(16, None), dtype="bfloat16",
        cases={"a": (1, 16, 2, 5, 7), "one_frame": (1, 16, 1, 5, 3)}, last="decoder.22",
    ),
    "taehv32": Recipe(
        family="taehv",
        facts="TAEHV, 32 channels: LeakyReLU, 2x2 pixels per output position; the host multiplies latents by "
        "HunyuanVideo 1.5's 1.03682 first and rescales and clamps the result as usual; 4 T - 3 frames",
        build=lambda: taehv(32, "HunyuanVideo15"),
        cases={"a": (1, 32, 3, 3, 4), "one_frame": (1, 32, 1, 3, 2), "batch2": (2, 32, 2, 2, 3)}, last="decoder.22",
    ),
    "cosmos": Recipe(
        family="cosmos",
        facts="Cosmos 1 tokenizer 8x8x8: latent mean and deviation per channel and frame mod 16; 8 T - 7 frames; "
        "`long` is longer than that period",
        build=cosmos, extra=cosmos_wavelets, keep=("decoder.", "post_quant_conv.", "latent_"),
        cases={"a": (1, 16, 3, 5, 7), "one_frame": (1, 16, 1, 5, 3), "batch2": (2, 16, 2, 4, 5),
               "long": (1, 16, 18, 1, 2)},
        last="decoder.conv_out.1.conv3d",
    ),
    "cogvideox": Recipe(
        family="cogvideox",
        facts="CogVideoX layout, decoded by rolling chunks of 4 output frames; odd T: 4 T - 3 frames, even T: 4 T",
        build=cogvideox,
        cases={"a": (1, 16, 3, 5, 6), "one_frame": (1, 16, 1, 5, 3), "batch2": (2, 16, 2, 3, 4),
               "even": (1, 16, 4, 3, 5)},
        last="decoder.conv_out.conv",
    ),
    "svd": Recipe(
        family="svd",
        facts="Stable Video Diffusion layout; the module takes one clip's frames as its batch [T, 4, h, w]; here a "
        "clip is z [1, 4, T, h, w] and x [1, 3, T, H, W]; T frames",
        build=svd, frames_in_batch=True,
        cases={"a": (1, 4, 5, 5, 7), "one_frame": (1, 4, 1, 5, 3), "batch2": (2, 4, 2, 4, 5)},
        last="decoder.conv_out.time_mix_conv",
    ),
    "ltx_noise": Recipe(
        family="ltx",
        facts="LTX-Video 0.9.1 style: timestep conditioning, noise on the latent and in convolutions, from torch's "
        "global generator: seed 7 set just before each decode; 4 T - 3 frames",
        build=lambda: ltx(LTX_NOISE), config=LTX_NOISE, noise_seed=7, keep=("decoder.", "per_channel_statistics."),
        cases={"a": (1, 128, 3, 4, 3), "one_frame": (1, 128, 1, 2, 3)}, last="decoder.conv_out.conv",
    ),
    "ltx_split": Recipe(
        family="ltx",
        facts="LTX-Video blocks that double space and time apart; causal, zeros beyond the picture; 4 T - 3 frames",
        build=lambda: ltx(LTX_SPLIT), config=LTX_SPLIT, keep=("decoder.", "per_channel_statistics."),
        cases={"a": (1, 128, 3, 4, 3), "one_frame": (1, 128, 1, 2, 3), "batch2": (2, 128, 2, 3, 2)},
        last="decoder.conv_out.conv",
    ),
}  # fmt: skip


def set_weights(module: Any, recipe: Recipe, seed: int) -> None:
    """Activations near 1: convolutions by fan-in, norms around 1, biases small."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if name.endswith("timestep_scale_multiplier"):
                continue  # 1000, without which the timestep says nothing
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim > 1:
                value = noise * math.prod(tensor.shape[1:]) ** -0.5
            else:
                value = noise * 0.1 + (1.0 if name.endswith(("weight", "_std", "std-of-means")) else 0.0)
                value = noise if name.endswith("mix_factor") else value
            tensor.copy_(value.to(getattr(torch, recipe.dtype)))


def decode(module: Any, recipe: Recipe, z: Any) -> Any:
    import torch

    if recipe.noise_seed is not None:
        torch.manual_seed(recipe.noise_seed)
    with torch.no_grad():
        if not recipe.frames_in_batch:
            return module.decode(z.clone())
        return torch.stack([module.decode(clip.movedim(0, 1).clone()).movedim(0, 1) for clip in z])


def make(name: str, version: str) -> None:
    """Write one golden."""
    import torch
    from safetensors.torch import save_file

    recipe = RECIPES[name]
    seed = sum(map(ord, name))
    module = recipe.build().eval().float()
    set_weights(module, recipe, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    latents = {case: torch.randn(shape, generator=generator) for case, shape in recipe.cases.items()}
    state = module.state_dict()
    with torch.no_grad():
        gain = 0.5 / decode(module, recipe, latents["a"]).std()
        for part in ("weight", "bias"):
            tensor = state[f"{recipe.last}.{part}"]
            tensor.copy_((tensor * gain).to(getattr(torch, recipe.dtype)))
    stored = {f"z:{case}": z for case, z in latents.items()}
    for case, z in latents.items():
        x = stored[f"x:{case}"] = decode(module, recipe, z).float().contiguous()
        print(f"{name} {case}: {list(z.shape)} -> {list(x.shape)}, deviation {x.std():.3f}")
    kept = {key: t for key, t in state.items() if key.startswith(recipe.keep)}
    stored |= {f"w:{key}": t.to(getattr(torch, recipe.dtype)).contiguous() for key, t in kept.items()}
    stored |= {f"w:{key}": t for key, t in recipe.extra().items()}
    metadata = {
        "family": recipe.family, "facts": recipe.facts, "reference": f"ComfyUI {version} module, fp32, CPU",
        "weights": f"random, seeded, rounded to {recipe.dtype}",
        "config": json.dumps({"vae": recipe.config}) if recipe.config else "",
        "latent_channels": str(latents["a"].shape[1]),
    }  # fmt: skip
    path = GOLDEN_DIR / f"{name}.safetensors"
    save_file(stored, str(path), metadata=metadata)
    path.chmod(0o644)  # safetensors leaves it readable by its owner alone
    print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")


def inside(folder: str, names: list[str]) -> None:
    """In the checkout's Python."""
    sys.path.insert(0, folder)
    import torch
    from comfy.cli_args import args
    from comfyui_version import __version__

    args.cpu = True  # before the host looks for devices
    torch.set_num_threads(1)
    for name in names or RECIPES:
        make(name, __version__)


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], sys.argv[3:])
        return
    pairs = os.environ.get(VARIABLE, "").split()
    if not pairs:
        sys.exit(f'set {VARIABLE} to "CHECKOUT=PYTHON", a ComfyUI checkout and the Python it runs on')
    unknown = set(sys.argv[1:]) - set(RECIPES)
    if unknown:
        sys.exit(f"no such golden: {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    folder, _, python = pairs[0].partition("=")
    command = [python, str(Path(__file__).resolve()), "--inside", str(Path(folder).resolve()), *sys.argv[1:]]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
