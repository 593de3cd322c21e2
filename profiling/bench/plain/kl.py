"""The yardstick for pictures: a KL decoder as anybody would write it in torch, and three-pass tiling as a host does it.

Nothing here uses the engine, so that neither its speed nor its mistakes can hide in both sides of a comparison.
Sources: Rombach et al. 2022, arXiv:2112.10752 (decoder); ComfyUI's "VAE Decode (Tiled)" (what three passes mean).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

NORM_GROUPS = 32
NORM_EPS = 1e-6
_RESIDUAL_GAIN = 0.5
"""Each res block adds half a unit of deviation, so that the stream of a random decoder stays below 2."""


class Norm(nn.Module):
    """GroupNorm over 32 groups."""

    def __init__(self, channels: int) -> None:
        """Scale and shift per channel."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return functional.group_norm(x, NORM_GROUPS, self.weight, self.bias, NORM_EPS)


class ResBlock(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))), with a 1x1 convolution on x where the width changes."""

    def __init__(self, read: int, out: int) -> None:
        """From `read` to `out` channels."""
        super().__init__()
        self.norm1 = Norm(read)
        self.conv1 = nn.Conv2d(read, out, 3, padding=1)
        self.norm2 = Norm(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        if read != out:
            self.nin_shortcut = nn.Conv2d(read, out, 1)
        self.widens = read != out

    def forward(self, x: Tensor) -> Tensor:
        """[B, read, H, W] -> [B, out, H, W]."""
        h = self.conv1(functional.silu(self.norm1(x)))
        h = self.conv2(functional.silu(self.norm2(h)))
        return h + (self.nin_shortcut(x) if self.widens else x)


class MidAttention(nn.Module):
    """Single-head attention over all pixels."""

    def __init__(self, channels: int) -> None:
        """1x1 convolutions as projections."""
        super().__init__()
        self.norm = Norm(channels)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        h = self.norm(x)
        # [B, C, H, W] -> [B, 1 head, H * W, C]
        q, k, v = (part(h).flatten(2).transpose(1, 2).unsqueeze(1) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(mixed.squeeze(1).transpose(1, 2).reshape(x.shape))


class Upsample(nn.Module):
    """Nearest-neighbour doubling, then a 3x3 convolution."""

    def __init__(self, channels: int) -> None:
        """Keeps the width."""
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, 2 H, 2 W]."""
        return self.conv(functional.interpolate(x, scale_factor=2.0, mode="nearest"))


class _Mid(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = ResBlock(channels, channels)
        self.attn_1 = MidAttention(channels)
        self.block_2 = ResBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class _Level(nn.Module):
    def __init__(self, read: int, out: int, n_blocks: int, doubles: bool) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResBlock(read if i == 0 else out, out) for i in range(n_blocks))
        if doubles:
            self.upsample = Upsample(out)
        self.doubles = doubles

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        return self.upsample(x) if self.doubles else x


class _Decoder(nn.Module):
    def __init__(self, z: int, widths: Sequence[int], n_blocks: int, out: int) -> None:
        super().__init__()
        lowest = widths[-1]
        self.conv_in = nn.Conv2d(z, lowest, 3, padding=1)
        self.mid = _Mid(lowest)
        reads = [*widths[1:], lowest]
        self.up = nn.ModuleList(_Level(reads[i], widths[i], n_blocks, doubles=i > 0) for i in range(len(widths)))
        self.norm_out = Norm(widths[0])
        self.conv_out = nn.Conv2d(widths[0], out, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        h = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            h = level(h)
        return self.conv_out(functional.silu(self.norm_out(h)))


class PlainKLDecoder(nn.Module):
    """post_quant_conv and decoder of a KL autoencoder; parameters carry the ldm names."""

    def __init__(
        self, widths: Sequence[int], *, z: int = 4, n_res: int = 2, latent: int | None = None, out: int = 3
    ) -> None:
        """Widths of the levels from the picture's resolution down; `latent`: channels before post_quant_conv."""
        super().__init__()
        self.post_quant_conv = nn.Conv2d(latent, z, 1) if latent is not None else None
        self.decoder = _Decoder(z, widths, n_res + 1, out)

    @classmethod
    def from_weights(cls, weights: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32) -> PlainKLDecoder:
        """The decoder that these tensors (ldm names; others are ignored) are of; float32 ones are not copied.

        ValueError if a tensor is missing or does not fit.
        """
        own = {k: w.detach().to(dtype) for k, w in weights.items() if k.startswith(("decoder.", "post_quant_conv."))}
        try:
            n_levels = 1 + max(int(name.split(".")[2]) for name in own if name.startswith("decoder.up."))
            n_blocks = 1 + max(int(name.split(".")[4]) for name in own if name.startswith("decoder.up.0.block."))
            widths = [own[f"decoder.up.{i}.block.0.conv2.weight"].shape[0] for i in range(n_levels)]
            z, out = own["decoder.conv_in.weight"].shape[1], own["decoder.conv_out.weight"].shape[0]
        except (KeyError, ValueError) as e:
            raise ValueError(f"not a whole KL decoder in ldm names ({e}); give decoder.conv_in.weight and so on") from e
        latent = own["post_quant_conv.weight"].shape[1] if "post_quant_conv.weight" in own else None
        with torch.device("meta"):
            module = cls(widths, z=z, n_res=n_blocks - 1, latent=latent, out=out)
        try:
            module.load_state_dict(own, assign=True)
        except RuntimeError as e:
            raise ValueError(f"the tensors do not make a KL decoder: {e}") from e
        return module.eval().requires_grad_(False)

    def forward(self, latent: Tensor) -> Tensor:
        """[B, z, h, w] -> raw picture [B, 3, H, W], about -1 to 1."""
        return self.decoder(latent if self.post_quant_conv is None else self.post_quant_conv(latent))

    @torch.no_grad()
    def decode(self, latent: Tensor) -> Tensor:
        """`forward` without gradients."""
        return self(latent)


def sd_shapes(
    *, ch: int = 128, mult: Sequence[int] = (1, 2, 4, 4), z: int = 4, n_res: int = 2
) -> dict[str, tuple[int, ...]]:
    """Shapes of an SD decoder's tensors, by ldm name; the defaults are the published size."""
    with torch.device("meta"):
        module = PlainKLDecoder([ch * m for m in mult], z=z, n_res=n_res, latent=z)
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def random_sd_weights(
    seed: int = 0, ch: int = 128, mult: Sequence[int] = (1, 2, 4, 4), z: int = 4, n_res: int = 2
) -> dict[str, Tensor]:
    """Seeded float32 weights of an SD decoder, by fan-in: a unit latent gives a picture of deviation near 0.6."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in sd_shapes(ch=ch, mult=mult, z=z, n_res=n_res).items():
        tensor = torch.randn(shape, generator=generator)
        if len(shape) == 4:
            tensor *= (shape[1] * shape[2] * shape[3]) ** -0.5 * (_RESIDUAL_GAIN if ".conv2." in name else 1.0)
        else:
            tensor *= 0.05
            if "norm" in name and name.endswith("weight"):
                tensor += 1.0
        weights[name] = tensor
    return weights


def _starts(size: int, tile: int, overlap: int) -> list[int]:
    """Where tiles begin; the last one is cut off at the edge."""
    return [0] if size <= tile else list(range(0, size - overlap, tile - overlap))


def _ramp(size: int, feather: int) -> Tensor:
    """Weights [size] that rise and fall linearly over `feather` elements; flat where they would not fit."""
    if feather <= 0 or feather >= size:
        return torch.ones(size)
    rise = (torch.arange(size) + 1) / feather
    return torch.minimum(rise, rise.flip(0)).clamp(max=1.0)


def tiled_decode(
    decode_fn: Callable[[Tensor], Tensor], latent: Tensor, *, tile: tuple[int, int], overlap: int, scale: int
) -> Tensor:
    """One pass over overlapping tiles (height, width in latents), cross-faded linearly; [B, C, h * scale, w * scale].

    ValueError if the overlap (in latents) leaves no step between tiles.
    """
    if overlap < 0 or overlap >= min(tile):
        raise ValueError(
            f"an overlap of {overlap} leaves no step between tiles of {tile[0]}x{tile[1]}; make it smaller"
        )
    h, w = latent.shape[2:]
    if h <= tile[0] and w <= tile[1]:
        return decode_fn(latent)
    pictures = []
    for one in torch.split(latent, 1):
        total = weight = None
        for top in _starts(h, tile[0], overlap):
            for left in _starts(w, tile[1], overlap):
                part = decode_fn(one[:, :, top : top + tile[0], left : left + tile[1]])
                rows, columns = (_ramp(n, overlap * scale).to(part) for n in part.shape[2:])
                mask = rows[:, None] * columns
                if total is None or weight is None:
                    total = part.new_zeros(1, part.shape[1], h * scale, w * scale)
                    weight = part.new_zeros(1, 1, h * scale, w * scale)
                y, x = top * scale, left * scale
                area = (..., slice(y, y + part.shape[2]), slice(x, x + part.shape[3]))
                total[area] += part * mask
                weight[area] += mask
        if total is not None and weight is not None:
            pictures.append(total / weight)
    return torch.cat(pictures)


def three_pass_decode(
    decode_fn: Callable[[Tensor], Tensor],
    latent: Tensor,
    tile: tuple[int, int] = (64, 64),
    overlap: int = 16,
    scale: int = 8,
) -> Tensor:
    """The mean of three tiled passes: tall tiles, wide tiles, tiles as given. Sizes in latents, raw picture out."""
    h, w = tile
    shapes = ((2 * h, w // 2), (h // 2, 2 * w), (h, w))
    passes = [tiled_decode(decode_fn, latent, tile=shape, overlap=overlap, scale=scale) for shape in shapes]
    return (passes[0] + passes[1] + passes[2]) / 3
