"""Halo VAE's node against ComfyUI's own, inside ComfyUI: time, peak memory, error. Run it by ComfyUI's Python.

    python benchmarks/in_comfyui.py CHECKOUT --size 512 --threads 1,2 --runs 5
    python benchmarks/in_comfyui.py CHECKOUT --precision bf16 --json result.json

One VAE object of SD's full size with random weights, one latent. The nodes' own functions run in one process and in
turn: VAE Decode, VAE Decode (Tiled) with tiles of 256 pixels, and VAE Decode (Halo). The figure is the median, at the
thread count that suits each side best. Memory is the peak resident set of a fresh process above its level after
loading the VAE and a decode of 64x64 pixels; median of three. Linux only for memory.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

SIDES = ("stock", "tiled", "halo")
NAMES = {"stock": "VAE Decode", "tiled": "VAE Decode (Tiled), 256 px", "halo": "VAE Decode (Halo)"}
BARS = (("stock", "time", 0.70), ("stock", "peak", 0.58), ("tiled", "time", 0.20))
"""(side, what, most that ours may be as a share of that side's)."""
WARM_UP_PX = 64
MIB = 1 << 20
WAIT_POLICY = "OMP_WAIT_POLICY"


@dataclass(frozen=True, kw_only=True)
class SideResult:
    """One side. None = not measured."""

    side: str
    threads_ns: dict[int, tuple[int, ...]]
    """Runs by thread count, in order."""
    max_error: float
    """Largest distance from the untiled float32 picture, in 0-1."""
    peaks_bytes: tuple[int, ...]

    @property
    def best_ns(self) -> float:
        """Median at the thread count that suits this side best."""
        return min(statistics.median(runs) for runs in self.threads_ns.values())

    @property
    def peak_bytes(self) -> float | None:
        """Median over the processes."""
        return statistics.median(self.peaks_bytes) if self.peaks_bytes else None


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="in_comfyui.py", description="Halo VAE's node against ComfyUI's own.")
    parser.add_argument("checkout", type=Path, help="folder of ComfyUI")
    parser.add_argument("--size", type=int, default=512, help="edge of the square picture in pixels")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="what the VAE is loaded in")
    parser.add_argument("--threads", default="1,2", help="thread counts, comma-separated")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each side at each thread count")
    parser.add_argument("--processes", type=int, default=3, help="fresh processes per memory figure; 0: no memory")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"what to compare: {', '.join(SIDES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to this file")
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# -- inside ComfyUI


def start(checkout: Path) -> None:
    """Make ComfyUI's modules and ours importable, as ComfyUI's main.py would on the CPU."""
    if not (checkout / "main.py").is_file():
        raise SystemExit(f"{Path(sys.argv[0]).name}: {checkout} is no ComfyUI checkout: it has no main.py")
    folder = tempfile.TemporaryDirectory(prefix="halo-vae-")
    atexit.register(folder.cleanup)
    (Path(folder.name) / "halo_vae").symlink_to(Path(__file__).resolve().parents[1], target_is_directory=True)
    sys.path[0:1] = [str(checkout.resolve()), folder.name]
    os.environ["HALO_VAE_DATA_DIR"] = folder.name  # the user's own history is none of this
    logging.disable(logging.WARNING)
    sys.argv = ["main.py", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()


def make_vae(precision: str) -> Any:
    """ComfyUI's VAE object around a random decoder of SD's size."""
    import comfy.sd
    import torch

    from halo_vae.benchmarks.plain_kl import random_sd_weights

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    return comfy.sd.VAE(sd=random_sd_weights(), dtype=dtype)


def make_sides(vae: Any, precision: str) -> dict[str, Callable[[Any], Any]]:
    """Latent to picture, by each node's own function."""
    import nodes as comfy_nodes
    from halo_vae.nodes.extension import HaloVAEDecode

    def halo(z: Any) -> Any:
        return HaloVAEDecode.execute(samples={"samples": z}, vae=vae, precision_mode=precision).args[0]

    def tiled(z: Any) -> Any:
        return comfy_nodes.VAEDecodeTiled().decode(vae, {"samples": z}, tile_size=256, overlap=64)[0]

    return {"stock": lambda z: comfy_nodes.VAEDecode().decode(vae, {"samples": z})[0], "tiled": tiled, "halo": halo}


def measure_peak_here(args: argparse.Namespace) -> int:
    """Peak of one decode of one side in this fresh process, in bytes above the level."""
    import torch

    from halo_vae.benchmarks.engines import random_latent
    from halo_vae.nodes.extension import session
    from halo_vae.profiling.memory import PeakWatch, process_counter

    torch.set_num_threads(max(map(int, args.threads.split(","))))
    decode = make_sides(make_vae(args.precision), args.precision)[args.child]
    with torch.inference_mode():
        decode(random_latent(WARM_UP_PX))
        session().engine.pool.clear()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        watch = PeakWatch(process_counter())
        picture = decode(random_latent(args.size))
        seen = watch.finish()
    if seen.above_start_bytes is None or not bool(torch.isfinite(picture).all()):
        raise SystemExit("in_comfyui.py: the peak could not be told")
    return seen.above_start_bytes


def time_here(args: argparse.Namespace, sides: Sequence[str]) -> tuple[dict[str, SideResult], tuple[str, ...]]:
    """Errors, then times in turn, and reasons to doubt them."""
    import torch

    from halo_vae.benchmarks.engines import random_latent
    from halo_vae.benchmarks.timing import doubts, load_average, time_in_turn

    threads = tuple(map(int, args.threads.split(",")))
    latent, load_before = random_latent(args.size), load_average()
    with torch.inference_mode():
        reference = make_sides(make_vae("fp32"), "fp32")["stock"](latent)
        made = make_sides(make_vae(args.precision), args.precision)
        decodes = {side: made[side] for side in sides}
        errors = {side: float((decode(latent) - reference).abs().max()) for side, decode in decodes.items()}
        del reference
        timed = time_in_turn({side: partial(decode, latent) for side, decode in decodes.items()}, threads, args.runs)
    found = {
        side: SideResult(
            side=side, max_error=errors[side], peaks_bytes=(),
            threads_ns={case.threads: case.samples_ns for case in timed if case.engine == side},
        )
        for side in sides
    }  # fmt: skip
    return found, doubts(timed, load_before, load_average(), os.cpu_count(), os.environ.get(WAIT_POLICY))


# -- the asking process


def measure_peaks(args: argparse.Namespace, side: str) -> tuple[int, ...]:
    """Peaks of a side in fresh processes."""
    if not args.processes or not sys.platform.startswith("linux"):
        return ()
    command = [sys.executable, str(Path(__file__).resolve()), str(args.checkout), "--child", side]
    command += ["--size", str(args.size), "--precision", args.precision, "--threads", args.threads]
    env = {**os.environ, WAIT_POLICY: "passive"}
    found = []
    for _ in range(args.processes):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"in_comfyui.py: measuring {side} failed: {(done.stderr.strip() or '?').splitlines()[-1]}")
        found.append(int(done.stdout.splitlines()[-1]))
    return tuple(found)


def render(results: Mapping[str, SideResult], args: argparse.Namespace, version: str, why: Sequence[str]) -> str:
    """A markdown report."""
    lines = [
        f"# {args.size}x{args.size} pixels, {args.precision}, {version}\n",
        f"Median of {args.runs} run(s), taken in turn, at the better of {args.threads} thread(s); peak: median of "
        f"{args.processes} fresh process(es). Errors against the untiled float32 picture.\n",
        "| node | time | Halo ÷ it | peak memory | Halo ÷ it | max error |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    ours = results.get("halo")
    for r in results.values():
        peak = "n/a" if r.peak_bytes is None else f"{r.peak_bytes / MIB:.0f} MiB"
        lines.append(
            f"| {NAMES[r.side]} | {r.best_ns / 1e9:.2f} s | {_ratio(ours and ours.best_ns, r.best_ns)} | {peak} "
            f"| {_ratio(ours and ours.peak_bytes, r.peak_bytes)} | {r.max_error:.1e} |"
        )
    lines += ["", *(_bar(results, *bar) for bar in BARS)]
    for r in results.values():
        for n, runs in r.threads_ns.items():
            lines.append(f"- {r.side} at {n} thread(s): {', '.join(f'{ns / 1e9:.2f}' for ns in runs)} s")
    return "\n".join([*lines, *(f"- doubt: {doubt}" for doubt in why)])


def _bar(results: Mapping[str, SideResult], side: str, what: str, most: float) -> str:
    ours, theirs = results.get("halo"), results.get(side)
    mine = other = None
    if ours is not None and theirs is not None:
        mine, other = (ours.best_ns, theirs.best_ns) if what == "time" else (ours.peak_bytes, theirs.peak_bytes)
    if mine is None or not other:
        return f"- {what} against {NAMES[side]}: not measured"
    held = "held" if mine <= most * other else "MISSED"
    return f"- {what} against {NAMES[side]}: {mine / other:.2f}, at most {most:.2f} wanted: {held}"


def _ratio(value: float | None, base: float | None) -> str:
    return "n/a" if value is None or not base else f"{value / base:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print."""
    args = parse_arguments(argv)
    sides = [side for side in SIDES if side in args.sides.split(",")]
    if not sides or args.size < WARM_UP_PX or args.size % 8 or args.runs < 1:
        raise SystemExit(f"in_comfyui.py: give sides of {', '.join(SIDES)}, a size of 64 or more that 8 divides, runs")
    start(args.checkout)
    if args.child is not None:
        print(measure_peak_here(args))
        return 0
    results, why = time_here(args, sides)
    results = {side: SideResult(**{**vars(r), "peaks_bytes": measure_peaks(args, side)}) for side, r in results.items()}
    from halo_vae.nodes.comfy_host import ComfyHost

    version = ComfyHost().name
    print(render(results, args, version, why))
    if args.json is not None:
        facts = {"size_px": args.size, "precision": args.precision, "host": version, "doubts": why}
        args.json.write_text(json.dumps({**facts, "sides": [asdict(r) for r in results.values()]}, indent=1), "utf-8")
    return 0


if __name__ == "__main__":
    if WAIT_POLICY not in os.environ:  # read by the thread library when torch is imported, so it must be there before
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, WAIT_POLICY: "passive"})
    sys.exit(main())
