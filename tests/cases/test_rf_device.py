"""RF: which chip it is, and convolutions of few shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halo_vae.optim.device import profile_from
from halo_vae.optim.gfx import family_of, gfx_of_target, is_apu, is_strix_halo, parse_gfx
from halo_vae.tests.cases.support import record, settings
from halo_vae.tests.fixtures import PointDec, latent
from halo_vae.tests.optim import profiles

# -- RF-6

NAMES = [
    ("gfx1151", "gfx1151", "rdna3.5"),
    ("gfx1151:sramecc-:xnack-", "gfx1151", "rdna3.5"),
    ("GFX1151", "gfx1151", "rdna3.5"),
    ("gfx1150", "gfx1150", "rdna3.5"),
    ("gfx1152", "gfx1152", "rdna3.5"),
    ("gfx1100", "gfx1100", "rdna3"),
    ("gfx11", "gfx11", "other"),
    ("gfx90a:sramecc+:xnack-", "gfx90a", "cdna"),
    ("gfx942:xnack-:sramecc+", "gfx942", "cdna"),
    ("gfx1201", "gfx1201", "rdna4"),
]


@pytest.mark.parametrize(("text", "base", "family"), NAMES)
def test_rf_6_a_chip_is_known_by_its_whole_name(text: str, base: str, family: str) -> None:
    assert parse_gfx(text) == base
    assert family_of(base) == family
    assert is_strix_halo(parse_gfx(text)) == (text.lower().startswith("gfx1151"))


def test_rf_6_three_of_them_are_strix_halo() -> None:
    assert [is_strix_halo(parse_gfx(text)) for text, _, _ in NAMES] == [True] * 3 + [False] * 7


@pytest.mark.parametrize(("text", "base", "family"), NAMES)
def test_rf_6_so_is_a_profile(text: str, base: str, family: str) -> None:
    found = profile_from(replace(profiles.GFX1100, arch=text, driver_gfx=None))
    assert (found.gfx, found.family) == (base, family)


@pytest.mark.parametrize("text", [None, "", "sm_90", "gfx", "gfx1151x", "a gfx1151", "Radeon 8060S", ":xnack-"])
def test_rf_6_other_words_are_no_chip(text: str | None) -> None:
    assert parse_gfx(text) is None


@pytest.mark.parametrize(
    ("version", "name"), [(110501, "gfx1151"), (90010, "gfx90a"), (90402, "gfx942"), (120001, "gfx1201"), (0, None)]
)
def test_rf_6_the_kernel_driver_counts_in_decimals(version: int, name: str | None) -> None:
    assert gfx_of_target(version) == name


def test_rf_6_chips_inside_processors() -> None:
    inside = ("gfx1033", "gfx1035", "gfx1036", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153")
    assert all(map(is_apu, inside))
    assert not any(map(is_apu, ("gfx1030", "gfx1100", "gfx1201", "gfx942", "gfx11", None)))


# -- RF-8


@pytest.mark.parametrize("overlap", [0, 96, 128])
@pytest.mark.parametrize("batch", [1, 2])
def test_rf_8_all_tiles_have_one_shape(batch: int, overlap: int) -> None:
    model, z = PointDec(), latent((batch, 4, 130, 170))
    tile_px = 48 * 8
    _, heard = record(model, z, settings(tile_px, overlap))
    fed = {(call["shape"], call["dtype"]) for call in model.log}
    assert len({shape[1:] for shape, _ in fed}) == 1
    assert len({dtype for _, dtype in fed}) == 1
    assert len(fed) <= 1 + (batch % heard.plan.images_per_pass > 0)
    assert max(next(iter(fed))[0][2:]) <= 48
    assert len(model.log) > 9
    model.log.clear()
    record(model, z, settings(tile_px, overlap))
    assert {(call["shape"], call["dtype"]) for call in model.log} == fed


@pytest.mark.parametrize("machine", [name for name in profiles.MACHINES if name != "cpu"])
@pytest.mark.parametrize("name", ["sd", "flux"])
def test_rf_8_a_gpu_asks_for_no_new_shape_at_the_next_resolution(name: str, machine: str) -> None:
    decoder, device = profiles.DECODERS[name](torch.bfloat16), profiles.profile_of(machine)
    channels = profiles.LATENTS[name][1]
    seen: list[set[object]] = []
    for height, width in ((128, 128), (130, 170), (128, 216), (256, 256)):
        plan = profiles.plan_on(device, decoder, (1, channels, height, width))
        seen.append({(s.input, s.weight, s.dtype, s.layout) for s in plan.conv_shapes})
    assert seen[0]
    assert all(shapes == seen[0] for shapes in seen[1:])
