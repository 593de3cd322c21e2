"""Results made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from halo_vae.profiling.bench.results import RunLine, SeriesLine, fingerprint
from halo_vae.profiling.environment import Environment

ENVIRONMENT = Environment(
    python="3.12.1", torch="2.13.0", cuda=None, hip=None, miopen=None, cudnn=None, os="Linux 6.8.0", machine="x86_64",
    cpu="A CPU", cpu_count=2, threads=2, device="cpu", device_arch=None, variables=(),
)  # fmt: skip


def make_run(n: int = 0, **changes: Any) -> RunLine:
    """An ok run with five samples about 100 ms; `n` tells its id."""
    run = RunLine(
        run_id=f"{n:032x}", session="20260101T000000Z", lane="single", case="small_image", configuration="phase1",
        scenario="hot", host="box", arch="x86_64", device="cpu", dtype="fp32", threads=2, vae="tiny", status="ok",
        started_at="2026-01-01T00:00:00+00:00",
        samples_ns=(100_000_000, 101_000_000, 99_000_000, 100_500_000, 99_500_000),
        warm_ups_ns=(400_000_000,), asked_samples=5, seed=0, latent_shape=(1, 4, 32, 32), max_error=1e-6,
        mean_error=1e-7, psnr_db=120.0, peak_bytes=50_000_000, served="recomputed", **fingerprint(ENVIRONMENT),
    )  # fmt: skip
    return replace(run, **changes)


def make_series(**changes: Any) -> SeriesLine:
    """Three readings of a sensor."""
    line = SeriesLine(
        session="20260101T000000Z", host="box", name="cpu_share", unit="share", at_ns=(0, 1_000_000_000, 2_000_000_000),
        values=(0.1, None, 0.9),
    )  # fmt: skip
    return replace(line, **changes)
