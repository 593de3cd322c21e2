"""ComfyUI's own video decoders against our exact engine: time, peak memory, error. Run it by ComfyUI's Python.

    python benchmarks/video_in_comfyui.py CHECKOUT --family wan21 --size 256 --frames 17 --threads 1,2 --runs 5
    python benchmarks/video_in_comfyui.py CHECKOUT --family wan21 --size 256 --flat

One module of the host's at full width with seeded random weights, one latent. The module is called directly, and the
engine decodes with the module's own weights; both end with the raw clip. They run in one process and in turn; the
figure is the median at the thread count that suits each side best. Memory is the peak resident set of a fresh process
above its level after loading and a decode of a few frames of 64x64 pixels; median of three. Linux only for memory.

`--flat` asks instead whether our memory grows with the clip.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from halo_vae.benchmarks.timing import TimedCase
    from halo_vae.benchmarks.video_hosts import HaloSide, HostFamily, HostSide
    from halo_vae.benchmarks.video_report import Comparison, Decoded, Flatness, VideoCase

if __package__:
    from .in_comfyui import WAIT_POLICY, start
else:  # as a script: its own folder comes first on the path
    from in_comfyui import WAIT_POLICY, start

FAMILIES = ("wan21", "wan22", "hunyuan_video", "hunyuan15", "ltx")
SIDES = ("host", "ours")
WARM_UP_PX = 64
SCHEMA_VERSION = 1


class VideoBenchError(ValueError):
    """Something cannot be compared."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="video_in_comfyui.py", description="ComfyUI's own video decoders against our exact engine."
    )
    parser.add_argument("checkout", type=Path, help="folder of ComfyUI")
    parser.add_argument("--family", choices=FAMILIES, default="wan21")
    parser.add_argument("--size", type=int, default=256, help="edge of the square clip in pixels")
    parser.add_argument("--frames", type=int, default=17, help="output frames")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="what the module is loaded in")
    parser.add_argument("--threads", default="1,2", help="thread counts, comma-separated")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each side at each thread count")
    parser.add_argument("--processes", type=int, default=3, help="fresh processes per memory figure; 0: no memory")
    parser.add_argument("--flat", action="store_true", help="only ask whether ours grows from 33 to 129 frames")
    parser.add_argument("--flat-size", type=int, default=96, help="edge in pixels at which --flat also measures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to a new file")
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def make_case(args: argparse.Namespace, versions: str) -> VideoCase:
    """The request. VideoBenchError for what cannot be compared."""
    from halo_vae.benchmarks.video_hosts import FAMILIES as HOSTS
    from halo_vae.benchmarks.video_report import FLAT_FRAMES, VideoCase
    from halo_vae.optim.device import describe_device

    try:
        threads = tuple(dict.fromkeys(int(part) for part in args.threads.split(",")))
    except ValueError:
        raise VideoBenchError(f"--threads is {args.threads!r}; give whole numbers separated by commas") from None
    if min(threads) < 1 or args.runs < 1 or args.processes < 0:
        raise VideoBenchError("--threads and --runs are at least 1, --processes at least 0")
    sizes = (args.size, args.flat_size) if args.flat else (args.size,)
    try:
        for size in sizes:
            for frames in FLAT_FRAMES if args.flat else (args.frames,):
                HOSTS[args.family].latent_shape(size, frames)
    except ValueError as error:
        raise VideoBenchError(str(error)) from None
    if args.processes and not sys.platform.startswith("linux"):
        raise VideoBenchError("peak memory is measured on Linux only; give --processes 0 to leave it out")
    native = describe_device("cpu").native_dtypes
    if args.precision == "bf16" and "bfloat16" not in native:
        raise VideoBenchError(f"this CPU multiplies {', '.join(native)} natively, not bfloat16; use fp32")
    if args.json is not None and args.json.exists():
        raise VideoBenchError(f"{args.json} exists; name a new file")
    return VideoCase(
        family=args.family, size_px=args.size, frames=args.frames, precision=args.precision, threads=threads,
        runs=args.runs, processes=args.processes, versions=versions,
    )  # fmt: skip


def host_versions() -> str:
    """Of the host and of torch."""
    import torch

    from halo_vae.nodes.comfy_host import ComfyHost

    return f"{ComfyHost().name}, torch {torch.__version__}"


def make_sides(family: HostFamily, module: Any, precision: str) -> tuple[HostSide, HaloSide]:
    """Both sides over one module, which is cast in place."""
    from halo_vae.benchmarks.video_hosts import HaloSide, HostSide

    return HostSide(module, precision), HaloSide(module, precision, family.hints(module))


# -- time and error, in this process


def compare(case: VideoCase) -> tuple[Decoded, tuple[TimedCase, ...], tuple[str, ...]]:
    """What both sides make of one latent, then their times in turn, and reasons to doubt those."""
    import torch

    from halo_vae.benchmarks.timing import doubts, load_average, time_in_turn
    from halo_vae.benchmarks.video_hosts import FAMILIES as HOSTS
    from halo_vae.benchmarks.video_hosts import make_module

    family, load_before = HOSTS[case.family], load_average()
    latent, module = family.latent(case.size_px, case.frames), make_module(family)
    before = torch.get_num_threads()
    torch.set_num_threads(max(case.threads))
    try:
        reference = None
        if case.precision != "fp32":
            reference = make_sides(family, module, "fp32")[0].decode(latent)
        host, ours = make_sides(family, module, case.precision)
        decoded = _decode_both(family, host, ours, latent, reference)
        del reference
        sides = {"host": lambda: host.decode(latent), "ours": lambda: ours.decode(latent)}
        timed = time_in_turn(sides, case.threads, case.runs)
    finally:
        torch.set_num_threads(before)
    policy = os.environ.get(WAIT_POLICY)
    return decoded, timed, doubts(timed, load_before, load_average(), os.cpu_count(), policy)


def _decode_both(
    family: HostFamily, host: HostSide, ours: HaloSide, latent: Tensor, reference: Tensor | None
) -> Decoded:
    """The first decode of each side; `reference` is the host's in float32 where that is another one."""
    from halo_vae.benchmarks.video_hosts import as_frames
    from halo_vae.benchmarks.video_report import Decoded

    theirs, mine = as_frames(host.decode(latent)), ours.decode(latent).float()
    exact = theirs if reference is None else as_frames(reference)
    predicted, plan = ours.predict(tuple(latent.shape))  # after the decode: what is packed is not promised again
    return Decoded(
        host_frames=theirs.shape[0], our_frames=mine.shape[0], deviation=float(theirs.std()),
        max_error=_distance(mine, theirs), max_error_fp32=(_distance(theirs, exact), _distance(mine, exact)),
        predicted_bytes=predicted.total, carried_bytes=plan.carried_bytes if plan.n_chunks > 1 else None,
        same_state=family.same_state,
    )  # fmt: skip


def _distance(a: Tensor, b: Tensor) -> float | None:
    return float((a - b).abs().max()) if a.shape == b.shape else None


# -- memory, in fresh processes


def measure_peak_here(case: VideoCase, side: str) -> int:
    """Peak of one decode of one side in this process, which must be fresh, in bytes above the level.

    VideoBenchError where it cannot be told.
    """
    import torch

    from halo_vae.benchmarks.video_hosts import FAMILIES as HOSTS
    from halo_vae.benchmarks.video_hosts import make_module
    from halo_vae.optim.heap import trim_heap
    from halo_vae.profiling.memory import PeakWatch, process_counter

    torch.set_num_threads(max(case.threads))
    family = HOSTS[case.family]
    host, ours = make_sides(family, make_module(family), case.precision)
    decode = host.decode if side == "host" else ours.decode
    decode(family.latent(WARM_UP_PX, 1 + family.rate))
    latent = family.latent(case.size_px, case.frames)
    ours.engine.pool.clear()
    gc.collect()
    trim_heap()
    watch = PeakWatch(process_counter())
    clip = decode(latent)
    seen = watch.finish()
    if seen.above_start_bytes is None:
        raise VideoBenchError("this system lets no process reset its peak, and the decode stayed below an earlier one")
    if not bool(torch.isfinite(clip).all()):
        raise VideoBenchError("the clip is not finite, so its memory means nothing")
    return seen.above_start_bytes


def measure_peaks(
    args: argparse.Namespace, case: VideoCase, side: str, size: int | None = None, frames: int | None = None
) -> tuple[int, ...]:
    """Peaks of a side in fresh processes, at the case's size and frames or at others."""
    command = [sys.executable, str(Path(__file__).resolve()), str(args.checkout.resolve()), "--child", side]
    command += ["--family", case.family, "--precision", case.precision, "--threads", args.threads]
    command += ["--size", str(size or case.size_px), "--frames", str(frames or case.frames)]
    env = {**os.environ, WAIT_POLICY: "passive"}
    found = []
    for _ in range(case.processes):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise VideoBenchError(f"measuring the memory of {side} failed: {last}")
        found.append(int(done.stdout.splitlines()[-1]))
    return tuple(found)


# -- results


def run_comparison(args: argparse.Namespace, case: VideoCase) -> Comparison:
    """Time, error and memory of both sides."""
    from halo_vae.benchmarks.video_report import Comparison, clip_doubts, memory_doubts

    decoded, times, doubts = compare(case)
    gc.collect()
    peaks: dict[str, tuple[int, ...]] = {}
    lost: list[str] = []
    for side in SIDES:
        try:
            peaks[side] = measure_peaks(args, case, side)
        except VideoBenchError as error:  # the times took long, and are worth keeping
            peaks[side] = ()
            lost.append(str(error))
    return Comparison(
        case=case, decoded=decoded, times=times, peaks_bytes=peaks,
        doubts=(*doubts, *lost, *memory_doubts(peaks), *clip_doubts(decoded)),
    )  # fmt: skip


def run_flat(args: argparse.Namespace, case: VideoCase) -> list[Flatness]:
    """Ours at two lengths: as predicted at the size asked for, and as predicted and measured at a small one."""
    from halo_vae.benchmarks.video_hosts import FAMILIES as HOSTS
    from halo_vae.benchmarks.video_hosts import make_module
    from halo_vae.benchmarks.video_report import FLAT_FRAMES, Flatness

    family = HOSTS[case.family]
    _, ours = make_sides(family, make_module(family), case.precision)
    found = []
    for size in dict.fromkeys((args.size, args.flat_size)):
        peaks = [ours.predict(family.latent_shape(size, frames))[0] for frames in FLAT_FRAMES]
        measured = None
        if size == args.flat_size and case.processes:
            taken = [measure_peaks(args, case, "ours", size, frames) for frames in FLAT_FRAMES]
            short, long = (tuple(n - p.output for n in each) for each, p in zip(taken, peaks, strict=True))
            measured = short, long
        predicted = peaks[0].pool + peaks[0].scratch, peaks[1].pool + peaks[1].scratch
        found.append(Flatness(size_px=size, predicted_bytes=predicted, measured_bytes=measured))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print. 0 when done, 1 where memory could not be measured, 2 where nothing can be compared."""
    args, code = parse_arguments(argv), 0
    start(args.checkout)
    from halo_vae.benchmarks.video_report import render_comparison, render_flatness

    try:
        case = make_case(args, host_versions())
        if args.child is not None:
            print(measure_peak_here(case, args.child))
            return 0
        if args.flat:
            flat = run_flat(args, case)
            text, facts = render_flatness(case, flat), {"case": asdict(case), "flat": [asdict(f) for f in flat]}
        else:
            found = run_comparison(args, case)
            code = 1 if case.processes and not all(found.peaks_bytes.values()) else 0
            text, facts = render_comparison(found), {**asdict(found), "bars": found.bars}
    except (VideoBenchError, ImportError) as error:  # an older host may lack a module
        print(f"video_in_comfyui.py: {error}", file=sys.stderr)
        return 2
    print(text)
    if args.json is not None:
        args.json.write_text(json.dumps({"schema_version": SCHEMA_VERSION, **facts}, indent=1) + "\n", "utf-8")
    return code


if __name__ == "__main__":
    if WAIT_POLICY not in os.environ:  # read by the thread library when torch is imported, so it must be there before
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, WAIT_POLICY: "passive"})
    sys.exit(main())
