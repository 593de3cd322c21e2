"""How the demo's small KL VAE was trained: on a CPU, in about two hours. Kept as a record; nothing runs it.

Needs torch, diffusers, scikit-image, scikit-learn and pillow:

    python train_tiny_vae.py SECONDS CROP BATCH OUT.pt

An AutoencoderKL of widths 32-64-128-128 with 4 latent channels, trained as an autoencoder on crops of the public
sample photographs that scikit-image and scikit-learn ship: L1 plus gradient L1 plus a small pull of the latent to zero,
in bf16 autocast. The first 2 400 steps had one res-block per level and 96-px crops; then a second, zero-initialised
block was added, which leaves the function as it is, and training went on, at the end with 176-px crops. Weights were
then rounded to fp16 and the decoder renamed to ldm keys.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import skimage
import sklearn
import torch
from diffusers import AutoencoderKL
from PIL import Image

LONGEST_PX = 1024
SKIMAGE = (
    "astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "hubble_deep_field.jpg", "ihc.png",
    "motorcycle_left.png", "color.png", "retina.jpg",
)  # fmt: skip
SKLEARN = ("china.jpg", "flower.jpg")


def photographs() -> list[torch.Tensor]:
    """The photographs, each [3, H, W] in -1..1 and at most 1024 px on a side."""
    paths = [Path(skimage.__file__).parent / "data" / name for name in SKIMAGE]
    paths += [Path(sklearn.__file__).parent / "datasets" / "images" / name for name in SKLEARN]
    images = []
    for path in paths:
        image = Image.open(path).convert("RGB")
        image.thumbnail((LONGEST_PX, LONGEST_PX))
        images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1)
    return images


def build() -> AutoencoderKL:
    """The autoencoder, untrained."""
    vae = AutoencoderKL(
        block_out_channels=(32, 64, 128, 128), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=2, latent_channels=4, norm_num_groups=32,
    )  # fmt: skip
    return vae.to(memory_format=torch.channels_last)


def draw_crops(images: list[torch.Tensor], crop: int, n: int, rng: np.random.Generator) -> torch.Tensor:
    """Random crops [n, 3, crop, crop], half of them mirrored."""
    crops = []
    for _ in range(n):
        image = images[rng.integers(len(images))]
        y, x = rng.integers(image.shape[1] - crop + 1), rng.integers(image.shape[2] - crop + 1)
        piece = image[:, y : y + crop, x : x + crop]
        crops.append(piece.flip(2) if rng.random() < 0.5 else piece)
    return torch.stack(crops).contiguous(memory_format=torch.channels_last)


def loss_of(vae: AutoencoderKL, x: torch.Tensor) -> torch.Tensor:
    """L1 of the picture, half of it of its gradients, and a small pull of the latent to zero."""
    with torch.autocast("cpu", torch.bfloat16):
        mean = vae.encode(x).latent_dist.mean
        y = vae.decode(mean + 0.02 * torch.randn_like(mean)).sample
    d = y.float() - x
    gradients = (d[..., 1:] - d[..., :-1]).abs().mean() + (d[..., 1:, :] - d[..., :-1, :]).abs().mean()
    return d.abs().mean() + 0.5 * gradients + 2e-4 * (mean.float() ** 2).mean()


def train(seconds: float, crop: int, batch: int, out: Path) -> None:
    """Train for that long, going on from `out` if it exists; the learning rate falls along a cosine."""
    images, vae, rng = photographs(), build(), np.random.default_rng()
    if out.exists():
        vae.load_state_dict(torch.load(out))
    optimizer = torch.optim.AdamW(vae.parameters(), lr=4e-4, betas=(0.9, 0.98))
    start, step = time.monotonic(), 0
    while (done := (time.monotonic() - start) / seconds) < 1:
        rate = 4e-4 * min(1.0, (step + 1) / 50) * (0.03 + 0.97 * 0.5 * (1 + np.cos(np.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(vae, draw_crops(images, crop, batch, rng))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(step, f"loss {loss.item():.4f}", flush=True)
            torch.save(vae.state_dict(), out)
    torch.save(vae.state_dict(), out)


if __name__ == "__main__":
    train(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
