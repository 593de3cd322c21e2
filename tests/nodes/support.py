"""VAE objects around small decoders that the package knows, and sessions to decode them in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halo_vae.benchmarks.plain_kl import PlainKLDecoder, random_sd_weights
from halo_vae.nodes.session import Session
from halo_vae.optim.families import lower
from halo_vae.optim.weights import MappingWeights
from halo_vae.profiling.record import Level
from halo_vae.profiling.store import HistoryStore
from halo_vae.tests.fixtures import FakeVAE
from halo_vae.tests.goldens import golden
from halo_vae.tests.nodes.fake_host import FakeHost
from halo_vae.tests.optim.video.reference import Interpreter


class KLModel(nn.Module):
    """A narrow SD decoder, as a host's VAE object holds one: weights under the usual names, and `decode`."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        plain = PlainKLDecoder.from_weights(weights)
        self.decoder, self.post_quant_conv = plain.decoder, plain.post_quant_conv
        self.calls: list[tuple[int, ...]] = []

    def decode(self, z: Tensor) -> Tensor:
        self.calls.append(tuple(z.shape))
        return self.decoder(self.post_quant_conv(z))  # type: ignore[no-any-return]


def kl_vae(seed: int = 0, **options: Any) -> FakeVAE:
    """A VAE object that the package decodes exactly, x4 and 32 channels wide."""
    return FakeVAE(KLModel(random_sd_weights(seed, ch=32, mult=(1, 1, 1), n_res=1)), ratio=4, **options)


def stock(vae: FakeVAE, z: Tensor) -> Tensor:
    """The host's own picture."""
    with torch.no_grad():
        return vae.decode(z)


def new_session(
    host: FakeHost | None = None, *, level: Level = "summary", store: HistoryStore | None = None
) -> Session:
    return Session(host or FakeHost(), level=level, store=store, keep_history=store is not None)


class ClipModel(nn.Module):
    """A golden's decoder as a host holds it: its weights under their names, and a `decode` by the plain interpreter."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__()
        found = golden(name)
        for path, tensor in found.weights.items():
            layer: nn.Module = self
            *way, leaf = path.split(".")
            for part in way:
                if part not in dict(layer.named_children()):
                    layer.add_module(part, nn.Module())
                layer = layer.get_submodule(part)
            layer.register_buffer(leaf, tensor.float())
        self.calls: list[tuple[int, ...]] = []
        for attribute, value in attributes.items():
            setattr(self, attribute, value)
        hints = {"config": found.metadata["config"]} if found.metadata.get("config") else {}
        self.program = lower(MappingWeights(found.weights).specs, hints=hints)
        self._interpreter = Interpreter(self.program, dict(found.weights))

    def decode(self, z: Tensor) -> Tensor:
        self.calls.append(tuple(z.shape))
        frames_in_batch = z.ndim == 4  # as Stable Video Diffusion's
        clips = z.movedim(0, 1)[None] if frames_in_batch else z
        made = torch.cat([self._interpreter.run(clip) for clip in clips.split(1)])
        return made[0].movedim(0, 1) if frames_in_batch else made


def clip_vae(name: str = "wan21", *, attributes: Mapping[str, Any] | None = None, **options: Any) -> FakeVAE:
    """A VAE object of a golden video decoder, with the ratios that a host states for it."""
    model = ClipModel(name, **(attributes or {}))
    program = model.program
    given = {
        "channels": program.latent_channels, "ratio": program.scale[1], "t_ratio": program.scale[0],
        "dim": 2 if program.family == "svd" else 3,
    } | options  # fmt: skip
    return FakeVAE(model, **given)
