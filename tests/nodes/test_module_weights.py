"""Weights read through a host's own way of casting them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from halo_vae.nodes.module_weights import ModuleWeights, why_not_plain
from halo_vae.optim.errors import WeightsError

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Sequential(nn.Conv2d(2, 3, 1), nn.GroupNorm(1, 3))
        self.register_buffer("running", torch.arange(3.0))
        self.scale = nn.Parameter(torch.ones(()))


def fetch(layer: nn.Module, leaf: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    return getattr(layer, leaf).to(device, dtype) * 2  # type: ignore[no-any-return]


def test_names_are_those_of_the_state_dict() -> None:
    model = Model()
    source, state = ModuleWeights(model, fetch), model.state_dict()
    assert {name: spec.shape for name, spec in source.specs.items()} == {k: tuple(t.shape) for k, t in state.items()}
    assert all(spec.dtype == state[name].dtype for name, spec in source.specs.items())


def test_values_come_as_the_host_gives_them() -> None:
    model = Model()
    source = ModuleWeights(model, fetch)
    got = source.get("decoder.0.weight", torch.float64, CPU)
    assert torch.equal(got, model.decoder[0].weight.detach().double() * 2)
    assert not got.requires_grad
    model.decoder[0].weight = nn.Parameter(torch.zeros(3, 2, 1, 1))  # as a host does when it patches or moves them
    assert not source.get("decoder.0.weight", torch.float32, CPU).any()
    with pytest.raises(WeightsError, match=r"no tensor 'decoder\.9\.weight'"):
        source.get("decoder.9.weight", torch.float32, CPU)


def test_hash_follows_stored_values_or_patched_ones() -> None:
    one, other = Model(), Model()
    assert ModuleWeights(one, fetch).content_hash != ModuleWeights(other, fetch).content_hash
    other.load_state_dict(one.state_dict())
    plain = ModuleWeights(one, fetch).content_hash
    assert ModuleWeights(other, fetch).content_hash == plain

    def tripled(layer: nn.Module, leaf: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        return fetch(layer, leaf, dtype, device) * 1.5

    assert ModuleWeights(one, tripled).content_hash == plain
    assert (
        ModuleWeights(one, tripled, patched=True).content_hash != ModuleWeights(one, fetch, patched=True).content_hash
    )


def test_tensors_that_are_not_there_yet_count_by_shape() -> None:
    with torch.device("meta"):
        model = Model()
    assert ModuleWeights(model, fetch).content_hash == ModuleWeights(model, fetch).content_hash


def test_plain_models_are_plain() -> None:
    model = Model()
    assert why_not_plain(model) is None
    model.encoder = nn.Conv2d(3, 2, 1, padding_mode="reflect")  # plays no part in decoding
    assert why_not_plain(model) is None
    model.decoder[0].padding_mode = "circular"
    assert why_not_plain(model) == "decoder.0 pads its borders by circular"
    assert "no torch module" in str(why_not_plain(object()))
