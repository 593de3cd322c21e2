"""The budget is a function of readings: which one limits it, and what is done without one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halo_vae.optim.budget import HOST_RESERVE, LARGEST_POOL, budget_of
from halo_vae.optim.device import profile_from
from halo_vae.optim.device_readers import PoolReading, Readings, Versions
from halo_vae.optim.events import PeakPrediction
from halo_vae.tests.optim import profiles
from halo_vae.tests.optim.profiles import CPU, CUDA, GFX1100, GFX1151_CARVE_OUT, GFX1151_GTT, GFX1151_WINDOWS, GIB, pool


def unified(readings: Readings) -> tuple[int | None, str]:
    budget = budget_of(readings, unified=True)
    return budget.nbytes, budget.reason


@pytest.mark.parametrize(
    ("machine", "gib", "words"),
    [
        ("gfx1151", 63, "limited by what HIP calls free"),
        ("gfx1151-gtt", 108.3, "limited by the system's available memory less 2 GiB"),
        ("gfx1151-windows", 78, "carve-out and GTT cannot be read"),
        ("gfx1100", 23, "what HIP calls free"),
        ("gfx1030", 15, "what HIP calls free"),
        ("gfx942", 190, "what HIP calls free"),
        ("cuda", 22.5, "what CUDA calls free"),
        ("cpu", 24, "the system's available memory"),
    ],
)
def test_every_machine_names_what_limits_it(machine: str, gib: float, words: str) -> None:
    found = profiles.profile_of(machine)
    assert found.budget_bytes is not None
    assert found.budget_bytes / GIB == pytest.approx(gib, abs=1e-6)
    assert words in found.budget_reason
    assert found.invalid_readings == ()


def test_the_carve_out_comes_on_top_of_what_is_shared() -> None:
    roomy = replace(GFX1151_CARVE_OUT, device_pool=pool(120, 126))
    assert unified(roomy)[0] == (63 + 31) * GIB
    assert "limited by GTT" in unified(roomy)[1]
    assert unified(replace(roomy, host=pool(10, 62)))[0] == (63 + 10) * GIB - HOST_RESERVE
    assert unified(replace(roomy, host=pool(1, 62)))[0] == 63 * GIB  # less than the reserve is nothing


def test_an_apu_with_parts_unknown_counts_what_is_known() -> None:
    full = replace(GFX1151_GTT, device_pool=None)
    assert unified(replace(full, host=None))[0] == int(0.3 * GIB) + 119 * GIB
    assert unified(replace(full, gtt=None))[0] == int(0.3 * GIB) + 108 * GIB
    assert unified(replace(full, carve_out=None))[0] == 108 * GIB
    nbytes, reason = unified(replace(full, gtt=None, host=None))
    assert nbytes == int(0.3 * GIB)
    assert "limited by the carve-out" in reason
    nbytes, reason = unified(replace(GFX1151_WINDOWS, device_pool=None))
    assert nbytes is None
    assert "neither HIP nor the kernel driver" in reason


def test_a_cuda_device_that_shares_the_hosts_memory() -> None:
    shared = replace(CUDA, integrated=True, device_pool=pool(100, 119), host=pool(30, 119))
    assert unified(shared) == (28 * GIB, "limited by the system's available memory less 2 GiB for other programs")
    assert unified(replace(shared, host=None)) == (100 * GIB, "limited by CUDA")
    assert unified(replace(shared, host=None, device_pool=None))[0] is None


def test_what_torch_holds_unused_counts_up_to_all_there_is() -> None:
    held = replace(GFX1100, device_pool=pool(3, 24), cached_bytes=15 * GIB)
    assert profile_from(held).budget_bytes == 18 * GIB
    assert "15.0 GiB that torch holds unused" in profile_from(held).budget_reason
    too_much = replace(held, cached_bytes=30 * GIB)
    assert profile_from(too_much).budget_bytes == 24 * GIB
    assert profile_from(too_much).budget_reason == "all that HIP says there is"


@pytest.mark.parametrize(
    ("name", "readings"),
    [
        ("carve-out", {"carve_out": PoolReading(free_bytes=-5, total_bytes=GIB)}),
        ("GTT", {"gtt": PoolReading(free_bytes=2**64 - 4096, total_bytes=2**64 - 1)}),
        ("GTT", {"gtt": PoolReading(free_bytes=9, total_bytes=8)}),
        ("system memory", {"host": PoolReading(free_bytes=0, total_bytes=0)}),
        ("system memory", {"host": PoolReading(free_bytes=LARGEST_POOL + 1)}),
    ],
)
def test_each_pool_is_refused_by_name(name: str, readings: dict[str, PoolReading]) -> None:
    found = profile_from(replace(GFX1151_GTT, **readings))  # type: ignore[arg-type]
    assert [text.partition(":")[0] for text in found.invalid_readings] == [name]
    assert found.budget_bytes is not None
    assert found.budget_bytes <= 120 * GIB
    assert f"refused: {name}" in found.memory_choice.reason


@pytest.mark.parametrize("which", ["carve_out", "gtt"])
def test_an_empty_pool_is_no_fault(which: str) -> None:
    empty = PoolReading(free_bytes=0, total_bytes=0)
    assert profile_from(replace(GFX1151_CARVE_OUT, **{which: empty})).invalid_readings == ()  # type: ignore[arg-type]


def test_unknown_is_none_and_says_why() -> None:
    blind = Readings(kind="cpu", name="cpu", versions=Versions(torch="2"))
    assert profile_from(blind).budget_bytes is None
    assert "does not tell" in profile_from(blind).budget_reason
    assert profile_from(blind).memory_choice.value == "unknown"
    other = profile_from(Readings(kind="other", name="mps", versions=Versions(torch="2"), host=pool(8, 16)))
    assert other.budget_bytes is None
    assert "mps" in other.budget_reason


def test_a_cards_budget_holds_no_picture_and_an_apus_does() -> None:
    peak = PeakPrediction(pool=10, scratch=5, packed=2, output=100)
    card, apu = (profiles.profile_of(name) for name in ("gfx1100", "gfx1151"))
    assert (card.needed_bytes(peak), apu.needed_bytes(peak)) == (17, 117)
    assert replace(card, budget_bytes=17).fits(peak)
    assert not replace(card, budget_bytes=16).fits(peak)
    assert not replace(apu, budget_bytes=116).fits(peak)
    assert replace(apu, budget_bytes=None).fits(peak)


def test_reading_again_later_is_the_same_profile_but_for_its_memory() -> None:
    later = profile_from(replace(CPU, host=pool(3, 31)))
    assert later != profile_from(CPU)
    assert later.at_any_time() == profile_from(CPU).at_any_time()
