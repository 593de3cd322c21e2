"""Measured peak memory of a decode, and how it compares with the plan's promise. Linux only.

    python benchmarks/peak.py --engines strips,tiles --precisions fp32,bf16 --sizes 256,512 --batches 1,4

A fresh process loads the weights, decodes 64x64 pixels to warm up (threads start, weights are packed), gives back what
the pool and malloc keep of that, and notes its resident set: the level. Then it resets its peak and decodes. Measured
is VmHWM above the level; the figure is the median of three processes. malloc is left as users have it, except for that
one `malloc_trim` before the level is taken: memory that the warm-up freed would otherwise serve the decode unseen.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WARM_UP_PX = 64
MIB = 1 << 20
TOLERANCE_SHARE = 0.10
TOLERANCE_BYTES = 24 * MIB
"""A prediction holds if it is within the share of the measured peak or these bytes, whichever is larger."""


class PeakError(RuntimeError):
    """A peak could not be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakCase:
    """One decode to measure."""

    engine: str
    """One of engines.ENGINES."""
    precision: str
    """"fp32" or "bf16"."""
    size_px: int
    """Edge of the square picture."""
    batch: int = 1
    threads: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakSample:
    """What one process measured. The last five fields are None for engines without a plan."""

    level_bytes: int
    above_level_bytes: int
    predicted_pool: int | None = None
    predicted_scratch: int | None = None
    predicted_packed: int | None = None
    predicted_output: int | None = None
    pool_high_water_bytes: int | None = None

    @property
    def predicted_bytes(self) -> int | None:
        """Sum of the plan's parts."""
        parts = (self.predicted_pool, self.predicted_scratch, self.predicted_packed, self.predicted_output)
        known = [part for part in parts if part is not None]
        return sum(known) if known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakResult:
    """A case and its processes, in order."""

    case: PeakCase
    samples: tuple[PeakSample, ...]

    @property
    def measured_bytes(self) -> int:
        """Median peak above the level."""
        return int(statistics.median(s.above_level_bytes for s in self.samples))

    @property
    def predicted_bytes(self) -> int | None:
        """The plan's promise; None for engines that make none."""
        return self.samples[0].predicted_bytes

    @property
    def holds(self) -> bool | None:
        """Is the promise within the tolerance? None where there is none."""
        if self.predicted_bytes is None:
            return None
        allowed = max(TOLERANCE_SHARE * self.measured_bytes, TOLERANCE_BYTES)
        return abs(self.predicted_bytes - self.measured_bytes) <= allowed

    @property
    def pool_as_planned(self) -> bool | None:
        """Was the pool's high-water mark exactly the plan's?"""
        if self.samples[0].predicted_pool is None:
            return None
        return all(s.pool_high_water_bytes == s.predicted_pool for s in self.samples)


# -- in the measured process


def measure_here(case: PeakCase, weights_file: Path) -> PeakSample:
    """Measure in this process, which must be fresh. PeakError where the peak cannot be told."""
    import torch

    from halo_vae.benchmarks.engines import HaloSide, load_weights, make_side, random_latent
    from halo_vae.optim.heap import trim_heap
    from halo_vae.profiling.memory import PeakWatch, process_counter

    torch.set_num_threads(case.threads)
    side = make_side(case.engine, load_weights(weights_file))
    latent = random_latent(case.size_px, case.batch)
    side.decode(random_latent(WARM_UP_PX))
    plan = None
    if isinstance(side, HaloSide):
        side.engine.pool.clear()
        side.engine.pool.reset_high_water()
        plan = side.plan(latent).predicted
    gc.collect()
    trim_heap()
    watch = PeakWatch(process_counter())
    picture = side.decode(latent)
    seen = watch.finish()
    if not bool(torch.isfinite(picture).all()):
        raise PeakError("the picture is not finite, so its memory means nothing")
    if seen.start_bytes is None or seen.above_start_bytes is None:
        raise PeakError("this system lets no process reset its peak, and the decode stayed below an earlier one")
    if plan is None or not isinstance(side, HaloSide):
        return PeakSample(level_bytes=seen.start_bytes, above_level_bytes=seen.above_start_bytes)
    return PeakSample(
        level_bytes=seen.start_bytes, above_level_bytes=seen.above_start_bytes, predicted_pool=plan.pool,
        predicted_scratch=plan.scratch, predicted_packed=plan.packed, predicted_output=plan.output,
        pool_high_water_bytes=side.engine.pool.high_water_bytes,
    )  # fmt: skip


# -- in the asking process


def require_linux() -> None:
    """PeakError elsewhere."""
    if not sys.platform.startswith("linux"):
        raise PeakError(f"peaks are read from /proc, which {sys.platform} lacks; run this on Linux or leave memory out")


@contextmanager
def weights_on_disk(weights: Mapping[str, Tensor], precisions: Sequence[str]) -> Iterator[dict[str, Path]]:
    """{precision: file} of float32 weights in each precision, for the time of the block."""
    from halo_vae.benchmarks.engines import DTYPES, save_weights

    with tempfile.TemporaryDirectory(prefix="halo-vae-peak-") as folder:
        files = {}
        for precision in dict.fromkeys(precisions):
            files[precision] = Path(folder) / f"{precision}.safetensors"
            save_weights({name: tensor.to(DTYPES[precision]) for name, tensor in weights.items()}, files[precision])
        yield files


def measure_peak(case: PeakCase, weights_file: Path, processes: int = 3) -> PeakResult:
    """Median over fresh processes. PeakError if one fails or the system is not Linux."""
    require_linux()
    return PeakResult(case=case, samples=tuple(_run_child(case, weights_file) for _ in range(processes)))


def _run_child(case: PeakCase, weights_file: Path) -> PeakSample:
    script = str(Path(__file__).resolve())
    command = [sys.executable, script, "--child", json.dumps(asdict(case)), "--weights", str(weights_file)]
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise PeakError(f"measuring {case.engine} {case.precision} at {case.size_px} pixels failed: {last}")
    return PeakSample(**json.loads(done.stdout.splitlines()[-1]))


# -- command line


def render_peaks(results: Sequence[PeakResult]) -> str:
    """A markdown table, MiB."""
    head = (
        "engine", "precision", "size", "batch", "predicted", "pool + scratch + packed + output", "measured", "off by",
        "within", "pool as planned",
    )  # fmt: skip
    return "\n".join([_row(head), "|---|---|---:|---:|---:|---|---:|---:|---|---|", *map(_render_peak, results)])


def _render_peak(r: PeakResult) -> str:
    sample, predicted, measured = r.samples[0], r.predicted_bytes, r.measured_bytes
    told = parts = off = "–"
    if predicted is not None:
        each = (sample.predicted_pool, sample.predicted_scratch, sample.predicted_packed, sample.predicted_output)
        told, parts = f"{predicted / MIB:.1f}", " + ".join(f"{(part or 0) / MIB:.1f}" for part in each)
        off = f"{(predicted - measured) / MIB:+.1f} ({predicted / max(1, measured) - 1:+.1%})"
    words = {True: "yes", False: "NO", None: "–"}
    case = r.case
    return _row((
        case.engine, case.precision, str(case.size_px), str(case.batch), told, parts, f"{measured / MIB:.1f}", off,
        words[r.holds], words[r.pool_as_planned],
    ))  # fmt: skip


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="peak.py", description="Measured peak memory of decodes, and what their plans promised."
    )
    parser.add_argument("--engines", default="strips,tiles", help="comma-separated: plain, three_pass, strips, tiles")
    parser.add_argument("--precisions", default="fp32", help="comma-separated: fp32, bf16")
    parser.add_argument("--sizes", default="512", help="edges of square pictures in pixels, comma-separated")
    parser.add_argument("--batches", default="1", help="pictures per decode, comma-separated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processes", type=int, default=3, help="fresh processes per figure")
    parser.add_argument("--ch", type=int, default=128, help="channels of the widest map (128: SD's size)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every combination and print a table. 0 if every promise holds, 1 if not, 2 where none can be measured."""
    args = parse_arguments(argv)
    if args.child is not None:
        print(json.dumps(asdict(measure_here(PeakCase(**json.loads(args.child)), args.weights))))
        return 0
    try:
        require_linux()
        results = _measure_all(args)
    except PeakError as e:
        print(f"peak.py: {e}", file=sys.stderr)
        return 2
    print(render_peaks(results))
    return 0 if all(r.holds is not False and r.pool_as_planned is not False for r in results) else 1


def _measure_all(args: argparse.Namespace) -> list[PeakResult]:
    from halo_vae.benchmarks.plain_kl import random_sd_weights

    precisions = args.precisions.split(",")
    results = []
    with weights_on_disk(random_sd_weights(0, args.ch), precisions) as files:
        for engine in args.engines.split(","):
            for precision in precisions:
                for size in map(int, args.sizes.split(",")):
                    for batch in map(int, args.batches.split(",")):
                        case = PeakCase(
                            engine=engine, precision=precision, size_px=size, batch=batch, threads=args.threads
                        )
                        results.append(measure_peak(case, files[precision], args.processes))
                        print(render_peaks(results[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
