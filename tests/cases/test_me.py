"""ME: memory estimate, unified memory, size limits."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from halo_vae.nodes import actions
from halo_vae.nodes.decode_latent import decode_latent
from halo_vae.optim.accelerator import gpu_api
from halo_vae.optim.budget import HOST_RESERVE, budget_of
from halo_vae.optim.decode import Engine
from halo_vae.optim.device import DeviceProfile, describe_device, profile_from
from halo_vae.optim.device_readers import PoolReading, Readings, Versions, read_device
from halo_vae.optim.errors import PlanError
from halo_vae.optim.limits import LARGEST_TENSOR, kernel_elements
from halo_vae.optim.plan import Plan
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.video.plan import ClipPlan
from halo_vae.optim.video.steps import Run
from halo_vae.profiling.collector import Collector
from halo_vae.profiling.recorded import decode_recorded
from halo_vae.profiling.render.text import render_record
from halo_vae.tests.cases.exact import exact_kl
from halo_vae.tests.cases.support import Recorder, max_diff, record, settings, shapes, whole
from halo_vae.tests.fixtures import FakeVAE, PointDec, latent
from halo_vae.tests.nodes.fake_host import FakeHost
from halo_vae.tests.nodes.support import new_session
from halo_vae.tests.optim import profiles
from halo_vae.tests.optim.helpers import profile
from halo_vae.tests.optim.profiles import GIB, MIB, pool, reasons_of

HIP = Versions(torch="2.9.1", hip="7.1")
TIB = 1 << 40


class StoppedError(Exception):
    """Raised where the decode proper would begin."""


# -- ME-1


class Refusing(FakeHost):
    """Notes what it is asked to make room for, and goes no further."""

    def load(self, vae: Any, needed_bytes: int) -> None:
        super().load(vae, needed_bytes)
        raise StoppedError


def test_me_1_a_tiled_decode_asks_for_the_memory_of_a_tile() -> None:
    vae, host = FakeVAE(PointDec()), Refusing()
    z = {"samples": torch.zeros(1, 4, 512, 512)}
    full = vae.memory_used_decode((1, 4, 512, 512), torch.float32)
    vae.mem_shapes.clear()
    with pytest.raises(StoppedError):
        new_session(host).decode(z, vae, settings(512, 64))
    assert vae.mem_shapes
    assert max(side for shape in vae.mem_shapes for side in shape[2:]) <= 64
    assert len(host.loads) == 1
    assert 30 * host.loads[0] <= full


def test_me_1_without_tiles_the_estimate_is_that_of_the_whole() -> None:
    vae = FakeVAE(PointDec())

    class Planned(Recorder):
        def planned(self, plan: Any) -> None:
            super().planned(plan)
            raise StoppedError

    heard = Planned()
    with pytest.raises(StoppedError):
        decode_latent({"samples": torch.zeros(1, 4, 512, 512)}, vae, DecodeSettings(method="stock"), observer=heard)
    assert vae.mem_shapes == [(1, 4, 512, 512)]
    assert heard.plan.predicted.scratch == vae.memory_used_decode((1, 4, 512, 512), torch.float32)


# -- ME-2


def apu(**given: Any) -> Readings:
    return Readings(kind="hip", name="cuda:0", versions=HIP, arch="gfx1151", **{"integrated": True} | given)


SMALL_HOST = apu(device_pool=pool(100, 120), carve_out=pool(0.4, 0.5), gtt=pool(100, 120), host=pool(6, 128))
LARGE_CARVE_OUT = apu(device_pool=pool(95, 112), carve_out=pool(90, 96), gtt=pool(10, 16), host=pool(20, 32))
CARD = Readings(
    kind="hip", name="cuda:0", versions=HIP, arch="gfx1100", integrated=False, device_pool=pool(14, 16),
    carve_out=pool(14.2, 16), gtt=pool(60, 62), host=pool(100, 125),
)  # fmt: skip


def test_me_2_an_apu_takes_no_more_than_the_host_can_give() -> None:
    found = profile_from(SMALL_HOST)
    assert found.unified_memory
    assert found.budget_bytes is not None
    assert found.budget_bytes == int(0.4 * GIB) + 6 * GIB - HOST_RESERVE
    assert found.budget_bytes <= 6.4 * GIB
    assert "the system's available memory" in found.budget_reason
    planned = profiles.plan_on(found, profiles.sd(), (1, 4, 64, 64)).summary
    value, reason = reasons_of(planned)["memory"]
    assert value == f"{found.budget_bytes / GIB:.2f} GiB"
    assert "limited by the system's available memory" in reason


def test_me_2_a_large_carve_out_is_used_up_to_what_hip_calls_free() -> None:
    found = profile_from(LARGE_CARVE_OUT)
    assert found.budget_bytes is not None
    assert 88 * GIB <= found.budget_bytes <= 95 * GIB
    assert "limited by what HIP calls free" in found.budget_reason


def test_me_2_a_card_has_its_own_memory() -> None:
    found = profile_from(CARD)
    assert not found.unified_memory
    assert found.budget_bytes == 14 * GIB
    assert "HIP" in found.budget_reason


@pytest.mark.parametrize("free_gtt", [0, 2, 8, 64])
@pytest.mark.parametrize("free_host", [0, 1, 4, 40])
@pytest.mark.parametrize("free_carve_out", [0, 0.5, 32])
def test_me_2_never_the_same_memory_twice(free_gtt: int, free_host: int, free_carve_out: float) -> None:
    readings = apu(
        device_pool=pool(200, 200), carve_out=pool(free_carve_out, 64), gtt=pool(free_gtt, 64), host=pool(free_host, 64)
    )
    budget = budget_of(readings, unified=True)
    assert budget.nbytes is not None
    assert budget.nbytes <= free_carve_out * GIB + min(free_gtt, free_host) * GIB
    assert budget.nbytes >= free_carve_out * GIB


# -- ME-4

ABSURD: list[tuple[int | None, int | None]] = [
    (2**64 - 1, 512 * MIB), (-1, 8 * GIB), (0, 0), (None, None), (9 * GIB, 8 * GIB)
]  # fmt: skip


@pytest.mark.parametrize("integrated", [False, True])
@pytest.mark.parametrize(("free", "total"), ABSURD)
def test_me_4_an_absurd_figure_of_the_driver_is_refused(free: int | None, total: int | None, integrated: bool) -> None:
    arch = "gfx1151" if integrated else "gfx1100"
    found = profile_from(
        Readings(
            kind="hip", name="cuda:0", versions=HIP, arch=arch, integrated=integrated, host=pool(20, 32),
            device_pool=PoolReading(free_bytes=free, total_bytes=total),
        )
    )  # fmt: skip
    assert found.budget_bytes is None
    assert len(found.invalid_readings) == 1
    assert "HIP" in found.invalid_readings[0]
    if free is not None:
        assert str(free) in found.invalid_readings[0]


@pytest.mark.parametrize(("free", "total"), ABSURD)
def test_me_4_other_readings_take_the_place_of_a_refused_one(free: int | None, total: int | None) -> None:
    refused = PoolReading(free_bytes=free, total_bytes=total)
    card = Readings(
        kind="hip", name="cuda:0", versions=HIP, arch="gfx1100", device_pool=refused, carve_out=pool(7, 8)
    )  # fmt: skip
    assert profile_from(card).budget_bytes == 7 * GIB
    shared = apu(device_pool=refused, carve_out=pool(0.5, 0.5), gtt=pool(4, 8), host=pool(20, 32))
    assert profile_from(shared).budget_bytes == int(4.5 * GIB)


def test_me_4_a_driver_that_raises_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any) -> None:
        raise RuntimeError("HIP error: the device is lost")

    for name in ("mem_get_info", "get_device_properties", "memory_reserved"):
        monkeypatch.setattr(gpu_api(), name, lost)
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    found = profile_from(read_device(torch.device("cuda:0")))
    assert found.kind == "hip"
    assert found.budget_bytes is None
    assert "HIP memory: HIP error: the device is lost" in found.invalid_readings


def test_me_4_the_record_names_what_was_refused() -> None:
    wrapped = apu(
        device_pool=PoolReading(free_bytes=2**64 - 1, total_bytes=512 * MIB), carve_out=pool(0.4, 0.5),
        gtt=pool(4, 8), host=pool(20, 32),
    )  # fmt: skip
    found = profile_from(wrapped)
    _, made = decode_recorded(
        Engine(profile=found), exact_kl(), latent((1, 4, 8, 8)), DecodeSettings(), collector=Collector("summary")
    )
    assert made.plan is not None
    value, reason = next((c.value, c.reason) for c in made.plan.choices if c.name == "memory")
    assert value == "4.40 GiB"
    assert f"refused: HIP: {2**64 - 1} bytes free" in reason
    assert str(2**64 - 1) in render_record(made)


# -- ME-6


def test_me_6_a_batch_is_capped_however_much_is_free() -> None:
    """The cap is the device's, no setting: plans, the monitor and the doctor show it; a setting turns batches off."""
    model, z = PointDec(), latent((64, 4, 8, 8))
    cap = profile().batch_cap
    assert cap <= 16
    images, heard = record(model, z, settings(), profile(budget_bytes=TIB))
    largest = max(shape[0] for shape in shapes(model))
    assert 1 < largest <= cap
    assert heard.plan.images_per_pass == largest
    assert reasons_of(heard.plan)["images_per_pass"] == (str(largest), f"at most {cap}")
    told = actions.monitor(new_session(), None)
    assert re.search(rf"pictures per pass +at most {describe_device('cpu').batch_cap}\b", told)
    one_by_one, model = settings(batch_optimization=False), PointDec()
    record(model, z[:3], one_by_one, profile(budget_bytes=TIB))
    assert [shape[0] for shape in shapes(model)] == [1, 1, 1]
    singles = torch.cat([record(PointDec(), one, settings())[0] for one in z.split(1)])
    assert torch.equal(images, singles)
    assert max_diff(images, whole(PointDec(), z)) == 0


@pytest.mark.parametrize("machine", list(profiles.MACHINES))
def test_me_6_so_is_an_exact_one(machine: str) -> None:
    roomy = profiles.profile_of(machine)
    planned = profiles.plan_on(roomy, profiles.sd(), (64, 4, 8, 8)).summary
    assert planned.images_per_pass == roomy.batch_cap <= 16
    assert f"at most {roomy.batch_cap} pictures" in reasons_of(planned)["images_per_pass"][1]


# -- ME-7


def roomy(machine: str, **changes: Any) -> DeviceProfile:
    return replace(profiles.profile_of(machine), budget_bytes=TIB, budget_reason="given", **changes)


def largest_of(plan: Plan | ClipPlan) -> int:
    """Elements of the largest tensor that any kernel of the plan gets."""
    if isinstance(plan, ClipPlan):
        runs = {(s.index, s.stop - s.start) for s in plan.driver().steps() if isinstance(s, Run)}
        return max(plan.backends.kernel_elements(index, n) for index, n in runs)
    return max(kernel_elements(s, plan.program, p.latent, plan.workers) for p in plan.passes for s in p.steps)


@pytest.mark.parametrize("strategy", ["strips", "tiles"])
@pytest.mark.parametrize("machine", ["gfx1151", "gfx942", "cuda", "cpu"])
@pytest.mark.parametrize("shape", [(1, 4, 512, 512), (8, 4, 128, 128)])
def test_me_7_no_kernel_gets_more_than_32_bits_can_index(shape: tuple[int, ...], machine: str, strategy: str) -> None:
    for tile_bytes in (None, TIB):  # the device's own, and as large as it likes
        wide = {} if tile_bytes is None else {"tile_bytes": tile_bytes, "pass_pixels": 1 << 60}
        chosen = DecodeSettings(precision_mode="fp32", plan=strategy, tile_size=0)  # type: ignore[arg-type]
        plan = profiles.plan_on(roomy(machine, **wide), profiles.sd(), shape, chosen)
        assert isinstance(plan, Plan)
        whole_map = plan.passes[0].n_images * 256 * 64 * math.prod(shape[2:])
        assert largest_of(plan) <= LARGEST_TENSOR
        if tile_bytes is not None and strategy == "strips":
            assert whole_map > LARGEST_TENSOR  # the map of a pass is too large for a kernel, and it is cut
            assert largest_of(plan) > LARGEST_TENSOR // 4


def test_me_7_seven_pictures_may_stay_whole_and_eight_may_not() -> None:
    device = roomy("cpu", tile_bytes=TIB, pass_pixels=1 << 60)
    chosen = DecodeSettings(precision_mode="fp32", tile_size=0)

    def most_at_once(batch: int) -> int:
        plan = profiles.plan_on(device, profiles.sd(), (batch, 4, 128, 128), chosen)
        assert isinstance(plan, Plan)
        wide = [s for s in plan.ops if s.grid.height == 1024 and getattr(s.op, "in_channels", 0) == 256]
        assert wide
        return max(s.grid.images_per_call for s in wide if s.grid.rows == 1024)

    assert most_at_once(7) == 7
    assert most_at_once(8) <= 7


def test_me_7_a_picture_that_cannot_be_cut_is_refused() -> None:
    # keys of the middle attention: 512 channels over 2048 x 2048 latents
    with pytest.raises(PlanError, match="2147483648 elements"):
        profiles.plan_on(roomy("cpu"), profiles.sd(), (1, 4, 2048, 2048), DecodeSettings(precision_mode="fp32"))


@pytest.mark.parametrize("machine", ["gfx1151", "cuda", "cpu"])
@pytest.mark.parametrize("shape", [(1, 16, 5, 256, 256), (1, 16, 2, 512, 512)])
def test_me_7_no_kernel_of_a_clip_does_either(shape: tuple[int, ...], machine: str) -> None:
    for tile_bytes in (None, TIB):
        changes = {} if tile_bytes is None else {"tile_bytes": tile_bytes}
        plan = profiles.plan_on(roomy(machine, **changes), profiles.wan(torch.bfloat16), shape)
        assert isinstance(plan, ClipPlan)
        assert largest_of(plan) <= LARGEST_TENSOR
