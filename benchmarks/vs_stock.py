"""Halo VAE against stock behaviour, in ratios: time, peak memory, error, and convolution shapes.

    python benchmarks/vs_stock.py --size 512 --threads 1,2 --runs 5
    python benchmarks/vs_stock.py --precision bf16 --json result.json

Stock is the untiled decode in contiguous layout, and the mean of three passes over tiles of 256 px
(overlap 64 px).
Both sides decode the same latent with the same random weights of SD's size, in one process, in turn; the figure is the
median, and the bar is stock at the thread count that suits it best. Memory comes from fresh processes (see peak.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halo_vae.benchmarks.comparison import Request

SCHEMA_VERSION = 1
WAIT_POLICY = "OMP_WAIT_POLICY"


class BenchError(ValueError):
    """Something was asked that cannot be compared."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="vs_stock.py", description="Halo VAE against stock behaviour: time, peak memory, error, shapes."
    )
    parser.add_argument("--size", type=int, help="edge of the square picture in pixels (512; 256 with --quick)")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="bf16 needs a CPU that multiplies it"
    )
    parser.add_argument("--threads", help="thread counts, comma-separated (1,2; 2 with --quick)")
    parser.add_argument("--runs", type=int, help="timed runs of each engine at each thread count (5; 1 with --quick)")
    parser.add_argument("--engines", default="plain,three_pass", help="stock engines: plain, three_pass")
    parser.add_argument("--plans", default="strips,tiles", help="plans of Halo VAE: strips, tiles")
    parser.add_argument("--ch", "--width", type=int, default=128, help="channels of the widest map (128: SD's size)")
    parser.add_argument(
        "--processes", type=int, help="fresh processes per memory figure (3; 1 with --quick; 0: no memory)"
    )
    parser.add_argument("--quick", action="store_true", help="a first impression: small, one run of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything measured to a new file")
    return parser.parse_args(argv)


def make_request(args: argparse.Namespace) -> Request:
    """Defaults filled in. BenchError for what cannot be compared."""
    from halo_vae.benchmarks.comparison import Request
    from halo_vae.benchmarks.engines import PLANS, SCALE, STOCK
    from halo_vae.optim.device import describe_device

    def given(value: int | None, default: int, quick: int) -> int:
        return value if value is not None else quick if args.quick else default

    threads = _integers(args.threads or ("2" if args.quick else "1,2"), "--threads")
    stock, plans = _names(args.engines, STOCK, "--engines"), _names(args.plans, PLANS, "--plans")
    size, runs, processes = given(args.size, 512, 256), given(args.runs, 5, 1), given(args.processes, 3, 1)
    if size < SCALE or size % SCALE:
        raise BenchError(f"--size is {size}; give a positive multiple of {SCALE} pixels")
    if runs < 1 or processes < 0 or min(threads) < 1:
        raise BenchError("--runs and --threads are at least 1, --processes at least 0")
    if args.ch < 32 or args.ch % 32:
        raise BenchError(f"--ch is {args.ch}; give a multiple of 32, the number of norm groups")
    native = describe_device("cpu").native_dtypes
    if args.precision == "bf16" and "bfloat16" not in native:
        raise BenchError(
            f"this CPU multiplies {', '.join(native)} natively, not bfloat16, so bf16 would be emulated; use fp32"
        )
    if processes and not sys.platform.startswith("linux"):
        raise BenchError("peak memory is measured on Linux only; give --processes 0 to leave it out")
    engines = tuple(dict.fromkeys(("plain", *stock, *plans)))
    return Request(
        size_px=size, precision=args.precision, threads=threads, runs=runs, engines=engines, ch=args.ch,
        processes=processes,
    )  # fmt: skip


def _integers(text: str, flag: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise BenchError(f"{flag} is {text!r}; give whole numbers separated by commas") from None


def _names(text: str, allowed: Sequence[str], flag: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    if unknown := [name for name in names if name not in allowed]:
        raise BenchError(f"{flag} names {unknown[0]!r}; choose from {', '.join(allowed)}")
    return names


def with_passive_waiting() -> int | None:
    """Start over with OMP_WAIT_POLICY=passive where it is not set (OpenMP reads it once); the new run's exit code."""
    if WAIT_POLICY in os.environ:
        return None
    env = {**os.environ, WAIT_POLICY: "passive"}
    return subprocess.run([sys.executable, *sys.orig_argv[1:]], env=env, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print a markdown report. 0 when done, 2 where something cannot be compared or written."""
    args = parse_arguments(argv)
    from halo_vae.benchmarks.comparison import compare
    from halo_vae.benchmarks.comparison_text import render_comparison
    from halo_vae.benchmarks.peak import PeakError

    try:
        if args.json is not None and args.json.exists():
            raise BenchError(f"{args.json} exists; name a new file")
        result = compare(make_request(args))
    except (BenchError, PeakError) as e:
        print(f"vs_stock.py: {e}", file=sys.stderr)
        return 2
    print(render_comparison(result))
    if args.json is not None:
        args.json.write_text(json.dumps({"schema_version": SCHEMA_VERSION, **asdict(result)}, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    code = with_passive_waiting()
    sys.exit(main() if code is None else code)
