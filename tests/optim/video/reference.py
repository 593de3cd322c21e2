"""A plain interpreter of clip programs: whole clip, whole frames, no tiles. What the engine must equal."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import Tensor

from halo_vae.optim.program import Linear, Program
from halo_vae.optim.video.frames import conv_taps, dropped, scope_of, upsampled_count, upsampled_source
from halo_vae.optim.video.ops import (
    ClipAttention,
    ClipConv,
    ClipNorm,
    ClipScale,
    LatentModulation,
    Modulation,
    Unpack,
)

PAD = {"zero": "constant", "replicate": "replicate", "reflect": "reflect"}


class Interpreter:
    """Runs a program on one clip [1, C, T, H, W] in float32."""

    def __init__(self, program: Program, weights: dict[str, Tensor], generator: torch.Generator | None = None) -> None:
        self.program = program
        self.w = {k: t.float() for k, t in weights.items()}
        self.generator = generator

    def run(self, latent: Tensor) -> Tensor:
        """The raw clip [1, C, t, H, W]."""
        self.z = latent[0].float()
        values = {0: self.z}
        for op in self.program.ops:
            src = values[op.inputs[0]]
            if isinstance(op, ClipConv):
                y = self.conv(op, src, values[op.inputs[1]] if op.skip else None)
            elif isinstance(op, ClipAttention):
                y = self.attention(op, src)
            else:
                assert isinstance(op, ClipScale)
                y = self.scale(op, src)
            values[op.output] = y
        return values[self.program.output][None]

    # -- pieces

    def act(self, x: Tensor, act: str) -> Tensor:
        if act == "silu":
            return F.silu(x)
        if act == "relu":
            return F.relu(x)
        if act == "leaky_relu":
            return F.leaky_relu(x, 0.2)
        return torch.tanh(x / 3) * 3 if act == "tanh3" else x

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        w = self.w[linear.weight]
        b = self.w[linear.bias] if linear.bias else None
        return F.linear(x.movedim(0, -1), w.reshape(w.shape[0], -1), b).movedim(-1, 0)

    def norm(self, x: Tensor, norm: ClipNorm | None) -> Tensor:
        if norm is None:
            return x
        c, t = x.shape[:2]
        if norm.kind == "group":
            w, b = self.w[norm.weight], self.w[norm.bias]
            scopes = [scope_of(f, norm.scope, norm.scope_offset) for f in range(t)]
            y = torch.empty_like(x)
            for scope in set(scopes):
                frames = [f for f in range(t) if scopes[f] == scope]
                y[:, frames] = F.group_norm(x[None, :, frames], norm.groups, w, b, norm.eps)[0]
        elif norm.kind == "rms":
            y = F.normalize(x, dim=0, eps=norm.eps) * math.sqrt(c) * self.w[norm.weight].reshape(c, 1, 1, 1)
        elif norm.kind == "pixel":
            y = x / torch.sqrt((x * x).mean(0, keepdim=True) + norm.eps)
        else:
            y = F.layer_norm(x.movedim(0, -1), (c,), self.w[norm.weight], self.w[norm.bias], norm.eps).movedim(-1, 0)
        if norm.modulation is not None:
            scale, shift = self.modulation(norm.modulation, c)
            y = y * (1 + scale.view(c, 1, 1, 1)) + shift.view(c, 1, 1, 1)
        if norm.latent is not None:
            y = self.latent_modulation(norm.latent, y)
        return y

    def modulation(self, m: Modulation, c: int) -> tuple[Tensor, Tensor]:
        t = m.timestep * (self.w[m.multiplier] if m.multiplier else torch.tensor(1.0))
        freqs = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32) / 128)
        angles = t * freqs
        e = torch.cat([torch.cos(angles), torch.sin(angles)])
        e = self.linear(F.silu(self.linear(e, m.first)), m.second)
        rows = self.w[m.table] + e.view(-1, c)
        return rows[m.scale_row], rows[m.shift_row]

    def latent_modulation(self, m: LatentModulation, y: Tensor) -> Tensor:
        _, t, h, w = y.shape
        z = self.z[None]
        if t > 1 and t % 2 == 1:
            first, rest = F.interpolate(z[:, :, :1], size=(1, h, w)), F.interpolate(z[:, :, 1:], size=(t - 1, h, w))
            z = torch.cat([first, rest], 2)
        else:
            z = F.interpolate(z, size=(t, h, w))
        return y * self.linear(z[0], m.scale) + self.linear(z[0], m.shift)

    def weight(self, op: ClipConv) -> Tensor:
        w = self.w[op.weight]
        if op.form == "conv2d":
            return w[:, :, None]
        if op.form == "linear":
            return w[:, :, None, None, None]
        if op.form == "past":
            c = w.shape[1] // 2
            return torch.stack([w[:, c:], w[:, :c]], 2)
        return w

    def unpack(self, x: Tensor, u: Unpack | None) -> Tensor:
        if u is None:
            return x
        if u.haar:
            for _ in range(u.haar):
                x = haar(x)
            return x
        size = {"c": x.shape[0] // (u.t * u.s * u.s), "t": u.t, "h": u.s, "w": u.s}
        t, h, w = x.shape[1:]
        y = x.reshape(*(size[a] for a in u.order), t, h, w)
        at = {a: i for i, a in enumerate(u.order)}
        y = y.permute(at["c"], 4, at["t"], 5, at["h"], 6, at["w"])
        return y.reshape(size["c"], t * u.t, h * u.s, w * u.s)

    def unpack_first(self, x: Tensor, u: Unpack | None, first: str, keep: int) -> Tensor:
        """Unpack with the rule of the first frame applied."""
        if u is None or u.t == 1 or first == "same":
            return self.unpack(x, u)
        if first == "drop":
            return self.unpack(x, u)[:, u.t - 1 :]
        alone = Unpack(t=1, s=u.s, order=u.order)
        head = self.unpack(x[:, :1], alone)[:keep]
        return torch.cat([head, self.unpack(x[:, 1:], u)], 1) if x.shape[1] > 1 else head

    def upsample(self, x: Tensor, op: ClipConv) -> Tensor:
        n = x.shape[1]
        frames = [upsampled_source(op.upsample_time, u, n) for u in range(upsampled_count(op.upsample_time, n))]
        x = x[:, frames]
        return x.repeat_interleave(2, 2).repeat_interleave(2, 3) if op.upsample == 2 else x

    def conv(self, op: ClipConv, src: Tensor, skip: Tensor | None) -> Tensor:
        x = self.act(self.norm(src, op.norm), op.act)
        n = x.shape[1]
        spatial = x.repeat_interleave(2, 2).repeat_interleave(2, 3) if op.upsample == 2 else x
        p = op.halo
        padded = F.pad(spatial[None], (p, p, p, p, 0, 0), mode=PAD[op.border])[0] if p else spatial
        w, b = self.weight(op), self.w[op.bias] if op.bias else None
        frames = []
        zero = torch.zeros_like(padded[:, 0])
        for c in range(upsampled_count(op.upsample_time, n)):
            window = torch.stack([zero if f is None else padded[:, f] for f in conv_taps(op, c, n)], 1)
            frames.append(F.conv3d(window[None], w, b)[0])
        y = torch.cat(frames, 1)
        if op.gain:
            y = y * torch.sigmoid(self.w[op.gain])
        if op.noise:
            h, wd = y.shape[2:]
            y = y + torch.randn(h, wd, generator=self.generator)[None, None] * self.w[op.noise].reshape(-1, 1, 1, 1)
        keep = op.out_channels // ((op.unpack.t * op.unpack.s**2) if op.unpack else 1)
        if op.first_frame == "bypass":
            head = src[:, :1]
            y = torch.cat([head, self.unpack(y[:, 1:], op.unpack)], 1) if y.shape[1] > 1 else head
        else:
            y = self.unpack_first(y, op.unpack, op.first_frame, keep)
        if skip is not None:
            y = y + self.skip(op, skip, y)
        y = self.act(y, op.post_act) * op.out_gain + op.out_offset
        latent_frames = self.z.shape[1]
        extra = dropped(op, n, latent_frames)
        if op.first_frame != "same" and not (op.last_of_one and latent_frames == 1):
            extra -= op.frames_per_conv - 1
        return y[:, extra:]

    def skip(self, op: ClipConv, x: Tensor, y: Tensor) -> Tensor:
        skip = op.skip
        assert skip is not None
        if skip.upsampled:
            return self.upsample(x, op)
        if not skip.tile:
            first = x[:, :1]
            x = x.repeat_interleave(skip.repeat, 0)
            if skip.unpack is not None and op.first_frame == "single" and skip.unpack.t > 1:
                head = self.unpack(
                    first.repeat_interleave(skip.repeat // skip.unpack.t, 0),
                    Unpack(t=1, s=skip.unpack.s, order=skip.unpack.order),
                )
                rest = self.unpack(x[:, 1:], skip.unpack)
                return torch.cat([head, rest], 1) if x.shape[1] > 1 else head
        if skip.unpack is not None:
            x = self.unpack(x, skip.unpack)
            if skip.unpack.t > 1 and (op.first_frame != "same" or x.shape[1] != y.shape[1]):
                x = x[:, skip.unpack.t - 1 :]
        return x.repeat(skip.repeat, 1, 1, 1) if skip.tile else x

    def attention(self, op: ClipAttention, src: Tensor) -> Tensor:
        x = self.norm(src, op.norm)
        if op.qkv is not None:
            q, k, v = self.linear(x, op.qkv).chunk(3, 0)
        else:
            assert op.q
            assert op.k
            assert op.v
            q, k, v = (self.linear(x, part) for part in (op.q, op.k, op.v))
        c, t, h, w = q.shape
        shape = {"frame": (t, h * w), "clip": (1, t * h * w), "past": (h * w, t)}[op.scope]

        def rows(a: Tensor) -> Tensor:
            a = a.permute(2, 3, 1, 0) if op.scope == "past" else a.permute(1, 2, 3, 0)
            return a.reshape(*shape, c)

        y = F.scaled_dot_product_attention(rows(q), rows(k), rows(v), is_causal=op.scope == "past")
        y = y.view(h, w, t, c).permute(3, 2, 0, 1) if op.scope == "past" else y.view(t, h, w, c).permute(3, 0, 1, 2)
        return src + self.linear(y, op.proj)

    def scale(self, op: ClipScale, x: Tensor) -> Tensor:
        if op.noise_share:
            noise = torch.randn(x.shape, generator=self.generator)
            x = noise * op.noise_share + (1.0 - op.noise_share) * x
        x = x * op.before
        c, t = x.shape[:2]

        def vector(name: str) -> Tensor:
            v = self.w[name].reshape(c, op.period)
            return v[:, [f % op.period for f in range(t)]][:, :, None, None]

        x = x * vector(op.scale) if op.scale else x
        x = x + vector(op.shift) if op.shift else x
        return self.act(x, op.act)


def haar(x: Tensor) -> Tensor:
    """One level of the inverse 3-D Haar transform: [8 C, t, h, w] -> [C, 2 t, 2 h, 2 w].

    Sub-bands lie slowest in the channels, numbered 4 a + 2 b + c with a, b, c = 1 for the difference along T, H, W;
    a sample is the sum of sub-bands with sign (-1) to the offset along each differenced axis. With orthonormal filters
    and the reference's rescaling by sqrt(8) every factor is one.
    """
    c8, t, h, w = x.shape
    c = c8 // 8
    bands = x.view(2, 2, 2, c, t, h, w)
    out = torch.zeros(c, t, 2, h, 2, w, 2)
    for p in range(8):
        i, j, k = p >> 2, (p >> 1) & 1, p & 1
        total = sum(
            (-1) ** (a * i + b * j + d * k) * bands[a, b, d] for a in range(2) for b in range(2) for d in range(2)
        )
        out[:, :, i, :, j, :, k] = total
    return out.reshape(c, 2 * t, 2 * h, 2 * w)
