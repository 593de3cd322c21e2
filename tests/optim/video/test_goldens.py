"""Streamed and tiled decodes equal the reference implementations' whole ones, and really were streamed and tiled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.device import DeviceProfile
from halo_vae.optim.kernels.winograd import EDGE
from halo_vae.optim.pool import MemoryPool
from halo_vae.optim.program import Op
from halo_vae.optim.video import backends, conv, driver, runner
from halo_vae.optim.video.frames import boundaries, dropped, frame_counts, output_frames
from halo_vae.optim.video.ops import ClipConv
from halo_vae.tests.goldens import NOISE_SEED, VIDEO_GOLDENS, golden
from halo_vae.tests.optim.helpers import max_diff, narrow_winograd, profile
from halo_vae.tests.optim.video.helpers import ClipRecorder, conv_frames, decode_clip, golden_decoder

TOLERANCE = 5e-5
"""Largest difference in float32 on clips of deviation 0.3 to 0.8; rounding alone is a tenth of this."""
DRAWS = ("ltx_timestep", "ltx_noise")
CASES = [(name, case) for name in VIDEO_GOLDENS for case in golden(name).latents]
EDGES = (2, 3, 5, 0)
"""Tile edges in latent pixels; 0 leaves the tile to the planner, which holds these frames whole."""
KERNELS = (
    (True, "winograd", "conv2d_sum"), (True, "winograd", "conv3d"), (True, "direct", "conv2d_sum"),
    (True, "direct", "conv3d"), (False, "direct", "conv2d_sum"), (False, "winograd", "conv3d"),
)  # fmt: skip
"""(channels_last, convolution, convolution3d)."""


@dataclass(frozen=True, kw_only=True)
class How:
    """One way to decode."""

    chunk: int
    """Latent frames; 0 = all at once."""
    plan: str
    edge: int
    kernels: tuple[bool, str, str]

    @property
    def device(self) -> DeviceProfile:
        return profile(convolution=self.kernels[1], convolution3d=self.kernels[2])

    def given(self, decoder: Decoder, latent_frames: int) -> dict[str, Any]:
        """Settings."""
        return {
            "chunk_lat": self.chunk or latent_frames, "plan": self.plan, "tile_size": self.tile_px(decoder),
            "tensor_layout_optimization": self.kernels[0],
        }  # fmt: skip

    def tile_px(self, decoder: Decoder) -> int:
        return max(16, self.edge * decoder.program.scale[1]) if self.edge else 0


def chunk_sizes(latent_frames: int) -> list[int]:
    return [c for c in (1, 2, 3) if c < latent_frames] + [0]


SLOWEST = ("wan21", "hunyuan_video", "hunyuan_refiner", "hunyuan15", "mochi", "svd", "cogvideox")
"""Of these the everyday run takes the shorter and smaller case, and its first clip only."""


def everyday() -> list[tuple[str, str, How]]:
    """Most cases once, so that over the cases every choice meets every other."""
    few, many = (("strips", 3), ("tiles", 5), ("strips", 2)), (("tiles", 2), ("strips", 3), ("tiles", 3), ("strips", 2))
    heavy, light = (itertools.cycle(itertools.product(KERNELS, tiles)) for tiles in (few, many))
    chunks, taken = itertools.cycle((1, 2, 1)), []
    for name, case in CASES:
        if name in SLOWEST and case in ("a", "even"):
            continue
        t = golden(name).latents[case].shape[2]
        chunk = next(chunks) if t > 1 else 0
        kernels, (plan, edge) = next(heavy if name in SLOWEST else light)
        taken.append((name, case, How(chunk=chunk if chunk < t else 1, plan=plan, edge=edge, kernels=kernels)))
    return taken


def product(chunk: int) -> Iterator[How]:
    for plan, edge, kernels in itertools.product(("strips", "tiles"), EDGES, KERNELS):
        yield How(chunk=chunk, plan=plan, edge=edge, kernels=kernels)


@pytest.fixture(autouse=True)
def _kernels_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """These decoders are too narrow for Winograd to pay, and their maps too small for sums of 2-D convolutions."""
    narrow_winograd(monkeypatch, 4)
    monkeypatch.setattr(backends, "SMALL_MAP", {True: 0, False: 0})


def decode_as(
    name: str, case: str, how: How, clips: int | None = None, **given: Any
) -> tuple[Tensor, ClipRecorder, Decoder]:
    """The raw clips, of the first few only if asked."""
    g, decoder = golden(name), golden_decoder(name)
    z = g.latents[case][:clips]
    before = z.clone()
    torch.manual_seed(NOISE_SEED)
    state = torch.get_rng_state()
    raw, heard = decode_clip(Engine(profile=how.device), decoder, z, **how.given(decoder, z.shape[2]), **given)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(z, before)
    return raw, heard, decoder


def check(name: str, case: str, how: How, clips: int | None = None) -> ClipRecorder:
    raw, heard, decoder = decode_as(name, case, how, clips)
    expected = golden(name).expected[case][:clips]
    assert raw.shape[2] == output_frames(decoder.program, golden(name).latents[case].shape[2]) == expected.shape[2]
    assert max_diff(raw, expected) <= TOLERANCE
    shape = tuple(golden(name).latents[case][:clips].shape)
    assert_streamed(heard, decoder, shape, how)
    assert_tiled(heard, decoder, shape, how)
    assert_kernels(heard, decoder, how)
    return heard


# -- what was heard


def assert_streamed(heard: ClipRecorder, decoder: Decoder, shape: tuple[int, ...], how: How) -> None:
    """Every op made each frame once, never more of them in a run than a chunk gives."""
    program, (b, _, t, *_) = decoder.program, shape
    size = how.chunk or t
    n_chunks = math.ceil(t / size)
    assert heard.chunks == [(i, b * n_chunks) for i in range(b * n_chunks)]
    assert heard.plan.n_chunks == n_chunks
    at = boundaries(program, range(0, t, size), t)
    assert len(at) == n_chunks - 1
    assert heard.plan.boundaries == at
    assert {(c, f) for c, f, _ in heard.boundaries} <= set(itertools.product(range(b), at))
    # without a step that is no boundary there is nothing to compare with
    assert heard.boundaries or len(at) in (0, output_frames(program, t) - 1)
    counts = frame_counts(program, t)
    for index, op in enumerate(program.ops):
        if isinstance(op, ClipConv):
            n, runs = counts[op.inputs[0]], heard.runs_of(index)
            total = conv_frames(op, n) - dropped(op, n, t) // op.frames_per_conv
            assert sum(run.frames for run in runs) == b * total, op.name
            doubling = 1 if op.upsample_time == "none" else 2
            most = size * program.values[op.inputs[0]].scale[0] * doubling
            assert max(run.frames for run in runs) <= most, op.name
            assert len(runs) >= b * math.ceil(total / most), op.name
    deepest = heard.runs_of(len(program.ops) - 1)
    if n_chunks > 1 and counts[program.output] > size * program.scale[0]:
        assert len(deepest) >= 2 * b


def assert_tiled(heard: ClipRecorder, decoder: Decoder, shape: tuple[int, ...], how: How) -> None:
    """Every run was cut as the setting says, worked out from its meaning alone."""
    program, (_, _, _, h, w) = decoder.program, shape
    assert heard.plan.strategy == how.plan
    assert sum(len(run.tiles) for run in heard.runs) == heard.plan.n_tiles == len(heard.tiles)
    for run in heard.runs:
        n = len(run.tiles)
        assert [t[:2] for t in run.tiles] == [(i, n) for i in range(n)]
        assert run.promised == n
        assert run.report is not None
        assert run.report.n_tiles == n
        op = program.ops[run.index]
        if isinstance(op, ClipConv):
            assert n in expected_tiles(decoder, op, (h, w), how), op.name
    halos = [i for i, op in enumerate(program.ops) if isinstance(op, ClipConv) and op.halo]
    grid = heard.plan.tile_grid
    assert min(len(run.tiles) for i in halos for run in heard.runs_of(i)) >= grid[0] * grid[1]
    if how.edge and how.tile_px(decoder) // program.scale[1] < min(h, w):
        assert grid[0] * grid[1] >= 2


def expected_tiles(decoder: Decoder, op: Op, size: tuple[int, int], how: How) -> set[int]:
    """Tiles of a run that the setting allows."""
    (h, w), scale, out_scale = size, decoder.program.values[op.inputs[0]].scale[1], decoder.program.scale[1]
    setting = how.tile_px(decoder)
    if not setting:
        return {1}
    if how.plan == "tiles":
        edge = max(1, setting // out_scale)
        n = math.ceil(h / min(edge, h)) * math.ceil(w / min(edge, w))
        return {n}
    area = setting**2 * scale**2 // out_scale**2  # a strip covers as much as a square tile of the setting
    height = h * scale
    if height * w * scale <= area:
        return {1}
    n = math.ceil(height / max(1, area // (w * scale)))
    rows = -(-math.ceil(height / n) // EDGE) * EDGE  # strips of whole squares, where that leaves more than one
    return {math.ceil(height / rows)} if rows < height else {n}


def assert_kernels(heard: ClipRecorder, decoder: Decoder, how: How) -> None:
    channels_last, convolution, convolution3d = how.kernels
    assert heard.plan.layout == ("channels_last" if channels_last else "contiguous")
    assert {report.dtype for report in heard.ops} == {"float32"}
    assert {dtype for *_, dtype in heard.tiles} == {"float32"}
    ops = [decoder.program.ops[i] for i in range(len(decoder.program.ops))]
    in_time = [op.name for op in ops if isinstance(op, ClipConv) and op.kernel[0] > 1 and op.upsample == 1]
    by_op = {report.name: report.backend for report in heard.ops}
    wide = heard.plan.tile_px[0] >= 4 * EDGE
    if convolution == "winograd" and channels_last:
        assert ("winograd" in heard.backends) or not wide
    else:
        assert "winograd" not in heard.backends
        assert {by_op[name] for name in in_time} <= {convolution3d}
    # a run of nothing but a bypassed first frame asks for no convolution
    in_3d = {name for name, shape in heard.convs if len(shape.input) == 5}
    assert in_3d <= {name for name, backend in by_op.items() if backend == "conv3d"}
    assert in_3d or "conv3d" not in heard.backends or heard.plan.n_chunks == 1


# -- goldens


@pytest.mark.parametrize(("name", "case", "how"), everyday(), ids=str)
def test_golden_in_chunks_and_tiles(name: str, case: str, how: How) -> None:
    check(name, case, how, 1 if name in SLOWEST else None)


def test_the_everyday_run_meets_every_choice() -> None:
    hows = [how for *_, how in everyday()]
    assert {how.kernels for how in hows} == set(KERNELS)
    assert {(how.plan, how.edge) for how in hows} == {
        ("tiles", 2), ("tiles", 3), ("tiles", 5), ("strips", 2), ("strips", 3)
    }  # fmt: skip
    assert {how.chunk for name, case, how in everyday() if case != "one_frame"} == {1, 2}
    assert {name for name, case, _ in everyday() if case != "one_frame"} == set(VIDEO_GOLDENS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case", "chunk"),
    [(name, case, chunk) for name, case in CASES for chunk in chunk_sizes(golden(name).latents[case].shape[2])],
)
def test_golden_in_every_kind_of_chunk_and_tile(name: str, case: str, chunk: int) -> None:
    for how in product(chunk):
        try:
            check(name, case, how)
        except AssertionError as error:
            raise AssertionError(f"{how}: {error}") from error


@pytest.mark.parametrize("name", DRAWS)
def test_noise_is_that_of_the_seed(name: str) -> None:
    """As the seed of the settings, or as that of the caller's generator; neither is left used up."""
    how = How(chunk=1, plan="tiles", edge=2, kernels=KERNELS[0])
    expected = golden(name).expected["a"]
    by_state, _, _ = decode_as(name, "a", how, seed=-1)
    assert max_diff(by_state, expected) <= TOLERANCE
    g, decoder = golden(name), golden_decoder(name)
    engine = Engine(profile=how.device)
    given = how.given(decoder, g.latents["a"].shape[2])
    torch.manual_seed(12)
    state = torch.get_rng_state()
    by_seed, _ = decode_clip(engine, decoder, g.latents["a"], **given, seed=NOISE_SEED)
    assert torch.equal(by_seed, by_state)
    assert torch.equal(torch.get_rng_state(), state)
    other, _ = decode_clip(engine, decoder, g.latents["a"], **given, seed=-1)
    assert max_diff(other, expected) > 100 * TOLERANCE
    assert torch.equal(torch.get_rng_state(), state)


# -- that the tests would see it


@pytest.mark.parametrize("convolution", ["direct", "winograd"])
def test_what_fresh_memory_holds_does_not_matter(convolution: str) -> None:
    def rubbish(nbytes: int, device: torch.device) -> Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8, device=device)  # NaN in every float dtype

    for name in ("ltx_split", "cosmos"):
        g, decoder = golden(name), golden_decoder(name)
        engine = Engine(profile=profile(convolution=convolution), pool=MemoryPool(rubbish))
        raw, heard = decode_clip(engine, decoder, g.latents["a"], plan="tiles", tile_size=48, chunk_lat=1)
        assert max_diff(raw, g.expected["a"]) <= TOLERANCE
        assert (convolution == "winograd") == ("winograd" in heard.backends)


@pytest.mark.parametrize("name", ["wan21", "ltx_plain", "cosmos", "taehv"])
def test_a_forgotten_past_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance is tight enough: without the frames kept from the chunk before, the error is far above it."""
    monkeypatch.setattr(runner.ClipRunner, "_keep", lambda self, step: forget(self, step))

    def forget(self: runner.ClipRunner, step: Any) -> None:
        index = step.index
        shape = self.plan.layouts.staged.get(index) or self.plan.layouts.frames[self.program.ops[index].inputs[0]]
        for _, kept in step.moves:
            self.take(kept, shape)
            self.page(kept, shape).zero_()

    raw, _, _ = decode_as(name, "a", How(chunk=1, plan="strips", edge=0, kernels=KERNELS[2]))
    expected = golden(name).expected["a"]
    assert max_diff(raw[:, :, :1], expected[:, :, :1]) <= TOLERANCE or name in ("ltx_plain", "taehv")
    assert max_diff(raw, expected) > 100 * TOLERANCE


@pytest.mark.parametrize("axis", [1, 2])
def test_a_missing_row_or_column_of_context_is_seen(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = conv.ClipConvStep._window

    def starved(self: conv.ClipConvStep, page: Any, tile: Any) -> Tensor:
        out = real(self, page, tile)
        stop, extent = ((tile.rows.stop, self._source.height), (tile.cols.stop, self._source.width))[axis - 1]
        if self._op.halo and stop < extent:
            out = out.clone()
            out.select(axis, -1).zero_()
        return out

    monkeypatch.setattr(conv.ClipConvStep, "_window", starved)
    raw, _, _ = decode_as("wan21", "one_frame", How(chunk=0, plan="tiles", edge=3, kernels=KERNELS[2]))
    assert max_diff(raw, golden("wan21").expected["one_frame"]) > 100 * TOLERANCE


def test_statistics_of_a_part_of_the_clip_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each chunk normalised by itself, a decoder with norms over the whole clip gives something else."""
    monkeypatch.setattr(driver, "scopes_ready", lambda have, n, scope, offset: have)
    raw, _, _ = decode_as("hunyuan_video", "batch2", How(chunk=1, plan="strips", edge=0, kernels=KERNELS[2]), 1)
    assert max_diff(raw, golden("hunyuan_video").expected["batch2"][:1]) > 100 * TOLERANCE
