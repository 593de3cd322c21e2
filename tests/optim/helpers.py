"""What the engine's tests share: a recorder of every event, a fixed device, tiny decoders and references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from halo_vae.optim.decode import Decoder, Engine
from halo_vae.optim.device import DeviceProfile, describe_device
from halo_vae.optim.events import ConvShape, Fallback, OpReport, PlanSummary, SilentObserver
from halo_vae.optim.families import lower
from halo_vae.optim.kernels import backends
from halo_vae.optim.kernels.eager import run_eager
from halo_vae.optim.plan import DtypePlan, Plan
from halo_vae.optim.planner import make_plan
from halo_vae.optim.precision import WidenedOps, choose_dtypes
from halo_vae.optim.program import Program
from halo_vae.optim.settings import DecodeSettings
from halo_vae.optim.store import keep_raw
from halo_vae.optim.weights import MappingWeights
from halo_vae.tests.goldens import golden
from halo_vae.tests.optim.families import layouts

if TYPE_CHECKING:
    import pytest

PROFILE = replace(
    describe_device("cpu"),
    native_dtypes=("bfloat16", "float32"),
    budget_bytes=None,
    strategy="strips",
    layout="channels_last",
    batch_cap=16,
    pass_pixels=512 * 512,
    tile_bytes=16 << 20,
    attention="sdpa",
    convolution="direct",
)
"""One CPU, the same on every machine; the other convolution algorithm is for larger tiles than most tests have."""


def profile(**changes: Any) -> DeviceProfile:
    """That CPU with some fields changed."""
    return replace(PROFILE, **changes)


def narrow_winograd(monkeypatch: pytest.MonkeyPatch, channels: int) -> None:
    """Let `winograd` take ops of so few channels and of any size, for which it would not pay."""
    rules = replace(backends.WINOGRAD, least_channels=channels, least_pixels=1)
    monkeypatch.setitem(cast(dict[str, Any], backends.BACKENDS), "winograd", rules)


@dataclass
class Recorder(SilentObserver):
    """Keeps every event in order; `on_tile` runs at each tile and may raise."""

    on_tile: Callable[[], None] = lambda: None
    phases: list[str] = field(default_factory=list)
    plans: list[PlanSummary] = field(default_factory=list)
    started: list[tuple[int, int, str, int]] = field(default_factory=list)
    tiles: list[tuple[str, int, int, tuple[int, ...], str]] = field(default_factory=list)
    """(op, i, n, shape, dtype)."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    ops: list[OpReport] = field(default_factory=list)
    redone: list[tuple[str, str, int]] = field(default_factory=list)
    convs: list[tuple[str, ConvShape]] = field(default_factory=list)
    """(op, shape)."""
    lookups: list[tuple[str, bool]] = field(default_factory=list)
    requests: list[tuple[int, bool]] = field(default_factory=list)
    prefetches: list[bool] = field(default_factory=list)
    passes: list[tuple[int, int]] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    converted_bytes: int = 0

    def mark(self, phase: str) -> None:
        self.phases.append(phase)

    def planned(self, plan: PlanSummary) -> None:
        self.plans.append(plan)

    def op_started(self, index: int, n_ops: int, name: str, n_tiles: int) -> None:
        self.started.append((index, n_ops, name, n_tiles))

    def tile_started(self, i: int, n: int, shape: tuple[int, ...], dtype: str) -> None:
        self.on_tile()
        self.tiles.append((self.started[-1][2], i, n, shape, dtype))

    def progress(self, done: int, total: int) -> None:
        self.steps.append((done, total))

    def op_done(self, report: OpReport) -> None:
        self.ops.append(report)

    def op_redone(self, name: str, dtype: str, macs: int) -> None:
        self.redone.append((name, dtype, macs))

    def conv_requested(self, shape: ConvShape) -> None:
        self.convs.append((self.started[-1][2], shape))

    def cache_lookup(self, cache: str, hit: bool) -> None:
        self.lookups.append((cache, hit))

    def pool_request(self, nbytes: int, hit: bool) -> None:
        self.requests.append((nbytes, hit))

    def prefetch_asked(self, ready: bool) -> None:
        self.prefetches.append(ready)

    def pass_done(self, images: int, slots: int) -> None:
        self.passes.append((images, slots))

    def fallback(self, event: Fallback) -> None:
        self.fallbacks.append(event)

    def converted(self, nbytes: int) -> None:
        self.converted_bytes += nbytes

    @property
    def plan(self) -> PlanSummary:
        """The plan that went through."""
        return self.plans[-1]

    def tiles_of(self, op: str) -> int:
        """Calls of tile_started during an op."""
        return sum(name == op for name, *_ in self.tiles)

    def dtype_of(self, op: str) -> str:
        """Compute dtype of the kept result of an op."""
        return next(report.dtype for report in reversed(self.ops) if report.name == op)


class FailAfter:
    """Raises at the n-th call."""

    def __init__(self, n: int, error: BaseException) -> None:
        self.left, self.error = n, error

    def __call__(self) -> None:
        self.left -= 1
        if self.left <= 0:
            raise self.error


def decoder_of(weights: Mapping[str, Tensor], loaded: torch.dtype = torch.float32) -> Decoder:
    """A decoder on the CPU."""
    source = MappingWeights(weights)
    return Decoder(weights=source, program=lower(source.specs), loaded_dtype=loaded)


def golden_decoder(name: str, loaded: torch.dtype = torch.float32) -> Decoder:
    """A golden's decoder."""
    return decoder_of(golden(name).weights, loaded)


SMALL = layouts.kl_ldm(4, (64, 32), n_res=1, embed=4)
"""A x2 decoder with a narrowing block, a doubling and attention: 20 ops' worth of engine in a few milliseconds."""


def small_weights(seed: int = 0) -> dict[str, Tensor]:
    """Seeded float32 weights of the small decoder."""
    return layouts.random_weights(SMALL, seed)


def small_decoder(seed: int = 0, loaded: torch.dtype = torch.float32) -> Decoder:
    """The small decoder."""
    return decoder_of(small_weights(seed), loaded)


def latent(*shape: int, seed: int = 3) -> Tensor:
    """Seeded normal float32 values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def settings(**given: Any) -> DecodeSettings:
    """Settings of an exact decode, in float32 unless said."""
    return DecodeSettings(**({"method": "exact", "precision_mode": "fp32"} | given))


def decode_raw(engine: Engine, decoder: Decoder, z: Tensor, **given: Any) -> tuple[Tensor, Recorder]:
    """The raw picture [B, C, H, W] and what happened."""
    heard = Recorder()
    raw = engine.decode(decoder, z, settings(**given), observer=heard, finish=keep_raw)
    return raw.movedim(-1, 1), heard


def reference(decoder: Decoder, z: Tensor) -> Tensor:
    """The raw picture by the reference ops in float32, untiled."""
    return run_eager(decoder.program, decoder.weights, z.float())


def max_diff(a: Tensor, b: Tensor) -> float:
    """Largest difference; the shapes must agree. NaN counts as infinite."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(torch.nan_to_num((a.float() - b.float()).abs(), nan=float("inf")).max())


def plan_of(
    program: Program,
    shape: tuple[int, int, int, int],
    chosen: DecodeSettings | None = None,
    device: DeviceProfile = PROFILE,
    *,
    native: str = "float32",
    dtypes: DtypePlan | None = None,
) -> Plan:
    """A plan without weights."""
    chosen = chosen or settings()
    edge = max(shape[2] * program.scale[1], shape[3] * program.scale[2])
    decision = choose_dtypes(chosen.precision_mode, program, native, device, edge, WidenedOps(), "")
    if dtypes is not None:
        decision = replace(decision, dtypes=dtypes)
    out_bytes = shape[0] * program.out_channels * shape[2] * shape[3] * program.scale[1] * program.scale[2] * 4
    return make_plan(program, shape, chosen, device, decision, out_bytes=out_bytes, stored=native)


def kl_program(*widths: int, z: int = 4, n_res: int = 2) -> Program:
    """A KL decoder of any size, for planning only."""
    return lower(layouts.specs(layouts.kl_ldm(z, widths, n_res=n_res, embed=z)))


HOT = "decoder.mid.block_1.conv1"
"""A convolution of the small decoder whose result is normalised at once, so that it may be large."""
HOTTER = "decoder.up.0.block.1.conv1"
EVERY_DTYPE = ("float16", "bfloat16", "float32")


def hot_decoder(*ops: str, loaded: torch.dtype = torch.float32, seed: int = 0, factor: float = 3e5) -> Decoder:
    """The small decoder, with results beyond float16 in some ops."""
    weights = small_weights(seed)
    for op in ops:
        weights[f"{op}.weight"] = weights[f"{op}.weight"] * factor
    decoder = decoder_of(weights, loaded)
    decoder.program = replace(decoder.program, working_dtypes=EVERY_DTYPE)
    return decoder


def tolerance(mode: str, expected: Tensor) -> float:
    """Rounding through some twenty ops, as part of the picture's spread."""
    return {"fp32": 1e-4, "fp16": 0.03, "mixed": 0.12, "bf16": 0.3}[mode] * float(expected.std())
