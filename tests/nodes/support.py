"""VAE objects around small decoders that the package knows, and sessions to decode them in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halo_vae.benchmarks.plain_kl import PlainKLDecoder, random_sd_weights
from halo_vae.nodes.session import Session
from halo_vae.profiling.record import Level
from halo_vae.profiling.store import HistoryStore
from halo_vae.tests.fixtures import FakeVAE
from halo_vae.tests.nodes.fake_host import FakeHost


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
