"""Which VAE a word stands for, what a phase asks of a decode, and the size that a warm run decodes at."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halo_vae.optim.settings import DecodeSettings
from halo_vae.profiling.bench.cases import CASES, BenchError
from halo_vae.profiling.bench.configurations import settings_for, warm_shape
from halo_vae.profiling.bench.vaes import find_vaes, prepare_vae
from halo_vae.profiling.cli.demo import DATA, VAE_NAME


def test_names_are_structures_with_seeded_weights(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    first, again = prepare_vae("sd/4", "kl", 3, tmp_path), prepare_vae("sd/4", "kl", 3, tmp_path / "again")
    assert first is not None
    assert again is not None
    assert (first.label, first.latent_channels, first.note) == ("random:sd/4", 4, "1/4 of the width of sd")
    weights, others = load_file(first.path), load_file(again.path)
    assert weights["decoder.conv_in.weight"].shape == (128, 4, 3, 3)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    other = prepare_vae("sd/4", "kl", 4, tmp_path)
    assert other is not None
    assert not torch.equal(load_file(other.path)["decoder.conv_in.weight"], weights["decoder.conv_in.weight"])


def test_flux_has_sixteen_channels_and_no_convolution_before_the_decoder(tmp_path: Path) -> None:
    vae = prepare_vae("flux/4", "kl", 0, tmp_path)
    assert vae is not None
    assert vae.latent_channels == 16
    assert not any(name.startswith("post_quant_conv") for name in load_file(vae.path))


def test_each_family_takes_the_first_word_that_is_one_of_it(tmp_path: Path) -> None:
    found = find_vaes(("wan21/24", "tiny", "sd/4"), ("kl", "wan21", "kl"), 0, tmp_path)
    assert {family: vae.label for family, vae in found.items()} == {"kl": "tiny", "wan21": "random:wan21/24"}
    assert list(found) == ["kl", "wan21"]


def test_file_is_named_by_its_hash_and_never_by_its_path(tmp_path: Path) -> None:
    vae = prepare_vae(str(DATA / VAE_NAME), "kl", 0, tmp_path)
    assert vae is not None
    assert len(vae.label) == 16
    int(vae.label, 16)
    assert prepare_vae(str(DATA / VAE_NAME), "wan21", 0, tmp_path) is None  # pictures only


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("sd/5", "divide by one of 1, 2, 4"), ("sd/8", "divide by"), ("wan21/0", "divide by"),
        ("sdxl", "give a safetensors file"),
    ],
)  # fmt: skip
def test_words_that_are_no_vae_are_told(word: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=says):
        prepare_vae(word, "wan21" if word.startswith("wan") else "kl", 0, tmp_path)


def test_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    def save(*args: object) -> None:
        raise SafetensorError(f"I/O error: {errno.ENOSPC}")

    monkeypatch.setattr("safetensors.torch.save_file", save)
    with pytest.raises(BenchError, match="free space"):
        prepare_vae("wan21/24", "wan21", 0, tmp_path)


# -- configurations


def test_phases_add_up_to_the_defaults() -> None:
    first, second, third = (settings_for(phase, "fp32", 5) for phase in ("phase1", "phase2", "phase3"))  # type: ignore[arg-type]
    assert third == DecodeSettings(method="exact")
    assert (first.precision_mode, second.precision_mode) == ("fp32", "auto")
    assert (first.batch_optimization, first.memory_prefetching) == (False, False)
    assert (second.batch_optimization, second.memory_prefetching) == (True, True)
    assert (second.chunk_lat, second.adaptive_precision) == (5, False)  # a clip as a whole, nothing repaired
    assert all(s.tensor_layout_optimization and s.advanced_caching for s in (first, second, third))


def test_half_precision_case_is_loaded_and_computed_in_it() -> None:
    assert settings_for("phase1", "bf16", 1).precision_mode == "bf16"
    assert settings_for("phase3", "bf16", 1, plan="tiles", kernel_backend="torch").plan == "tiles"


@pytest.mark.parametrize("configuration", ["baseline", "stock"])
def test_other_configurations_are_not_the_engines(configuration: str) -> None:
    with pytest.raises(ValueError, match="phase1"):
        settings_for(configuration, "fp32", 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_warm_size_is_another_for_nearly_the_same_work(case: object) -> None:
    shape = case.latent_shape  # type: ignore[attr-defined]
    other = warm_shape(shape)
    assert other != shape
    assert other[:-2] == shape[:-2]
    assert min(other[-2:]) * 8 >= 256  # no smaller than one tile
    work = other[-2] * other[-1] / (shape[-2] * shape[-1])
    assert work == (1.125 if shape[-1] == 32 else 63 / 64)


def test_latent_too_small_for_another_size_is_told() -> None:
    with pytest.raises(ValueError, match="8x8"):
        warm_shape((1, 4, 7, 9))
