"""Values in the host's memory: which ones go, and that decodes of them are exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halo_vae.optim import pinned
from halo_vae.optim.arena import Buffer
from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.executor import Progress
from halo_vae.optim.kernels import torch_kernels
from halo_vae.optim.ladder import PICTURE_RUNGS, UNSQUEEZED, Squeeze, steps_of
from halo_vae.optim.offload import fetch_window, split_buffers
from halo_vae.optim.pictures import PictureRequest, run_pictures
from halo_vae.optim.places import Places
from halo_vae.optim.plan import Plan
from halo_vae.optim.planner import plan_with
from halo_vae.optim.pool import MemoryPool
from halo_vae.optim.precision import WidenedOps, choose_dtypes
from halo_vae.optim.store import keep_raw
from halo_vae.optim.tiling import TileGrid
from halo_vae.tests.goldens import IMAGE_GOLDENS, TOLERANCE, golden
from halo_vae.tests.optim.helpers import (
    HOT,
    Recorder,
    golden_decoder,
    hot_decoder,
    latent,
    max_diff,
    profile,
    reference,
    settings,
    small_decoder,
    tolerance,
)

HOST = torch.device("cpu:0")
"""Another name for the CPU, so that a test can tell the two places apart."""


def squeezed_plan(decoder: Decoder, z: Tensor, squeeze: Squeeze, **given: Any) -> Plan:
    chosen, device = settings(**given), profile(layout="channels_last", tile_bytes=1 << 18)
    b, _, h, w = z.shape
    decision = choose_dtypes(chosen.precision_mode, decoder.program, "float32", device, 64, WidenedOps(), "")
    return plan_with(
        decoder.program, (b, z.shape[1], h, w), chosen, device, decision, out_bytes=0, stored="float32",
        squeeze=squeeze,
    )  # fmt: skip


def run(decoder: Decoder, z: Tensor, plan: Plan, pool: MemoryPool | None = None) -> tuple[Tensor, Recorder]:
    """The raw picture [B, C, H, W] of one attempt at that plan, and what happened."""
    heard = Recorder()
    request = PictureRequest(
        decoder=decoder, latent=z, shape=(z.shape[0], z.shape[1], z.shape[2], z.shape[3]), settings=settings(),
        observer=heard, finish=keep_raw, out_dtype=torch.float32, out_device=torch.device("cpu"),
    )  # fmt: skip
    places = Places(pool=pool or MemoryPool(), host=HOST)
    with torch.inference_mode():
        image = run_pictures(
            request, plan, places, Progress(heard, plan.summary.macs), careful=True, on_widened=lambda name: None
        )
    return image.movedim(-1, 1), heard


# -- which values go


def homes(*sizes: int) -> list[Buffer]:
    return [Buffer(key=f"h{i}", nbytes=n, first=0, last=9) for i, n in enumerate(sizes)]


WORK = [Buffer(key="stage", nbytes=256, first=0, last=9)]


def test_the_widest_go_first_and_only_as_many_as_must() -> None:
    for level, gone in ((0, set()), (1, {"h2"}), (2, {"h0", "h1", "h2", "h3"})):
        device, offload = split_buffers(homes(256, 1024, 2048, 512), WORK, level)
        assert offload.homes == gone
        assert set(device.offsets) == {"stage", "h0", "h1", "h2", "h3"} - gone
        assert set(offload.host.offsets) == gone
        assert device.nbytes + offload.host.nbytes == 256 * 16


def test_homes_that_share_bytes_stay_together() -> None:
    first, second, third = homes(256, 2048, 512)
    inner = replace(first, tail_of="h1")
    device, offload = split_buffers([inner, second, third], WORK, 1)
    assert offload.homes == {"h0", "h1"}
    assert offload.host.nbytes == 2048
    assert set(device.offsets) == {"stage", "h2"}


@pytest.mark.parametrize("plan", ["strips", "tiles"])
def test_each_level_leaves_less_on_the_device(plan: str) -> None:
    decoder, z = golden_decoder("kl_sd"), golden("kl_sd").latents["a"]
    whole, half, least = (squeezed_plan(decoder, z, Squeeze(offload=n), plan=plan, tile_size=64) for n in range(3))
    pools = [p.passes[0].arena.nbytes for p in (whole, half, least)]
    assert pools[1] <= pools[0] // 2
    assert pools[2] < pools[1]
    assert whole.host_bytes == 0 < half.host_bytes <= least.host_bytes
    assert not whole.passes[0].offload.homes
    assert {c.name: c.value for c in least.summary.choices}["offload"].startswith(f"{len(least.passes[0].slices) - 1} ")
    assert "offload" not in {c.name for c in whole.summary.choices}
    assert least.predicted.total == sum(
        (least.predicted.pool, least.predicted.scratch, least.predicted.packed, least.predicted.host)
    )
    assert least.predicted.working == least.predicted.total - least.host_bytes


# -- exact


@pytest.mark.parametrize(("plan", "level"), [("strips", 2), ("tiles", 2), ("strips", 1)])
@pytest.mark.parametrize("name", [name for name in IMAGE_GOLDENS if name != "kl_diffusers"])  # the network of kl_sd
def test_goldens_are_exact_out_of_host_memory(name: str, plan: str, level: int) -> None:
    decoder, g = golden_decoder(name), golden(name)
    case = next(iter(g.latents))
    planned = squeezed_plan(
        decoder, g.latents[case], Squeeze(offload=level), plan=plan, tile_size=max(16, 3 * decoder.program.scale[1]),
        tensor_layout_optimization=level == 1,
    )  # fmt: skip
    assert planned.passes[0].offload.homes
    raw, _ = run(decoder, g.latents[case], planned)
    assert max_diff(raw, g.expected[case]) <= TOLERANCE


@pytest.mark.parametrize("mode", ["bf16", "fp16", "mixed"])
def test_narrow_dtypes_out_of_host_memory(mode: str) -> None:
    decoder, z = small_decoder(), latent(2, 4, 9, 7)
    decoder.program = replace(decoder.program, working_dtypes=("float16", "bfloat16", "float32"))
    given = {"precision_mode": mode, "tile_size": 16}
    raw, _ = run(decoder, z, squeezed_plan(decoder, z, Squeeze(offload=2), **given))
    near, _ = run(decoder, z, squeezed_plan(decoder, z, UNSQUEEZED, **given))
    expected = reference(decoder, z)
    assert max_diff(raw, near) <= 1e-6
    assert max_diff(raw, expected) <= tolerance(mode, expected)


def test_an_op_is_redone_wider_out_of_host_memory() -> None:
    decoder, z = hot_decoder(HOT), latent(1, 4, 6, 5)
    given = {"precision_mode": "fp16"}
    raw, heard = run(decoder, z, squeezed_plan(decoder, z, Squeeze(offload=2), **given))
    assert [name for name, _, _ in heard.redone] == [HOT]
    expected = reference(decoder, z)
    assert max_diff(raw, expected) <= tolerance("fp16", expected)


def test_values_lie_where_the_plan_says() -> None:
    decoder, z, asked = small_decoder(), latent(1, 4, 12, 12), []

    def source(nbytes: int, device: torch.device) -> Tensor:
        asked.append((str(device), nbytes))
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    pool, plan = MemoryPool(source), squeezed_plan(decoder, z, Squeeze(offload=2))
    raw, heard = run(decoder, z, plan, pool)
    assert asked == [("cpu", plan.pool_bytes), ("cpu:0", plan.host_bytes)]
    assert pool.high_water_bytes == plan.pool_bytes + plan.host_bytes
    assert "transfer" in heard.phases
    assert max_diff(raw, reference(decoder, z)) <= 1e-4


class FarReads(TorchDispatchMode):
    """Names the kernels that were given memory of the host's, other than to copy it or to look at it."""

    COPIES = ("copy_", "to", "_to_copy")
    VIEWS = ("slice", "select", "view", "permute", "t", "as_strided", "alias", "transpose", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.far: set[int] = set()
        self.used_by: set[str] = set()
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.untyped_storage().data_ptr() in self.far for x in given):
            name = func.overloadpacket.__name__
            self.copies += name in self.COPIES
            if name not in (*self.COPIES, *self.VIEWS):
                self.used_by.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("plan", "mode"), [("strips", "fp32"), ("tiles", "mixed")])
@pytest.mark.parametrize("name", ["kl_flux2", "hunyuan_image", "taesd", "kl_x4"])
def test_kernels_never_touch_host_memory(name: str, plan: str, mode: str) -> None:
    """As on a GPU, where they could not."""
    decoder, z, reads = golden_decoder(name), golden(name).latents["a"][..., :5, :4], FarReads()

    def source(nbytes: int, device: torch.device) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if device == HOST:
            reads.far.add(memory.untyped_storage().data_ptr())
        return memory

    tile = max(16, 3 * decoder.program.scale[1])
    planned = squeezed_plan(decoder, z, Squeeze(offload=2), plan=plan, tile_size=tile, precision_mode=mode)
    with reads:
        run(decoder, z, planned, MemoryPool(source))
    assert reads.copies > len(planned.ops)
    assert reads.used_by == set()


def test_the_transfers_of_an_offloaded_decode_are_counted_as_scratch() -> None:
    decoder, z = small_decoder(), latent(1, 4, 12, 12)
    near, far = (squeezed_plan(decoder, z, Squeeze(offload=n)) for n in (0, 2))
    assert far.passes[0].scratch_bytes > near.passes[0].scratch_bytes


def test_packages_that_work_on_whole_values_are_left_out() -> None:
    decoder, z = small_decoder(), latent(1, 4, 6, 5)
    plan = squeezed_plan(decoder, z, Squeeze(offload=1), kernel_backend="kitchen")
    assert all(step.backend != "kitchen" and step.staging == "torch" for step in plan.ops)


def test_an_engine_chooses_it_when_a_card_is_short() -> None:
    """A card with room for half of the pool; the host's memory is not part of its budget."""
    decoder, g = golden_decoder("kl_sd"), golden("kl_sd")
    card = profile(unified_memory=False, tile_bytes=1 << 18)
    steps = steps_of(PICTURE_RUNGS)
    before = next(i for i, step in enumerate(steps) if step.rung.name == "offload")
    z = g.latents["a"]
    tightest = squeezed_plan(decoder, z, steps[before - 1].squeeze)
    engine = Engine(profile=replace(card, budget_bytes=tightest.predicted.working - 1), host_device=HOST)
    heard = Recorder()
    image = engine.decode(decoder, z, settings(), observer=heard, finish=keep_raw)
    assert max_diff(image.movedim(-1, 1), g.expected["a"]) <= TOLERANCE
    assert heard.plan.predicted.host > 0
    assert heard.fallbacks[-1].used.startswith("widest values in host memory")
    assert len(heard.plans) == 1


# -- windows


@pytest.mark.parametrize(("grow", "carried"), [(1, 0), (1, 2), (2, 0)])  # upsampled tiles carry nothing
def test_a_window_is_staged_as_the_whole_would_be(grow: int, carried: int) -> None:
    src = latent(2, 3, 7, 5)
    for rows, cols in ((3, 5), (2, 2), (7, 5), (1, 1)):
        grid = TileGrid(n_images=2, height=7 * grow, width=5 * grow, images_per_call=2, rows=rows, cols=cols)
        for tile in grid.tiles():
            whole = torch.full((2, 3, rows + 2, cols + 2), 7.0)
            windowed = whole.clone()
            window, seen = fetch_window(src, tile, 1, carried, grow, torch.device("cpu"))
            assert window.shape[2] <= rows + 2
            assert window.data_ptr() != src.data_ptr()
            if grow == 2:
                torch_kernels.stage_upsampled(src, tile, 1, None, "silu", whole)
                torch_kernels.stage_upsampled(window, seen, 1, None, "silu", windowed)
            else:
                torch_kernels.stage(src, tile, 1, None, "silu", whole, None, carried)
                torch_kernels.stage(window, seen, 1, None, "silu", windowed, None, carried)
            assert torch.equal(whole, windowed)


# -- locked pages


class FakeRuntime:
    def __init__(self, status: int = 0, error: Exception | None = None) -> None:
        self.status, self.error = status, error
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if self.error is not None:
            raise self.error
        if self.status == 0:
            self.locked[pointer] = nbytes
        return self.status

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        del self.locked[pointer]
        return 0


def test_pages_are_locked_for_as_long_as_the_memory_lives() -> None:
    runtime, memory = FakeRuntime(), torch.empty(4096, dtype=torch.uint8)
    assert pinned.lock_pages(memory, lambda: runtime)
    assert runtime.locked == {memory.data_ptr(): 4096}
    del memory
    assert runtime.locked == {}


@pytest.mark.parametrize("runtime", [None, FakeRuntime(status=2), FakeRuntime(error=RuntimeError("no")), object()])
def test_pages_that_cannot_be_locked_are_used_as_they_are(runtime: Any) -> None:
    assert not pinned.lock_pages(torch.empty(4096, dtype=torch.uint8), lambda: runtime)
