"""Small CPU stand-ins for VAE decoders, used by the acceptance cases.

Every fixture is seeded by an explicit generator, so none touches the global random state unless it says so (NoiseDec).
Latents are [B, C, H, W] (pictures) or [B, C, T, H, W] (clips); decoders return [B, 3, ...] in about -1 to 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def latent(shape: Sequence[int], seed: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tuple(shape), generator=gen(seed)).to(dtype)


class Logged(nn.Module):
    """Base: every call is appended to .log as a dict, so a test can count calls and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[dict[str, Any]] = []
        self.anchor = nn.Parameter(torch.zeros(1), requires_grad=False)  # gives the module a dtype and a device

    def note(self, z: Tensor) -> None:
        self.log.append(
            {
                "shape": tuple(z.shape),
                "dtype": z.dtype,
                "device": z.device.type,
                "grad": torch.is_grad_enabled(),
                "inference": torch.is_inference_mode_enabled(),
            }
        )

    def run(self, z: Tensor) -> Tensor:
        raise NotImplementedError

    def decode(self, z: Tensor, **options: Any) -> Tensor:
        self.note(z)
        return self.run(z)

    forward = decode


def enlarged(x: Tensor, r: int) -> Tensor:
    """Nearest upscale by r along H and W."""
    return x.repeat_interleave(r, -2).repeat_interleave(r, -1)


class PointDec(Logged):
    """F1. Nearest upscale by r of the first `out` channels. No neighbourhood at all."""

    def __init__(self, r: int = 8, out: int = 3) -> None:
        super().__init__()
        self.r, self.out = r, out

    def run(self, z: Tensor) -> Tensor:
        return enlarged(z[:, : self.out], self.r)


class ConvDec(Logged):
    """F2. 3x3 convs with nearest x2 between; `ups` doublings. Receptive radius < 2 latent pixels."""

    def __init__(self, c: int = 4, ups: int = 3, out: int = 3, seed: int = 1) -> None:
        super().__init__()
        g = gen(seed)
        self.ups = ups
        chans = [c] + [8] * ups + [out]
        self.w, self.b = nn.ParameterList(), nn.ParameterList()
        for c_in, c_out in itertools.pairwise(chans):
            self.w.append(nn.Parameter(torch.randn(c_out, c_in, 3, 3, generator=g) * 0.18, requires_grad=False))
            self.b.append(nn.Parameter(torch.randn(c_out, generator=g) * 0.05, requires_grad=False))

    def run(self, z: Tensor) -> Tensor:
        for i in range(self.ups + 1):
            z = nn.functional.conv2d(z, self.w[i], self.b[i], padding=1)
            if i < self.ups:
                z = nn.functional.interpolate(nn.functional.silu(z), scale_factor=2, mode="nearest")
        return z


class NormDec(Logged):
    """F3. Whole-image GroupNorm (one group) before an x8 nearest upscale: per-tile statistics shift colour."""

    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4, generator=gen(seed)) * 0.3, requires_grad=False)
        self.norm = nn.GroupNorm(1, 4)

    def run(self, z: Tensor) -> Tensor:
        return enlarged(torch.einsum("oc,bchw->bohw", self.w.to(z.dtype), self.norm(z)), 8)

    @staticmethod
    def two_tone(seed: int = 6) -> Tensor:
        """Dark left half, bright right half: [1, 4, 32, 64]."""
        g = gen(seed)
        left = torch.randn(1, 4, 32, 32, generator=g) * 0.2 - 1.5
        return torch.cat([left, torch.randn(1, 4, 32, 32, generator=g) * 0.2 + 1.5], -1)


class CausalDec(Logged):
    """F5. Causal video decoder: T latents -> 1 + 4(T-1) frames, 2-frame cache per conv, x8 in space.

    chunk(z, cache) is the streaming entry (cache = {} for a new clip); decode(z) runs one clip in one chunk.
    """

    def __init__(self, c: int = 4, seed: int = 3) -> None:
        super().__init__()
        g = gen(seed)
        self.w = [torch.randn(c, c, 3, generator=g) * 0.35 for _ in range(3)]
        self.up = [torch.randn(2 * c, c, 3, generator=g) * 0.35 for _ in range(2)]
        self.out = torch.randn(3, c, generator=g) * 0.4

    def conv(self, x: Tensor, w: Tensor, cache: dict[Any, Tensor], key: Any) -> Tensor:
        prev = cache.get(key)
        if prev is None:
            prev = torch.zeros_like(x[:, :, :1]).expand(-1, -1, 2, -1, -1)
        xx = torch.cat([prev, x], 2)
        cache[key] = xx[:, :, -2:].clone()
        b, c, t, h, wd = xx.shape
        y = nn.functional.conv1d(xx.permute(0, 3, 4, 1, 2).reshape(b * h * wd, c, t), w.to(x.dtype))
        return y.reshape(b, h, wd, -1, y.shape[-1]).permute(0, 3, 4, 1, 2)

    def chunk(self, z: Tensor, cache: dict[Any, Tensor]) -> Tensor:
        first = not cache
        x = nn.functional.silu(self.conv(z, self.w[0], cache, "c0"))
        for i in range(2):
            y = self.conv(x, self.up[i], cache, ("u", i))
            b, c2, t, h, w = y.shape
            y = y.reshape(b, 2, c2 // 2, t, h, w).permute(0, 2, 3, 1, 4, 5).reshape(b, c2 // 2, 2 * t, h, w)
            if first:
                y = y[:, :, 1:]
            x = nn.functional.silu(self.conv(y, self.w[i + 1], cache, ("c", i + 1)))
        return enlarged(torch.einsum("oc,bcthw->bothw", self.out.to(x.dtype), x), 8)

    def run(self, z: Tensor) -> Tensor:
        return self.chunk(z, {})


class OverflowDec(Logged):
    """F6. PointDec that fails by dtype.

    kind='natural': z*256*256 overflows float16 where |z| >= 1 (inf - inf = NaN). kind='nan' (or 'inf'): where
    |z[:, :1]| >= 1 and the dtype is in `bad`, writes that value. kind='mark': as 'nan', and adds 0.5 to every other
    pixel for dtypes in `bad`, which shows the dtype that made a pixel.
    """

    def __init__(self, kind: str = "natural", bad: Sequence[torch.dtype] = (torch.float16,), r: int = 8) -> None:
        super().__init__()
        self.kind, self.bad, self.r = kind, bad, r

    def run(self, z: Tensor) -> Tensor:
        x = z[:, :3].clone()
        if self.kind == "natural":
            y = x * 256 * 256
            x = y / 65536 + (y - y)
        elif z.dtype in self.bad:
            hit = (z[:, :1].abs() >= 1).expand_as(x)
            x = (
                (x + 0.5).masked_fill(hit, float("nan"))
                if self.kind == "mark"
                else x.masked_fill(hit, float(self.kind))
            )
        return enlarged(x, self.r)


def device_memory_error() -> Exception:
    return torch.OutOfMemoryError("HIP out of memory. (fake)")


class LimitDec(Logged):
    """F7. Raises `exc()` when the latent given has more than `limit` elements (hook(z) runs first), else decodes."""

    def __init__(
        self,
        inner: Logged,
        limit: int = 10**12,
        exc: Callable[[], BaseException] = device_memory_error,
        hook: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self.inner, self.limit, self.exc, self.hook = inner, limit, exc, hook

    def run(self, z: Tensor) -> Tensor:
        if z.numel() > self.limit:
            if self.hook:
                self.hook(z)
            raise self.exc()
        return self.inner.run(z)


class IndexDec(Logged):
    """F9. Returns a constant picture equal to the number of this call (1, 2, 3, ...), or `const` when given."""

    def __init__(self, const: float | None = None, r: int = 8, out: int = 3, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.const, self.r, self.out, self.dtype = const, r, out, dtype

    def run(self, z: Tensor) -> Tensor:
        value = float(len(self.log)) if self.const is None else self.const
        size = (z.shape[0], self.out, *z.shape[2:-2], z.shape[-2] * self.r, z.shape[-1] * self.r)
        return torch.full(size, value, dtype=self.dtype or z.dtype)


class NoiseDec(PointDec):
    """F10. PointDec plus 0.1 * noise drawn from the GLOBAL generator, as timestep-conditioned decoders do."""

    def run(self, z: Tensor) -> Tensor:
        return super().run(z + 0.1 * torch.randn_like(z))


class TimeIndexDec(Logged):
    """F12. k(T-1)+1 frames; every pixel of a frame holds the latent value z[:, 0, t, 0, 0] that frame belongs to."""

    def __init__(self, k: int = 4, r: int = 8) -> None:
        super().__init__()
        self.k, self.r = k, r

    def run(self, z: Tensor) -> Tensor:
        b, _, _, h, w = z.shape
        v = z[:, 0, :, 0, 0]
        v = torch.cat([v[:, :1], v[:, 1:].repeat_interleave(self.k, 1)], 1)
        return v[:, None, :, None, None].expand(b, 3, v.shape[1], h * self.r, w * self.r).clone()


class FakePatcher:
    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.load_device = self.offload_device = torch.device("cpu")

    def get_free_memory(self, device: torch.device) -> int:
        return 1 << 40

    def is_dynamic(self) -> bool:
        return False


class FakeVAE:
    """Duck of comfy.sd.VAE.

    inplace=True has the habit of ComfyUI 0.20.1 (process_output works in place and returns its input), inplace=False
    that of 0.3.64 (returns a new tensor).
    """

    def __init__(
        self,
        model: nn.Module | None,
        ratio: int = 8,
        channels: int = 4,
        dim: int = 2,
        t_ratio: int | None = None,
        dtype: torch.dtype = torch.float32,
        inplace: bool = True,
        out: int = 3,
        working: Sequence[torch.dtype] = (torch.float16, torch.bfloat16, torch.float32),
    ) -> None:
        self.first_stage_model = model
        self.device = self.output_device = torch.device("cpu")
        self.vae_dtype = dtype
        self.patcher = FakePatcher(model)
        self.latent_channels, self.latent_dim, self.output_channels = channels, dim, out
        self.working_dtypes = list(working)
        self.disable_offload = self.not_video = False
        self.extra_1d_channel = None
        self.mem_shapes: list[tuple[int, ...]] = []
        self.upscale_ratio: Any = ratio
        self.upscale_index_formula: Any = None
        if dim == 3:
            k = t_ratio or 4
            self.upscale_ratio = (lambda a: max(0, a * k - (k - 1)), ratio, ratio)
            self.upscale_index_formula = (k, ratio, ratio)
        self.process_output: Callable[[Tensor], Tensor] = (
            (lambda x: x.add_(1.0).div_(2.0).clamp_(0.0, 1.0))
            if inplace
            else (lambda x: torch.clamp((x + 1.0) / 2.0, 0.0, 1.0))
        )

    def memory_used_decode(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self.mem_shapes.append(tuple(shape))
        n = 1
        for side in shape[2:]:
            n *= side
        return 2178 * n * 64 * dtype.itemsize

    def spacial_compression_decode(self) -> int:
        return self.upscale_ratio[-1] if isinstance(self.upscale_ratio, tuple) else self.upscale_ratio

    def temporal_compression_decode(self) -> int | None:
        return round(self.upscale_ratio[0](8192) / 8192) if isinstance(self.upscale_ratio, tuple) else None

    def throw_exception_if_invalid(self) -> None:
        if self.first_stage_model is None:
            raise RuntimeError("ERROR: VAE is invalid: None")

    def decode(self, z: Tensor, vae_options: Any = None) -> Tensor:
        x = self.first_stage_model.decode(z.to(self.vae_dtype)).float()
        return self.process_output(x).movedim(1, -1)


def to_image(x: Tensor) -> Tensor:
    """Reference finish: float32, [0, 1], channels last, frames folded into the batch."""
    x = torch.clamp((x.float() + 1) / 2, 0, 1).movedim(1, -1)
    return x.reshape(-1, *x.shape[-3:])
